"""Keeps a mark in a lake that is a folder, as long as a power cut could still lose writes of this process.

In: the lake's folder.
Out: - a mark (a file in the folder), which exists while writes of the process may not be on disk
     - `sync`, after which all earlier writes are on disk

Before a process begins to write, it looks for marks of other processes that have ended. If there are any, these
processes may have left half-written commits, and the process removes such commits (`half_written`). Raises OSError
if the folder cannot be written, or if writes did not reach the disk.

The system call syncfs(2) writes a whole file system to disk. This covers the writes of this process, of delta-rs,
of a JVM, and of other processes of this machine. Its argument is an open file of the file system. Since Linux 5.8
the call reports all writes that have failed since this file was opened. So the mark, a file, is opened before the first
write. After an error no write counts as durable.
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

#: The folder of the marks. It is next to the folders of the slots, whose names contain no dot.
_MARKS_FOLDER = ".unsynced"
#: The name of a file in the folder of the marks. A process locks this file while it begins to write.
_LOCK_NAME = "lock"
_LIBC = ctypes.CDLL(None, use_errno=True)
#: The codes of errors of file systems that do not support locks.
_NO_LOCK_ERRORS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: On macOS, the command that makes the disk itself write its cache, too.
_FULL_SYNC = getattr(fcntl, "F_FULLFSYNC", None)


class UnsyncedWrites:
    """The writes of this process to a lake. Some of them may not be on disk yet."""

    def __init__(self, lake: Path) -> None:
        self._lake, marks_folder = lake, lake / OWN_FOLDER / _MARKS_FOLDER
        # pgsieve's own folder contains raw messages, even of rows that a row filter will hide, so other users must not
        # read it. If the folder exists already, its mode is not changed.
        marks_folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks_folder.mkdir(mode=0o700, exist_ok=True)
        with _exclude_writers(marks_folder):
            _remove_half_written_commits(lake, marks_folder)
            mark = marks_folder / uuid.uuid4().hex
            self._descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            # The mark is locked until this process ends. A locked mark shows others that its process is still running.
            _lock(self._descriptor, fcntl.LOCK_EX)
        # Before the first write the mark must be on disk; nothing else needs to be.
        os.fsync(self._descriptor)
        for folder in (marks_folder, marks_folder.parent, lake):
            with _open_folder(folder) as descriptor:
                os.fsync(descriptor)
        self._error_code: int | None = None
        #: Writes the lake's file systems to disk, and removes the mark.
        self.close = weakref.finalize(self, _finish_writes, self._lake, self._descriptor, mark, os.getpid())

    def sync(self) -> None:
        """Write all earlier writes to disk. If some of them are lost, raise OSError, now and in each later call."""
        if self._error_code is not None:
            raise OSError(self._error_code, os.strerror(self._error_code))
        try:
            _sync_all_file_systems(self._lake, self._descriptor)
        except OSError as error:
            self._error_code = error.errno or errno.EIO
            # Without a call of `close` the mark stays, so that the next process checks the files on disk.
            self.close.detach()
            raise


_writes_by_lake: "weakref.WeakValueDictionary[str, UnsyncedWrites]" = weakref.WeakValueDictionary()
_SHARING_LOCK = threading.Lock()


def get_unsynced_writes(lake: str) -> UnsyncedWrites:
    """The unsynced writes to a lake. All users of the lake in this process share one object."""
    with _SHARING_LOCK:
        if (writes := _writes_by_lake.get(lake)) is None:
            writes = _writes_by_lake[lake] = UnsyncedWrites(Path(lake))
        return writes


def remove_half_written_commits(lake: str) -> None:
    """Before the lake is read, remove half-written commits of processes that have ended without closing the lake.

    Does nothing if this user cannot write to the lake's folder. In that case the next process that writes to the
    lake removes these commits. If a reader comes earlier, it reports a damaged table.
    """
    marks_folder = Path(lake, OWN_FOLDER, _MARKS_FOLDER)
    if marks_folder.is_dir():
        with suppress(OSError), _exclude_writers(marks_folder):
            _remove_half_written_commits(Path(lake), marks_folder)


def close_all_lakes() -> None:
    """At the end of a command, write the file systems of all lakes to disk, and remove the marks.

    A lake opened later is closed when the process ends.
    """
    with _SHARING_LOCK:
        for writes in list(_writes_by_lake.values()):
            writes.close()
        _writes_by_lake.clear()


def _remove_half_written_commits(lake: Path, marks_folder: Path) -> None:
    """Remove half-written commits of processes that have ended without closing the lake.

    Then remove the marks of these processes.
    """
    abandoned_marks = list[tuple[Path, int]]()
    for mark in marks_folder.iterdir():
        if mark.name == _LOCK_NAME:
            continue
        try:
            descriptor = os.open(mark, os.O_RDWR)
        except FileNotFoundError:
            continue  # Its process has ended in the meantime, and has written everything to disk.
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                abandoned_marks.append((mark, os.fstat(descriptor).st_mtime_ns))
        finally:
            os.close(descriptor)
    if not abandoned_marks:
        return
    # The import is here, and not at the top, because it is slow and rarely needed.
    from pgsieve.resources.lake.half_written import roll_back_tables

    roll_back_tables(lake, min(written_ns for _, written_ns in abandoned_marks))
    with _open_folder(lake) as descriptor:
        _sync_file_system(descriptor)
    for mark, _ in abandoned_marks:
        mark.unlink(missing_ok=True)


def _finish_writes(lake: Path, descriptor: int, mark: Path, pid: int) -> None:
    """Write the lake's file systems to disk, and remove the mark. In a forked process this does nothing."""
    if os.getpid() != pid:
        return
    try:
        _sync_all_file_systems(lake, descriptor)
        mark.unlink(missing_ok=True)
    except OSError:
        pass  # The mark stays, so that the next process checks the files on disk.
    finally:
        os.close(descriptor)


