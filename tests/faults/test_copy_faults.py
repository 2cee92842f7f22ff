"""An initial copy under temporary faults: copied tables stay copied, and no table is set aside.

A large table is copied by Spark's executors, or by threads of the run's own process (`THREADS`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from pgsieve.resources.failpoints import Failpoint
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import INTERRUPTED, REFUSED, Site, settle, site
from tests.faults.proxy import Proxy
from tests.fixtures.oracle import wait_until

pytestmark = pytest.mark.spark

TABLES = [f"copied_{number}" for number in range(12)]
#: Spark's master for copies by threads; such a copy starts no Spark.
THREADS = "threads[2]"
#: pgsieve's sessions during a copy, as conditions on pg_stat_activity.
SESSIONS = {
    "reader": "state = 'active' AND query LIKE 'COPY %'",
    "snapshot": "backend_type = 'walsender'",
    "lock": "query LIKE 'select pg_advisory_lock%'",
}


def add_tables(database: psycopg.Connection) -> None:
    for table in TABLES:
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text)")
        database.execute(f"INSERT INTO {table} SELECT i, 'first' FROM generate_series(1, 50) i")
    database.execute(f"ALTER PUBLICATION bank ADD TABLE {', '.join(TABLES)}")


def add_large_table(database: psycopg.Connection, rows: int = 40_000) -> None:
    database.execute("CREATE TABLE large (id int PRIMARY KEY, note text)")
    database.execute(
        f"INSERT INTO large SELECT i, repeat(md5(i::text), 10) FROM generate_series(1, {rows}) i"
    )
    database.execute("ALTER PUBLICATION bank ADD TABLE large")


def versions(pgsieve: Site) -> dict[str, int]:
    """The Delta version of each existing replica. A table that was copied once has version 0."""
    paths = {table: pgsieve.replica("accounts", table) for table in TABLES}
    return {
        table: DeltaTable(str(path)).version()
        for table, path in paths.items()
        if DeltaTable.is_deltatable(str(path))
    }


def compare(pgsieve: Site, database: psycopg.Connection, *tables: str) -> None:
    for table in tables:
        expected = database.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
        assert sorted(pgsieve.rows(pgsieve.replica("accounts", table))) == expected, table


@contextmanager
def terminating(pgsieve: Site, condition: str, times: int | None = None) -> Iterator[list[int]]:
    """In the block, terminate sessions of pgsieve, at most `times` of them. The list gets their pids."""
    terminated: list[int] = []
    done = threading.Event()
    query = (
        "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND"
        f" pid <> pg_backend_pid() AND application_name = 'pgsieve' AND {condition}"
    )
    reading = (
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {SESSIONS['reader']}"
    )

    def work() -> None:
        with pgsieve.connect() as connection:
            while not done.wait(0.01) and (times is None or len(terminated) < times):
                row = connection.execute(reading).fetchone()
                if row is not None and row[0]:
                    terminated.extend(pid for pid, _ in connection.execute(query))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield terminated
    finally:
        done.set()
        worker.join()


@pytest.mark.drawn
def test_a_killed_copy_keeps_copied_tables_and_the_next_run_copies_the_rest(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: three runs, each a process, and a Spark Connect server."""
    with site("copy_killed", publisher_server, tmp_path, master) as (pgsieve, database):
        add_tables(database)
        for number in (7, 5):
            copied = len(versions(pgsieve))
            point = f"{Failpoint.TABLE_COPIED}:{number}"
            assert pgsieve.run(failpoint=point) == -signal.SIGKILL, pgsieve.log
            assert len(versions(pgsieve)) > copied
            pgsieve.write(database)
            for table in TABLES:
                database.execute(f"UPDATE {table} SET note = %s WHERE id = 1", [f"after {number}"])
        before = versions(pgsieve)
        assert len(before) >= 7
        started = {table: pgsieve.replica("accounts", table) for table in before}
        settle(pgsieve, database)
        compare(pgsieve, database, *TABLES)
        for table, path in started.items():
            # One commit is the copy, the other one has the changes since.
            operations = [c["operation"] for c in DeltaTable(str(path)).history()]
            assert len(operations) == 2, (table, operations)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("session", "by"),
    [
        ("snapshot", "executors"),
        *(
            pytest.param(session, "executors", marks=pytest.mark.long)
            for session in SESSIONS
            if session != "snapshot"
        ),
        ("reader", "threads"),
        pytest.param("snapshot", "threads", marks=pytest.mark.long),
    ],
)
def test_a_session_terminated_during_a_copy_costs_at_most_time(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str, session: str, by: str
) -> None:
    """It takes long: a large copy through a slow network is started again."""
    spark = THREADS if by == "threads" else master
    with (
        Proxy(publisher_server.port) as proxy,
        site(f"copy_{session}_{by}", publisher_server, tmp_path, spark, port=proxy.port) as (
            pgsieve,
            database,
        ),
    ):
        add_large_table(database)
        proxy.delay = 0.005
        with terminating(pgsieve, SESSIONS[session], times=1) as terminated:
            assert pgsieve.run() == 0, pgsieve.log
        assert terminated
        settle(pgsieve, database)
        compare(pgsieve, database, "large")


