"""A file system of its own, in a file: it can be full, and its power can be cut.

Where the file is on another such file system, and that is full or without power, the kernel takes what is written here, and
cannot bring it to disk: it says so when it is asked to, with ENOSPC or EIO.

To go down at once, without writing back, is what its shutdown does (EXT4_IOC_SHUTDOWN in fs/ext4/ext4.h of Linux). Before that its
journal is written, at the worst moment: files have their names then, and no bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path

#: Only root may mount one, and the kernel needs loop devices.
HAS_DISKS = os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None

_SHUTDOWN, _WITHOUT_JOURNAL = 0x8004587D, 2


class Disk:
    """A file system at a folder."""

    def __init__(self, folder: Path, size: int = 1 << 30, image: Path | None = None) -> None:
        self.folder, self._image = folder, image or folder.with_suffix(".image")
        self._filler = folder / ".filler"
        folder.mkdir(parents=True)
        with self._image.open("xb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(self._image)], check=True)
        self.mount()

    def cut(self, *, names: bool) -> None:
        """Cut the power: whoever writes gets errors from now on. With `names` the journal is on disk by then, and no file's bytes."""
        if names:
            with contextlib.suppress(OSError), (self.folder / ".other").open("wb") as other:
                other.write(b"x")
                other.flush()
                os.fsync(other.fileno())
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_JOURNAL))
        finally:
            os.close(folder)

    def restore(self) -> None:
        """Give it power again, once nobody has a file of it open."""
        self.umount()
        self.mount()
        self.make_room()

    def fill(self, room: int) -> None:
        """Leave so many bytes of room, or somewhat less."""
        free = shutil.disk_usage(self.folder).free
        with contextlib.suppress(OSError), self._filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, free - room))

    def make_room(self) -> None:
        """Let it be as large as it is; one without power stays as it is."""
        with contextlib.suppress(OSError):
            self._filler.unlink(missing_ok=True)

    def umount(self) -> None:
        """Take it away."""
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", str(self.folder)], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, "a process still has a file open"
            time.sleep(0.05)

    def mount(self) -> None:
        """Put it back, repaired as the system does at its start."""
        repaired = subprocess.run(["e2fsck", "-y", str(self._image)], check=False, capture_output=True)
        assert repaired.returncode <= 1, repaired.stdout  # 1: errors are corrected.
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.folder)], check=True)
