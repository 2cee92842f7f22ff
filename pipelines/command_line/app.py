"""The application `pgsieve`, its exit codes and errors, and the options that several commands have.

In: arguments, the configuration file, the environment
Out: results on stdout, progress and errors on stderr, and an exit code on which scripts can rely:

====  ===================================================================================================
0     done, and nothing is wrong
1     done, with findings: `check` found a difference, `validate` a problem, `run` a table set aside
2     refused, with a message: wrong arguments or configuration, or a source that does not answer; also if only one
      of several subscriptions is refused
70    a fault of pgsieve itself (EX_SOFTWARE of sysexits.h); `--verbose` shows the traceback
130   interrupted
====  ===================================================================================================

A table set aside gets no changes until it is copied again.

Only the commands that need Dagster and Spark import them. So `--help` answers quickly, and so does a command with a
wrong configuration file.
"""

import errno
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pgsieve import __version__
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line import console
from pgsieve.pipelines.commands.results import Failure, Refusal
from pgsieve.pipelines.config.model import DEFAULT_FILE, FILE_VARIABLE, Config, load_config
from pgsieve.resources.tracing import span

EXIT_FINDINGS = 1
EXIT_REFUSED = 2
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130

#: The message after Ctrl-C in a command that changes the lake or the server.
AFTER_INTERRUPTED_CHANGE = "committed work stays; repeat the command"


def report_error(ctx: Any, error: Exception) -> None:
    """Print the error that ends a command on stderr. With `--json`, it is also printed on stdout, as one line of JSON."""
    with suppress(OSError):  # If stderr cannot be written, the exit code still tells.
        if isinstance(error, PgsieveError):
            console.print_error(error)
        else:
            console.print_fault(error, verbose=is_verbose(ctx))
    if ctx.params.get("as_json"):
        with suppress(OSError):  # If stdout cannot be written, that may be the error that was just reported.
            console.print_json_line(Refusal(error))


class _PlainHelp:
    """Lets `--help` show each value by its metavar, without Python's types such as `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments of the command. The metavar of a flag is empty, since a flag takes no value."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.param_type_name == "argument":
                # Newer versions of typer would show the type beside the metavar.
                parameter.display_type_rich = _hide_type
        return params


def _hide_type(ctx: Any) -> None:
    del ctx


class Group(_PlainHelp, TyperGroup):
    """A group of commands. If wrong arguments contain `--json`, the error about them is also printed as JSON."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options that come before the name of the command."""
        ctx.meta.setdefault(_ARGUMENTS_KEY, tuple(args))
        with _print_usage_error_as_json(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Find the command, parse its arguments, and run it."""
        with _print_usage_error_as_json(ctx):
            return super().invoke(ctx)


#: The context of a command has the arguments of the process under this key.
_ARGUMENTS_KEY = "pgsieve.arguments"
#: The base class of exceptions for wrong arguments. It is a class of click, or of the copy of click that newer versions
#: of typer contain.
_UsageError: Any = typer.BadParameter.__base__


@contextmanager
def _print_usage_error_as_json(ctx: Any) -> Iterator[None]:
    """If the block raises an error about arguments, and they contain `--json`, print the error as JSON on stdout.

    The error is raised again, and typer prints it on stderr.
    """
    try:
        yield
    except _UsageError as error:
        if ctx.parent is None and "--json" in ctx.meta[_ARGUMENTS_KEY]:
            console.print_json_line(Refusal(PgsieveError(error.format_message())))
        raise


class Command(_PlainHelp, TyperCommand):
    """A command of pgsieve. If it raises an error, the error is printed in one line and becomes an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command's function with its parsed arguments."""
        try:
            return self._invoke_and_flush(ctx)
        except typer.Exit:
            raise
        except typer.Abort as error:  # Ctrl-C or Ctrl-D at a question.
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except PgsieveError as error:
            report_error(ctx, error)
            raise typer.Exit(EXIT_REFUSED) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:  # For example `pgsieve … | head`.
                raise
            from pgsieve.pipelines.commands.failures import find_refusal

            if (refusal := find_refusal(error)) is not None:
                report_error(ctx, refusal)
                raise typer.Exit(EXIT_REFUSED) from error
            report_error(ctx, error)
            raise typer.Exit(EXIT_FAULT) from error

    def _invoke_and_flush(self, ctx: Any) -> Any:
        """Run the function of the command, and flush stdout.

        If stdout cannot be written, the flush makes this an error of the command. Without the flush, Python would notice
        it only after the command has ended.
        """
        try:
            result = super().invoke(ctx)
        except typer.Exit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return result


app = typer.Typer(
    name="pgsieve",
    cls=Group,
    help="PostgreSQL logical replication into Delta Lake, with PostgreSQL's own row filters.",
    epilog="Example: pgsieve demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Configuration file (default: $PGSIEVE_CONFIG, else ./pgsieve.yaml).",
    ),
]


