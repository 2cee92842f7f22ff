"""A run decodes a slot's backlog about once, or in smaller parts if the server ends long statements."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.records.slices import join_summaries
from pgsieve.assets.steps.slot_consumption import backlog
from pgsieve.assets.steps.slot_consumption import reading as change_log
from pgsieve.assets.steps.slot_consumption.appending import make_peek_options
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.messages import read_slice_by_executor
from pgsieve.assets.steps.slot_consumption.reading import ReadySlot, read_slot_to
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query
from pgsieve.resources.postgres.slot import create_slot, read_slot_state
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.lakes import no_session
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import DECODINGS_LOGGED, TEST_SETTINGS, decodings, new_server

MIB = 1024 * 1024


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server for these tests alone: its log says how often a slot was decoded."""
    settings = {**TEST_SETTINGS, **DECODINGS_LOGGED, "max_wal_size": "4GB"}
    with new_server(postgres_version, settings) as running:
        yield running


def a_slot_stream(server: EmbeddedServer, name: str, conninfo: str | None = None) -> SlotStream:
    source = Source("shop", conninfo or server.conninfo())
    return SlotStream(name, source, name, name, filtered=True, subscriptions={"sub": ("p",)})


def drained(slot_stream: SlotStream, lake: Lake) -> tuple[change_log.DrainResult, list[str]]:
    messages: list[str] = []
    return drain_slot(slot_stream, lake, [], messages.append), messages


def stored_messages(lake: Lake, slot_stream: SlotStream) -> pa.Table:
    """The change log, in order."""
    rows = pa.table(DeltaTable(lake.paths.change_log(slot_stream.name)).to_pyarrow_table())
    return rows.select(["slice", "commit_lsn", "ordinal", "kind", "data"]).sort_by(
        [("commit_lsn", "ascending"), ("ordinal", "ascending")]
    )


def fill(connection: psycopg.Connection, transactions: int, rows: int) -> None:
    """Commit transactions in two tables, the second of which appears late."""
    for number in range(transactions):
        with connection.transaction():
            connection.execute(
                "INSERT INTO t SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, %s) i", [rows]
            )
            if number % 3 == 2:
                connection.execute("INSERT INTO u VALUES (%s)", [number])


@pytest.mark.drawn
def test_a_backlog_of_many_slices_is_decoded_few_times_and_gives_the_same_slices(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_log, "SLICE_BYTES", MIB)
    lake = Lake(str(tmp_path), no_session)
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int, b text); CREATE TABLE u (a int)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t, u")
        slot_streams = [a_slot_stream(server, name) for name in ("ahead", "single")]
        for slot_stream in slot_streams:
            drained(slot_stream, lake)
        # While this transaction is open, the server decodes from its begin.
        with psycopg.connect(server.conninfo()) as long:
            long.execute("INSERT INTO t VALUES (0, 'long')")
            fill(connection, 24, 2_000)
            before = [decodings(server, slot_stream.slot) for slot_stream in slot_streams]
            done, _ = drained(slot_streams[0], lake)
            monkeypatch.setattr(backlog, "MAX_SLICES", 1)
            one_by_one, _ = drained(slot_streams[1], lake)
            ahead, single = (decodings(server, f.slot) - b for f, b in zip(slot_streams, before, strict=True))
        assert done.slices == one_by_one.slices >= 10
        assert ahead <= 12 < 2 * one_by_one.slices <= single, (ahead, single)
        own, other = (stored_messages(lake, slot_stream) for slot_stream in slot_streams)
        # The first slice begins where the slot was created.
        assert own.drop_columns("slice").equals(other.drop_columns("slice"))
        for end in own["slice"].unique().to_pylist():
            kinds = own.filter(pa.compute.equal(own["slice"], end))["kind"].to_pylist()
            assert kinds.index("R") < kinds.index("I"), "a slice does not describe its relations"


