"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr, and the
exit codes of `app`. The modules of commands register them, in the order in which `--help` lists them.
"""

# ruff: noqa: E402 - the collector's threshold comes before the imports
import atexit
import errno
import gc
import io
import os
import sys
from pathlib import Path

# Before anything else is imported. A search for cycles goes through what Dagster, SQLAlchemy and pyarrow make as they are imported,
# which stays: with Python's threshold of 700 new containers, and from the first import on, that was a tenth of the processor time
# of a command with nothing to do.
gc.set_threshold(100_000)
# Nor are there cycles worth looking for when the process ends, which took half a second and more.
atexit.register(gc.freeze)

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line.app import FAULT, FOUND, REFUSED, app
from pgsieve.pipelines.command_line.console import print_error

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, operation  # noqa: F401


def main() -> None:
    """Entry point of the console script."""
    _name_files_in_utf8()
    # Python has none where the caller has closed it (`>&-`).
    sys.stdout, sys.stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    code: str | int | None = FAULT
    try:
        app(prog_name="pgsieve")
    except SystemExit as ended:
        code = ended.code
    except OSError as error:
        code = _unwritten(error)
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            # The interpreter would write it once more as it ends, and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or _unwritten(error)  # A command has told it, and ended with a code.
    sys.exit(code)


def _name_files_in_utf8() -> None:
    """Begin anew where a locale has Python name files otherwise than Arrow, delta-rs and the JVM do: a lake is one folder for all."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # For the processes that this one starts.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - what runs already


def _unwritten(error: OSError) -> int:
    """Tell what could not be written outside of commands: help, the version, a shell's completion. Out: the exit code."""
    if error.errno == errno.EPIPE:
        return FOUND  # As of a command: `pgsieve --help | head` is no fault.
    print_error(
        PgsieveError(
            f"{error.filename or 'stdout'} cannot be written: {error.strerror}",
            hint="make room, or write elsewhere",
        )
    )
    return REFUSED


def _nowhere() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


if __name__ == "__main__":
    main()
