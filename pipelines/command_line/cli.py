"""The program `pgsieve`: the entry point of the console script.

In: arguments, the configuration file, the environment
Out: results on stdout, progress and errors on stderr, and the exit codes that `app` lists

The import of a module registers its commands, and `--help` lists the commands in the order of these imports.
"""

# ruff: noqa: E402 - the garbage collector is configured before the other imports
import atexit
import errno
import gc
import io
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# Dagster, SQLAlchemy and pyarrow create many objects while they are imported, and none of these is garbage. By default
# Python often searches for garbage meanwhile. In a command that has nothing to do, that took a tenth of the processor
# time.
gc.set_threshold(100_000)
# When the process ends, Python searches for garbage once more, which took half a second or longer. `gc.freeze` exempts
# all objects from this search. The system frees the memory anyway.
atexit.register(gc.freeze)

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line.app import EXIT_FAULT, EXIT_FINDINGS, EXIT_REFUSED, app
from pgsieve.pipelines.command_line.console import print_error
from pgsieve.pipelines.command_line.dropped_interrupts import repeat_dropped_interrupts

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, moments, operation  # noqa: F401


def main() -> None:
    """Run the command that this process's arguments name, and exit with the command's exit code."""
    _restart_in_utf8_mode()
    # If the caller has closed a stream (`>&-` in a shell), Python sets it to None.
    sys.stdout, sys.stderr = sys.stdout or _open_null_device(), sys.stderr or _open_null_device()
    # Let SIGTERM interrupt a command as Ctrl-C does. Dagster does so only while it runs a step. If SIGTERM was ignored, it
    # stays ignored.
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    repeat_dropped_interrupts()
    code: str | int | None = EXIT_FAULT
    try:
        app(prog_name="pgsieve")
    except SystemExit as exit_request:
        code = exit_request.code
    except OSError as error:
        code = _report_write_error(error)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            _discard_output(sys.stdout)
            code = code or _report_write_error(error)  # A command with a nonzero code has printed its error.
        try:
            sys.stderr.flush()
        except OSError:
            _discard_output(sys.stderr)
    sys.exit(code)


def _discard_output(stream: TextIO) -> None:
    """Discard what a stream could not write. Otherwise Python would try again at its exit, and end with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _restart_in_utf8_mode() -> None:
    """Restart Python in UTF-8 mode, unless it encodes the names of files in UTF-8 already.

    Arrow, delta-rs and the JVM always encode these names in UTF-8. If Python did not, it would look for a lake under
    another name.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # For child processes.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - the same program again


def _report_write_error(error: OSError) -> int:
    """Report that help, the version or a shell completion could not be written; returns the exit code."""
    if error.errno == errno.EPIPE:
        # Typer uses the same exit code if the reader of a pipe has closed the pipe.
        return EXIT_FINDINGS
    with suppress(OSError):
        print_error(
            PgsieveError(
                f"{error.filename or 'stdout'} cannot be written: {error.strerror}",
                hint="make room, or write elsewhere",
            )
        )
    return EXIT_REFUSED


def _open_null_device() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


if __name__ == "__main__":
    main()