def _complete_subscription(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the configuration's subscriptions that begin with `incomplete`. Empty if the file cannot be read."""
    import yaml

    file = ctx.params.get("config") or ctx.find_root().params.get("config")
    try:
        text = Path(file or os.environ.get(FILE_VARIABLE) or DEFAULT_FILE).read_text(encoding="utf-8")
        return [name for name in yaml.safe_load(text)["subscriptions"] if name.startswith(incomplete)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        return []


SubscriptionsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SUBSCRIPTION",
        help="Subscriptions, by name (default: all).",
        autocompletion=_complete_subscription,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


UiHostOption = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address that the web interface listens on.")
]
UiPortOption = Annotated[
    int,
    typer.Option("--port", min=1, max=65535, metavar="PORT", help="Port that the web interface listens on."),
]


class _LogFormat(StrEnum):
    """The format of progress and errors on stderr."""

    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[
    _LogFormat | None,
    typer.Option(
        "--log-format",
        metavar="text|json",
        help="How progress, warnings and errors are written to stderr; json: one object a line. Also PGSIEVE_LOG_FORMAT.",
        show_choices=True,
    ),
]


_LEVEL_VARIABLE = "PGSIEVE_LOG_LEVEL"


class _LogLevel(StrEnum):
    """The lowest level of log records on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevelOption = Annotated[
    _LogLevel | None,
    typer.Option(
        "--log-level",
        metavar="debug|info|warning|error",
        help="The lowest level of log records on stderr (default: warning); debug shows which engine writes each table, and"
        " why. Also PGSIEVE_LOG_LEVEL.",
        case_sensitive=False,
        show_choices=True,
    ),
]

SubscriptionArgument = Annotated[
    str,
    typer.Argument(
        metavar="SUBSCRIPTION", help="A subscription, by name.", autocompletion=_complete_subscription
    ),
]


def command(
    epilog: str,
    name: str | None = None,
    group: typer.Typer = app,
    *,
    panel: str | None = None,
    after_interrupt: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command. The options about the log may also come after the command's name.

    - `group`: the group to which the command belongs; `panel`: its section in `--help`
    - `after_interrupt`: what Ctrl-C leaves, and what the user does then; None if there is nothing to say
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run_command(
            *arguments: Any,
            log_format: _LogFormat | None = None,
            log_level: _LogLevel | None = None,
            **options: Any,
        ) -> None:
            _configure_log(log_format, log_level)
            try:
                with span(f"pgsieve {function.__name__}"):
                    # Interrupts have waited for this since the start of the process (`pgsieve.__main__`).
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
                    function(*arguments, **options)
            except KeyboardInterrupt:
                console.print_interrupt(after_interrupt)
                raise
            finally:
                from pgsieve.resources.lake.unsynced import close_all_lakes

                close_all_lakes()

        signature = inspect.signature(function)
        log_options = {"log_format": LogFormatOption, "log_level": LogLevelOption}
        log_parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in log_options.items()
        ]
        typed_command: Any = run_command
        # Typer would print the line breaks of the source code, so the lines of each paragraph are joined.
        typed_command.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(function.__doc__ or ""))
        typed_command.__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), *log_parameters]
        )
        typed_command.__annotations__ = {**function.__annotations__, **log_options}
        group.command(name, cls=Command, epilog=epilog, rich_help_panel=panel)(run_command)
        return function

    return register


def _configure_log(log_format: str | None, log_level: str | None) -> None:
    """Set how progress and errors are written to stderr."""
    if log_level is not None:
        console.set_log_level(log_level)
    if log_format == _LogFormat.JSON:
        console.log_as_json()


def _print_version(requested: bool) -> None:
    if requested:
        print(f"pgsieve {__version__}")
        raise typer.Exit


@app.callback()
def apply_common_options(
    ctx: typer.Context,
    config: ConfigOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the traceback of an unexpected error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Apply the options that come before the command."""
    # `is_verbose` reads the value of `verbose` from the context, and `_print_version` is called with that of `version`.
    del verbose, version
    console.install_warning_formatter()
    _configure_log(log_format or os.environ.get("PGSIEVE_LOG_FORMAT"), log_level or _read_log_level())
    ctx.obj = config


def _read_log_level() -> str | None:
    if (level := os.environ.get(_LEVEL_VARIABLE)) and level.lower() not in {*_LogLevel}:
        raise typer.BadParameter(f"{_LEVEL_VARIABLE} is none of {', '.join(_LogLevel)}")
    return level or None


def load_settings(ctx: typer.Context, config: Path | None) -> Config:
    """Read the configuration file, and keep other libraries from importing pandas and Polars, which takes long.

    The option `--config` names the file. If the option is given both before and after the command's name, the one after the
    name counts. Without the option, the default file is read.
    """
    settings = load_config(config or ctx.obj)
    from pgsieve.resources.data_frames import hide_data_frame_libraries

    hide_data_frame_libraries()
    return settings


def is_verbose(ctx: Any) -> bool:
    """True if the user wants the traceback of an unexpected error."""
    return bool(ctx.find_root().params["verbose"])


def ignore_step(*_: object) -> None:
    """Print nothing about a step of the demo. With `--json`, the report at the end contains all steps."""


def exit_with(failures: Sequence[Failure], *, problems: bool = False) -> None:
    """Exit with the greatest exit code of the failures.

    If there are no failures, exit with 1 if there are problems. If there are no problems either, the function returns.
    """
    codes = [EXIT_REFUSED if isinstance(failure.error, PgsieveError) else EXIT_FAULT for failure in failures]
    if code := max(codes, default=EXIT_FINDINGS if problems else 0):
        raise typer.Exit(code)
