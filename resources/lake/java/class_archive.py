"""Keeps an archive of the classes that Spark loads. It halves the processor time that a JVM needs until its first job.

In: the settings of a session.
Out: a file next to the jars (`pgsieve.resources.lake.jars`), which is created once; and the Java option that names
     it.

Java ignores the file if it does not belong to this Java and these jars. If the file cannot be written, pgsieve
works without it.

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

#: The environment variable that names a folder with jars that were fetched on another machine.
FOLDER_VARIABLE = "PGSIEVE_JARS"
#: Options that keep Java from writing about the archive into its output, which is also Spark's log.
_SILENT_OPTIONS = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off", "-Xlog:class+path=off")
#: The module that creates the archive, when it is run as a program.
_PROGRAM = "pgsieve.resources.lake.archived_session"


def find_jars_folder() -> Path:
    """The folder of the jars and the archive. PGSIEVE_JARS names it; otherwise it is the virtual environment."""
    return Path(os.environ.get(FOLDER_VARIABLE) or sys.prefix)


def find_archive_path() -> Path:
    """The path of the archive for this Java. The file may not exist yet."""
    return find_jars_folder() / f"spark-{version('pyspark')}-{_compute_java_digest()}.jsa"


def _compute_java_digest() -> str:
    """A digest of the path, size and modification time of the Java program. It differs between Java installations."""
    home = os.environ.get("JAVA_HOME")
    program = Path(home) / "bin" / "java" if home else Path(shutil.which("java") or "java")
    with suppress(OSError):
        program = program.resolve(strict=True)
        status = program.stat()
        return sha256(f"{program} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    return "none"


def make_archive_options(java_options: str) -> list[str]:
    """The Java options that make a JVM use the archive.

    Empty if there is no archive, or if the user's `java_options` already choose one.
    """
    file = find_archive_path()
    if "SharedArchiveFile" in java_options or "ArchiveClassesAtExit" in java_options or not file.is_file():
        return []
    return [f"-XX:SharedArchiveFile={file}", *_SILENT_OPTIONS]


def make_archive() -> bool:
    """Create the archive in a separate process, which takes up to half a minute. Return True if the archive exists now.

    An incomplete archive would crash the JVM. So the file gets its name only after all of it is on disk.
    """
    file = find_archive_path()
    if file.is_file() or not os.access(file.parent, os.W_OK):
        return file.is_file()
    temporary_path = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        process = subprocess.run(  # noqa: S603 - our own interpreter, no shell
            [sys.executable, "-m", _PROGRAM, str(temporary_path)], capture_output=True, check=False
        )
        with suppress(OSError):
            if not process.returncode:
                _sync_and_rename(temporary_path, file)
    finally:
        temporary_path.unlink(missing_ok=True)
    return file.is_file()


def make_archive_writing_options(archive: Path) -> str:
    """The Java options that make a JVM write an archive of its classes when it ends."""
    return " ".join((f'"-XX:ArchiveClassesAtExit={archive}"', *_SILENT_OPTIONS))


def copy_archive(folder: Path) -> None:
    """Copy the archive into a folder, if it exists and the folder does not have it yet. Raises OSError."""
    file = find_archive_path()
    if file.is_file() and not (folder / file.name).exists():
        temporary_path = folder / f".{file.name}.{os.getpid()}"
        try:
            shutil.copyfile(file, temporary_path)
            _sync_and_rename(temporary_path, folder / file.name)
        finally:
            temporary_path.unlink(missing_ok=True)


def _sync_and_rename(temporary_path: Path, file: Path) -> None:
    """Make sure that an archive is on disk, and then give it its final name."""
    with temporary_path.open("rb") as content:
        os.fsync(content.fileno())
    temporary_path.replace(file)
