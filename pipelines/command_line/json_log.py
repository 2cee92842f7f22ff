"""Turns stderr into a log of JSON objects, one per line. This includes lines that the JVM or a C library writes.

In: progress, errors, Python's log records and warnings, and lines that the JVM or a C library writes to file descriptor
    2
Out: lines on the original stderr. docs/monitoring.md lists their keys. Nothing here raises an error.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.visible import escape_controls_in_json
from pgsieve.resources.passwords import conceal_passwords

#: These bytes end the thread that reads the pipe. The thread cannot wait for the end of the pipe instead, because a child
#: process may keep the pipe open.
_PIPE_END_MARK = b"\0end of pgsieve's stderr\n"
_STDERR_DESCRIPTOR = 2


class JsonLog:
    """Replaces file descriptor 2 (stderr) by a pipe until `close`.

    Each line that other code writes to stderr becomes an object.
    """

    def __init__(self) -> None:
        sys.stderr.flush()
        self._stderr_descriptor, self._lock = os.dup(_STDERR_DESCRIPTOR), threading.Lock()
        read_end, write_end = os.pipe()
        self._pipe_write_end: int | None = write_end
        os.dup2(write_end, _STDERR_DESCRIPTOR)
        self._reader_thread = threading.Thread(
            target=self._copy_lines, args=(read_end,), name="stderr", daemon=True
        )
        self._reader_thread.start()
        self._handler = _JsonLogHandler(self)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(capture=True)
        atexit.register(self.close)

    def write(self, level: str, **entries: object) -> None:
        """Write one line. Entries that are None are left out."""
        time_text = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entries = {
            "time": time_text,
            "level": level,
            **{key: value for key, value in entries.items() if value is not None},
        }
        line = escape_controls_in_json(json.dumps(entries, ensure_ascii=False, default=str)).encode() + b"\n"
        with self._lock:
            while line:  # If stderr is a pipe, one call may write only a part of the line.
                try:
                    line = line[os.write(self._stderr_descriptor, line) :]
                except OSError:  # No process reads the pipe any more.
                    return

    def write_error(
        self, error: BaseException, *, subscriptions: tuple[str, ...] = (), verbose: bool = False
    ) -> None:
        """Write an error.

        If it is a fault of pgsieve, only the type of the exception is written; with `verbose`, the traceback, too.
        """
        subscription_names = list(subscriptions) or None
        if isinstance(error, PgsieveError):
            self.write(
                "error",
                message=error.message,
                hint=error.hint,
                sqlstate=error.sqlstate,
                subscriptions=subscription_names,
            )
            return
        traceback_text = conceal_passwords("".join(traceback.format_exception(error))) if verbose else None
        hint = None if verbose else "run `pgsieve --verbose …` for the traceback"
        message = f"unexpected {type(error).__name__}"
        self.write(
            "error", message=message, hint=hint, subscriptions=subscription_names, traceback=traceback_text
        )

    def set_log_level(self, level: int) -> None:
        """Write log records of this level and of higher levels."""
        self._handler.setLevel(level)

    def close(self) -> None:
        """Restore stderr, after all lines were written."""
        atexit.unregister(self.close)
        if self._pipe_write_end is None:
            return
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(capture=False)
        sys.stderr.flush()
        os.write(self._pipe_write_end, _PIPE_END_MARK)
        os.dup2(self._stderr_descriptor, _STDERR_DESCRIPTOR)
        os.close(self._pipe_write_end)
        self._pipe_write_end = None
        self._reader_thread.join(2)

    def _copy_lines(self, read_end: int) -> None:
        """Read lines from the pipe, and write them to the log, until the bytes that end this thread."""
        with os.fdopen(read_end, "rb") as lines:
            for line in lines:
                if line.endswith(_PIPE_END_MARK):
                    line = line[: -len(_PIPE_END_MARK)]  # noqa: PLW2901 - text that was written without a line break
                    if line:
                        self._write_foreign_line(line)
                    return
                self._write_foreign_line(line)

    def _write_foreign_line(self, line: bytes) -> None:
        if text := conceal_passwords(line.decode(errors="replace").rstrip()):
            self.write("info", logger="stderr", message=text)


class _JsonLogHandler(logging.Handler):
    """Writes Python's log records to a JSON log, by default warnings and errors."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        traceback_text = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        names_by_level = {logging.ERROR: "error", logging.WARNING: "warning", logging.INFO: "info"}
        self._log.write(
            next(
                (name for min_level, name in names_by_level.items() if record.levelno >= min_level), "debug"
            ),
            logger=record.name,
            message=conceal_passwords(record.getMessage()),
            traceback=None if traceback_text is None else conceal_passwords(traceback_text),
        )


class JsonProgress:
    """Writes an object to a JSON log when a task starts, and another with the duration in seconds when it ends."""

    def __init__(self, log: JsonLog) -> None:
        self._log, self._lock = log, threading.Lock()
        self._start_times_by_task: dict[str, float] = {}

    def start(self, task: str) -> None:
        """Write that a task begins."""
        with self._lock:
            self._start_times_by_task[task] = time.monotonic()
        self._log.write("info", event="started", task=task)

    def finish(self, task: str) -> None:
        """Write that a task has ended, and how long it took."""
        with self._lock:
            start_time = self._start_times_by_task.pop(task)
        self._log.write("info", event="ended", task=task, seconds=round(time.monotonic() - start_time, 3))

    def tell(self, line: str) -> None:
        """Write a line about a running task."""
        self._log.write("info", message=line)


def to_json_value(value: object) -> object:
    """Convert a result to values that JSON has.

    A dataclass becomes a mapping of its fields, and an error a mapping with its message, hint and SQLSTATE.
    """
    if isinstance(value, PgsieveError):
        return {"message": value.message, "hint": value.hint, "sqlstate": value.sqlstate}
    if isinstance(value, BaseException):
        return {"message": f"unexpected {type(value).__name__}", "hint": None, "sqlstate": None}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: to_json_value(getattr(value, name)) for name in fields}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