@pytest.mark.drawn
def test_permanent_faults_stop_a_copy_and_set_nothing_aside(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a Spark Connect server starts, and a copy is retried until pgsieve gives up."""
    with (
        Proxy(publisher_server.port) as proxy,
        site("copy_faulty", publisher_server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        add_tables(database)
        add_large_table(database)
        proxy.delay = 0.005
        with terminating(pgsieve, "state = 'active' AND query LIKE 'COPY %\"large\"%'") as terminated:
            assert pgsieve.run() == REFUSED, pgsieve.log
        assert len(terminated) > 4
        # The server's last message may be lost with the connection.
        assert "[57P01]" in pgsieve.log or "closed the connection" in pgsieve.log
        assert set(versions(pgsieve)) == set(TABLES)
        assert "public.copied_3: 50 rows copied in" in pgsieve.log, "the progress is not printed"
        proxy.heal()
        settle(pgsieve, database)
        compare(pgsieve, database, "large", *TABLES)
        assert set(versions(pgsieve).values()) == {0}, "a copied table was copied again"


@pytest.mark.long
def test_connections_cut_again_and_again_during_a_copy_set_nothing_aside(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a copy through a network that cuts every connection is repeated."""
    with (
        Proxy(publisher_server.port) as proxy,
        site("copy_cut", publisher_server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        add_large_table(database)
        proxy.delay, proxy.cut_after = 0.002, 3_000_000
        process = pgsieve.start("run")
        wait_until(lambda: proxy.cuts >= 2, lambda: pgsieve.log, 120)
        proxy.heal()
        process.join(120)
        assert process.exitcode == 0, pgsieve.log
        settle(pgsieve, database)
        compare(pgsieve, database, "large")


@pytest.mark.drawn
def test_copying_threads_end_with_their_process_and_the_next_run_copies_the_table(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes long: three runs, each a process, copy a large table."""
    with site("copy_by_threads", publisher_server, tmp_path, THREADS) as (pgsieve, database):
        add_large_table(database, 600_000)  # two chunks
        large = Path(pgsieve.replica("accounts", "large"))
        for point in (Failpoint.CHUNK_COPIED, f"{Failpoint.CHUNK_COPIED}:2"):
            assert pgsieve.run(failpoint=f"{point}") == -signal.SIGKILL, pgsieve.log
            pgsieve.write(database)
            assert not DeltaTable.is_deltatable(str(large)), "a partial copy was committed"
        settle(pgsieve, database)
        compare(pgsieve, database, "large")
        # Files that a killed run may have written are in no commit.
        assert len(DeltaTable(str(large)).file_uris()) > 1, "the table was copied in one chunk"


@pytest.mark.drawn
@pytest.mark.parametrize("master", [THREADS, pytest.param("local[2]", marks=pytest.mark.spark)])
def test_a_copy_that_is_interrupted_ends_soon(
    publisher_server: EmbeddedServer, tmp_path: Path, master: str
) -> None:
    """It takes long: a large copy through a slow network is started again."""
    with (
        Proxy(publisher_server.port) as proxy,
        site("copy_interrupted", publisher_server, tmp_path, master, port=proxy.port) as (pgsieve, database),
    ):
        add_large_table(database, 600_000)
        proxy.delay = 0.02  # 250 MB would take more than a minute
        reading = f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {SESSIONS['reader']}"
        process = pgsieve.start("run")
        wait_until(lambda: database.execute(reading).fetchone() == (2,), lambda: pgsieve.log, 120)
        proxy.delay = 0.5  # the rest of the copy would take longer than the limit below
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(300)
        assert process.exitcode == INTERRUPTED, pgsieve.log
        wait_until(lambda: database.execute(reading).fetchone() == (0,), lambda: "a chunk is read on")
        proxy.heal()
        settle(pgsieve, database)
        compare(pgsieve, database, "large")
