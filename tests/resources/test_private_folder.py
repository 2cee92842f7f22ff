"""The temporary folder of a process is its user's alone, and is gone after the process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from pgsieve.resources.private_folder import private_folder, remove_left

#: Makes its folder, says where, and ends in the way that it is told.
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


def test_a_folder_goes_with_its_process_or_with_the_next(tmp_path: Path) -> None:
    first, left = _started(tmp_path)
    first.communicate("die\n")
    assert first.returncode == -signal.SIGKILL
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    theirs = tmp_path / f"pgsieve-{os.geteuid()}-theirs"
    theirs.mkdir(mode=0o755)
    alive, used = _started(tmp_path)
    assert not left.exists()
    assert theirs.exists(), "one that is not its user's alone was not made here"
    ending, folder = _started(tmp_path)
    assert used.exists(), "its process lives"
    ending.communicate("end\n")
    alive.communicate("end\n")
    assert not folder.exists()
    assert not used.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (target := tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / f"pgsieve-{os.geteuid()}-x").symlink_to(target)
    remove_left(tmp_path)
    assert target.exists()


def test_a_folder_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    assert private_folder(str(tmp_path / "big" / "disk")).parent == tmp_path / "big" / "disk"
