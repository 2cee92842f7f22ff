"""The temporary folder of a process: only its user can read it, and it is removed even if the process is killed.

In: the place for temporary files. Out: a folder of mode 0700, one per process. The process keeps a lock on
it. A process that creates such a folder first removes its user's folders without a lock.
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
    """The folder of this process, below `base` or the default place for temporary files.

    Raises OSError if it cannot be created.
    """
    return _made(base or tempfile.gettempdir(), os.getpid())


@cache
def _made(base: str, _process: int) -> Path:
    Path(base).mkdir(parents=True, exist_ok=True)
    remove_left(Path(base))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=base))
        # Before it is locked, another process may consider it abandoned, and remove it.
        if (lock := _locked(folder)) is not None:
            break
    atexit.register(_remove, folder, lock, os.getpid())
    return folder


def _locked(folder: Path) -> int | None:
    """Lock a folder. None if another process has locked it, another user owns it, or it is gone."""
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
    """Remove the folders below `base` that this user's ended processes have left."""
    for folder in base.glob(f"{_prefix()}*"):
        if (lock := _locked(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _remove(folder: Path, lock: int, process: int) -> None:
    """Remove the folder of this process; a forked process leaves it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
