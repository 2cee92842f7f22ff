"""Install pgsieve's checkout, with extras, into the environment of the Python that runs this.

In: the extras, separated by commas; pip's configuration from the environment and from files. Out: the
installation, a line of progress, and pip's output in `.venv/install.log`. If pip fails, the script prints the
reason, and returns pip's exit status.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

#: The time between two lines of progress, if the output is not a terminal.
_PROGRESS_SECONDS = 10.0
_REASON_LINES = 30
#: The modules that commands, and the Python processes of Spark, import.
_IMPORTED = (
    "pgsieve.pipelines.command_line.cli",
    "pgsieve.pipelines.command_line.replication",
    "pgsieve.pipelines.commands.run",
    "pgsieve.pipelines.definitions",
    "pyspark.sql.connect.session",
    "pyspark.worker",
    "deltalake",
    "pandas",
)
#: The variable that keeps Python from storing compiled modules.
_NO_BYTECODE_VARIABLE = "PYTHONDONTWRITEBYTECODE"
#: Names the file that setuptools reads besides a project's own files, unless the user's environment names another.
_BUILD_ENVIRONMENT = {"DIST_EXTRA_CONFIG": str(Path(__file__).with_name("wheels.cfg"))}


def main(extras: str) -> int:
    """Install, and return pip's exit status."""
    log = Path(sys.prefix, "install.log")
    # Python compiles modules at their first import. To compile all of them would take longer than the installation.
    pip_install = [sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    command = [*pip_install, "--editable", f".[{extras}]"]
    lines = list[str]()
    progress = _Progress()
    with subprocess.Popen(
        command,
        env={**_BUILD_ENVIRONMENT, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line)
            progress.show(line)
    progress.end()
    log.write_text("".join(lines), encoding="utf-8")
    if pip.returncode:
        sys.stderr.write("\n".join([*_reason(lines), f"pip failed; its output is in {log}.\n"]))
    elif sys.dont_write_bytecode:
        _compile(_IMPORTED)
    return pip.returncode


def _compile(modules: Sequence[str]) -> None:
    """Compile these modules and their imports, which otherwise takes each process seconds."""
    environment = {name: value for name, value in os.environ.items() if name != _NO_BYTECODE_VARIABLE}
    subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], env=environment, check=False)


def _reason(lines: list[str]) -> Iterator[str]:
    """The lines of pip's output from its first error on, without the long lists of available versions."""
    first = next((at for at, line in enumerate(lines) if line.lstrip().lower().startswith("error")), None)
    chosen = lines[-_REASON_LINES:] if first is None else lines[first : first + _REASON_LINES]
    for line in chosen:
        begin, separator, _ = line.rstrip().partition(" (from versions: ")
        yield begin + (")" if separator and begin.count("(") > begin.count(")") else "")


class _Progress:
    """Shows how many packages pip has collected: in one line of a terminal, elsewhere by a line every ten seconds."""

    def __init__(self) -> None:
        self._on_terminal = sys.stdout.isatty()
        self._count, self._last, self._began = 0, 0.0, monotonic()

    def show(self, line: str) -> None:
        """Show pip's progress from a line of its output."""
        word = next(iter(line.split()), "")
        if word == "Collecting":
            self._count += 1
            self._print(f"{self._count} packages found, {line.split()[1]}")
        elif word == "Building":
            self._print(f"{self._count} packages found, building {line.split()[-2]}")
        elif line.startswith("Installing collected packages"):
            self._print(f"putting {self._count} packages in place", at_once=True)

    def end(self) -> None:
        """Show the result, and end the line."""
        seconds = f"{monotonic() - self._began:.0f} s"
        self._print(f"{self._count} packages, {seconds}", at_once=True)
        if self._on_terminal:
            sys.stdout.write("\n")

    def _print(self, text: str, *, at_once: bool = False) -> None:
        now = monotonic()
        if self._on_terminal:
            sys.stdout.write(f"\r\033[K  {text[:76]}")
        elif at_once or now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            sys.stdout.write(f"  {text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
