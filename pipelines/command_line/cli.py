"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr,
and the exit codes of `app`. Importing a module registers its commands; `--help` lists them in this order.
"""

# ruff: noqa: E402 - the collector's threshold comes before the imports
import atexit
import errno
import gc
import io
import os
import sys
from pathlib import Path

# Set before the other imports. Dagster, SQLAlchemy and pyarrow create many objects during import, and none of
# them is garbage. With Python's threshold of 700 new containers, searching them took a tenth of the CPU time
# of a command without work.
gc.set_threshold(100_000)
# The collection at the process's end took half a second and more, and its memory is freed anyway.
atexit.register(gc.freeze)

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line.app import EXIT_FAULT, EXIT_FINDINGS, EXIT_REFUSED, app
from pgsieve.pipelines.command_line.console import print_error

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, moments, operation  # noqa: F401


def main() -> None:
    """Entry point of the console script."""
    _restart_in_utf8_mode()
    # Python sets a stream to None if the caller has closed it (`>&-`).
    sys.stdout, sys.stderr = sys.stdout or _open_null_device(), sys.stderr or _open_null_device()
    code: str | int | None = EXIT_FAULT
    try:
        app(prog_name="pgsieve")
    except SystemExit as ended:
        code = ended.code
    except OSError as error:
        code = _report_write_error(error)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # Otherwise the interpreter would flush again at its exit, and end with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or _report_write_error(error)  # A command with a nonzero code has printed its error.
    sys.exit(code)


def _restart_in_utf8_mode() -> None:
    """Restart Python in UTF-8 mode, unless it already encodes file names in UTF-8.

    Arrow, delta-rs and the JVM do, and all of them must find a lake by the same name.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # For child processes.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - what runs already


def _report_write_error(error: OSError) -> int:
    """Report that help, the version or a completion could not be written; returns the exit code."""
    if error.errno == errno.EPIPE:
        return EXIT_FINDINGS  # typer's exit code for a command whose output is a closed pipe.
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
