"""Alterations on the publisher are noticed, and the publisher's messages of such a slice are kept, wherever a run dies.

The oracle is a slot that the publisher filters by the same publications, read up to the same LSN.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from pgsieve.assets.steps.records.catalogs import AlteredSlices, make_publisher_slot_stream
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.slices import Slices
from pgsieve.assets.steps.slot_consumption import appending, follow, reading, ready
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.follow import FollowedSlotStream
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.assets.steps.update_transformation.slice_contents import read_slice_contents
from pgsieve.decoding.protocol.messages import Relation, Type, decode
from pgsieve.decoding.publications.catalog import PublicationError
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.decoding.publications.routing import find_routes
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.alterations import fingerprint_catalog
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.oracle import Session, wait_until
from tests.fixtures.servers import new_server
from tests.fixtures.streamed import consume_stream

pytestmark = pytest.mark.slow

TABLES = """
    CREATE SCHEMA s; CREATE TABLE s.x (a int PRIMARY KEY);
    CREATE TABLE t (a int PRIMARY KEY, b text);
    CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
    CREATE TABLE r0 PARTITION OF r FOR VALUES FROM (0) TO (10);
    CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (10) TO (20);
    CREATE PUBLICATION p FOR TABLE t, r WITH (publish_via_partition_root = true);
    CREATE PUBLICATION q FOR TABLE s.x; CREATE PUBLICATION leaves FOR TABLE r
"""
ALTERATIONS = """
    ALTER PUBLICATION p SET (publish = 'insert, delete')
    ALTER PUBLICATION p RENAME TO other; ALTER PUBLICATION other RENAME TO p
    ALTER PUBLICATION p DROP TABLE t
    DROP PUBLICATION q; CREATE PUBLICATION q FOR TABLE s.x
    ALTER PUBLICATION q ADD TABLE t
    BEGIN; ALTER TABLE t RENAME TO u; ALTER TABLE u RENAME TO t; COMMIT
    ALTER TABLE t SET SCHEMA s; ALTER TABLE s.t SET SCHEMA public
    ALTER TABLE t RENAME COLUMN b TO c
    ALTER TABLE t ADD d int DEFAULT 3
    ALTER TABLE t REPLICA IDENTITY FULL
    ALTER SCHEMA s RENAME TO z
    ALTER TABLE r DETACH PARTITION r1
    CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (20) TO (30)
    DROP TABLE r0
"""
INDIFFERENT = """
    CREATE TABLE w (a int)
    DROP TABLE IF EXISTS w
    CREATE TEMPORARY TABLE w (a int)
    INSERT INTO t VALUES (1); TRUNCATE t; TRUNCATE r
    VACUUM FULL; ANALYZE
    CREATE INDEX ON t (b); REINDEX TABLE t
    CREATE PUBLICATION w FOR TABLE t
