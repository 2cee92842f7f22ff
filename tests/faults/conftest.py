"""A Spark that outlives the processes which are killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.spark_servers import connect_server, python_without_pgsieve

#: Only root may be another user, and mount a file system that is full, or one in a file, for which the kernel needs loop devices.
_IS_ROOT = os.geteuid() == 0
_HAS_DISKS = _IS_ROOT and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4") is not None
collect_ignore = [
    *([] if _IS_ROOT else ["test_bare_machines.py", "test_lake_refusals.py"]),
    *([] if _HAS_DISKS else ["test_power_cuts.py"]),
]


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A warm Spark that the killed processes are clients of."""
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder, python_without_pgsieve(folder)) as address:
        yield address
