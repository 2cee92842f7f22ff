"""A run that is killed at any point loses no change, applies none twice, and leaves no work for people."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import MARKING, NOT_SMALL, Site, site, start_pgsieve
from tests.fixtures.s3_server import S3Server
from tests.fixtures.shop import Shop
from tests.fixtures.spark_servers import connect_server, python_without_pgsieve
from tests.fixtures.tries import drawn_seed

pytestmark = pytest.mark.spark

#: Failpoints that only the first run of a subscription reaches, in order. The second slot and the last table belong to the second
#: subscription. Tables are copied in parallel, so a run killed at one table may have finished all tables of the first subscription.
FIRST = (
    Failpoint.CAPTURE_CREATED,
    Failpoint.SLOT_CREATED,
    Failpoint.POSITION_RECORDED,
    Failpoint.CATALOG_RECORDED,
    Failpoint.SNAPSHOT_EXPORTED,
    Failpoint.COPY_BEGUN,
    Failpoint.COPY_PLANNED,
    Failpoint.CHUNK_COPIED,
    Failpoint.TABLE_COPIED,
    Failpoint.COPY_FINISHED,
    Failpoint.TABLES_READY,
    Failpoint.SLOT_CREATED,
    Failpoint.TABLE_COPIED,
)
#: Failpoints that a later run reaches, also the commit of a second replica. For one of them, `alter_for` prepares the run.
LATER = (*(point for point in Failpoint if point not in FIRST), f"{Failpoint.REPLICA_COMMITTED}:2")


def test_a_first_run_killed_at_each_failpoint_in_turn_is_completed_by_the_next(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a process for each failpoint, and a Spark Connect server."""
    with site("killed_first", publisher_server, tmp_path, master) as (pgsieve, database):
        for point in FIRST:
            assert (point, pgsieve.run(failpoint=point)) == (point, -signal.SIGKILL), pgsieve.log
            pgsieve.write(database)
        assert pgsieve.run() == 0, pgsieve.log
        pgsieve.verify(database)


