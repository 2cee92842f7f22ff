"""All kinds of trouble at once, for PGSIEVE_BUDGET_SECONDS: no change is lost, and none is applied twice.

`make soak-hard-day` runs it for an hour. PGSIEVE_SEED repeats the draws, but threads and processes interleave in another way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.disk import HAS_DISKS, Disk
from tests.faults.hard_day import Day, lived
from tests.faults.report import accumulate
from tests.fixtures.servers import TEST_SETTINGS, new_server
from tests.fixtures.spark_servers import connect_server, python_without_pgsieve
from tests.fixtures.tries import budget_seconds, drawn_seed

pytestmark = [pytest.mark.spark, pytest.mark.long]

#: Free space of the lake's file system while it is not full.
_SIZE = 8 << 30
#: The publisher sends large transactions while they are in progress.
SETTINGS = {**TEST_SETTINGS, "logical_decoding_work_mem": "64kB"}


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server for this test alone, because the test mistreats it."""
    with new_server(postgres_version, SETTINGS) as running:
        yield running


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk | None]:
    """A file system for the lake, or None if this user cannot mount one."""
    made = Disk(tmp_path / "disk", _SIZE) if HAS_DISKS else None
    yield made
    if made:
        made.umount()


@pytest.fixture
def spark(tmp_path: Path) -> Callable[[], AbstractContextManager[str]]:
    """Starts a warm Spark, whose clients are the killed processes."""
    numbers = itertools.count()
    (folder := tmp_path / "spark").mkdir()
    python = python_without_pgsieve(folder)
    return lambda: connect_server(folder / str(next(numbers)), python)


def test_a_hard_day_ends_with_the_rows_of_the_built_in_subscriptions(
    server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
    disk: Disk | None,
    spark: Callable[[], AbstractContextManager[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It takes as long as its budget."""
    budget = budget_seconds(60)
    seed = drawn_seed()
    with capsys.disabled():
        print(f"\nreproduce: PGSIEVE_SEED={seed} PGSIEVE_BUDGET_SECONDS={budget:g}; logs: {tmp_path}")
        with lived(Day(seed, tmp_path, disk, server, subscriber_server, spark)) as hard:
            hard.live(budget, max(20, min(180, budget / 3)))
        print(hard.report)
        print(accumulate(hard.report, Path("build/hard_days.jsonl")))
    assert not hard.report.findings, f"seed {seed}"
    assert hard.report.kills
