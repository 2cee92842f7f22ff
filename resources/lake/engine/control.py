"""Starts, uses and ends the warm engine (a local Spark Connect server) of a folder.

In: the folder, and the settings of the engine's session.
Out: the record of a running engine (its processes and token), and an `EngineUse`.

Raises EngineError if an engine does not start to serve, or does not end.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import IO

from pgsieve import __version__
from pgsieve.resources.lake.engine import server
from pgsieve.resources.lake.engine.installed_code import compute_code_digest
from pgsieve.resources.lake.engine.record import (
    SOCKET_NAME,
    EngineError,
    EngineFolder,
    EngineRecord,
)

#: The time between two looks at whether an engine serves.
_POLL_SECONDS = 0.1
_START_SECONDS = 150.0
_END_SECONDS = 30.0


@dataclass(frozen=True)
class EngineUse:
    """The use of an engine by this process.

    The engine counts as used until `close`, or until this process ends. `stop` ends even an engine that is in use.
    """

    record: EngineRecord
    lock: IO[bytes]
    #: The file descriptor of the engine's folder. Connections by this descriptor reach the folder even if another
    #: folder gets its name.
    folder_descriptor: int

    @property
    def has_same_code(self) -> bool:
        """True if the engine's workers have the same source code of pgsieve as this process."""
        return bool(self.record.code) and self.record.code == compute_code_digest()

    @property
    def target(self) -> str:
        """The engine's address for gRPC."""
        return f"unix:/proc/self/fd/{self.folder_descriptor}/{SOCKET_NAME}"

    def close(self) -> None:
        """End the use."""
        self.lock.close()
        os.close(self.folder_descriptor)


def compute_fingerprint(settings: Mapping[str, str]) -> str:
    """A digest of an engine's settings, and of the versions of the software.

    Engines with the same digest are interchangeable.
    """
    versions = {name: version(name) for name in ("pyspark", "delta-spark")}
    identity = [__version__, sys.executable, os.environ.get("JAVA_HOME", ""), versions, dict(settings)]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def begin_use(folder: EngineFolder, settings: Mapping[str, str]) -> EngineUse | None:
    """Use the engine with these settings.

    None if no such engine is running, or if other users have access to its folder.
    """
    try:
        descriptor = folder.open()
    except (OSError, EngineError):
        return None
    lock = _lock_use(folder)
    record = folder.read_record()
    if record is None or record.fingerprint != compute_fingerprint(settings):
        lock.close()
        os.close(descriptor)
        return None
    return EngineUse(record, lock, descriptor)


def _lock_use(folder: EngineFolder) -> IO[bytes]:
    """Take a shared lock for a use, and wait for it if need be.

    The engine itself takes the lock for short moments, to find out whether a process uses it.
    """
    while True:
        lock = folder.lock("used", is_shared=True)
        if lock is not None:
            return lock
        time.sleep(_POLL_SECONDS / 10)


def start(
    folder: EngineFolder, settings: Mapping[str, str], max_idle: timedelta, owner_pid: int | None = None
) -> EngineRecord:
    """Start an engine with these settings, unless one is serving already. Return its record.

    The engine ends with the process `owner_pid`; without an owner, after it was unused for `max_idle`. If an engine with
    other settings is running, it is ended first. Raises EngineError if that engine is in use, or if the new engine ends
    while it starts, or does not serve in time.
    """
    is_launched = False
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and not (is_launched and not folder.is_serving()):
        record = folder.read_record()
        if record is not None and record.fingerprint == compute_fingerprint(settings):
            return record
        is_launched = launch(folder, settings, max_idle, owner_pid) or is_launched
        time.sleep(_POLL_SECONDS)
    raise EngineError(
        f"the engine does not start to serve: {_read_last_line(folder)}",
        hint=f"read {folder.log_path}; meanwhile each run starts its own Spark",
    )


def launch(
    folder: EngineFolder, settings: Mapping[str, str], max_idle: timedelta, owner_pid: int | None = None
) -> bool:
    """Start an engine, and do not wait until it serves. See `start`.

    Return False if an engine with these settings is serving or starting already.
    """
    folder.create()
    with _lock_start(folder) as is_free:
        record = folder.read_record()
        if not is_free or (record is None and folder.is_serving()):
            return False
        if record is not None:
            if record.fingerprint == compute_fingerprint(settings):
                return False
            _end_other_engine(folder, record)
        with folder.open_in_block() as descriptor:
            log_descriptor = os.open(
                folder.log_path.name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=descriptor
            )
            process = subprocess.Popen(  # noqa: S603 - our own interpreter, no shell
                # With -P Python imports no module from the current folder.
                [sys.executable, "-P", "-m", server.__name__],
                cwd=f"/proc/self/fd/{descriptor}",
                # `stores.storage.hide_token` may have unset the session token of S3 in the environment of this process,
                # because the lake has other keys. `os.environ` still has the token, which the engine may need.
                env=dict(os.environ),
                stdin=subprocess.PIPE,
                stdout=log_descriptor,
                stderr=log_descriptor,
                start_new_session=True,
            )
            os.close(log_descriptor)
        plan = server.EnginePlan(
            compute_fingerprint(settings), max_idle.total_seconds(), owner_pid, dict(settings)
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(json.dumps(asdict(plan)).encode())
        # Wait only until the process has locked the file `serving`, so that no other process starts a second engine.
        while process.poll() is None and not folder.is_serving():
            time.sleep(_POLL_SECONDS / 10)
    return True


@contextmanager
def _lock_start(folder: EngineFolder) -> Iterator[bool]:
    """Keep other processes from starting an engine within the block.

    Yield False if another process is starting one already.
    """
    lock = folder.lock("starting")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _end_other_engine(folder: EngineFolder, record: EngineRecord) -> None:
    """End an engine with other settings. Raises EngineError if a process uses it."""
    use_lock = folder.lock("used")
    if use_lock is None:
        raise EngineError(
            f"the engine of {folder.path} has version {record.version} of pgsieve, or other settings of Spark, and is in use",
            hint="wait for the runs that use it, or end it: pgsieve engine stop",
            sqlstate="55006",
        )
    with use_lock:
        stop(folder)


def stop(folder: EngineFolder) -> bool:
    """End the engine, even if it is in use. Return True if one was running. Raises EngineError if it does not end."""
    record = folder.read_record()
    if record is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while folder.is_serving():
        if time.monotonic() > deadline:
            raise EngineError(
                f"the engine does not end (process {record.pid})", hint=f"read {folder.log_path}"
            )
        time.sleep(_POLL_SECONDS)
    return True


def is_used(folder: EngineFolder) -> bool:
    """True if a process is using the engine."""
    lock = folder.lock("used")
    if lock is None:
        return True
    lock.close()
    return False


def _read_last_line(folder: EngineFolder) -> str:
    """The last line in the log of the engine."""
    with suppress(OSError):
        lines = folder.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it printed nothing"
    return "it printed nothing"
