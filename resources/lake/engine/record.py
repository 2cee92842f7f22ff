"""Manages the files that describe a running warm engine, which is a local Spark Connect server.

They are in one folder, which only its owner can read.

    <folder>/starting  locked by a process while it starts an engine
    <folder>/serving   locked by the engine's process until it ends
    <folder>/used      locked (shared) by each process that uses the engine; locked (exclusively) to end an unused engine
    <folder>/engine.json   the record, with the token that Spark requires
    <folder>/socket    the engine's address
    <folder>/spark.conf, java.options   the settings of Spark's process, and its Java options
    <folder>/engine.log    the output of Spark and of the engine's own process

The system releases the locks of a process when the process ends. So no file has to be removed after a kill.
Another user with access to the parent folder could replace the folder by another one. So each access opens the
folder and checks its owner. Raises EngineError if other users have access to the folder.
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

#: The name of the socket, which is in the folder.
SOCKET_NAME = "socket"
_RECORD_NAME = "engine.json"


class EngineError(PgsieveError):
    """The engine does not start, does not end, or has another configuration; or other users have access to its folder."""


@dataclass(frozen=True)
class EngineRecord:
    """A running engine.

    - `pid`, `spark_pid`: the process of the engine, and the process of Spark
    - `token`: the token that Spark requires of its clients
    - `version`: the version of pgsieve
    """

    pid: int
    spark_pid: int
    token: str
    #: The digest of the engine's settings. An engine with another fingerprint may give other results.
    fingerprint: str
    version: str
    #: The time at which the engine began to serve, in seconds since 1970.
    since: float
    #: The digest of the pgsieve code that the engine runs (`installed_code`); empty if not known.
    code: str = ""


@dataclass(frozen=True)
class EngineFolder:
    """The folder through which an engine and its users find each other."""

    path: Path

    @property
    def address(self) -> str:
        """The engine's address, for messages."""
        return f"unix:{self.path / SOCKET_NAME}"

    @property
    def log_path(self) -> Path:
        """The file with the output of Spark and of the engine's own process."""
        return self.path / "engine.log"

    def create(self) -> None:
        """Create the folder for this user only. Raises EngineError if other users have access to it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.stat().st_uid == os.geteuid():
            self.path.chmod(0o700)
        with self.open_in_block():
            return

    def open(self) -> int:
        """Open the folder. Return a file descriptor, which stays valid even if another folder gets the folder's name.

        Raises OSError, and EngineError if other users have access to the folder.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise EngineError(
                f"other users have access to the engine's folder {self.path}, so it is not used",
                hint="delete it; pgsieve makes it again, for its user only",
                sqlstate="42501",
            )
        return descriptor

    @contextmanager
    def open_in_block(self) -> Iterator[int]:
        """Open the folder for the length of the block. See `open`."""
        folder = self.open()
        try:
            yield folder
        finally:
            os.close(folder)

    def is_serving(self) -> bool:
        """True if the process of an engine is running."""
        if not self.path.is_dir():
            return False
        lock = self.lock("serving", is_shared=True)
        if lock is None:
            return True
        lock.close()
        return False

    def lock(self, name: str, *, is_shared: bool = False) -> IO[bytes] | None:
        """Lock a file, and return it. It is locked until it is closed. None if another process has locked it."""
        with self.open_in_block() as folder:
            file = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder), "rb")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def read_record(self) -> EngineRecord | None:
        """The record of the engine that is serving. None if no engine is serving."""
        with suppress(OSError, ValueError, TypeError), self.open_in_block() as folder:
            with os.fdopen(os.open(_RECORD_NAME, os.O_RDONLY, dir_fd=folder), encoding="utf-8") as file:
                record = EngineRecord(**json.load(file))
            if self.is_serving():
                return record
        return None

    def write_record(self, record: EngineRecord) -> None:
        """Record an engine that is serving from now on."""
        self.write_private(_RECORD_NAME, json.dumps(asdict(record)))

    def remove_record(self) -> None:
        """Remove the record of the engine."""
        with suppress(FileNotFoundError), self.open_in_block() as folder:
            os.unlink(_RECORD_NAME, dir_fd=folder)

    def write_private(self, name: str, text: str) -> None:
        """Write a file that only its owner can read. The file is replaced as a whole, so no reader sees a part of it."""
        temporary_name = f"{name}.new"
        with self.open_in_block() as folder:
            with suppress(FileNotFoundError):
                os.unlink(temporary_name, dir_fd=folder)
            descriptor = os.open(temporary_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary_name, name, src_dir_fd=folder, dst_dir_fd=folder)
