"""Runs that keep versions of rows are killed while these are begun and written. The next run repairs everything."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import MARKING, NOT_SMALL, site

#: During the copy; then between replicas and their versions, table by table, and before the cut.
_POINTS = (
    Failpoint.TABLE_COPIED,
    Failpoint.COPY_FINISHED,
    f"{Failpoint.REPLICA_COMMITTED}:2",
    f"{Failpoint.REPLICA_COMMITTED}:3",
    f"{Failpoint.REPLICA_COMMITTED}:4",
    f"{Failpoint.REPLICA_COMMITTED}:5",
)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("conf", "by_parts"),
    [
        (None, False),
        pytest.param(MARKING, False, marks=pytest.mark.long),
        (NOT_SMALL, True),
        pytest.param(MARKING, True, marks=pytest.mark.long),
    ],
)
def test_versions_are_complete_wherever_a_run_is_killed(
    publisher_server: EmbeddedServer, tmp_path: Path, conf: dict[str, str] | None, *, by_parts: bool
) -> None:
    """It takes long: two runs for each failpoint, each a process. Tasks decide the changes `by_parts` of the keys."""
    with site("killed_versions", publisher_server, tmp_path, "threads[2]", conf=conf) as (pgsieve, database):
        pgsieve.keep_versions()
        if by_parts:
            pgsieve.divide_by_keys()
        for point in _POINTS:
            assert (point, pgsieve.run(failpoint=point)) == (point, -signal.SIGKILL), pgsieve.log
            pgsieve.write(database)
            if point in _POINTS[1:]:
                assert pgsieve.run() == 0, pgsieve.log
                pgsieve.verify_versions()
            pgsieve.write(database)
