"""A file system in a file. It can be full, and its power can be cut.

The file may lie in another such file system, which is full or without power. Then the kernel accepts writes but cannot bring them
to disk, and an fsync reports ENOSPC or EIO.

A power cut is a shutdown of the file system without writing back (EXT4_IOC_SHUTDOWN in fs/ext4/ext4.h of Linux). Before it the journal
may be written, which is the worst moment: files then have their names, but no bytes.
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

#: Mounting needs root, and loop devices of the kernel.
HAS_DISKS = os.geteuid() == 0 and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None

_SHUTDOWN, _WITHOUT_JOURNAL = 0x8004587D, 2


class Disk:
    """A file system, mounted at a folder."""

    def __init__(self, folder: Path, size: int = 1 << 30, image: Path | None = None) -> None:
        self.folder, self._image = folder, image or folder.with_suffix(".image")
        self._filler = folder / ".filler"
        folder.mkdir(parents=True)
        with self._image.open("xb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(self._image)], check=True)
        self.mount()

    def cut(self, *, names: bool) -> None:
        """Cut the power: from now on writes fail. With `names` the journal is on disk before, but no file's bytes."""
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
        """Restore the power. No process may have one of its files open."""
        self.umount()
        self.mount()
        self.make_room()

    def fill(self, room: int) -> None:
        """Leave at most `room` bytes free."""
        free = shutil.disk_usage(self.folder).free
        with contextlib.suppress(OSError), self._filler.open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(1, free - room))

    def make_room(self) -> None:
        """Free the filled space, unless the power is cut."""
        with contextlib.suppress(OSError):
            self._filler.unlink(missing_ok=True)

    def umount(self) -> None:
        """Unmount the file system."""
        deadline = time.monotonic() + 60
        while subprocess.run(["umount", str(self.folder)], check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, "a process still has a file open"
            time.sleep(0.05)

    def mount(self) -> None:
        """Repair the file system as a system does at its start, and mount it."""
        repaired = subprocess.run(["e2fsck", "-y", str(self._image)], check=False, capture_output=True)
        assert repaired.returncode <= 1, repaired.stdout  # 1: errors were corrected.
        subprocess.run(["mount", "-o", "loop", str(self._image), str(self.folder)], check=True)
