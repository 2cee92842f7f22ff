"""Everything at once, for as long as PGSIEVE_BUDGET_SECONDS says: nothing lost, nothing twice.

`make soak-hard-day` lives it for an hour. PGSIEVE_SEED draws the same again, though threads and processes meet otherwise.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.hard_day import accumulate, day
from tests.faults.troubles import LAKE_SIZE
from tests.fixtures.servers import TEST_SETTINGS, new_server

pytestmark = [pytest.mark.spark, pytest.mark.long]

#: Large transactions are sent while they are in progress.
SETTINGS = {**TEST_SETTINGS, "logical_decoding_work_mem": "64kB"}


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server of the test's own, to be mistreated."""
    with new_server(postgres_version, SETTINGS) as running:
        yield running


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be full, where this user may mount one; else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={LAKE_SIZE}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    yield folder
    if mounted:
        # Lazily: Spark may still have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_hard_day_ends_with_the_rows_of_the_built_in_subscriptions(
    server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
    lake: Path,
    master: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget = float(os.environ.get("PGSIEVE_BUDGET_SECONDS") or 60)
    seed = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(2**32))
    with capsys.disabled():
        print(f"\nreproduce: PGSIEVE_SEED={seed} PGSIEVE_BUDGET_SECONDS={budget:g}; logs: {tmp_path}")
        with day(seed, tmp_path, lake, server, subscriber_server, master) as hard:
            hard.live(budget, max(20, min(180, budget / 3)))
        print(hard.report)
        print(accumulate(hard.report, Path("build/hard_days.jsonl")))
    assert not hard.report.findings, f"seed {seed}"
    assert hard.report.kills
