"""Prints results, progress and errors, as text or as JSON. `reports` decides how each result looks as text.

Results go to stdout, and progress and errors to stderr. So `pgsieve status --json > file` writes nothing but JSON into
the file. Text from a database or a file is printed without interpreting markup in it, and with its control characters
escaped. Nothing here raises an error.
"""

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, TypeVar

from rich.console import Console, RenderableType
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as RichText

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.visible import escape_controls, escape_controls_in_json
from pgsieve.pipelines.command_line.json_log import JsonLog, JsonProgress, to_json_value
from pgsieve.pipelines.commands.results import (
    Failure,
    Progress,
)
from pgsieve.pipelines.config.file import ConfigError
from pgsieve.resources.passwords import conceal_passwords

Result = TypeVar("Result")

#: The text of a table's cell that has no value.
NO_VALUE = "–"

#: The object that writes progress and errors as JSON, one object for each line; None if they are written as text.
_json_log: JsonLog | None = None
#: Log records below this level are not written.
_log_level = logging.WARNING


class Text(RichText):
    """A text on one line, in which characters that control a terminal are escaped (`pgsieve.decoding.visible`)."""

    def __init__(self, text: str = "", style: str = "", **options: Any) -> None:
        super().__init__(escape_controls(text), style, **options)

    def append(self, text: RichText | str, style: Any = None) -> "Text":
        """Append another text, or a string in a style."""
        super().append(escape_controls(text) if isinstance(text, str) else text, style)
        return self


class _WarningFormatter(logging.Formatter):
    """Formats log records, and escapes characters in them that control a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is Python's
        return escape_controls(super().formatMessage(record))


def install_warning_formatter() -> None:
    """Escape control characters in log records that have no handler. Python itself prints such records on stderr."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_WarningFormatter())


def set_log_level(level: str) -> None:
    """Write log records of this level and of higher levels. The case of the level's name does not matter.

    Records below warnings are written only by pgsieve's own loggers. These records say what each step decides.
    """
    global _log_level  # noqa: PLW0603 - the process has one stderr
    _log_level = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("pgsieve").setLevel(_log_level)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(_log_level)
    if _json_log is not None:
        _json_log.set_log_level(_log_level)


def log_as_json() -> None:
    """From now on, write progress, warnings, errors, and lines that other code writes to stderr, as JSON."""
    global _json_log  # noqa: PLW0603 - the process has one stderr
    if _json_log is None:
        _json_log = JsonLog()
        _json_log.set_log_level(_log_level)


def log_as_text() -> bool:
    """From now on, write the log as text to the original stderr. Returns true if the log was JSON before.

    Call this before `os._exit`, or before another program writes to stderr.
    """
    global _json_log
    former_log, _json_log = _json_log, None
    if former_log is not None:
        former_log.close()
    return former_log is not None


#: The file to which this context (contextvars) writes instead of stdout and stderr.
_OUTPUT_FILE: ContextVar[TextIO | None] = ContextVar("output_file", default=None)


@contextmanager
def redirect_output(file: TextIO) -> Iterator[None]:
    """Within the block, print the results and errors of this thread into a file. Other threads print as before."""
    token = _OUTPUT_FILE.set(file)
    try:
        yield
        file.flush()
    finally:
        _OUTPUT_FILE.reset(token)


def _make_stdout_console() -> Console:
    """A console on stdout. If stdout is a pipe or a file, a table is as wide as its contents."""
    output = _OUTPUT_FILE.get() or sys.stdout
    width = None if output.isatty() else 10_000
    return Console(file=output, highlight=False, markup=False, emoji=False, width=width)


def stderr_console(*, is_terminal: bool | None = None) -> Console:
    """A console on stderr, for progress, errors, and the tables that are shown before a question.

    By default Rich finds out whether stderr is a terminal. `is_terminal` decides it instead.
    """
    return Console(
        file=_OUTPUT_FILE.get(),
        stderr=True,
        highlight=False,
        markup=False,
        emoji=False,
        force_terminal=is_terminal,
    )


def print_out(*renderables: RenderableType) -> None:
    """Print texts and tables on stdout. Each text is one line, however long it is."""
    console = _make_stdout_console()
    for renderable in renderables:
        console.print(renderable, soft_wrap=not isinstance(renderable, Table))


def make_table(*columns: str, title: str | None = None, right_aligned: Sequence[str] = ()) -> Table:
    """Make an empty table with these columns. The columns in `right_aligned` are right-aligned."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right_aligned else "left",
            overflow="fold",
            header_style="dim",
        )
    return table


def make_cell(value: object, style: str = "") -> Text:
    """The text of a table's cell. None becomes a dash."""
    if value is None:
        return Text(NO_VALUE, style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no", style=style)
    return Text(f"{value:,}" if isinstance(value, int) else str(value), style=style)


def add_row(table: Table, *values: object) -> None:
    """Add a row to a table. Each value is a plain value, or a text that has a style already."""
    table.add_row(*(value if isinstance(value, Text) else make_cell(value) for value in values))


def format_bytes(count: int | None) -> str | None:
    """Format a number of bytes as `pg_size_pretty` does: 10 kB instead of 10240 bytes (src/backend/utils/adt/dbsize.c)."""
    if count is None:
        return None
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 10_240:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.0f} TB"


# Errors


