"""Marks a lake in a folder as long as writes of a process may not be on disk yet.

In: the lake's folder. Out: a mark in the folder as long as a power cut may lose writes; and `synchronise`,
after which all earlier writes are on disk. A process that begins to write first looks for the marks of ended
processes, and removes their half-written commits (`half_written`). Raises OSError if the folder cannot be
written, or if writes did not reach the disk.

syncfs(2) writes a whole file system to disk: the writes of this process, of delta-rs, of a JVM, and of other
processes of this host. It is called with an open file. Since Linux 5.8 it reports each write that has failed
since that file was opened. The mark is this file, opened before the first write. After such an error no write
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

#: The folder of the marks, next to the feeds' folders, whose names have no dot; and the file that is locked
#: there.
_MARKS, _LOCK = ".unsynced", "lock"
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: macOS: have the disk write its own cache, too.
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Unsynced:
    """The writes of this process to a lake that may not be on disk yet."""

    def __init__(self, lake: Path) -> None:
        self._lake, marks = lake, lake / OWN_FOLDER / _MARKS
        # Other users must not read pgsieve's own folder, as it will have rows that no filter has rejected
        # yet. An existing folder keeps its mode.
        marks.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks.mkdir(mode=0o700, exist_ok=True)
        with _alone(marks):
            _put_back(lake, marks)
            mark = marks / uuid.uuid4().hex
            self._file = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # The lock lasts as long as this process. Other processes leave a locked mark alone.
            _lock(self._file, fcntl.LOCK_EX)
        # Only the mark itself has to be on disk before the first write.
        os.fsync(self._file)
        for folder in (marks, marks.parent, lake):
            with _opened(folder) as file:
                os.fsync(file)
        self._failed: int | None = None
        #: Writes everything to disk, and removes the mark.
        self.leave = weakref.finalize(self, _end, self._file, mark, os.getpid())

    def synchronise(self) -> None:
        """Have all earlier writes to the lake on disk.

        Raises OSError if some are lost, and again in each later call.
        """
        if self._failed is not None:
            raise OSError(self._failed, os.strerror(self._failed))
        try:
            _synchronise(self._file)
            for folder in _elsewhere(self._lake):
                with _opened(folder) as file:
                    _synchronise(file)
        except OSError as error:
            self._failed = error.errno or errno.EIO
            # The mark stays, so that the next process checks what is on disk.
            self.leave.detach()
            raise


_shared: "weakref.WeakValueDictionary[str, Unsynced]" = weakref.WeakValueDictionary()
_SHARING = threading.Lock()


def unsynced(lake: str) -> Unsynced:
    """The object of a lake; the parts of this process that have the lake open share it."""
    with _SHARING:
        if (one := _shared.get(lake)) is None:
            one = _shared[lake] = Unsynced(Path(lake))
        return one


def recover(lake: str) -> None:
    """Remove half-written commits of processes that ended without closing the lake, before the lake is read.

    If this user cannot write to the folder, nothing is done: the next writer removes them, or a reader
    reports damage.
    """
    marks = Path(lake, OWN_FOLDER, _MARKS)
    if marks.is_dir():
        with suppress(OSError), _alone(marks):
            _put_back(Path(lake), marks)


def leave_all() -> None:
    """Close all lakes at the end of a command, with all writes on disk.

    The end of a process closes the other lakes.
    """
    with _SHARING:
        for one in list(_shared.values()):
            one.leave()
        _shared.clear()


def _put_back(lake: Path, marks: Path) -> None:
    """Remove half-written commits of processes that ended without closing the lake, and these processes' marks."""
    left = list[tuple[Path, int]]()
    for mark in marks.iterdir():
        if mark.name == _LOCK:
            continue
        file = os.open(mark, os.O_RDWR)
        try:
            if _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB):
                left.append((mark, os.fstat(file).st_mtime_ns))
        finally:
            os.close(file)
    if not left:
        return
    # This import is slow, and rarely needed.
    from pgsieve.resources.lake.half_written import put_back

    put_back(lake, min(since for _, since in left))
    with _opened(lake) as file:
        _synchronise(file)
    for mark, _ in left:
        mark.unlink(missing_ok=True)


def _end(file: int, mark: Path, process: int) -> None:
    """Write the lake to disk and remove the mark; a forked process does nothing."""
    if os.getpid() != process:
        return
    try:
        _synchronise(file)
        mark.unlink(missing_ok=True)
    except OSError:
        pass  # The mark stays.
    finally:
        os.close(file)


def _synchronise(file: int) -> None:
    """Write the file system of an open file to disk."""
    if _FULL_SYNC is not None:
        os.sync()
        fcntl.fcntl(file, _FULL_SYNC)
    elif _LIBRARY.syncfs(file):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _elsewhere(lake: Path) -> list[Path]:
    """Folders of subscriptions and their subfolders on other file systems than the lake's, one per file system."""
    others, device = dict[int, Path](), lake.stat().st_dev
    for pattern in ("*", "*/*"):
        for folder in lake.glob(pattern):
            if folder.is_dir() and (other := folder.stat().st_dev) != device:
                others.setdefault(other, folder)
    return list(others.values())


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    file = os.open(folder, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _alone(marks: Path) -> Iterator[None]:
    """Within the block no other process begins to write, as it could rely on a commit that is about to be removed."""
    file = os.open(marks / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _lock(file: int, how: int) -> bool:
    """Whether a file could be locked; False if another process has locked it.

    False also if the file system has no locks, since then each mark may be a living process'.
    """
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, *_NO_LOCKS}:
            raise
        return False
    return True
