"""Sends OpenTelemetry traces, if OpenTelemetry's environment variables name an exporter.

In: operations, as blocks.
Out: spans. OpenTelemetry's own exporters send them as its variables say (OTEL_EXPORTER_OTLP_…,
     OTEL_TRACES_EXPORTER, OTEL_SERVICE_NAME, OTEL_SDK_DISABLED). Without these variables nothing is imported and
     nothing is sent.

The attributes of spans are names, for example of a source (a publisher's database), a slot or a subscription. They are
never values of cells. Raises PgsieveError if the variables request traces, but OpenTelemetry's SDK is not installed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from pgsieve.decoding.errors import PgsieveError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def _find_exporter_name(environ: Mapping[str, str] | None = None) -> str | None:
    """The name of the exporter that the environment variables request; None if they request none."""
    environ = os.environ if environ is None else environ
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    default = "otlp" if any(environ.get(name) for name in _ENDPOINT_VARIABLES) else "none"
    name = environ.get("OTEL_TRACES_EXPORTER") or default
    return None if name == "none" else name


@cache
def _get_tracer() -> "Tracer | None":
    """The tracer of this process; None if no traces are requested.

    If pgsieve runs within another program that has a provider of tracers, the tracer is one of this provider.
    """
    name = _find_exporter_name()
    if name is None:
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
    except ImportError as error:
        raise PgsieveError(
            "traces are requested (OTEL_…), but OpenTelemetry is not installed",
            hint="install it with `pip install 'pgsieve[tracing]'`, or set OTEL_TRACES_EXPORTER=none",
        ) from error
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        exporters: dict[str, type[SpanExporter]] = {"otlp": OTLPSpanExporter, "console": ConsoleSpanExporter}
        if name not in exporters:
            raise PgsieveError(f'OTEL_TRACES_EXPORTER is "{name}"', hint="otlp (by HTTP), console, or none")
        provider = TracerProvider(
            resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "pgsieve")})
        )
        provider.add_span_processor(BatchSpanProcessor(exporters[name]()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("pgsieve")


def is_traced() -> bool:
    """True if spans are sent."""
    return _get_tracer() is not None


@contextmanager
def span(name: str, **attributes: str | float | bool) -> Iterator[None]:
    """Make the block a span within the current span. If the block fails, the span has only the class of the error."""
    tracer = _get_tracer()
    if tracer is None:
        yield
        return
    from opentelemetry.trace import StatusCode

    with tracer.start_as_current_span(
        name, attributes=_add_prefix(attributes), record_exception=False, set_status_on_exception=False
    ) as open_span:
        try:
            yield
        except BaseException as error:
            open_span.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def send_span(
    name: str, start_time: float, end_time: float, *, has_failed: bool = False, **attributes: str
) -> None:
    """Send a span for an operation that has ended.

    `start_time` and `end_time` are seconds since 1970, as time.time() returns them.
    """
    tracer = _get_tracer()
    if tracer is None:
        return
    from opentelemetry.trace import StatusCode

    ended_span: Span = tracer.start_span(
        name, attributes=_add_prefix(attributes), start_time=int(start_time * 1e9)
    )
    if has_failed:
        ended_span.set_status(StatusCode.ERROR)
    ended_span.end(int(end_time * 1e9))


def _add_prefix(attributes: Mapping[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
    return {f"pgsieve.{name}": value for name, value in attributes.items()}