def print_error(error: PgsieveError, prefix: str = "") -> None:
    """Print an error in red on one line, and then its hint on another line.

    If the error is about a configuration file, each problem of the file is printed on its own line.
    """
    if _json_log is not None and not isinstance(error, ConfigError):
        _json_log.write_error(error)
        return
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _print_error_line(error.describe(problem), problem.hint)
        return
    code = f" [{error.sqlstate}]" if error.sqlstate else ""
    _print_error_line(f"{prefix}{error.message}{code}", error.hint)


def print_failures(failures: Sequence[Failure], *, verbose: bool) -> None:
    """Print the errors that ended the work for some subscriptions, with the subscriptions' names."""
    for failure in failures:
        if _json_log is not None:
            _json_log.write_error(failure.error, subscriptions=failure.subscriptions, verbose=verbose)
            continue
        prefix = f"{', '.join(failure.subscriptions)}: "
        if isinstance(failure.error, PgsieveError):
            print_error(failure.error, prefix)
        else:
            print_fault(failure.error, prefix, verbose=verbose)


def print_fault(error: BaseException, prefix: str = "", *, verbose: bool) -> None:
    """Print that pgsieve itself has a fault.

    With `verbose`, the traceback is printed, too. It is printed without the values of variables, which contain values
    of rows.
    """
    if _json_log is not None:
        _json_log.write_error(error, verbose=verbose)
    elif verbose:
        traceback_text = conceal_passwords("".join(traceback.format_exception(error)))
        stderr_console().print(
            "\n".join(map(escape_controls, traceback_text.split("\n"))), end="", soft_wrap=True
        )
        _print_error_line(f"{prefix}unexpected {type(error).__name__}", None)
    else:
        _print_error_line(
            f"{prefix}unexpected {type(error).__name__}", "run `pgsieve --verbose …` for the traceback"
        )


def print_interrupt(explanation: str | None) -> None:
    """Print that Ctrl-C, or a signal like it, ended the command. `explanation` says what the command leaves, and what to do."""
    message = f"interrupted: {explanation}" if explanation else "interrupted"
    if _json_log is not None:
        _json_log.write("warning", message=message)
        return
    stderr_console().print(Text(message, "bold"), soft_wrap=True)


def _print_error_line(message: str, hint: str | None) -> None:
    if _json_log is not None:
        _json_log.write("error", message=message, hint=hint)
        return
    console = stderr_console()
    console.print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint: ", "bold"), hint), soft_wrap=True)


# Progress


class _TerminalProgress:
    """Shows a line for each task that is running, below the output. The line disappears when the task ends."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str) -> None:
        self._tasks[task] = self._bars.add_task(escape_controls(task), total=None)

    def finish(self, task: str) -> None:
        self._bars.remove_task(self._tasks.pop(task))
        self._bars.refresh()  # Otherwise the line would stay for a moment, among the results on stdout.

    def tell(self, line: str) -> None:
        self._bars.console.print(escape_controls(line), markup=False, highlight=False)


class LineProgress:
    """Writes a line when a task starts, and another when it ends: on stderr, or into a file."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._tasks: dict[str, float] = {}

    def start(self, task: str) -> None:
        """Write that a task begins."""
        with self._lock:
            self._tasks[task] = time.monotonic()
        self._write_line(f"{task}: started")

    def finish(self, task: str) -> None:
        """Write that a task has ended, and how long it took."""
        with self._lock:
            start_seconds = self._tasks.pop(task)
        self._write_line(f"{task}: ended after {time.monotonic() - start_seconds:.1f} s")

    def tell(self, line: str) -> None:
        """Write a line about a running task."""
        self._write_line(line)

    def _write_line(self, line: str) -> None:
        file = self._file or sys.stderr
        file.write(escape_controls(line) + "\n")
        file.flush()


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Within the block, show progress on stderr.

    On a terminal, the running tasks are displayed; otherwise lines are written, as text or as JSON.
    """
    if _json_log is not None:
        yield JsonProgress(_json_log)
        return
    console = stderr_console()
    if not console.is_terminal:
        yield LineProgress()
        return
    # While a step runs, Dagster replaces stderr by a pipe, and copies the output of the pipe to the terminal. Without
    # `is_terminal`, Rich would find that stderr is not a terminal, and would print plain lines into the display.
    console = stderr_console(is_terminal=True)
    text = TextColumn("{task.description}", markup=False)
    with Bars(SpinnerColumn(), text, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield _TerminalProgress(bars)


# Results


def to_json(report: object, *, indent: int | None = 2) -> str:
    """Convert a result to JSON. The keys are the names of the fields in `pgsieve.pipelines.commands.results`."""
    return escape_controls_in_json(json.dumps(to_json_value(report), indent=indent, ensure_ascii=False))


def print_json(report: object) -> None:
    """Print a result as JSON."""
    sys.stdout.write(to_json(report) + "\n")


def print_result(report: Result, print_text: Callable[[Result], None], *, as_json: bool) -> None:
    """Print a result as JSON, or as text for people."""
    if as_json:
        print_json(report)
    else:
        print_text(report)


def print_json_line(report: object) -> None:
    """Print a result as one line of JSON, and flush stdout, because the next result may follow much later."""
    sys.stdout.write(to_json(report, indent=None) + "\n")
    sys.stdout.flush()
