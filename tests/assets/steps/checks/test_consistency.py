"""The consistency check by segments: it finds and names differences while sessions write, and repairs them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pgsieve.assets.steps.checks import consistency
from pgsieve.assets.steps.checks.consistency import (
    MAX_ATTEMPTS,
    REWRITTEN_PROBLEM,
    TableConsistency,
    check_consistency,
)
from pgsieve.assets.steps.checks.repair import repair
from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.resources.lake.delta.layout import SubscriptionLayout, TableLayout
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.snapshot import Snapshot, export_snapshot
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import own_database

pytestmark = pytest.mark.slow

ROWS = 100_000
_numbers = itertools.count(1)


def _quiet(_: str) -> None:
    pass


def _no_session() -> NoReturn:
    raise AssertionError("this needs no JVM")


@dataclass
class Replicated:
    """A database with one subscription to its publication `p`."""

    database: psycopg.Connection
    subscription: Subscription
    folder: Path

    def lake(self, small: int, session: Callable[[], SparkSession] = _no_session) -> Lake:
        """The lake. Tables of more than `small` bytes are compared by segments; without `session` by threads."""
        thread_count = 2 if session is _no_session else None
        return Lake(str(self.folder), session, LakeSettings(small, thread_count=thread_count))

    def publish(self, *statements: str) -> None:
        """Run statements, and copy the tables of publication `p` in this process."""
        for statement in statements:
            self.database.execute(statement)
        lake = self.lake(10**9)
        copied = copy_tables(self.subscription, lake, find_tables_to_copy(self.subscription, lake), _quiet)
        assert not [c.problem for c in copied if c.problem]

    def check(self, small: int = 2**18) -> TableConsistency:
        (comparison,) = check_consistency(self.subscription, self.lake(small), _quiet)
        return comparison

    def replica(self, table: str) -> DeltaTable:
        return DeltaTable(self.lake(0).paths.replica("sub", "public", table))


@pytest.fixture
def replicated(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Replicated]:
    name = f"consistency_{next(_numbers)}"
    slot_stream = SlotStream(
        name=name,
        source=Source("publisher", publisher_server.conninfo(dbname=name)),
        slot=name,
        capture=name,
        filtered=False,
        subscriptions={"sub": ("p",)},
    )
    with own_database(publisher_server, name) as database:
        yield Replicated(database, Subscription("sub", slot_stream), tmp_path / "lake")


def items(rows: int) -> tuple[str, ...]:
    """Statements that create and publish a table of five columns."""
    return (
        "create table items (id int primary key, name text, price numeric(10,2), at timestamptz, note text)",
        f"""insert into items select i, 'item ' || i, i / 7.0, timestamptz '2024-01-01' + i * interval '1 s',
    nullif(repeat('n', i % 5), '') from generate_series(1, {rows}) i""",
        "create publication p for table items",
    )


@pytest.mark.drawn
@pytest.mark.slow
def test_each_changed_cell_among_two_million_is_found_and_named(replicated: Replicated) -> None:
    """It may take long: 400,000 rows are written, copied and compared."""
    rows = 400_000  # two million cells
    replicated.publish(*items(rows))
    assert replicated.check().equal
    table = replicated.replica("items")
    corruptions = [
        ({"price": "price + 0.01"}, "id = 54321"),
        ({"at": "at + interval '1 microsecond'"}, "id = 1"),
        ({"note": "''"}, "id = 70000 and note is null"),
        # Each column keeps its set of values, so sums over a column would not show the difference.
        ({"name": "case id when 7 then 'item 8' else 'item 7' end"}, "id in (7, 8)"),
    ]
    for updates, where in corruptions:
        table.update(updates=updates, predicate=where)
    comparison = replicated.check()
    assert (comparison.publisher_rows, comparison.replica_rows, comparison.differing) == (rows, rows, 10)
    assert set(comparison.keys) == {
        f"(id)=({key}) {side}"
        for key in (1, 7, 8, 54321, 70000)
        for side in ("missing from the replica", "only in the replica")
    }
    table.delete("id = 99")
    comparison = replicated.check()
    assert (comparison.publisher_rows, comparison.replica_rows, comparison.differing) == (rows, rows - 1, 11)
    assert len(comparison.keys) == 10


def test_equal_rows_of_a_filtered_table_without_a_key_are_counted(
    replicated: Replicated,
) -> None:
    replicated.publish(
        "create table readings (a int, b text) partition by list (a)",
        "create table readings_0 partition of readings for values in (0)",
        "create table readings_1 partition of readings default",
        "insert into readings select i % 3, 'value ' || i % 100 from generate_series(1, 60000) i",
        "create publication p for table readings where (a < 2) with (publish_via_partition_root = true)",
    )
    assert replicated.check(2**14).equal
    table = replicated.replica("readings")
    table.delete("a = 1 and b = 'value 7'")
    comparison = replicated.check(2**14)
    assert (comparison.publisher_rows, comparison.replica_rows) == (40000, 39800)
    assert (comparison.differing, comparison.keys) == (200, ("a row missing from the replica",))


def disturbed_exports(
    database: psycopg.Connection, *disturbances: tuple[str, str]
) -> AbstractContextManager[object]:
    """Run a pair of statements right before and right after each export of a snapshot, as long as there are pairs."""
    left = iter(disturbances)

    @contextmanager
    def exported(source: Source, seconds: float | None = None) -> Iterator[Snapshot]:
        before, after = next(left, ("", ""))
        database.execute(before)
        with export_snapshot(source, seconds) as snapshot:
            database.execute(after)
            yield snapshot

    return patch.object(consistency, "export_snapshot", exported)


#: A row is committed before each snapshot, but a TRUNCATE empties the table before the rows are read.
TRUNCATED = [
    (f"insert into items values ({-number})", "truncate items") for number in range(1, MAX_ATTEMPTS + 1)
]


def test_a_table_that_is_truncated_during_a_comparison_is_compared_again(replicated: Replicated) -> None:
    replicated.publish(*items(10))
    with disturbed_exports(replicated.database, TRUNCATED[0]):
        compared = replicated.check()
    assert (compared.equal, compared.publisher_rows, compared.replica_rows) == (True, 0, 0)
    with disturbed_exports(replicated.database, *TRUNCATED):
        assert replicated.check().problem == REWRITTEN_PROBLEM
    assert replicated.check().equal


def test_a_table_that_gets_a_column_during_a_comparison_is_compared_again(replicated: Replicated) -> None:
    replicated.publish(*items(10))
    added = "alter table items add more int default 7; insert into items values (11)"
    with disturbed_exports(replicated.database, (added, "")):
        compared = replicated.check()
    assert (compared.problem, compared.equal, compared.replica_rows) == (None, True, 11)


@pytest.mark.drawn
@pytest.mark.spark
def test_a_repair_deletes_no_row_after_the_table_was_read_as_empty(replicated: Replicated) -> None:
    """It takes long because Spark starts."""
    replicated.publish(*items(10))
    subscription, lake = replicated.subscription, replicated.lake(10**9, lambda: engine().session)
    name = ("public", "items")
    with disturbed_exports(replicated.database, *TRUNCATED):
        (done,) = repair(subscription, lake, [name], _quiet)
    assert (done.inserted, done.deleted, done.problem) == (0, 0, REWRITTEN_PROBLEM)
    assert replicated.replica("items").to_pyarrow_table()["id"].to_pylist() == [-MAX_ATTEMPTS]
    (done,) = repair(subscription, lake, [name], _quiet)
    assert (done.inserted, done.deleted, done.problem) == (0, 0, None)


@pytest.mark.spark
def test_no_difference_is_reported_while_sessions_write(replicated: Replicated) -> None:
    replicated.publish(*items(ROWS))
    stopped, conninfo = threading.Event(), replicated.database.info.dsn
    written = []

    def write(worker: int) -> None:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            for number in itertools.count():
                key = ROWS + 2 * number + worker + 1
                connection.execute("insert into items values (%s, 'new', 1, now(), null)", [key])
                connection.execute(
                    "update items set price = price + 1 where id = %s", [number + 1000 * worker]
                )
                connection.execute("delete from items where id = %s", [key - 20])
                written.append(key)
                if stopped.wait(0.02):
                    return

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, worker) for worker in range(2)]
        try:
            lake = replicated.lake(2**18, lambda: engine().session)
            for _ in range(2):
                before = len(written)
                (comparison,) = check_consistency(replicated.subscription, lake, _quiet)
                assert comparison.equal, comparison
                assert len(written) > before
        finally:
            stopped.set()
        for writer in writers:
            writer.result()


def _reprs(rows: pa.Table) -> list[str]:
    """The rows as text, which distinguishes NaN and -0."""
    return sorted(map(repr, rows.to_pylist()))


COLUMNS = "a int, x float8, y float8[], t text"
PAIR = (
    f"create table keyed (id int primary key, {COLUMNS})",
    f"create table keyless ({COLUMNS})",
    "alter table keyless replica identity full",
    "insert into keyed select i, i, -0.0, '{NULL,-0,NaN}', repeat('t', i) from generate_series(1, 2000) i",
    "insert into keyless select i % 10, -0.0, '{NaN}', null from generate_series(1, 2000) i",
    "create publication p for table keyed, keyless",
)
NAMES = [("public", "keyed"), ("public", "keyless")]


def corrupt(replicated: Replicated, new_id: int = 8) -> None:
    """Damage three rows of one table; one gets the key `new_id`. Remove 200 equal rows of another, and change 200."""
    keyed, keyless = (replicated.replica(name) for _, name in NAMES)
    keyed.update(updates={"a": "a + 1"}, predicate="id in (5, 6)")
    keyed.update(updates={"id": str(new_id)}, predicate="id = 9")
    keyless.delete("a = 3")
    keyless.update(updates={"t": "'changed'"}, predicate="a = 4")


@pytest.mark.spark
@pytest.mark.drawn
def test_a_repair_writes_only_differing_rows_and_moves_no_position(
    replicated: Replicated,
) -> None:
    """It takes long because Spark starts. The histories of rows follow the repair."""
    kept = HistoryChoices(HistoryChoice(initial=True, scd2=True))
    replicated.subscription = replace(replicated.subscription, histories=kept)
    replicated.publish(*PAIR)
    subscription, lake = replicated.subscription, replicated.lake(10**9, lambda: engine().session)
    replicated.database.execute("insert into keyed values (0); insert into keyless values (0)")
    assert all(c.equal for c in check_consistency(subscription, lake, _quiet))
    positions = [replicated.replica(name).transaction_version("pgsieve") for _, name in NAMES]
    corrupt(replicated)
    comparisons = check_consistency(subscription, lake, _quiet)
    assert [(c.differing, c.counts) for c in comparisons] == [(6, (1, 1, 2)), (600, (400, 200, 0))]
    progress: list[str] = []
    done = repair(subscription, lake, NAMES, progress.append)
    assert [(r.inserted, r.deleted, r.problem) for r in done] == [(3, 3, None), (400, 200, None)]
    assert (
        len([line for line in progress if "the change history of" in line and "pgsieve resync" in line]) == 2
    )
    states = TableStates(lake, subscription.name).read_newest()
    assert not any(s.definition.history.whole for s in states.values() if s.definition)
    assert all(c.equal for c in check_consistency(subscription, lake, _quiet))
    assert [(r.inserted, r.deleted) for r in repair(subscription, lake, NAMES, _quiet)] == [(0, 0), (0, 0)]
    repaired = [replicated.replica(name) for _, name in NAMES]
    assert [table.transaction_version("pgsieve") for table in repaired] == positions
    cut = Cuts(lake, subscription.name).read_last()
    assert cut is not None
    assert cut.tables == {name: table.version() for name, table in zip(NAMES, repaired, strict=True)}
    rows = repaired[0].to_pyarrow_table()
    versions = DeltaTable(lake.paths.row_versions("sub", *NAMES[0])).to_pyarrow_table()
    ends = pc.fill_null(pc.greater_equal(versions["valid_to_lsn"], cut.lsn), True)
    valid = versions.filter(pc.and_(pc.less(versions["valid_from_lsn"], cut.lsn), ends))
    assert _reprs(valid.select(rows.column_names)) == _reprs(rows)
    # Later changes still arrive.
    replicated.database.execute("insert into keyed values (-1); delete from keyless where a = 5")
    assert all(c.equal for c in check_consistency(subscription, lake, _quiet))
    versions = DeltaTable(lake.paths.row_versions("sub", *NAMES[0])).to_pyarrow_table()
    valid = versions.filter(versions["is_current"])
    assert _reprs(valid.select(rows.column_names)) == _reprs(replicated.replica("keyed").to_pyarrow_table())


@pytest.mark.parametrize("rewritten_bytes", [2**20, -1], ids=["rewritten files", "marked rows"])
@pytest.mark.parametrize("has_feed", [False, True], ids=["", "feed"])
def test_a_repair_of_few_rows_needs_no_spark(
    replicated: Replicated, rewritten_bytes: int, has_feed: bool
) -> None:
    """The replica also has rows that the publisher has once, and that another writer has added again."""
    feed = {"delta.enableChangeDataFeed": "true"} if has_feed else {}
    layout = SubscriptionLayout(default_layout=TableLayout(properties=feed))
    replicated.subscription = replace(replicated.subscription, layout=layout)
    replicated.publish(*PAIR)
    subscription = replicated.subscription
    lake = Lake(str(replicated.folder), _no_session, LakeSettings(10**9, rewritten_bytes=rewritten_bytes))
    corrupt(replicated)
    keyed = replicated.replica("keyed")
    write_deltalake(keyed, keyed.to_pyarrow_table().filter(pc.field("id") <= 2), mode="append")
    (done_keyed, done_keyless) = repair(subscription, lake, NAMES, _quiet)
    assert (done_keyed.inserted, done_keyed.deleted, done_keyed.problem) == (3, 5, None)
    assert (done_keyless.inserted, done_keyless.deleted, done_keyless.problem) == (400, 200, None)
    assert [c.equal for c in check_consistency(subscription, lake, _quiet)] == [True, True]
    assert lake.records.has_deletion_vectors(lake.paths.replica("sub", *NAMES[0])) is (
        rewritten_bytes < 0 or None
    )
    assert not (replicated.folder / "sub" / "_corrections" / "public" / "keyed").exists()
    repairs = [(r.inserted, r.deleted) for r in repair(subscription, lake, NAMES, _quiet)]
    assert repairs == [(0, 0), (0, 0)]
    if has_feed:
        changes = pa.table(replicated.replica("keyed").load_cdf(keyed.version() + 1).read_all())
        kinds = Counter(changes["_change_type"].to_pylist())
        assert kinds["delete"] + kinds["update_preimage"] == 5
        assert kinds["insert"] + kinds["update_postimage"] == 3
    replicated.database.execute("update keyed set a = -1; delete from keyless where a = 5")
    assert all(c.equal for c in check_consistency(subscription, lake, _quiet))


def soft_layout(*, keeps_deleted: bool) -> SubscriptionLayout:
    return SubscriptionLayout(layout_by_table={NAMES[0]: TableLayout(keeps_deleted=keeps_deleted)})


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize("keeps_deleted", [False, True], ids=["", "soft deletes"])
@pytest.mark.parametrize("small", [10**9, 0], ids=["few rows", "many rows"])
def test_spark_repairs_a_replica_with_a_constraint(
    replicated: Replicated, keeps_deleted: bool, small: int
) -> None:
    """A user has added the constraints, so only a MERGE may change rows. It takes long because Spark starts.

    The key of one row is NULL, so this row is deleted even if the replica keeps deleted rows.
    """
    layout = soft_layout(keeps_deleted=keeps_deleted)
    replicated.subscription = replace(replicated.subscription, layout=layout)
    replicated.publish(*PAIR)
    corrupt(replicated, new_id=-9)
    replicated.replica("keyed").update(updates={"id": "null"}, predicate="id = 20")
    for _, name in NAMES:
        replicated.replica(name).alter.add_constraint({"any": "a is null or a < 100000"})
    lake = replicated.lake(small, lambda: engine().session)
    done = repair(replicated.subscription, lake, NAMES, _quiet)
    assert [(r.inserted, r.deleted, r.problem) for r in done] == [(4, 4, None), (400, 200, None)]
    assert all(c.equal for c in check_consistency(replicated.subscription, lake, _quiet))
    rows = replicated.replica("keyed").to_pyarrow_table()
    deleted_keys = rows.filter(rows["_deleted"])["id"].to_pylist() if keeps_deleted else [-9]
    assert (rows.num_rows - keeps_deleted, deleted_keys) == (2000, [-9])


def test_a_repair_leaves_one_living_row_of_a_key_that_another_writer_has_given_twice(
    replicated: Replicated,
) -> None:
    """The replica keeps deleted rows, which are marked by their key."""
    replicated.subscription = replace(replicated.subscription, layout=soft_layout(keeps_deleted=True))
    replicated.publish(*PAIR)
    corrupt(replicated, new_id=8)
    lake = replicated.lake(10**9)
    done, _ = repair(replicated.subscription, lake, NAMES, _quiet)
    # The row with the key 8 equals the publisher's. It is marked as deleted, too, and then inserted again.
    assert (done.inserted, done.deleted, done.problem) == (4, 3, None)
    assert all(c.equal for c in check_consistency(replicated.subscription, lake, _quiet))
    assert replicated.replica("keyed").to_pyarrow_table().num_rows == 2000


def test_a_repair_deletes_rows_without_a_key_although_the_replica_keeps_deleted_rows(
    replicated: Replicated,
) -> None:
    """No key finds these rows, so they cannot be marked. One of them is there twice."""
    replicated.subscription = replace(replicated.subscription, layout=soft_layout(keeps_deleted=True))
    replicated.publish(*PAIR)
    keyed = replicated.replica("keyed")
    keyed.update(updates={"id": "null"}, predicate="id in (20, 21)")
    write_deltalake(keyed, keyed.to_pyarrow_table().filter(pc.field("a") == 21), mode="append")
    corrupt(replicated, new_id=3000)
    lake = replicated.lake(10**9)
    done, _ = repair(replicated.subscription, lake, NAMES, _quiet)
    assert (done.inserted, done.deleted, done.problem) == (5, 6, None)
    assert all(c.equal for c in check_consistency(replicated.subscription, lake, _quiet))
    rows = replicated.replica("keyed").to_pyarrow_table()
    assert rows.filter(rows["_deleted"])["id"].to_pylist() == [3000]
    assert (rows.num_rows, rows["id"].null_count) == (2001, 0)


def test_operations_that_are_not_published_explain_a_difference(replicated: Replicated) -> None:
    """For a table without a replica identity, `pgsieve init` publishes only INSERTs."""
    replicated.publish(
        "create table events (a int)",
        "insert into events values (1)",
        "create publication p for table events with (publish = 'insert')",
    )
    warned = list[str]()
    lake = replicated.lake(2**18)
    (equal,) = check_consistency(replicated.subscription, lake, _quiet, warn=warned.append)
    assert (equal.differing, warned) == (0, [])
    replicated.database.execute("update events set a = 2")
    (differing,) = check_consistency(replicated.subscription, lake, _quiet, warn=warned.append)
    assert differing.differing == 2
    (warning,) = warned
    assert "publish no UPDATEs, DELETEs, TRUNCATEs" in warning


@pytest.mark.long
@pytest.mark.spark
def test_a_lake_at_a_uri_is_compared_and_repaired_by_spark(replicated: Replicated) -> None:
    """It takes long because Spark starts."""
    replicated.publish(*PAIR)
    corrupt(replicated)
    lake = Lake(replicated.folder.as_uri(), lambda: engine().session)
    comparisons = check_consistency(replicated.subscription, lake, _quiet)
    assert [(c.publisher_rows, c.replica_rows, c.differing) for c in comparisons] == [
        (2000, 2000, 6),
        (2000, 1800, 600),
    ]
    assert [c.counts for c in comparisons] == [(1, 1, 2), (400, 200, 0)]
    done = repair(replicated.subscription, lake, NAMES, _quiet)
    assert [(r.inserted, r.deleted, r.problem) for r in done] == [(3, 3, None), (400, 200, None)]
    assert all(c.equal for c in check_consistency(replicated.subscription, lake, _quiet))


def test_tables_share_the_sessions_that_read_them(replicated: Replicated) -> None:
    """A session of ADBC reads all types of the database first. With 1,000 tables this takes longer than a small table."""

    def count_sessions() -> int:
        others = "select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        wait_until(
            lambda: not replicated.database.execute(others).fetchall(), lambda: "a session is still open"
        )
        query = "select sessions from pg_stat_database where datname = current_database()"
        ((count,),) = replicated.database.execute(query).fetchall()
        return int(count)

    added_sessions = []
    for first, last in ((1, 2), (3, 14)):
        before = count_sessions()
        tables = [f"t{number}" for number in range(first, last + 1)]
        replicated.publish(
            *(f"create table {table} (id int primary key)" for table in tables),
            *(f"insert into {table} values (1)" for table in tables),
            f"{'create' if first == 1 else 'alter'} publication p {'for' if first == 1 else 'add'} table {', '.join(tables)}",
        )
        results = check_consistency(replicated.subscription, replicated.lake(10**9), _quiet)
        assert [result.equal for result in results] == [True] * last
        added_sessions.append(count_sessions() - before)
    assert added_sessions[1] - added_sessions[0] < 12, added_sessions
