"""Marks a lake in a folder while writes of a process may not be on disk yet.

In: the lake's folder. Out: a mark in the folder while a power cut could lose writes; and `sync`, after which all
earlier writes are on disk. Before a process begins to write, it searches for the marks of processes that have
ended, and removes their half-written commits (`half_written`). Raises OSError if the folder cannot be written,
or if writes did not reach the disk.

syncfs(2) writes a whole file system to disk: the writes of this process, of delta-rs, of a JVM, and of other
processes of this host. Its argument is an open file. Since Linux 5.8 it reports all writes that have failed
since that file was opened. So the argument is the mark, opened before the first write. After an error no write
counts as durable.
"""

import ctypes
import errno
import fcntl
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pgsieve.resources.lake.paths import OWN_FOLDER

#: The folder of the marks, next to the feeds' folders, whose names have no dot.
_MARKS = ".unsynced"
#: The file in that folder that a process locks while it begins to write.
_LOCK = "lock"
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: macOS: the command that also makes the disk write its cache.
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class UnsyncedWrites:
    """The writes of this process to a lake that may not be on disk yet."""

    def __init__(self, lake: Path) -> None:
        self._lake, marks = lake, lake / OWN_FOLDER / _MARKS
        # pgsieve's own folder will have rows that no filter has rejected yet, so other users must not read it. An
        # existing folder keeps its mode.
        marks.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks.mkdir(mode=0o700, exist_ok=True)
        with _exclude_writers(marks):
            _recover(lake, marks)
            mark = marks / uuid.uuid4().hex
            self._file = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # The lock lasts until this process ends. Other processes ignore a locked mark.
            _lock(self._file, fcntl.LOCK_EX)
        # Only the mark itself has to be on disk before the first write.
        os.fsync(self._file)
        for folder in (marks, marks.parent, lake):
            with _open_folder(folder) as file:
                os.fsync(file)
        self._failed: int | None = None
        #: Writes everything to disk, and removes the mark.
        self.close = weakref.finalize(self, _end, self._file, mark, os.getpid())

    def sync(self) -> None:
        """Write all earlier writes to disk; raise OSError if some are lost, then and in each later call."""
        if self._failed is not None:
            raise OSError(self._failed, os.strerror(self._failed))
        try:
            _sync_file_system(self._file)
            for folder in _folders_on_other_devices(self._lake):
                with _open_folder(folder) as file:
                    _sync_file_system(file)
        except OSError as error:
            self._failed = error.errno or errno.EIO
            # The mark stays, so that the next process checks the files on disk.
            self.close.detach()
            raise


_shared: "weakref.WeakValueDictionary[str, UnsyncedWrites]" = weakref.WeakValueDictionary()
_SHARING = threading.Lock()


def unsynced_writes(lake: str) -> UnsyncedWrites:
    """The unsynced writes to a lake, one object for all users of the lake in this process."""
    with _SHARING:
        if (writes := _shared.get(lake)) is None:
            writes = _shared[lake] = UnsyncedWrites(Path(lake))
        return writes


def recover(lake: str) -> None:
    """Before the lake is read, remove half-written commits of processes that ended without closing the lake.

    Does nothing if this user cannot write to the folder. Then the next writer removes them, or a reader
    reports damage.
    """
    marks = Path(lake, OWN_FOLDER, _MARKS)
    if marks.is_dir():
        with suppress(OSError), _exclude_writers(marks):
            _recover(Path(lake), marks)


def close_all_lakes() -> None:
    """At the end of a command, write all lakes to disk, and close them. Others are closed at the process' end."""
    with _SHARING:
        for writes in list(_shared.values()):
            writes.close()
        _shared.clear()


def _recover(lake: Path, marks: Path) -> None:
    """Remove half-written commits of processes that ended without closing the lake, and their marks."""
    abandoned = list[tuple[Path, int]]()
    for mark in marks.iterdir():
        if mark.name == _LOCK:
            continue
        file = os.open(mark, os.O_RDWR)
        try:
            if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                abandoned.append((mark, os.fstat(file).st_mtime_ns))
        finally:
            os.close(file)
    if not abandoned:
        return
    # This import is slow, and rarely needed.
    from pgsieve.resources.lake.half_written import roll_back_tables

    roll_back_tables(lake, min(since for _, since in abandoned))
    with _open_folder(lake) as file:
        _sync_file_system(file)
    for mark, _ in abandoned:
        mark.unlink(missing_ok=True)


def _end(file: int, mark: Path, process: int) -> None:
    """Write the lake to disk and remove the mark; a forked process does nothing."""
    if os.getpid() != process:
        return
    try:
        _sync_file_system(file)
        mark.unlink(missing_ok=True)
    except OSError:
        pass  # The mark stays.
    finally:
        os.close(file)


def _sync_file_system(file: int) -> None:
    """Write the file system of an open file to disk."""
    if _FULL_SYNC is not None:
        os.sync()
        fcntl.fcntl(file, _FULL_SYNC)
    elif _LIBRARY.syncfs(file):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _folders_on_other_devices(lake: Path) -> list[Path]:
    """The folders of subscriptions and their subfolders on other file systems than the lake's, one per file system."""
    folders_by_device, device = dict[int, Path](), lake.stat().st_dev
    for pattern in ("*", "*/*"):
        for folder in lake.glob(pattern):
            if folder.is_dir() and (other := folder.stat().st_dev) != device:
                folders_by_device.setdefault(other, folder)
    return list(folders_by_device.values())


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    file = os.open(folder, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _exclude_writers(marks: Path) -> Iterator[None]:
    """Keep other processes from beginning to write within the block: they could rely on a commit that is removed."""
    file = os.open(marks / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _lock(file: int, operation: int) -> bool:
    """Lock a file; return False if another process has locked it.

    Returns False also on a file system without locks, where each mark may belong to a running process.
    """
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, *_NO_LOCKS}:
            raise
        return False
    return True