"""


_numbers = itertools.count(1)


def _each(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


@pytest.fixture(scope="module", params=[18, 16])
def server(request) -> Iterator[EmbeddedServer]:
    settings = {"fsync": "off", "autovacuum": "off", "wal_writer_delay": "10s"}
    with new_server(request.param, settings) as running:
        yield running


class Published:
    """A database whose changes arrive in two ways: captured, and filtered by the publisher."""

    def __init__(
        self, server: EmbeddedServer, folder: Path, *, streams: bool = False, beside: tuple[str, ...] = ()
    ) -> None:
        """`beside` are the publications of another subscription of the captured stream."""
        self.name = name = f"alterations_{next(_numbers)}"
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        self.conninfo = server.conninfo(dbname=name)
        self.run = Session(self.conninfo)
        self.run(TABLES)
        self.lake = Lake(str(folder / "lake"), _no_session)
        source = Source("publisher", server.conninfo(dbname=name))
        options = PgoutputOptions(streaming="on" if streams else "off")
        names = {"sub": ("p", "q")}
        shared = {**names, "beside": beside} if beside else names
        self.captured = SlotStream("captured", source, name, "captured", False, shared, options=options)
        self.filtered = SlotStream("filtered", source, f"{name}_filtered", "filtered", True, names)
        self.streams = streams
        for slot_stream in (self.captured, self.filtered):
            drain_slot(slot_stream, self.lake, (), print)

    @contextmanager
    def beside(self) -> Iterator[Session]:
        """Another session on the publisher."""
        session = Session(self.conninfo)
        try:
            yield session
        finally:
            session.close()

    def close(self) -> None:
        """Drop the slots."""
        self.run(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
        self.run.close()

    def consume(self) -> None:
        """Read the captured stream up to now."""
        if self.streams:
            with pytest.MonkeyPatch.context() as patch:
                # One slice, as in a drain. If there were several, slices without an alteration would not be kept.
                patch.setattr(follow.WaitingTransactions, "is_due", lambda _: False)
                consume_stream(self.captured, self.lake, read_current_lsn(self.run.connection))
        else:
            drain_slot(self.captured, self.lake, (), print)

    def settle(self) -> None:
        """Move the slot past the last alteration."""
        for _ in range(2):
            self.run("CHECKPOINT; INSERT INTO s.x SELECT coalesce(max(a), 0) + 1 FROM s.x")
            self.consume()

    def altered(self) -> set[int]:
        """The ends of the slices with an alteration."""
        durable = ChangeLog(self.lake, self.captured).read_position()
        assert durable is not None
        return AlteredSlices(self.lake, self.captured).read_ends("sub", durable)

    def kept(self) -> list[object]:
        """The kept messages of these slices."""
        return self._messages(make_publisher_slot_stream(self.captured, "sub"), self.altered())

    def sent(self) -> list[object]:
        """The messages that the publisher sends by its own filters, over all slices."""
        drain_slot(self.filtered, self.lake, (), print)
        path = self.lake.paths.change_log(self.filtered.name)
        return self._messages(self.filtered, set(self.lake.records.slices(path, 0)))

    def _messages(self, slot_stream: SlotStream, slices: set[int]) -> list[object]:
        rows = [
            r
            for r in self.lake.records.rows(self.lake.paths.change_log(slot_stream.name))
            if r["slice"] in slices
        ]
        read = [(r["commit_lsn"], r["ordinal"], decode(r["data"])) for r in rows]
        relations = {m.relation_id: m for _, _, m in read if isinstance(m, Relation)}
        assert relations or not read
        return sorted(
            ((lsn, at, repr(m)) for lsn, at, m in read if not isinstance(m, Relation | Type)),
        )


def _no_session() -> None:
    raise AssertionError("a change log in a local lake needs no Spark")


@pytest.fixture
def published(server, tmp_path) -> Iterator[Published]:
    made = Published(server, tmp_path)
    yield made
    made.close()


def test_only_alterations_of_published_objects_change_the_look(published) -> None:
    connection = published.run.connection
    for statements, differs in [(INDIFFERENT, False), (ALTERATIONS, True)]:
        for statement in _each(statements):
            before = fingerprint_catalog(connection, ["p", "q"])
            published.run(statement)
            after = fingerprint_catalog(connection, ["p", "q"])
            assert after.matches(before.digest, before.relations_digest, before.capture_digest) != differs, (
                statement
            )
            assert differs or after.removed_rows == before.removed_rows, statement


def test_a_recorded_catalog_decides_as_the_catalog_itself(published) -> None:
    published.run("CREATE TYPE mood AS ENUM ('ok'); CREATE TABLE w (a int); CREATE PUBLICATION w FOR TABLE w")
    published.run("ALTER PUBLICATION q ADD TABLE t (a) WHERE (a > 1); CREATE TABLE r2 PARTITION OF r DEFAULT")
    catalog = read_catalog(published.run.connection)
    recorded = catalog_from_json(catalog_to_json(catalog, ["p", "q"]))
    for names in (["p"], ["q"]):
        assert find_routes(recorded, recorded.select_publications(names)) == find_routes(
            catalog, catalog.select_publications(names)
        )
    # The catalog has no labels and fields, because they are in the layouts; it decodes no values.
    assert recorded.types.keys() == catalog.types.keys()
    assert all(
        (t.kind, t.underlying_oid) == (recorded.types[oid].kind, recorded.types[oid].underlying_oid)
        for oid, t in catalog.types.items()
    )
    assert "w" not in {table.name for table in recorded.tables.values()}


#: Each alteration is undone. The catalog afterwards shows no trace of it.
UNDONE = """
    ALTER PUBLICATION q ADD TABLE t; INSERT INTO t VALUES (1), (51); ALTER PUBLICATION q DROP TABLE t
    BEGIN; ALTER PUBLICATION q ADD TABLE t; INSERT INTO t VALUES (2), (52); ALTER PUBLICATION q DROP TABLE t; COMMIT
    ALTER PUBLICATION q ADD TABLES IN SCHEMA public; INSERT INTO t VALUES (3); ALTER PUBLICATION q DROP TABLES IN SCHEMA public
    ALTER TABLE r ATTACH PARTITION w FOR VALUES FROM (70) TO (80); INSERT INTO w VALUES (71); ALTER TABLE r DETACH PARTITION w
    CREATE TABLE x PARTITION OF r FOR VALUES FROM (80) TO (90); INSERT INTO r VALUES (81); DROP TABLE x
    ALTER TABLE r DETACH PARTITION r1; INSERT INTO r1 VALUES (12); ALTER TABLE r ATTACH PARTITION r1 FOR VALUES FROM (10) TO (20)
    ALTER PUBLICATION p SET (publish = 'delete'); INSERT INTO t VALUES (54); ALTER PUBLICATION p SET (publish = 'insert, update, delete, truncate')
    ALTER PUBLICATION p SET TABLE t WHERE (a < 50), r; INSERT INTO t VALUES (5), (55); ALTER PUBLICATION p SET TABLE t WHERE (a > 50), r
    ALTER PUBLICATION p SET TABLE t (a), r; INSERT INTO t VALUES (56, 'x'); ALTER PUBLICATION p SET TABLE t WHERE (a > 50), r
    ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (57); ALTER TABLE u RENAME TO t
    ALTER TABLE t REPLICA IDENTITY FULL; UPDATE t SET b = 'y'; ALTER TABLE t REPLICA IDENTITY DEFAULT
    CREATE PUBLICATION gone FOR TABLE t; INSERT INTO t VALUES (8); DROP PUBLICATION gone
    CREATE TABLE s.y (a int); INSERT INTO s.y VALUES (1); DROP TABLE s.y
