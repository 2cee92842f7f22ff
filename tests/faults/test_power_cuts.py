"""A power cut loses nothing: everything that was confirmed to a slot is on disk, and the next run repairs half-written files.

Nothing is lost either if the disk loses writes. The lake is on a file system in a file. These tests mount file systems, so they
are collected only for root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.disk import Disk
from tests.faults.killable import MARKING, NOT_SMALL, REFUSED, Site, settle, site
from tests.faults.test_kills import FIRST, LATER, alter_for
from tests.fixtures.oracle import wait_until
from tests.fixtures.tries import budget_seconds, drawn_seed

pytestmark = pytest.mark.spark


@contextlib.contextmanager
def powered(
    name: str, server: EmbeddedServer, folder: Path, conf: Mapping[str, str], image: Path | None = None
) -> Iterator[tuple[Site, psycopg.Connection, Disk]]:
    """A site whose lake is on a `Disk`, whose bytes are in a file."""
    disk = Disk(folder / "lake", image=image)
    try:
        # A Spark Connect server would keep files open, so there is none.
        with site(name, server, folder, "threads[2]", conf=conf) as (pgsieve, database):
            yield pgsieve, database, disk
    finally:
        disk.umount()


def cut_at(pgsieve: Site, database: psycopg.Connection, disk: Disk, point: Failpoint | str) -> None:
    """Let a run reach a failpoint, and cut the power there. File names are on disk, bytes only if they were made durable."""
    pgsieve.write(database)
    alter_for(point, database)
    assert (point, pgsieve.run(failpoint=point)) == (point, -signal.SIGKILL), pgsieve.log
    disk.cut(names=True)
    disk.restore()


@pytest.mark.drawn
def test_a_power_cut_costs_nothing(publisher_server: EmbeddedServer, tmp_path: Path) -> None:
    """It takes long: the power is cut several times. Each time one process runs, and another one repairs the lake."""
    with powered("power", publisher_server, tmp_path, {}) as (pgsieve, database, disk):
        cut_at(pgsieve, database, disk, Failpoint.TABLES_READY)
        settle(pgsieve, database)
        for point in (
            Failpoint.SLOT_CONFIRMED,
            f"{Failpoint.REPLICA_COMMITTED}:2",
            Failpoint.CUT_WRITTEN,
        ):
            cut_at(pgsieve, database, disk, point)
        # After a complete run nothing needs repair.
        pgsieve.write(database)
        settle(pgsieve, database)
        disk.cut(names=True)
        disk.restore()
        pgsieve.verify(database)
        settle(pgsieve, database)

        # The power is cut while a run writes. The run ends with an error.
        pgsieve.write(database, 30)
        process = pgsieve.start("run")
        log = pgsieve.lake / "_pgsieve" / "power" / "change_log" / "_delta_log"
        entries = len(list(log.glob("*.json")))
        while process.is_alive() and len(list(log.glob("*.json"))) == entries:
            time.sleep(0.001)
        disk.cut(names=True)
        process.join(300)
        assert process.exitcode == REFUSED, pgsieve.log
        disk.restore()
        settle(pgsieve, database)


def refused_when(
    lose: Callable[[], None], point: Failpoint, pgsieve: Site, database: psycopg.Connection
) -> None:
    """Assert that a run whose writes up to a failpoint are lost is refused with the reason, and its slots do not move."""
    pgsieve.write(database)
    positions = (
        "select confirmed_flush_lsn from pg_replication_slots where database = current_database() order by 1"
    )
    before, printed = database.execute(positions).fetchall(), len(pgsieve.log)
    process = pgsieve.start("run", failpoint=f"{point}?")
    state = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", lambda: pgsieve.log, 60)
    lose()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    process.join(300)
    output = " ".join(pgsieve.log[printed:].split())
    assert process.exitcode == REFUSED, output
    refusals = [
        f'lake "{pgsieve.lake}" cannot be written: {os.strerror(code)}' for code in (errno.ENOSPC, errno.EIO)
    ]
    assert any(refusal in output for refusal in refusals), output
    assert database.execute(positions).fetchall() == before, output


@pytest.mark.long
def test_writes_that_the_disk_loses_stop_the_run_before_its_slot_moves(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The kernel accepts the writes and then loses them, because the disk below the lake's file system is full or gone.

    It takes long: five runs, and repairs of file systems.
    """
    below = Disk(tmp_path / "below", 2 << 30)
    with contextlib.ExitStack() as ended:
        ended.callback(below.umount)
        pgsieve, database, disk = ended.enter_context(
            powered("lost_writes", publisher_server, tmp_path, {}, below.folder / "image")
        )
        settle(pgsieve, database)

        def fill() -> None:
            below.fill(0)
            # Write more than the blocks that were in use before: for these the image has space.
            (pgsieve.lake / ".more").write_bytes(bytes(64 << 20))

        for lose, mend in ((fill, below.make_room), (partial(below.cut, names=False), below.restore)):
            refused_when(lose, Failpoint.SLICE_COMMITTED, pgsieve, database)
            disk.umount()
            mend()
            disk.mount()
            settle(pgsieve, database)
        disk.cut(names=True)
        disk.restore()
        pgsieve.verify(database)


@pytest.mark.long
@pytest.mark.parametrize("conf", [{}, NOT_SMALL, MARKING], ids=["process", "threads", "marking"])
def test_a_power_cut_at_each_failpoint_costs_nothing(
    publisher_server: EmbeddedServer, tmp_path: Path, conf: Mapping[str, str], request: pytest.FixtureRequest
) -> None:
    """It takes long: several runs, a power cut and a repair for each failpoint."""
    name = f"power_{request.node.callspec.id}"
    with powered(name, publisher_server, tmp_path, conf) as (pgsieve, database, disk):
        for point in FIRST:
            cut_at(pgsieve, database, disk, point)
        settle(pgsieve, database)
        for point in LATER:
            cut_at(pgsieve, database, disk, point)
            pgsieve.write(database)
            settle(pgsieve, database)


@pytest.mark.long
def test_power_cuts_at_random_moments_cost_nothing(publisher_server: EmbeddedServer, tmp_path: Path) -> None:
    """It takes as long as its budget, by default two minutes."""
    seed = drawn_seed()
    chance, budget = random.Random(seed), budget_seconds(120)
    with powered("power_random", publisher_server, tmp_path, {}) as (pgsieve, database, disk):
        settle(pgsieve, database)
        began, cuts = time.monotonic(), 0
        while time.monotonic() - began < budget:
            with pgsieve.writing():
                process = pgsieve.start(
                    *chance.choice([("run",), ("run",), ("run", "--follow"), ("maintain",)])
                )
                time.sleep(chance.uniform(0, 6))
                disk.cut(names=chance.random() < 0.7)
                cuts += 1
                time.sleep(chance.uniform(0, 0.5))
                process.kill()
                process.join()
            disk.restore()
            assert pgsieve.run() == 0, f"seed {seed}: {pgsieve.log}"
            pgsieve.verify(database)
        assert cuts > 3
