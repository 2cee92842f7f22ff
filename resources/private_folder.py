"""The temporary folder of a process: readable by its user alone, and removed after the process, however that ends.

In: the place for temporary files. Out: a folder of mode 0700, created once a process. It is locked as long as
the process lives. Each process that creates one removes its user's folders that are no longer locked.
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
    """The folder of this process, below `base` or the default place.

    Raises OSError where none can be created.
    """
    return _made(base or tempfile.gettempdir(), os.getpid())


@cache
def _made(base: str, _process: int) -> Path:
    Path(base).mkdir(parents=True, exist_ok=True)
    remove_left(Path(base))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        # Another process may take it for an abandoned one before it is locked.
        if (lock := _locked(folder)) is not None:
            break
    atexit.register(_remove, folder, lock, os.getpid())
    return folder


def _locked(folder: Path) -> int | None:
    """The lock of a folder. None if another process has the lock, the folder is gone, or it is another user's."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(opened)
        is_own = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if is_own and os.path.samestat(status, folder.lstat()):
            return opened
    os.close(opened)
    return None


def _prefix() -> str:
    return f"pgsieve-{os.geteuid()}-"


def remove_left(base: Path) -> None:
    """Remove the folders below `base` of this user's processes that have ended."""
    for folder in base.glob(f"{_prefix()}*"):
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove(folder: Path, lock: int, process: int) -> None:
    """Remove the folder of this process; a forked process leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
