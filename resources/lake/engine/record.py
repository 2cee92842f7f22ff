"""The record of a running engine: files in one folder that only its owner can read.

    <folder>/serving   locked by the engine's process until it ends
    <folder>/used      locked, shared, by each process that uses the engine; the engine locks it exclusively to end
    <folder>/engine.json   the record, with the token that Spark requires
    <folder>/socket    the engine's address
    <folder>/spark.conf, java.options   the settings of Spark's process, and its Java options
    <folder>/engine.log    the output of Spark

The system releases a process' locks at its end, so no file has to be removed after a kill. Each access opens the
folder, and checks its owner, because another user with access to the parent folder could replace it. Raises
EngineError if other users have access to the folder.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pgsieve.decoding.errors import PgsieveError

#: The name of the socket in the folder.
SOCKET = "socket"
_RECORD = "engine.json"


class EngineError(PgsieveError):
    """The engine does not start, does not end, has another configuration, or other users have access to its folder."""


@dataclass(frozen=True)
class EngineRecord:
    """A running engine: its process and Spark's, the token, its fingerprint, pgsieve's version, and its start."""

    pid: int
    spark_pid: int
    token: str
    #: The digest of its settings; an engine with another fingerprint may give other results.
    fingerprint: str
    version: str
    #: The time at which the engine began to serve, in seconds since 1970.
    since: float


@dataclass(frozen=True)
class EngineFolder:
    """The folder by which an engine and its users find each other."""

    path: Path

    @property
    def address(self) -> str:
        """The engine's address, for messages."""
        return f"unix:{self.path / SOCKET}"

    @property
    def log(self) -> Path:
        """The file with the output of Spark and of the engine's process."""
        return self.path / "engine.log"

    def make(self) -> None:
        """Create the folder for this user only; raise EngineError if other users have access to it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.stat().st_uid == os.geteuid():
            self.path.chmod(0o700)
        with self.open_within():
            return

    def open(self) -> int:
        """Open the folder; return a descriptor, which stays valid even if another folder gets its name.

        Raises EngineError if other users have access to the folder, and OSError.
        """
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(folder)
            raise EngineError(
                f"other users have access to the engine's folder {self.path}, so it is not used",
                hint="delete it; pgsieve makes it again, for its user only",
                sqlstate="42501",
            )
        return folder

    @contextmanager
    def open_within(self) -> Iterator[int]:
        """Open the folder for the block. See `open`."""
        folder = self.open()
        try:
            yield folder
        finally:
            os.close(folder)

    def is_serving(self) -> bool:
        """Whether an engine's process runs."""
        if not self.path.is_dir():
            return False
        lock = self.lock("serving", shared=True)
        if lock is None:
            return True
        lock.close()
        return False

    def lock(self, name: str, *, shared: bool = False) -> IO[bytes] | None:
        """Lock a file until it is closed, and return it; None if another process has locked it."""
        with self.open_within() as folder:
            file = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder), "rb")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def read(self) -> EngineRecord | None:
        """The record of the engine that serves; None if none does."""
        with suppress(OSError, ValueError, TypeError), self.open_within() as folder:
            with os.fdopen(os.open(_RECORD, os.O_RDONLY, dir_fd=folder), encoding="utf-8") as file:
                record = EngineRecord(**json.load(file))
            if self.is_serving():
                return record
        return None

    def write(self, record: EngineRecord) -> None:
        """Record an engine that serves now."""
        self.write_private(_RECORD, json.dumps(asdict(record)))

    def forget(self) -> None:
        """Remove the record of the engine."""
        with suppress(FileNotFoundError), self.open_within() as folder:
            os.unlink(_RECORD, dir_fd=folder)

    def write_private(self, name: str, text: str) -> None:
        """Write a file that only its owner can read, atomically."""
        temporary = f"{name}.new"
        with self.open_within() as folder:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            with os.fdopen(new, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