@pytest.mark.drawn
@pytest.mark.slow
def test_a_statement_timeout_shorter_than_a_reading_makes_the_readings_smaller(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """It may take long: the backlog must be large enough for a timeout, and is read in many parts."""
    lake = Lake(str(tmp_path), no_session)
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int, b text); CREATE TABLE u (a int)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t, u")
        patient = a_slot_stream(server, "patient")
        for slot_stream in (patient, a_slot_stream(server, "hasty")):
            drained(slot_stream, lake)
        fill(connection, 60, 8_000)
        begun = time.monotonic()
        drained(patient, lake)
        # The timeout is a part of the time that a complete reading takes on this machine now.
        limit = max(50, int((time.monotonic() - begun) * 1000 / 4))
        hasty = a_slot_stream(server, "hasty", server.conninfo() + f" options='-c statement_timeout={limit}'")
        done, messages = drained(hasty, lake)
        assert any("canceling statement due to statement timeout" in line for line in messages), messages
        assert done.slices > 1
        rows = (stored_messages(lake, slot_stream) for slot_stream in (hasty, patient))
        changes = [each.filter(pa.compute.equal(each["kind"], "I"))["data"] for each in rows]
        assert changes[0].combine_chunks().equals(changes[1].combine_chunks())
        row = connection.execute(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = 'hasty'"
        ).fetchone()
        assert row == (done.to_lsn,)


def test_messages_that_a_server_repeats_after_a_crash_are_in_the_change_log_once(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """A crash sets the slot back to the last checkpoint, also during a drain that had already read the slot's position."""
    lake = Lake(str(tmp_path), no_session)
    slot_stream = a_slot_stream(server, "crashed")
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int, b text); CREATE TABLE u (a int)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t, u")
        drained(slot_stream, lake)
        # While a transaction is open, restart_lsn stays, and only checkpoints write an advance to disk.
        with psycopg.connect(server.conninfo()) as long:
            long.execute("INSERT INTO t VALUES (0, 'long')")
            for _ in range(2):
                connection.execute("CHECKPOINT")
                fill(connection, 3, 10)
                reached = drained(slot_stream, lake)[0].to_lsn
            server.stop(immediate=True)
            long.close()
    server.start()
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        state = read_slot_state(connection, slot_stream.slot)
        assert state is not None
        assert state.confirmed_lsn < reached, "the crash did not set the slot back"
        fill(connection, 3, 10)
        # Simulates a drain that prepared the slot before the crash.
        target = read_current_lsn(connection)
        read_slot_to(ReadySlot(connection, slot_stream, lake, ("p",)), target, lambda _: None)
    rows = stored_messages(lake, slot_stream)
    begins = rows.filter(pa.compute.equal(rows["kind"], "B"))
    assert begins.num_rows == len(begins["commit_lsn"].unique()) == 9
    last = rows.filter(pa.compute.equal(rows["slice"], target))
    assert pa.compute.min(last["commit_lsn"]).as_py() >= reached
    kinds = last["kind"].to_pylist()
    assert kinds.count("B") == 3
    assert kinds.index("R") < kinds.index("I"), "the skipped messages contained the descriptions of relations"


@pytest.mark.spark
@pytest.mark.drawn
def test_an_executor_skips_repeated_messages(server: EmbeddedServer) -> None:
    slot_stream = a_slot_stream(server, "executor")
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (a int, b text); CREATE TABLE u (a int)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t, u")
        create_slot(connection, "shop", slot_stream.slot)
        fill(connection, 3, 10)
        begin = read_current_lsn(connection)
        fill(connection, 3, 10)
        end = read_current_lsn(connection)
        query = peek_query(
            slot_stream.slot, end, make_peek_options(slot_stream, ["p"]), connection.info.server_version
        )
    kinds = []
    for since in (0, begin):
        rows = read_slice_by_executor(
            engine().session, slot_stream.source.make_executor_conninfo(), query, since, end
        )
        written = list[pa.Table]()
        (summary,) = rows.write(lambda frame, into=written: into.append(frame.toArrow())) or []
        messages = written[0].sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])
        kinds.append(messages["kind"].to_pylist())
        contents = join_summaries([summary])
        assert [bytes(each["data"])[:1] for each in contents["messages"]] == [
            kind.encode() for kind in kinds[-1] if kind in "RT"
        ]
        assert contents["relations"]
        assert contents["bytes"]
    assert [each.count("B") for each in kinds] == [6, 3]
    assert kinds[1] == kinds[0][: len(kinds[1])], "a reading does not describe its relations"
