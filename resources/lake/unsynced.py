"""Writes of a process to a lake in a folder that the file system may not have on disk yet.

In: the lake's folder. Out: a mark in it, as long as a power cut may lose something; and `synchronise`, after
which all earlier writes are safe. A process that begins to write and finds the mark of an ended process,
first puts back what that left half written (`half_written`). Raises OSError where the folder cannot be
written, or writes did not reach the disk.

syncfs(2) writes all of a file system: the writes of this process, of delta-rs, of a JVM, and of other
processes of this host. Since Linux 5.8 it fails where one of their writes was reported as successful too
early, since the file was opened with which it is called. The mark is that file, and is opened before anything
is written. After such an error nothing counts as durable any more.
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

#: Where the marks are; no folder of a feed has a dot in its name.
_MARKS, _LOCK = ".unsynced", "lock"
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: macOS: have the disk write its cache too.
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class Unsynced:
    """The writes of this process to a lake that may not be on disk yet."""

    def __init__(self, lake: Path) -> None:
        self._lake, marks = lake, lake / OWN_FOLDER / _MARKS
        # It has rows to which no filter has been applied. Where a user has made it, or changed its mode, it
        # stays so.
        marks.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks.mkdir(mode=0o700, exist_ok=True)
        with _alone(marks):
            _put_back(lake, marks)
            mark = marks / uuid.uuid4().hex
            self._file = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # Locked as long as this process lives: another process leaves a locked mark alone.
            _lock(self._file, fcntl.LOCK_EX)
        # The mark itself, before the writes that it is for; other processes' writes are not synchronised yet.
        os.fsync(self._file)
        for folder in (marks, marks.parent, lake):
            with _opened(folder) as file:
                os.fsync(file)
        self._failed: int | None = None
        #: Writes everything to disk, and removes the mark.
        self.leave = weakref.finalize(self, _end, self._file, mark, os.getpid())

    def synchronise(self) -> None:
        """Write all earlier writes to the lake to disk.

        Raises OSError, then and ever after, where some are lost.
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
            # Otherwise the mark stays, and the next process checks what is on disk.
            self.leave.detach()
            raise


_shared: "weakref.WeakValueDictionary[str, Unsynced]" = weakref.WeakValueDictionary()
_SHARING = threading.Lock()


def unsynced(lake: str) -> Unsynced:
    """The object of a lake: one for this process, until no part of it has the lake open."""
    with _SHARING:
        if (one := _shared.get(lake)) is None:
            one = _shared[lake] = Unsynced(Path(lake))
        return one


def recover(lake: str) -> None:
    """Put back half-written commits of processes that ended without closing the lake, before the lake is read.

    Where the folder cannot be written, this is left to the next writer, or reported as damage.
    """
    marks = Path(lake, OWN_FOLDER, _MARKS)
    if marks.is_dir():
        with suppress(OSError), _alone(marks):
            _put_back(Path(lake), marks)


def leave_all() -> None:
    """Close all lakes at the end of a command, with everything on disk.

    An ending process does so for the others.
    """
    with _SHARING:
        for one in list(_shared.values()):
            one.leave()
        _shared.clear()


def _put_back(lake: Path, marks: Path) -> None:
    """Put back half-written commits of processes that ended without closing the lake, and remove their marks."""
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
    # The modules that read tables are imported only here, where something is put back.
    from pgsieve.resources.lake.half_written import put_back

    put_back(lake, min(since for _, since in left))
    with _opened(lake) as file:
        _synchronise(file)
    for mark, _ in left:
        mark.unlink(missing_ok=True)


def _end(file: int, mark: Path, process: int) -> None:
    """Close the lake with all on disk, and without the mark; a forked process leaves it as it is."""
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
    """Folders of subscriptions, and those in them, that are on other file systems than the lake, one of each."""
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
    """Within the block no other process begins to write: it would rely on what is about to be put back."""
    file = os.open(marks / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _lock(file: int, how: int) -> bool:
    """Whether a file could be locked; False where another process has it.

    False also where the file system has no locks: then every process may be alive.
    """
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, *_NO_LOCKS}:
            raise
        return False
    return True
