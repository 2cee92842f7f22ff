"""A Spark that outlives the killed processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faults.disk import HAS_DISKS
from tests.fixtures.spark_servers import connect_server, python_without_pgsieve

#: Only root may run a process as another user, and mount a file system that becomes full.
_IS_ROOT = os.geteuid() == 0
collect_ignore = [
    *([] if _IS_ROOT else ["test_bare_machines.py", "test_lake_refusals.py"]),
    *([] if HAS_DISKS else ["test_power_cuts.py"]),
]


@pytest.fixture(scope="session")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A warm Spark, whose clients are the processes that tests kill."""
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder, python_without_pgsieve(folder)) as address:
        yield address
