"""Two sessions read a large part of a slot in parallel, with the same result as one session."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.records.catalogs import AlteredSlices
from pgsieve.assets.steps.slot_consumption import appending, reading
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.reading import DrainResult
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres import confirmation
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.slot_copy import SlotCopy, copy_slot
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.lakes import no_session
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server

pytestmark = pytest.mark.slow

TABLES = """
    CREATE TABLE a (k int PRIMARY KEY, v text);
    CREATE TABLE b (k int PRIMARY KEY, v text);
    CREATE PUBLICATION p FOR TABLE a, b;
"""
COPIES = "SELECT count(*) FROM pg_replication_slots WHERE temporary"


def connected(server: EmbeddedServer) -> psycopg.Connection:
    return psycopg.connect(server.conninfo(), autocommit=True)


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server for these tests alone: its slots are counted."""
    settings = {**TEST_SETTINGS, "max_replication_slots": "4", "logical_decoding_work_mem": "64kB"}
    with new_server(postgres_version, settings) as running, connected(running) as connection:
        connection.execute(TABLES)
        yield running


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake whose runs use two sessions, and confirm once, however little waits."""
    monkeypatch.setattr(reading, "SECOND_SESSION_BYTES", 0)
    monkeypatch.setattr(confirmation, "STATUS_UPDATE_MIN_BYTES", 0)
    return Lake(str(tmp_path), no_session)


def a_slot_stream(server: EmbeddedServer, name: str) -> SlotStream:
    return SlotStream(name, Source("shop", server.conninfo()), name, name, True, {"sub": ("p",)})


def drained(slot_stream: SlotStream, lake: Lake) -> DrainResult:
    return drain_slot(slot_stream, lake, [], lambda _: None)


def changes(lake: Lake, slot_stream: SlotStream) -> pa.Table:
    """The change log, in order, without descriptions, which each slice repeats."""
    rows = pa.table(DeltaTable(lake.paths.change_log(slot_stream.name)).to_pyarrow_table())
    rows = rows.filter(pa.compute.invert(pa.compute.is_in(rows["kind"], pa.array(["R", "Y"]))))
    rows = rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])
    return rows.select(["commit_lsn", "xid", "kind", "relation_id", "data"])


def slices(lake: Lake, slot_stream: SlotStream) -> int:
    return len(
        pa.table(DeltaTable(lake.paths.change_log(slot_stream.name)).to_pyarrow_table())["slice"].unique()
    )


def write(connection: psycopg.Connection, numbers: random.Random, transactions: int = 12) -> None:
    """Commit transactions of all kinds; subtransactions roll back, tables get columns, some transactions commit much later."""
    later: list[psycopg.Connection] = []
    for _ in range(transactions):
        key = numbers.randrange(10**9)
        table = numbers.choice("ab")
        with psycopg.connect(connection.info.dsn) as session:
            session.execute(
                f"INSERT INTO {table} SELECT {key} + i, repeat('x', 50) FROM generate_series(1, {numbers.randrange(1, 200)}) i"
                " ON CONFLICT DO NOTHING"
            )
            match numbers.randrange(6):
                case 0:
                    session.execute(f"UPDATE {table} SET v = 'y' WHERE k % 3 = 0")
                case 1:
                    session.execute(f"DELETE FROM {table} WHERE k % 5 = 0")
                case 2:
                    session.execute("SAVEPOINT s")
                    session.execute(f"UPDATE {table} SET v = 'z'")
                    session.execute("ROLLBACK TO s")
                case 3 if not later:
                    session.execute(f"ALTER TABLE {table} ADD COLUMN c{key} int DEFAULT 7")
                case 4 if not later:
                    session.execute("TRUNCATE a, b")
                case _:
                    pass
        if numbers.random() < 0.3:
            waiting = psycopg.connect(connection.info.dsn)
            waiting.execute(f"INSERT INTO {table} VALUES ({-key}, 'late') ON CONFLICT DO NOTHING")
            later.append(waiting)
        if later and numbers.random() < 0.5:
            with later.pop(0) as waiting:
                pass
    for waiting in later:
        with waiting:
            pass


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_two_sessions_read_the_same_as_one(
    server: EmbeddedServer, lake: Lake, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    slot_streams = two, one = a_slot_stream(server, "two"), a_slot_stream(server, "one")
    numbers = random.Random(seed)
    with connected(server) as connection:
        for slot_stream in slot_streams:
            drained(slot_stream, lake)
        for _ in range(3):
            write(connection, numbers)
            drained(two, lake)
        assert connection.execute(COPIES).fetchone() == (0,)
    monkeypatch.setattr(reading, "SECOND_SESSION_BYTES", 2**40)
    drained(one, lake)
    assert changes(lake, two).equals(changes(lake, one))
    assert slices(lake, one) == 1
    assert slices(lake, two) > 3


def test_one_session_reads_if_few_slots_are_free(server: EmbeddedServer, lake: Lake) -> None:
    slot_stream = a_slot_stream(server, "only")
    with connected(server) as connection:
        drained(slot_stream, lake)
        for name in ("x", "y"):
            connection.execute(f"SELECT pg_create_physical_replication_slot('{name}')")
        write(connection, random.Random(1))
        assert drained(slot_stream, lake).slices == 1
        connection.execute("SELECT pg_drop_replication_slot('x')")
        write(connection, random.Random(2))
        assert drained(slot_stream, lake).slices == 2


@pytest.mark.parametrize("refused", ["making", "moving"])
def test_the_slot_itself_is_read_if_its_copy_is_refused(
    server: EmbeddedServer, lake: Lake, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    slot_streams = unmoved, one = a_slot_stream(server, "refused"), a_slot_stream(server, "one")
    progress = list[str]()
    read = SlotCopy.read_batches
    with connected(server) as connection:
        for slot_stream in slot_streams:
            drained(slot_stream, lake)
        if refused == "making":
            for number in range(2):
                connection.execute(f"SELECT pg_create_physical_replication_slot('s{number}')")
            # Another client takes the last slots after they were counted.
            monkeypatch.setattr(reading, "has_spare_slots", lambda _: True)
        else:
            monkeypatch.setattr(SlotCopy, "read_batches", lambda copy, _, query: read(copy, 0, query))
        write(connection, random.Random(3))
        assert drain_slot(unmoved, lake, [], progress.append).slices == 2
    assert len([line for line in progress if "does not move a copy" in line]) == (refused == "moving")
    assert not [line for line in progress if "smaller parts" in line]
    monkeypatch.setattr(reading, "SECOND_SESSION_BYTES", 2**40)
    drained(one, lake)
    assert changes(lake, unmoved).equals(changes(lake, one))


def test_one_session_reads_a_slice_that_is_also_read_as_published(server: EmbeddedServer, lake: Lake) -> None:
    """Both readings are one slice, and nothing may come between them."""
    # One subscription has the leaves captured. Only the publisher knows whether all leaves or their root were truncated.
    subscriptions = {"root": ("root",), "leaves": ("leaves",)}
    slot_stream = SlotStream("tree", Source("shop", server.conninfo()), "tree", "tree", False, subscriptions)
    with connected(server) as connection:
        connection.execute("""
            CREATE TABLE root (k int PRIMARY KEY, v text) PARTITION BY RANGE (k);
            CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (100);
            CREATE TABLE high PARTITION OF root FOR VALUES FROM (100) TO (1000);
            CREATE PUBLICATION root FOR TABLE root WITH (publish_via_partition_root);
            CREATE PUBLICATION leaves FOR TABLE root""")
        drained(slot_stream, lake)
        for _ in range(2):
            connection.execute("INSERT INTO root SELECT i, repeat('x', 50) FROM generate_series(0, 999) i")
            connection.execute("TRUNCATE root")
        done = drained(slot_stream, lake)
    assert done.slices == 1
    assert AlteredSlices(lake, slot_stream).read_ends("root", done.to_lsn) == {done.to_lsn}


@pytest.mark.parametrize("ended", ["first", "second"])
def test_the_part_of_an_ended_session_is_read_again(
    server: EmbeddedServer, lake: Lake, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    slot_streams = cut, one = a_slot_stream(server, "cut"), a_slot_stream(server, "one")
    read = appending.fetch_message_batches if ended == "first" else SlotCopy.read_batches

    def reads_and_ends(*arguments: object) -> Iterator[pa.RecordBatch]:
        for batch in read(*arguments):  # type: ignore[operator]
            yield batch
            raise ConnectionResetError(104, "Connection reset by peer")

    with connected(server) as connection:
        for slot_stream in slot_streams:
            drained(slot_stream, lake)
        write(connection, random.Random(4))
        with monkeypatch.context() as patched:
            owner, name = (
                (appending, "fetch_message_batches") if ended == "first" else (SlotCopy, "read_batches")
            )
            patched.setattr(owner, name, reads_and_ends)
            with pytest.raises((PgsieveError, OSError)):
                drained(cut, lake)
        wait_until(lambda: connection.execute(COPIES).fetchone() == (0,), lambda: "a copy is left")
        # If only the second session ended, the slices of the first one are durable.
        assert slices(lake, cut) == (0 if ended == "first" else 1)
        drained(cut, lake)
    monkeypatch.setattr(reading, "SECOND_SESSION_BYTES", 2**40)
    drained(one, lake)
    assert changes(lake, cut).equals(changes(lake, one))


_FEW = "SELECT count(*) FROM pg_stat_activity WHERE usename = 'few'"


@pytest.mark.parametrize("connections", [3, 4])
def test_nothing_is_refused_if_few_connections_are_free(
    server: EmbeddedServer, lake: Lake, connections: int
) -> None:
    """A session needs three connections: of the run, of its lock, and of the reading."""
    progress = list[str]()
    with connected(server) as connection:
        connection.execute(f"CREATE ROLE few LOGIN REPLICATION CONNECTION LIMIT {connections}")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO few")
        slot_stream = SlotStream(
            "few", Source("shop", server.conninfo(user="few")), "few", "few", True, {"sub": ("p",)}
        )
        drained(slot_stream, lake)
        for number in range(3):
            write(connection, random.Random(number))
            # A server process counts until it has ended, a moment after its session.
            wait_until(lambda: connection.execute(_FEW).fetchone() == (0,), lambda: "a session is left")
            drain_slot(slot_stream, lake, [], progress.append)
    assert progress
    assert not [line for line in progress if "holds everything before" not in line]


def test_a_slot_copy_without_a_session_is_none(server: EmbeddedServer) -> None:
    conninfo = Source("shop", server.conninfo()).make_executor_conninfo()
    for refused in (
        replace(conninfo, password_command="false"),
        replace(conninfo, text=server.conninfo(user="nobody")),
    ):
        with copy_slot(refused, "s") as copy:
            assert copy is None
    with copy_slot(conninfo, "gone") as copy:
        assert copy is None


def test_a_failover_slot_is_read_by_one_session(
    server: EmbeddedServer, lake: Lake, postgres_version: int
) -> None:
    """The slot waits until a standby has its changes; a copy of the slot would not."""
    if postgres_version < 17:
        pytest.skip("slots have `failover` from 17 on")
    slot_stream = replace(a_slot_stream(server, "only"), failover=True)
    with connected(server) as connection:
        drained(slot_stream, lake)
        write(connection, random.Random(5))
        assert drained(slot_stream, lake).slices == 1


def test_stopping_a_slot_copy_does_not_wait_for_its_reading(server: EmbeddedServer) -> None:
    with connected(server) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        conninfo = Source("shop", server.conninfo()).make_executor_conninfo()
        raised = list[Exception]()
        with copy_slot(conninfo, "s") as copy:
            assert copy is not None
            begin = read_current_lsn(connection)

            def read() -> None:
                try:
                    # Only a cancellation ends it in time.
                    deque(copy.read_batches(begin, lambda _: "SELECT pg_sleep(600)::text"), 0)
                except Exception as error:  # noqa: BLE001 - looked at below
                    raised.append(error)

            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            sleepers = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            wait_until(
                lambda: connection.execute(sleepers).fetchone() == (1,), lambda: f"it never slept: {raised}"
            )
            stopped = time.monotonic()
            while thread.is_alive() and time.monotonic() < stopped + 60:
                copy.cancel_query()
                thread.join(0.1)
            assert raised
        wait_until(lambda: connection.execute(COPIES).fetchone() == (0,), lambda: "a copy is left")
