"""The temporary folder of a process: only its user can read it, and it is removed even if the process is killed.

In: the place for temporary files. Out: a folder of mode 0700, one per process, which the process has locked
until its end. Before a process creates its folder, it removes its user's folders without a lock.
"""

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


def private_folder(base: str | None = None) -> Path:
    """The folder of this process, below `base` or the default place for temporary files; raises OSError."""
    return _create(base or tempfile.gettempdir(), os.getpid())


@cache
def _create(base: str, _process: int) -> Path:
    Path(base).mkdir(parents=True, exist_ok=True)
    remove_abandoned_folders(Path(base))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        # Before the folder is locked, another process may consider it abandoned, and remove it.
        if (lock := _lock(folder)) is not None:
            break
    atexit.register(_remove, folder, lock, os.getpid())
    return folder


def _lock(folder: Path) -> int | None:
    """Lock a folder; return its descriptor. None if it is locked, gone, or not only this user's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        is_own = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if is_own and os.path.samestat(status, folder.lstat()):
            return descriptor
    os.close(descriptor)
    return None


def _prefix() -> str:
    return f"pgsieve-{os.geteuid()}-"


def remove_abandoned_folders(base: Path) -> None:
    """Remove the folders below `base` of this user's processes that have ended."""
    for folder in base.glob(f"{_prefix()}*"):
        if (lock := _lock(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove(folder: Path, lock: int, process: int) -> None:
    """Remove the folder of this process; a forked process leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
