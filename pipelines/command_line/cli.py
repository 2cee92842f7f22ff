"""The command line: `pgsieve COMMAND`.

In: arguments, the configuration file, the environment. Out: results on stdout, progress and errors on stderr,
and the exit codes of `app`. The modules of commands register them, in the order in which `--help` lists them.
"""

# ruff: noqa: E402 - the collector's threshold comes before the imports
import atexit
import errno
import gc
import io
import os
import sys
from pathlib import Path

# Set before anything else is imported. Dagster, SQLAlchemy and pyarrow create many objects during import,
# which all stay. With Python's threshold of 700 new containers the garbage collector searched them again and
# again: a tenth of the CPU time of a command with nothing to do.
gc.set_threshold(100_000)
# At the end of the process no cycles are worth collecting either; that took half a second and more.
atexit.register(gc.freeze)

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.command_line.app import FAULT, FOUND, REFUSED, app
from pgsieve.pipelines.command_line.console import print_error

# isort: off
from pgsieve.pipelines.command_line import first_steps, replication, comparison, moments, operation  # noqa: F401


def main() -> None:
    """Entry point of the console script."""
    _name_files_in_utf8()
    # Python sets a stream to None if the caller has closed it (`>&-`).
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
            # Otherwise the interpreter would try again to write the rest at its exit, and end with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = code or _unwritten(error)  # A command that ended with a code has printed the error.
    sys.exit(code)


def _name_files_in_utf8() -> None:
    """Restart Python in UTF-8 mode if the locale makes it encode file names otherwise.

    Arrow, delta-rs and the JVM use UTF-8, and all of them must find a lake by the same name.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"  # For child processes.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - what runs already


def _unwritten(error: OSError) -> int:
    """Report that help, the version or a shell's completion could not be written.

    Returns the exit code.
    """
    if error.errno == errno.EPIPE:
        return FOUND  # As for a command: `pgsieve --help | head` is no fault.
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