def _sync_all_file_systems(lake: Path, descriptor: int) -> None:
    """Write the lake's own file system, in which the descriptor is open, and those of its folders to disk."""
    _sync_file_system(descriptor)
    for folder in _find_folders_on_other_devices(lake):
        with _open_folder(folder) as folder_descriptor:
            _sync_file_system(folder_descriptor)


def _sync_file_system(descriptor: int) -> None:
    """Write the file system that contains an open file to disk."""
    if _FULL_SYNC is not None:
        os.sync()
        fcntl.fcntl(descriptor, _FULL_SYNC)
    elif _LIBC.syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _find_folders_on_other_devices(lake: Path) -> list[Path]:
    """Parts of the lake may be on other file systems. Return one folder of the lake for each of these.

    Only the folders in the lake's folder and their direct subfolders are searched.
    """
    folders_by_device, device = dict[int, Path](), lake.stat().st_dev
    for folder in (lake, *(Path(entry) for entry in _subfolders(lake))):
        for entry in _subfolders(folder):
            with suppress(FileNotFoundError):  # Another process has just removed it.
                if (other_device := entry.stat().st_dev) != device:
                    folders_by_device.setdefault(other_device, Path(entry))
    return list(folders_by_device.values())


def _subfolders(folder: Path) -> list[os.DirEntry[str]]:
    """The folders in a folder. Empty if there is no such folder, or if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _exclude_writers(marks_folder: Path) -> Iterator[None]:
    """Let no other process begin to write while the block runs. A writer could act on a commit that the block removes."""
    descriptor = os.open(marks_folder / _LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int) -> bool:
    """Lock a file. Return False if another process has locked it.

    On a file system without locks, the result is False, too, because each mark may belong to a process that is
    still running.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in {errno.EWOULDBLOCK, *_NO_LOCK_ERRORS}:
            raise
        return False
    return True
