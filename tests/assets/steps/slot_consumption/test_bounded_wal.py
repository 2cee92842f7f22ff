"""A slot retains little WAL while no published table changes, both in runs and in a follower."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import psycopg
import pytest

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.assets.steps.slot_consumption.reading import IDLE_BYTES
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres import confirmation
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from tests.fixtures.lakes import no_session
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import drop_slots

_numbers = count(1)
#: The writes of one step, about 1.5 MB.
WRITE = "insert into {} select 0, repeat(md5(i::text), 20) from generate_series(1, 2000) i"
RETAINED = "select (pg_current_wal_insert_lsn() - restart_lsn)::bigint from pg_replication_slots where slot_name = %s"


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    name = f"foreign_writes_{next(_numbers)}"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(publisher_server.conninfo(dbname=name), autocommit=True) as connection:
            connection.execute("create table unpublished (a int, b text)")
            connection.execute("create table filtered (a int, b text)")
            connection.execute(
                "create publication p for table filtered where (a > 0) with (publish = 'insert')"
            )
            yield connection
            drop_slots(connection)
        admin.execute(f"drop database {name} with (force)")


@pytest.mark.parametrize("filtered", [False, True], ids=["pipeline", "publisher"])
@pytest.mark.parametrize("follows", [False, True], ids=["run", "follow"])
@pytest.mark.drawn
def test_foreign_writes_retain_little_wal(
    database: psycopg.Connection,
    publisher_server: EmbeddedServer,
    tmp_path: Path,
    filtered: bool,
    follows: bool,
) -> None:
    """It may take long: many runs, or a follower, while other tables are written."""
    name = database.info.dbname
    source = Source("shop", publisher_server.conninfo(dbname=name))
    slot_stream = SlotStream(name, source, name, name, filtered, {"sub": ("p",)})
    lake = Lake(str(tmp_path), no_session)

    def retained() -> int:
        """How many bytes of WAL the slot retains."""
        row = database.execute(RETAINED, [name]).fetchone()
        assert row is not None
        return int(row[0])

    def write() -> None:
        # In mode `pipeline` the change log has published changes that a filter rejects, and confirms them.
        for table in ("unpublished", "filtered"):
            database.execute(WRITE.format(table))

    drain_slot(slot_stream, lake, [], print)
    if not follows:
        for _ in range(4):
            for _ in range(3):
                write()
                database.execute("select pg_log_standby_snapshot()")
            drain_slot(slot_stream, lake, [], print)
            assert retained() < IDLE_BYTES
        return
    with FollowedSlotStream(slot_stream, lake, print) as streamed, ThreadPoolExecutor(1) as pool:

        def follow() -> None:
            for _ in streamed.read_slice_ends():
                streamed.append_due_slice()

        following = pool.submit(follow)
        try:
            for _ in range(8):
                write()
                # The server does this every 15 seconds while sessions write.
                database.execute("select pg_log_standby_snapshot()")
                wait_until(lambda: retained() < 3 * IDLE_BYTES, lambda: f"{retained()} are retained")
        finally:
            streamed.stop()
        following.result()


def test_an_open_transaction_costs_no_run_anything_and_its_wal_is_freed_by_the_next(
    publisher_server: EmbeddedServer,
    database: psycopg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = database.info.dbname
    slot_stream = SlotStream(
        name, Source("shop", publisher_server.conninfo(dbname=name)), name, name, False, {"sub": ("p",)}
    )
    lake = Lake(str(tmp_path), no_session)
    advances, advance = list[int](), confirmation.advance_slot

    def counted(connection: psycopg.Connection, source: str, slot: str, lsn: int) -> None:
        advances.append(lsn)
        advance(connection, source, slot, lsn)

    def look() -> tuple[int, int, int]:
        """The retained WAL, the number of advances, and the version of the change log."""
        row = database.execute(RETAINED, [name]).fetchone()
        assert row is not None
        return int(row[0]), len(advances), lake.records.version(ChangeLog(lake, slot_stream).path)

    def run() -> tuple[int, int, int]:
        # The server does this every 15 seconds while sessions write.
        database.execute("select pg_log_standby_snapshot()")
        drain_slot(slot_stream, lake, [], print)
        return look()

    monkeypatch.setattr(confirmation, "advance_slot", counted)
    run()
    with psycopg.connect(publisher_server.conninfo(dbname=name)) as session:
        for _ in range(4):
            session.execute(WRITE.format("unpublished"))
        retained, *before = run()
        assert retained > IDLE_BYTES
        for _ in range(3):
            _, *after = run()
            assert after == before
        # Published changes are confirmed all the same.
        database.execute("insert into filtered values (1)")
        assert run()[1:] > tuple(before)
        session.rollback()
    assert run()[0] < IDLE_BYTES
