"""An archive of the classes that Spark loads at its start: it halves the CPU time of a JVM until its first job.

In: a session's settings. Out: a file next to the jars (`pgsieve.resources.lake.jars`), made once, and the
Java option that names it. Java checks that the file belongs to this Java and these jars, and otherwise
ignores it. If the file cannot be written, pgsieve works without it.

https://docs.oracle.com/en/java/javase/17/docs/specs/man/java.html#application-class-data-sharing
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

#: A folder with the jars of another machine; by default jars are in the virtual environment.
FOLDER_VARIABLE = "PGSIEVE_JARS"
#: Keeps Java from reporting its use of an archive in its output, which is Spark's log.
_SILENT_OPTIONS = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
_PROGRAM = "pgsieve.resources.lake.archived_session"


def jars_folder() -> Path:
    """The folder of the jars and the archive: PGSIEVE_JARS, or otherwise the virtual environment."""
    return Path(os.environ.get(FOLDER_VARIABLE) or sys.prefix)


def archive_file() -> Path:
    """The path of the archive of this Java's classes, even if it does not exist yet."""
    return jars_folder() / f"spark-{version('pyspark')}-{_java()}.jsa"


def _java() -> str:
    """A digest that distinguishes Java installations by the program's path, size and time."""
    home = os.environ.get("JAVA_HOME")
    program = Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "java")
    with suppress(OSError):
        program = program.resolve(strict=True)
        status = program.stat()
        return sha256(f"{program} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    return "none"


def options(java_options: str) -> list[str]:
    """The options that use the archive.

    Empty without an archive, or if the user's `java_options` name one.
    """
    file = archive_file()
    if "SharedArchiveFile" in java_options or "ArchiveClassesAtExit" in java_options or not file.is_file():
        return []
    return [f"-XX:SharedArchiveFile={file}", *_SILENT_OPTIONS]


def make_archive() -> bool:
    """Start a session in a separate process, use it once, and archive its classes, which takes half a minute.

    Returns whether there is an archive now. An incomplete archive would end the JVM, so the file gets its
    name once all of it is on disk.
    """
    file = archive_file()
    if file.is_file() or not os.access(file.parent, os.W_OK):
        return file.is_file()
    made = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter, no shell
            [sys.executable, "-m", _PROGRAM, str(made)], capture_output=True, check=False
        )
        with suppress(OSError):
            if not done.returncode:
                _publish(made, file)
    finally:
        made.unlink(missing_ok=True)
    return file.is_file()


def archiving_options(made: Path) -> str:
    """The options that have a JVM write an archive of its classes as it ends."""
    return " ".join((f'"-XX:ArchiveClassesAtExit={made}"', *_SILENT_OPTIONS))


def copy_archive(folder: Path) -> None:
    """Copy the archive, if there is one, into a folder that lacks it. Raises OSError."""
    file = archive_file()
    if file.is_file() and not (folder / file.name).exists():
        made = folder / f".{file.name}.{os.getpid()}"
        try:
            shutil.copyfile(file, made)
            _publish(made, folder / file.name)
        finally:
            made.unlink(missing_ok=True)


def _publish(made: Path, file: Path) -> None:
    """Write all of an archive to disk, and then give it the name that `options` uses."""
    with made.open("rb") as written:
        os.fsync(written.fileno())
    made.replace(file)