def test_a_run_killed_at_a_failpoint_is_completed_by_the_next(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a process for each failpoint, a complete run after every third one, and a Spark Connect server."""
    with site("killed_later", publisher_server, tmp_path, master) as (pgsieve, database):
        assert pgsieve.run() == 0, pgsieve.log
        kill_at_each(pgsieve, database, LATER)


@pytest.mark.parametrize("point", [Failpoint.TABLE_COPIED, Failpoint.COPY_FINISHED, Failpoint.TABLES_READY])
def test_a_copy_before_the_slot_was_replaced_is_made_anew(
    shop: Shop, tmp_path: Path, point: Failpoint
) -> None:
    """The new slot lacks the changes since the snapshot of the killed copy. It takes long: five runs, one a process."""
    assert not shop.run("one").failures
    run = start_pgsieve(("run", "two"), shop.path, tmp_path / "log", point)
    run.join(300)
    assert run.exitcode == -signal.SIGKILL
    shop.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
        " where database = current_database() and not temporary"
    )
    shop.database.execute("insert into stock values (5, 5); insert into orders values (5, 5)")
    assert shop.resync("one").lost
    assert not shop.run().failures
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    assert shop.ids("one", "orders") == [2, 3, 4, 5]


#: Failpoints after which the run's threads have written files, or these are committed.
BY_THREADS = (
    Failpoint.CHANGES_WRITTEN,
    Failpoint.REPLICA_COMMITTED,
)


@pytest.mark.drawn
def test_a_run_killed_while_its_threads_write_files_is_completed_by_the_next(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: five runs, each a process."""
    with site("killed_threads", publisher_server, tmp_path, "threads[2]", conf=MARKING) as (
        pgsieve,
        database,
    ):
        assert pgsieve.run() == 0, pgsieve.log
        kill_at_each(pgsieve, database, BY_THREADS)


@pytest.mark.long
@pytest.mark.timeout(1800)  # it executes 29 runs
@pytest.mark.parametrize("conf", [NOT_SMALL, MARKING])
def test_a_run_whose_threads_write_files_killed_at_any_failpoint_is_completed_by_the_next(
    publisher_server: EmbeddedServer, tmp_path: Path, conf: dict[str, str]
) -> None:
    """It takes long: a process for each failpoint."""
    with site("killed_by_threads", publisher_server, tmp_path, "threads[2]", conf=conf) as (
        pgsieve,
        database,
    ):
        kill_at_each(pgsieve, database, (*FIRST, *LATER), settled_at=len(FIRST))


@pytest.mark.long
@pytest.mark.timeout(1800)  # it executes 29 runs
@pytest.mark.parametrize("conf", [None, MARKING])
def test_a_killed_run_with_its_lake_on_s3_is_completed_by_the_next(
    publisher_server: EmbeddedServer, s3_server: S3Server, tmp_path: Path, conf: dict[str, str] | None
) -> None:
    """The processes write themselves, few or many rows, and mark some. None of them starts a JVM, but there are 29 of them."""
    with site("killed_on_s3", publisher_server, tmp_path, "threads[2]", store=s3_server, conf=conf) as (
        pgsieve,
        database,
    ):
        kill_at_each(pgsieve, database, (*FIRST, *LATER), settled_at=len(FIRST))


@pytest.mark.long
@pytest.mark.timeout(3600)  # it executes 28 runs, each with its own session on the server
def test_a_run_killed_while_spark_writes_its_lake_on_s3_is_completed_by_the_next(
    publisher_server: EmbeddedServer, s3_server: S3Server, tmp_path: Path
) -> None:
    """A Spark Connect server copies, transforms and applies. It survives the kills; other tests kill executors. There are 28 runs."""
    first = [point for point in FIRST if point != Failpoint.CHUNK_COPIED]
    with (
        connect_server(tmp_path, python_without_pgsieve(tmp_path), on_s3=True) as master,
        site("spark_on_s3", publisher_server, tmp_path / "site", master, store=s3_server, conf=NOT_SMALL) as (
            pgsieve,
            database,
        ),
    ):
        kill_at_each(pgsieve, database, (*first, *LATER), settled_at=len(first))


def alter_for(point: str, database: psycopg.Connection) -> None:
    """Alter a publication if only a run that finds an alteration reaches the failpoint."""
    if point == Failpoint.ALTERATION_RECORDED:
        with database.transaction():
            database.execute("ALTER PUBLICATION bank DROP TABLE savings")
            database.execute("ALTER PUBLICATION bank ADD TABLE savings")


def kill_at_each(
    pgsieve: Site, database: psycopg.Connection, points: Sequence[str], settled_at: int = 0
) -> None:
    """Kill a run at each failpoint in turn. At number `settled_at` and every third one from there, a complete run follows."""
    for number, point in enumerate(points, 1):
        pgsieve.write(database)
        alter_for(point, database)
        assert (point, pgsieve.run(failpoint=point)) == (point, -signal.SIGKILL), pgsieve.log
        pgsieve.write(database)
        if number == len(points) or (number >= settled_at and (number - settled_at) % 3 == 0):
            assert pgsieve.run() == 0, pgsieve.log
            pgsieve.verify(database)


# `make soak-hard-day` kills many more processes.
@pytest.mark.drawn
@pytest.mark.parametrize(
    ("lake", "kills"),
    [("folder", 6), *(pytest.param(lake, 12, marks=pytest.mark.long) for lake in ("folder", "s3"))],
)
def test_runs_killed_at_random_while_sessions_write_lose_and_repeat_nothing(
    request: pytest.FixtureRequest, publisher_server: EmbeddedServer, tmp_path: Path, lake: str, kills: int
) -> None:
    """It takes long: each kill follows some seconds of a run, and a complete run follows each kill."""
    seed = drawn_seed()
    print(f"reproduce: PGSIEVE_SEED={seed}")
    chosen = random.Random(seed)
    master = request.getfixturevalue("master") if lake == "folder" else "threads[2]"
    store = request.getfixturevalue("s3_server") if lake == "s3" else None
    name = f"killed_at_random_{lake}"
    with site(name, publisher_server, tmp_path, master, store=store) as (pgsieve, database):
        for number in range(1, kills + 1):
            with pgsieve.writing():
                process = pgsieve.start("run", *chosen.choice([[], ["--follow"]]))
                process.join(chosen.uniform(0, 8))
                process.kill()
                process.join()
            if number % 6 == 0 or number == kills:
                assert pgsieve.run() == 0, pgsieve.log
                pgsieve.verify(database)
    print(f"{kills} kills, {pgsieve.transfers} transactions")
