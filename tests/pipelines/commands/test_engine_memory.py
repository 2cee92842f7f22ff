"""The memory that `pgsieve engine status` shows."""

import subprocess
import sys

from pgsieve.pipelines.commands.engine import _measure_resident_bytes

#: The number of bytes that the child process of the measured process holds.
_HELD_BYTES = 100 * 1024 * 1024
#: A process that starts another, which holds memory until its input ends.
_PARENT = f"""
import subprocess, sys
child = "import sys; held = b'x' * {_HELD_BYTES}; print('ready', flush=True); sys.stdin.read()"
sys.exit(subprocess.call([sys.executable, "-c", child]))
"""


def test_memory_of_child_processes_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        resident_bytes = _measure_resident_bytes({parent.pid})
        parent.stdin.close()
    assert _HELD_BYTES < resident_bytes < 3 * _HELD_BYTES


def test_ended_process_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert _measure_resident_bytes({process.pid}) == 0
