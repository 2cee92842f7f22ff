"""The settings of a process."""

import os
import platform
import subprocess
import sys

import pytest

#: Prints how many page faults the second of two equal rounds of arrays causes. Each fault is of a page of the usual size:
#: option 41 of prctl(2) disables huge pages (PR_SET_THP_DISABLE).
_ROUNDS = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
{call}
def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [b"x" * (16 * 1024 * 1024) for _ in range(3)]
    del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
count_faults()
print(count_faults())
"""
_CALL = "from pgsieve.resources.processes import keep_freed_arrays; keep_freed_arrays()"


def _count_faults(call: str) -> int:
    process = subprocess.run(
        [sys.executable, "-c", _ROUNDS.format(call=call)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "GLIBC_TUNABLES": ""},
    )
    return int(process.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_arrays_are_kept_for_the_next_ones() -> None:
    assert _count_faults(_CALL) < 100
    assert _count_faults("") > 1_000