"""


@pytest.mark.drawn
@pytest.mark.parametrize("streams", [False, True])
def test_the_publisher_decides_about_alterations_that_are_undone_between_two_looks(
    server, tmp_path, streams
) -> None:
    """It may take long: the slot is decoded again after each alteration."""
    published = Published(server, tmp_path, streams=streams, beside=("others",))
    connection = published.run.connection
    missing = ("gone",) if connection.info.server_version >= 180000 else ()
    published.captured, published.filtered = (
        replace(slot_stream, subscriptions={**slot_stream.subscriptions, "sub": ("p", "q", *missing)})
        for slot_stream in (published.captured, published.filtered)
    )
    published.run(
        "ALTER PUBLICATION p SET TABLE t WHERE (a > 50), r; CREATE TABLE w (a int PRIMARY KEY, b text)"
    )
    published.run("CREATE PUBLICATION others FOR TABLE t, r, w, TABLES IN SCHEMA s")
    published.consume()
    for statements in _each(UNDONE)[:: 3 if streams else 1]:
        before = published.altered()
        published.run(f"{statements}; INSERT INTO t VALUES (9), (99); DELETE FROM t WHERE a IN (9, 99)")
        published.consume()
        assert published.altered() > before, statements
    assert published.kept() == published.sent()
    published.close()


def test_the_publisher_decides_about_a_transaction_older_than_the_catalog(published) -> None:
    # pgoutput decides by the catalog at the time of a change. The commit's slice may begin long after that.
    published.settle()
    with published.beside() as older:
        older("BEGIN; INSERT INTO t VALUES (1)")
        published.run("ALTER TABLE t SET (fillfactor = 90); ALTER TABLE s.x ADD c int")
        published.consume()
        published.consume()
        ends = published.altered()
        published.run("INSERT INTO s.x VALUES (10)")
        published.consume()
        assert published.altered() == ends, "a transaction that began later is decoded again"
        older("COMMIT")
    published.consume()
    assert published.altered() > ends
    assert published.kept() == published.sent()[-3:]


def test_the_publisher_decides_about_a_transaction_older_than_the_capture(published) -> None:
    published.run("CREATE TABLE u (a int PRIMARY KEY)")
    with published.beside() as older:
        older("BEGIN; INSERT INTO t VALUES (1)")
        published.run("ALTER PUBLICATION p ADD TABLE u")
        older("INSERT INTO u VALUES (2)")
        published.consume()
        published.run("ALTER TABLE s.x ADD c int")
        published.consume()
        older("COMMIT")
    published.consume()
    assert published.kept() == published.sent()
    assert str(published.sent()).count("Insert") == 2


def test_the_publisher_decides_although_no_capture_publication_is_as_old_as_the_changes(published) -> None:
    """Before PostgreSQL 18, the server sends no change with a publication that is younger."""
    published.run("INSERT INTO t VALUES (1)")
    published.consume()
    begin = len(published.sent())
    names = published.run.connection.execute("SELECT pubname FROM pg_publication WHERE pubname ~ '^captured'")
    for (name,) in names.fetchall():
        published.run(f"DROP PUBLICATION {name}")
    published.run("INSERT INTO t VALUES (2); INSERT INTO r VALUES (11)")
    published.consume()
    assert published.kept() == published.sent()[begin:]
    assert str(published.kept()).count("Insert") == 2


def test_known_removed_rows_of_the_catalog_cause_no_further_decoding(published) -> None:
    with published.beside() as reader:
        reader("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
        published.run(
            "ALTER PUBLICATION q ADD TABLE t; INSERT INTO t VALUES (1); ALTER PUBLICATION q DROP TABLE t"
        )
        for number in range(3):
            published.run(f"INSERT INTO s.x VALUES ({number})")
            published.consume()
        ends = published.altered()
        published.run("INSERT INTO s.x VALUES (4)")
        published.consume()
        assert published.altered() == ends
        assert fingerprint_catalog(published.run.connection, ["p", "q"]).removed_rows
        published.run(
            "ALTER PUBLICATION q ADD TABLE t; INSERT INTO t VALUES (2); ALTER PUBLICATION q DROP TABLE t"
        )
        published.consume()
        assert published.altered() > ends


@pytest.mark.drawn
def test_an_uncommitted_alteration_is_not_mistaken_for_a_removed_one(published) -> None:
    published.run("ALTER PUBLICATION p DROP TABLE t; CREATE PUBLICATION others FOR TABLE t")
    published.captured = replace(
        published.captured, subscriptions={**published.captured.subscriptions, "beside": ("others",)}
    )
    published.consume()
    published.settle()
    with published.beside() as altering:
        altering("BEGIN; ALTER PUBLICATION q ADD TABLE t")
        for number in range(100, 103):
            published.run(f"INSERT INTO s.x VALUES ({number})")
            published.consume()
        altering("COMMIT")
    published.run("INSERT INTO t VALUES (1); ALTER PUBLICATION q DROP TABLE t")
    published.consume()
    assert "Insert" in str(published.sent()[-2])
    assert published.kept()[-3:] == published.sent()[-3:]


WORKLOAD = """
    INSERT INTO t VALUES (1, 'x'), (2, 'x'); INSERT INTO r VALUES (1), (11); INSERT INTO s.x VALUES (1);
    ALTER PUBLICATION p SET (publish = 'insert, update');
    UPDATE t SET b = 'y'; DELETE FROM t WHERE a = 2; UPDATE r SET a = a + 1;
    ALTER PUBLICATION p DROP TABLE t; INSERT INTO t VALUES (3);
    ALTER PUBLICATION p ADD TABLE t WHERE (a > 4); INSERT INTO t VALUES (4), (5);
    ALTER TABLE r DETACH PARTITION r1; INSERT INTO r1 VALUES (13); INSERT INTO r VALUES (3);
    ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (6); TRUNCATE r;
    ALTER TABLE u RENAME TO t; INSERT INTO t VALUES (7); TRUNCATE t
