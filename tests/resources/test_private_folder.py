"""The temporary folder of a process is readable only for its user, and disappears after the process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from pgsieve.resources.private_folder import private_folder, remove_abandoned_folders

#: Creates its folder, prints it, and ends as the argument says.
PROCESS = """
import os, signal, sys
from pgsieve.resources.private_folder import private_folder
folder = private_folder()
(folder / "rows").write_text("x")
assert private_folder() == folder
if not os.fork():
    sys.exit()
os.wait()
assert (folder / "rows").exists(), "a forked process has removed it"
print(folder, flush=True)
if sys.stdin.readline() == "die\\n":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _started(base: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS],
        env={**os.environ, "TMPDIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_with_its_process_or_by_the_next(tmp_path: Path) -> None:
    first, left = _started(tmp_path)
    first.communicate("die\n")
    assert first.returncode == -signal.SIGKILL
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    theirs = tmp_path / f"pgsieve-{os.geteuid()}-theirs"
    theirs.mkdir(mode=0o755)
    alive, used = _started(tmp_path)
    assert not left.exists()
    assert theirs.exists(), "a folder that others can read was not made by pgsieve, so it stays"
    ending, folder = _started(tmp_path)
    assert used.exists(), "its process is alive"
    ending.communicate("end\n")
    alive.communicate("end\n")
    assert not folder.exists()
    assert not used.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (target := tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / f"pgsieve-{os.geteuid()}-x").symlink_to(target)
    remove_abandoned_folders(tmp_path)
    assert target.exists()


def test_a_folder_is_created_where_requested(tmp_path: Path) -> None:
    assert private_folder(str(tmp_path / "big" / "disk")).parent == tmp_path / "big" / "disk"
