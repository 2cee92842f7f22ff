"""What a running engine tells of itself: files of one folder, which only their owner can read.

    <folder>/serving   locked by the engine's process as long as it lives
    <folder>/used      locked, shared, by each process that works with the engine; the engine locks it for itself to end
    <folder>/engine.json   where Spark listens, the token it asks for, and what it was started with
    <folder>/engine.log    what Spark prints

The system gives locks back when a process ends, however it ends: no file has to be cleared away after a kill. A lock on
a file is a machine's own, as the engine is.
"""

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class EngineRecord:
    """A running engine: its process, Spark's process, the port on this host, the token, and what it was started with."""

    pid: int
    spark_pid: int
    port: int
    token: str
    #: What the session that it stands for would be made of; another engine answers for another one.
    fingerprint: str
    version: str
    #: Seconds since 1970 in which it began to serve.
    since: float

    @property
    def address(self) -> str:
        """The address as `spark.master` has it; without the token."""
        return f"sc://localhost:{self.port}"


@dataclass(frozen=True)
class EngineFolder:
    """The folder in which an engine and those that use it meet."""

    path: Path

    @property
    def log(self) -> Path:
        """What Spark and the engine's process print."""
        return self.path / "engine.log"

    @property
    def settings(self) -> Path:
        """Spark's settings, which may hold secrets: not in the command that starts it, which every user can read."""
        return self.path / "spark.conf"

    @property
    def _record(self) -> Path:
        return self.path / "engine.json"

    def make(self) -> None:
        """Make the folder, for its owner only."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)

    def is_serving(self) -> bool:
        """Whether an engine's process lives."""
        if not self.path.is_dir():
            return False
        lock = self.lock("serving", shared=True)
        if lock is None:
            return True
        lock.close()
        return False

    def lock(self, name: str, *, shared: bool = False) -> IO[bytes] | None:
        """The lock of a file, held until it is closed; None where another process holds it."""
        file = (self.path / name).open("ab")
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def read(self) -> EngineRecord | None:
        """What the running engine tells; None where none runs, or it does not serve yet."""
        with suppress(OSError, ValueError, TypeError):
            record = EngineRecord(**json.loads(self._record.read_text(encoding="utf-8")))
            if self.is_serving():
                return record
        return None

    def write(self, record: EngineRecord) -> None:
        """Tell of an engine that serves now."""
        self.write_private(self._record, json.dumps(asdict(record)))

    def forget(self) -> None:
        """Tell nobody of the engine any more."""
        self._record.unlink(missing_ok=True)

    def write_private(self, path: Path, text: str) -> None:
        """Write a file that only its owner can read, as a whole or not at all."""
        beside = path.with_suffix(".new")
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        beside.replace(path)