"""


class Died(BaseException):
    """Simulates the end of the process."""


@pytest.mark.drawn
@pytest.mark.parametrize("streams", [False, True])
def test_the_publishers_messages_of_a_slice_with_an_alteration_are_kept(server, tmp_path, streams) -> None:
    published = Published(server, tmp_path, streams=streams)
    published.run(WORKLOAD)
    published.consume()
    assert published.kept() == published.sent()
    published.settle()
    ends = published.altered()
    published.run("INSERT INTO t VALUES (8)")
    published.consume()
    assert published.altered() == ends, "a slice without an alteration is kept"
    published.close()


#: By failpoint, the functions that fail there.
STEPS = {
    "record_altered": [(AlteredSlices, "append")],
    "commit_slice": [(appending, "commit_slice")],
    "record_summary": [(Slices, "append")],
    "confirm": [(reading, "confirm"), (ready, "confirm")],
}


@pytest.mark.drawn
@pytest.mark.parametrize("step", STEPS)
def test_the_publishers_messages_are_kept_once_when_a_run_dies(published, monkeypatch, step) -> None:
    def die(*_: object, **__: object) -> None:
        raise Died

    published.run(WORKLOAD)
    for _ in range(2):
        with monkeypatch.context() as patched:
            for owner, function in STEPS[step]:
                patched.setattr(owner, function, die)
            with pytest.raises(Died):
                published.consume()
        published.run("INSERT INTO t VALUES ((SELECT coalesce(max(a), 8) + 1 FROM t))")
    published.consume()
    assert published.kept() == published.sent()


@pytest.mark.drawn
@pytest.mark.parametrize("streams", [False, True])
def test_a_truncate_of_all_leaves_is_not_mistaken_for_one_of_their_root(server, tmp_path, streams) -> None:
    # pgoutput_truncate(): via the root, only a TRUNCATE of the root counts. Another subscription needs the leaves, so they are captured.
    published = Published(server, tmp_path, streams=streams, beside=("leaves",))
    published.run("INSERT INTO r VALUES (1), (11); TRUNCATE r0, r1; INSERT INTO r VALUES (2)")
    published.consume()
    assert published.kept() == published.sent()
    assert "Truncate" not in str(published.sent())
    published.run("TRUNCATE r; INSERT INTO r VALUES (3)")
    published.consume()
    assert published.kept() == published.sent()
    assert "Truncate" in str(published.sent())
    published.settle()
    ends = published.altered()
    published.run("TRUNCATE r1; TRUNCATE t; INSERT INTO r VALUES (12)")
    published.consume()
    assert published.altered() == ends, "a slice that the captured messages decide is decoded again"
    published.close()


def test_an_alteration_is_found_while_the_capture_delivers_nothing(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(follow, "IDLE_SECONDS", 0.0)
    published = Published(server, tmp_path, streams=True)
    published.run("ALTER PUBLICATION q ADD TABLE t; DROP PUBLICATION q; CREATE TABLE y (a int PRIMARY KEY)")
    published.run("CREATE PUBLICATION q FOR TABLE y; INSERT INTO y VALUES (1)")
    published.consume()
    assert "Insert" in str(published.sent()[1])
    assert published.kept() == published.sent()
    published.close()


def test_a_slice_without_published_changes_can_be_read(published) -> None:
    published.run("ALTER PUBLICATION p DROP TABLE t; INSERT INTO t VALUES (1)")
    published.consume()
    (end,) = sorted(published.altered())[-1:]
    contents = read_slice_contents(published.lake, make_publisher_slot_stream(published.captured, "sub"), end)
    assert (contents.size, contents.changed_oids) == (0, frozenset())


def test_a_dropped_publication_is_ignored_from_18_on_and_stops_consumption_before(published) -> None:
    published.run("INSERT INTO t VALUES (1); ALTER PUBLICATION p RENAME TO gone; INSERT INTO t VALUES (2)")
    passed_over = published.run.connection.info.server_version >= 180000
    if passed_over:
        published.consume()
        assert published.kept() == published.sent()
    else:
        with pytest.raises(PublicationError, match='publication "p" does not exist'):
            published.consume()
    published.run("ALTER PUBLICATION gone RENAME TO p; INSERT INTO t VALUES (3)")
    published.consume()
    if passed_over:
        assert published.kept() == published.sent()
    else:  # The publisher can never decode the slice again, so the captured messages are evaluated.
        assert not published.altered()
        rows = published.lake.records.rows(published.lake.paths.change_log("captured"))
        assert [r["kind"] for r in rows].count("I") == 3


def test_a_server_may_restart_while_its_catalog_is_read(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(follow, "IDLE_SECONDS", 0.0)
    published = Published(server, tmp_path, streams=True)
    with (
        FollowedSlotStream(published.captured, published.lake, print) as streamed,
        ThreadPoolExecutor(1) as pool,
    ):
        following = pool.submit(lambda: [streamed.append_due_slice() for _ in streamed.read_slice_ends()])
        published.run("INSERT INTO t VALUES (1)")
        published.run.close()
        server.stop()
        server.start()
        published.run = Session(server.conninfo(dbname=published.name))
        published.run("INSERT INTO t VALUES (2)")
        target = read_current_lsn(published.run.connection)
        wait_until(
            lambda: streamed.position >= target or following.done(),
            lambda: f"at {streamed.position}, not {target}",
        )
        streamed.stop()
        following.result()
    published.consume()  # The stream may have ended, because its lock went with the server.
    rows = published.lake.records.rows(published.lake.paths.change_log("captured"))
    assert [r["kind"] for r in rows].count("I") == 2
    published.close()


def test_an_unflushed_commit_is_read_later(published) -> None:
    published.run("INSERT INTO t VALUES (1); SET synchronous_commit = off; INSERT INTO t VALUES (2)")
    published.consume()
    published.run("SET synchronous_commit = on; INSERT INTO t VALUES (3)")
    published.consume()
    rows = published.lake.records.rows(published.lake.paths.change_log("captured"))
    assert [r["kind"] for r in rows].count("I") == 3


def test_changes_before_the_creation_of_a_capture_publication_are_read(published) -> None:
    published.run("INSERT INTO t VALUES (1); ALTER PUBLICATION q SET (publish = 'insert')")
    published.run("INSERT INTO s.x VALUES (1)")
    published.consume()
    assert published.kept() == published.sent()
    rows = published.lake.records.rows(published.lake.paths.change_log("captured"))
    assert [r["kind"] for r in rows].count("I") == 2


@pytest.mark.drawn
@pytest.mark.parametrize("streams", [False, True])
def test_changes_of_a_transaction_older_than_a_capture_publication_are_read(
    server, tmp_path, streams
) -> None:
    published = Published(server, tmp_path, streams=streams)
    with published.beside() as older:
        older("BEGIN; INSERT INTO t VALUES (1)")
        # Another publication has to capture its table.
        published.run("ALTER PUBLICATION q SET (publish = 'insert'); INSERT INTO s.x VALUES (1)")
        published.consume()
        published.run("INSERT INTO s.x VALUES (2)")
        older("INSERT INTO t VALUES (2); INSERT INTO s.x VALUES (3); COMMIT")
        published.run("INSERT INTO t VALUES (3)")
    published.consume()
    published.run("INSERT INTO t VALUES (4)")
    published.consume()
    rows = published.lake.records.rows(published.lake.paths.change_log("captured"))
    assert [r["kind"] for r in rows].count("I") == 7
    # The subscription's publications existed all the time.
    kept, sent = published.kept(), published.sent()
    assert [row for row in sent if row in kept] == kept
    assert str(sent).count("Insert") == 7
    published.close()


def test_changes_of_a_transaction_older_than_a_subscribed_publication_are_read(published, capsys) -> None:
    with published.beside() as older:
        older("BEGIN; INSERT INTO t VALUES (1)")
        published.run("CREATE TABLE u (a int PRIMARY KEY); CREATE PUBLICATION new FOR TABLE u")
        slot_stream = replace(published.filtered, subscriptions={"sub": ("p", "q", "new")})
        drain_slot(slot_stream, published.lake, (), print)
        older("INSERT INTO t VALUES (2); COMMIT")
        published.run("INSERT INTO u VALUES (3)")
    drain_slot(slot_stream, published.lake, (), print)
    rows = published.lake.records.rows(published.lake.paths.change_log("filtered"))
    assert [r["kind"] for r in rows].count("I") == 3
    assert (
        "copied again: no table" in capsys.readouterr().out
        or published.run.connection.info.server_version >= 180000
    )
