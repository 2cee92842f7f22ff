"""Both transports leave the same changes in the change log, whatever the sessions of the publisher do.

The oracle is PostgreSQL's protocol version 1 without two_phase, drained through SQL. The others are drained through SQL with
two_phase, and through the streaming replication protocol with stops and restarts.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.slot_consumption import appending, follow
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.protocol.messages import Relation, decode
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import Receiver
from pgsieve.resources.postgres.slot import SlotError, SlotInUseError, wait_until_free
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.stream import ReplicationStream
from tests.fixtures.concurrent_sessions import SETTINGS, STEPS, TABLES, Workload, connect, flushed_lsn
from tests.fixtures.lakes import no_session
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import new_server
from tests.fixtures.streamed import consume_stream
from tests.fixtures.walsender import Walsender

pytestmark = pytest.mark.slow

OPTIONS = {
    "sql": PgoutputOptions(),
    "sql_two_phase": PgoutputOptions(two_phase=True),
    "streamed": PgoutputOptions(streaming="parallel"),
    "streamed_two_phase": PgoutputOptions(streaming="on", two_phase=True),
    "streamed_at_commit": PgoutputOptions(),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with new_server(18, SETTINGS) as running:
        with connect(running) as connection:
            connection.execute(TABLES)
        yield running


class Consumer:
    """A slot and its change log."""

    def __init__(self, name: str, server: EmbeddedServer, folder: Path) -> None:
        self.streams = name.startswith("streamed")
        self.lake = Lake(str(folder / name), no_session)
        source = Source("publisher", server.conninfo())
        subscriptions = {"sub": ("pub",)}
        options = OPTIONS[name]
        self.slot_stream = SlotStream(name, source, name, name, True, subscriptions, options=options)
        drain_slot(self.slot_stream, self.lake, [], print)

    def consume(self, target: int) -> None:
        """Consume everything that was committed before `target`."""
        if not self.streams:
            drain_slot(self.slot_stream, self.lake, [], print, target)
            return
        consume_stream(self.slot_stream, self.lake, target)

    def changes(self) -> list[tuple]:
        """All messages except descriptions, with their order keys and the descriptions by which they are decoded."""
        path, relations, contents = self.lake.paths.change_log(self.slot_stream.name), {}, []
        rows = self.lake.records.rows(path)
        for row in sorted(rows, key=lambda row: (row["slice"], row["number"])):
            message = decode(row["data"])
            if isinstance(message, Relation):
                relations[row["slice"], message.relation_id] = message
            elif row["kind"] != "Y":
                described = relations[row["slice"], row["relation_id"]] if row["kind"] in "IUD" else None
                contents.append(
                    (row["commit_lsn"], row["ordinal"], row["xid"], row["kind"], message, described)
                )
        return contents


@pytest.mark.drawn
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(phases=st.lists(st.lists(STEPS, min_size=5, max_size=30), min_size=1, max_size=3))
def test_both_transports_leave_the_same_changes(server, tmp_path_factory, phases) -> None:
    """It may take long: hypothesis draws many workloads, and each is read by several slots."""
    folder = tmp_path_factory.mktemp("lakes")
    with connect(server) as connection:
        consumers = [Consumer(name, server, folder) for name in OPTIONS]
        workload = Workload(server)
        try:
            for steps in [*phases, None]:
                workload.run(steps) if steps else workload.end()
                target = flushed_lsn(connection)
                for consumer in consumers:
                    consumer.consume(target)
            wanted = consumers[0].changes()
            for consumer in consumers[1:]:
                assert consumer.changes() == wanted, consumer.slot_stream.name
        finally:
            workload.end()
            workload.close()
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("DROP TABLE a, b; DROP PUBLICATION pub; DROP TYPE mood")
            connection.execute(TABLES)


class Died(BaseException):
    """Simulates the end of the process."""


@pytest.mark.parametrize("name", ["sql_two_phase", "streamed_two_phase"])
@pytest.mark.parametrize("step", ["append_slice", "save_prepared"])
def test_a_prepared_transaction_survives_a_run_that_dies(server, tmp_path, monkeypatch, name, step) -> None:
    appends = (follow, "append_slice") if name == "streamed_two_phase" else (appending, "commit_slice")
    owner, function = (PreparedTransactions, "save") if step == "save_prepared" else appends

    def die(*_: object) -> None:
        raise Died

    with connect(server) as connection:
        consumer = Consumer(name, server, tmp_path)
        try:
            connection.execute("BEGIN; INSERT INTO a VALUES (1); PREPARE TRANSACTION 'first'")
            connection.execute("BEGIN; INSERT INTO a VALUES (2); PREPARE TRANSACTION 'second'")
            connection.execute("INSERT INTO a VALUES (3)")
            consumer.consume(flushed_lsn(connection))
            connection.execute("COMMIT PREPARED 'first'")
            connection.execute("BEGIN; INSERT INTO a VALUES (4); PREPARE TRANSACTION 'third'")
            connection.execute("INSERT INTO a VALUES (5)")
            target = flushed_lsn(connection)
            with monkeypatch.context() as dying:
                dying.setattr(owner, function, die)
                with pytest.raises(Died):
                    consumer.consume(target)
            for gid in ("second", "third"):
                connection.execute(f"COMMIT PREPARED '{gid}'")
            consumer.consume(flushed_lsn(connection))
            inserted = [message.new[0].content for *_, kind, message, _ in consumer.changes() if kind == "I"]
            assert inserted == [b"3", b"1", b"5", b"2", b"4"]
        finally:
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("TRUNCATE a")


def test_a_follower_that_was_overtaken_during_a_lost_connection_ends_and_loses_nothing(
    server, tmp_path, monkeypatch
) -> None:
    # As in a restart of the server: the lock's session ends with the walsender's, and another process takes the lock first.
    overtaken, begin = threading.Event(), ReplicationStream._start_receiver
    begun = []

    def start(stream: ReplicationStream) -> Receiver:
        begun.append(stream)
        assert len(begun) == 1 or overtaken.wait(30)
        return begin(stream)

    monkeypatch.setattr(ReplicationStream, "_start_receiver", start)
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type IN ('client backend', 'walsender')"
    with connect(server) as connection, ThreadPoolExecutor(1) as pool:
        consumer = Consumer("streamed_at_commit", server, tmp_path)
        try:
            connection.execute("INSERT INTO a VALUES (1)")
            consuming = pool.submit(consume_stream, consumer.slot_stream, consumer.lake, 2**62)
            change_log = ChangeLog(consumer.lake, consumer.slot_stream)
            wait_until(lambda: len(consumer.changes()) > 0, lambda: "nothing is appended")
            before = change_log.read_position()
            connection.execute(f"{others} AND pid <> pg_backend_pid()")
            connection.execute("INSERT INTO a VALUES (2)")
            drain_slot(consumer.slot_stream, consumer.lake, [], print)
            assert (change_log.read_position() or 0) > (before or 0)
            overtaken.set()
            consuming.result(30)
            monkeypatch.undo()
            connection.execute("INSERT INTO a VALUES (3)")
            consumer.consume(flushed_lsn(connection))
            inserted = [message.new[0].content for *_, kind, message, _ in consumer.changes() if kind == "I"]
            assert inserted == [b"1", b"2", b"3"]
        finally:
            overtaken.set()
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("TRUNCATE a")


@pytest.mark.drawn
@pytest.mark.slow
def test_a_slot_that_cannot_repeat_a_prepared_transaction_is_refused(server, tmp_path, monkeypatch) -> None:
    name = "sql_two_phase"

    def die(*_: object) -> None:
        raise Died

    with connect(server) as connection:
        consumer = Consumer(name, server, tmp_path)
        try:
            connection.execute("INSERT INTO a VALUES (1)")
            with monkeypatch.context() as dying:
                dying.setattr(PreparedTransactions, "save", die)
                with pytest.raises(Died):
                    consumer.consume(flushed_lsn(connection))
            replication = server.conninfo(replication="database")
            options = {"proto_version": "1", "publication_names": "pub"}
            with Walsender(replication, name, options), pytest.raises(SlotInUseError):
                consumer.consume(flushed_lsn(connection))
            wait_until_free(connection, name)
            consumer.consume(flushed_lsn(connection))
            assert [kind for *_, kind, _, _ in consumer.changes()].count("I") == 1
        finally:
            wait_until_free(connection, name)
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("TRUNCATE a")


@pytest.mark.parametrize("name", ["sql_two_phase", "streamed_two_phase"])
def test_a_lost_prepared_transaction_is_an_error(server, tmp_path, name) -> None:
    with connect(server) as connection:
        consumer = Consumer(name, server, tmp_path)
        try:
            connection.execute("BEGIN; INSERT INTO a VALUES (1); PREPARE TRANSACTION 'first'")
            connection.execute("INSERT INTO a VALUES (2)")
            consumer.consume(flushed_lsn(connection))
            shutil.rmtree(consumer.lake.paths.prepared_transactions(name))
            connection.execute("COMMIT PREPARED 'first'")
            with pytest.raises(SlotError, match="does not have those that were received"):
                consumer.consume(flushed_lsn(connection))
        finally:
            connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            connection.execute("TRUNCATE a")
