"""Traces of a run, received over HTTP by a collector; and runs without the SDK."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fixtures.shop import Shop

WITHOUT_SDK = """
import sys
sys.modules["opentelemetry"] = None
from pgsieve.pipelines.command_line.cli import main
main()
"""


class Collector(BaseHTTPRequestHandler):
    received: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    Collector.received.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**environment, "OTEL_EXPORTER_OTLP_COMPRESSION": "none", **variables},
    )


@pytest.mark.drawn
def test_a_run_is_a_trace_with_a_span_for_each_step(shop: Shop, endpoint: str) -> None:
    shop.copy()
    slot = shop.written["sources"]["shop"]["slot"]
    done = run("-m", "pgsieve", "-c", str(shop.path), "run", "two", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    spans: dict[str, Span] = {
        each.name: each
        for request in Collector.received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for each in scope.spans
    }
    assert spans.keys() == {
        "pgsieve run",
        f"drain {slot}",
        "shop__change_log",
        "transform for two",
        "two__table_changes",
        "apply to two",
        "two_replica_tables",
    }
    root, drained, step = spans["pgsieve run"], spans[f"drain {slot}"], spans["shop__change_log"]
    assert root.parent_span_id == b""
    assert drained.parent_span_id == root.span_id
    assert step.parent_span_id == drained.span_id
    assert step.trace_id == root.trace_id
    for task, asset in (("transform for", "two__table_changes"), ("apply to", "two_replica_tables")):
        assert spans[asset].parent_span_id == spans[f"{task} two"].span_id
    assert drained.start_time_unix_nano <= step.start_time_unix_nano <= step.end_time_unix_nano
    named = {a.key: a.value.string_value for a in Collector.received[0].resource_spans[0].resource.attributes}
    assert named["service.name"] == "pgsieve"


@pytest.mark.drawn
def test_without_the_sdk_nothing_is_traced_and_a_request_for_traces_is_refused() -> None:
    assert run("-c", WITHOUT_SDK, "--version").returncode == 0
    asked = run("-c", WITHOUT_SDK, "status", OTEL_TRACES_EXPORTER="console")
    assert asked.returncode == 2
    assert "pip install 'pgsieve[tracing]'" in asked.stderr
    for variables in ({"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}, {}):
        assert "pgsieve.yaml: cannot be read" in run("-c", WITHOUT_SDK, "status", **variables).stderr
