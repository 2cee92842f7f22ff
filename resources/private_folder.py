"""Creates a temporary folder for a process. Only the user of the process can read it.

In: the folder in which the temporary folder is to be (the parent folder).
Out: a folder of mode 0700, one per process and parent folder. The process keeps it locked as long as the process runs.

The folder is removed when the process ends. If the process was killed, another process removes the folder: before
a process creates its own folder, it removes all such folders of the same user, in the same parent folder, that are not
locked.
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


def private_folder(parent_path: str | None = None) -> Path:
    """The folder of this process in `parent_path`. By default it is in the system's folder for temporary files.

    The first call creates it. Raises OSError.
    """
    return _create_folder(parent_path or tempfile.gettempdir(), os.getpid())


@cache
def _create_folder(parent_path: str, _pid: int) -> Path:
    """Create the folder of a process. The folder is cached by process id, so that a forked process creates its own."""
    Path(parent_path).mkdir(parents=True, exist_ok=True)
    remove_abandoned_folders(Path(parent_path))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_name_prefix(), dir=parent_path))
        # Until the folder is locked, another process may take it for a folder of a killed process, and remove it.
        if (descriptor := _lock_folder(folder)) is not None:
            break
    atexit.register(_remove_folder, folder, descriptor, os.getpid())
    return folder


def _lock_folder(folder: Path) -> int | None:
    """Lock a folder, and return its file descriptor.

    None if the folder is locked already, no longer exists, belongs to another user, or can be read by other users.
    """
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


def _name_prefix() -> str:
    return f"pgsieve-{os.geteuid()}-"


def remove_abandoned_folders(parent_path: Path) -> None:
    """Remove the folders in `parent_path` that belong to this user, but to no running process."""
    for folder in parent_path.glob(f"{_name_prefix()}*"):
        if (descriptor := _lock_folder(folder)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _remove_folder(folder: Path, descriptor: int, pid: int) -> None:
    """Remove the folder of this process. In a forked process this does nothing."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
