"""Maintenance makes a lake smaller, and deletes nothing that is still needed. No JVM.

The tests build lakes slice by slice, in every state in which the steps can leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pgsieve.assets.steps.operations import maintenance
from pgsieve.assets.steps.operations.maintenance import Retention, maintain_slot_stream, maintain_subscription
from pgsieve.assets.steps.records.catalogs import ALTERED_SCHEMA, CATALOG_SCHEMA, make_publisher_slot_stream
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.slices import SLICE_SCHEMA
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TRANSFORMED_SCHEMA, TableChanges
from pgsieve.assets.steps.subscription import Definition, SlotStream, Subscription
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.delta.errors import OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.work import get_job_name, measure_work
from tests.fixtures.lakes import find_slices, no_session

pytestmark = pytest.mark.slow

TABLES = ("a", "b")
NAMES = ("first", "second")
FEED = SlotStream("shop", Source("shop", ""), "shop", "shop", False, dict.fromkeys(NAMES, ()))
AT_ONCE = Retention(timedelta(), timedelta(), timedelta())
CHANGES = pa.schema({"slice": pa.int64(), "commit_time": pa.timestamp("us", "UTC"), "operation": pa.string()})


class Shop:
    """A lake with a stream and two subscriptions, each with two tables."""

    def __init__(self, folder: Path) -> None:
        self.lake = Lake(str(folder), no_session)
        self.subscriptions = [Subscription(name, FEED) for name in NAMES]
        self.local = self.lake.delta_rs
        assert self.local is not None
        for name in NAMES:
            definition = Definition((("id", "bigint"),), ("id",), Layout(1, (), 1, ()))
            TableStates(self.lake, name).append(
                [TableState("public", t, SyncState.READY, 1, definition) for t in TABLES]
            )
            for table in TABLES:
                self.local.write(self.replica(name, table), pa.table({"id": [0]}), Commit(1))

    def replica(self, name: str, table: str) -> str:
        return self.lake.paths.replica(name, "public", table)

    def receive(self, end: int, age: timedelta = timedelta(), owner: str = "shop") -> None:
        """Append a slice to the change log."""
        times = {"commit_time": datetime.now(UTC) - age, "slice": end, "commit_lsn": end - 1, "number": 0}
        row = {**times, "ordinal": 0, "xid": 1, "kind": "I", "relation_id": 1, "data": b"message %d" % end}
        self.local.write(
            self.lake.paths.change_log(owner), pa.Table.from_pylist([row], CHANGE_LOG_SCHEMA), Commit(end)
        )
        summary = {"slice": end, "bytes": 9, "relations": [1], "messages": []}
        self.local.append(self.lake.paths.slices(owner), pa.Table.from_pylist([summary], SLICE_SCHEMA), end)

    def transform(self, name: str, end: int, age: timedelta = timedelta(), *, sent: bool = True) -> None:
        """Transform a slice. With `sent=False` a row filter rejected all of its changes."""
        for table in TABLES if sent else ():
            row = {"slice": end, "commit_time": datetime.now(UTC) - age, "operation": "insert"}
            path = self.lake.paths.change_history(name, "public", table)
            self.local.write(path, pa.Table.from_pylist([row], CHANGES), Commit(end))
        rows = [TableChanges(end, "public", t, sent_counts={"insert": 1}).to_row() for t in TABLES if sent]
        table = pa.Table.from_pylist(rows or [{"slice": end}], TRANSFORMED_SCHEMA)
        self.local.append(self.lake.paths.transformed_slices(name), table, end)

    def apply(
        self, name: str, end: int, tables: tuple[str, ...] = TABLES, age: timedelta = timedelta()
    ) -> None:
        """Apply a slice to some tables. If it is all of them, a cut follows."""
        for table in tables:
            self.local.write(self.replica(name, table), pa.table({"id": [end]}), Commit(end))
        if tables == TABLES:
            versions = {("public", t): self.local.version(self.replica(name, t)) for t in TABLES}
            Cuts(self.lake, name).append(Cut(end, versions, datetime.now(UTC) - age))

    def all(self, end: int, age: timedelta = timedelta()) -> None:
        """Receive, transform and apply a slice."""
        self.receive(end, age)
        for name in NAMES:
            self.transform(name, end, age)
            self.apply(name, end, age=age)

    def maintain(self, retention: Retention = AT_ONCE) -> None:
        for subscription in self.subscriptions:
            maintain_subscription(subscription, self.lake, retention, print)
        maintain_slot_stream(FEED, self.lake, self.subscriptions, retention, print)

    def slices(self, path: str) -> set[int]:
        return {row["slice"] for row in self.local.rows(path)}

    def paths(self) -> list[str]:
        return [str(log.parent) for log in Path(self.lake.uri).rglob("_delta_log")]

    def ids(self, name: str, table: str, version: int | None = None) -> set[int]:
        """The ids in a replica, as another Delta reader sees them."""
        query = QueryBuilder().register("t", DeltaTable(self.replica(name, table), version=version))
        return set(pa.table(query.execute("select id from t").read_all())["id"].to_pylist())

    def files(self) -> int:
        return sum(1 for _ in Path(self.lake.uri).rglob("*.parquet"))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


#: How far each subscription is with a slice: 0 received, 1 transformed, 2 applied to table a, 3 applied to both.
PROGRESS = st.lists(st.integers(0, 3), min_size=4, max_size=4).map(lambda steps: sorted(steps, reverse=True))


@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(progress=st.tuples(PROGRESS, PROGRESS), sent=st.lists(st.booleans(), min_size=4, max_size=4))
def test_unapplied_changes_are_kept(tmp_path_factory, progress, sent) -> None:
    shop = Shop(tmp_path_factory.mktemp("lake"))
    for number, sends in enumerate(sent):
        end = 10 * number + 10
        shop.receive(end)
        for name, steps in zip(NAMES, progress, strict=True):
            if steps[number]:
                shop.transform(name, end, sent=sends)
            if steps[number] > 1 and sends:
                shop.apply(name, end, TABLES if steps[number] == 3 else ("a",))
    positions = {path: shop.local.position(path) for path in shop.paths()}
    shop.maintain()
    unapplied = {
        name: {10 * n + 10 for n, step in enumerate(steps) if step == 0 or (step < 3 and sent[n])}
        for name, steps in zip(NAMES, progress, strict=True)
    }
    for _ in range(2):
        assert unapplied["first"] | unapplied["second"] <= set(
            shop.local.slices(shop.lake.paths.change_log("shop"), 0)
        )
        assert shop.slices(shop.lake.paths.slices("shop")) == shop.slices(shop.lake.paths.change_log("shop"))
        for name, steps in zip(NAMES, progress, strict=True):
            waiting = {end for end in unapplied[name] if steps[end // 10 - 1] and sent[end // 10 - 1]}
            for table in TABLES if any(s and sent[n] for n, s in enumerate(steps)) else ():
                assert waiting <= shop.slices(shop.lake.paths.change_history(name, "public", table))
            assert waiting <= shop.slices(shop.lake.paths.transformed_slices(name))
        assert {path: shop.local.position(path) for path in positions} == positions
        shop.maintain()  # a second run changes nothing


def test_changes_that_all_have_applied_are_deleted_when_old_enough(shop: Shop) -> None:
    for end, days in ((10, 9), (20, 8), (30, 2), (40, 0)):
        shop.all(end, timedelta(days=days))
    shop.maintain(Retention(timedelta(days=7), timedelta(days=1), timedelta(days=7)))
    assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == [30, 40]
    assert shop.slices(shop.lake.paths.slices("shop")) == {30, 40}
    assert shop.slices(shop.lake.paths.change_history("first", "public", "a")) == {40}
    shop.maintain(Retention(None, None, timedelta(days=7)))
    assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == [30, 40]
    shop.maintain(Retention(timedelta(), timedelta(), timedelta(days=7)))
    assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == []
    assert shop.slices(shop.lake.paths.change_history("first", "public", "a")) == set()


def test_old_changes_behind_a_young_one_stay(shop: Shop) -> None:
    shop.all(10, timedelta(days=3))
    shop.all(20, timedelta())
    shop.all(30, timedelta(days=3))
    shop.maintain(Retention(timedelta(days=1), timedelta(days=1), timedelta(days=7)))
    assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == [20, 30]


def test_a_compacted_slice_is_read_by_itself(shop: Shop) -> None:
    path = shop.lake.paths.change_log("shop")
    for end in (10, 20, 30):
        shop.receive(end)
    shop.maintain()
    assert DeltaTable(path).get_add_actions().num_rows == 1
    assert list(shop.local.slices(path, 10)) == [20, 30]
    assert shop.local.open_slices(path).read_messages(20) == [b"message 20"]
    assert len(find_slices(shop.local, path, [20]).files) == 1
    assert find_slices(shop.local, path, [40], must_exist=False).files == []


def test_records_of_alterations_are_deleted_with_their_changes_but_the_next_slices_catalog_stays(
    shop: Shop,
) -> None:
    path = shop.lake.paths.catalogs("shop")
    for lsn in (5, 15, 25, 35):
        row = {"lsn": lsn, "digest": "", "catalog": "{}", "subscriptions": list(NAMES)}
        shop.local.append(path, pa.Table.from_pylist([row], CATALOG_SCHEMA))
    for end in (10, 20, 30):
        shop.all(end)
        row = {"subscription": "first", "begin": end - 10, "slice": end}
        shop.local.append(shop.lake.paths.altered_slices("shop"), pa.Table.from_pylist([row], ALTERED_SCHEMA))
        shop.receive(end, owner=make_publisher_slot_stream(FEED, "first").name)
    shop.receive(40)
    shop.maintain()
    assert {row["lsn"] for row in shop.local.rows(path)} == {25, 35}
    assert shop.local.rows(shop.lake.paths.altered_slices("shop")) == []
    assert shop.slices(shop.lake.paths.change_log(make_publisher_slot_stream(FEED, "first").name)) == set()
    assert shop.slices(shop.lake.paths.change_log("shop")) == {40}


def test_changes_that_a_filter_rejects_do_not_keep_the_change_log(shop: Shop) -> None:
    shop.all(10)
    for end in (20, 30):
        shop.receive(end)
        shop.transform("first", end)
        shop.apply("first", end)
        shop.transform("second", end, sent=False)
    shop.maintain()
    assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == []
    assert shop.slices(shop.lake.paths.transformed_slices("second")) == {30}


@pytest.mark.parametrize(("versions", "kept"), [(timedelta(), [40]), (timedelta(days=7), [30, 40])])
def test_every_cut_that_is_kept_can_be_read(shop: Shop, versions: timedelta, kept: list[int]) -> None:
    for end, days in ((10, 9), (20, 8), (30, 2), (40, 0)):
        shop.all(end, timedelta(days=days))
    files = shop.files()
    shop.maintain(replace(AT_ONCE, versions=versions))
    recorded = Cuts(shop.lake, "first").read_all()
    assert list(dict.fromkeys(c.lsn for c in recorded)) == kept, "compaction does not renew the newest cut"
    for cut in recorded:
        for name, version in cut.tables.items():
            assert shop.ids("first", name[1], version) == {0, *range(10, cut.lsn + 1, 10)}
    assert (shop.files() < files) == (not versions)


def test_versions_of_a_replica_stay_while_a_run_has_not_written_its_cut(shop: Shop) -> None:
    shop.all(10, timedelta(days=1))
    shop.receive(20)
    shop.transform("first", 20)
    shop.apply("first", 20, ("a",))
    (cut,) = Cuts(shop.lake, "first").read_all()
    shop.maintain(replace(AT_ONCE, versions=timedelta(hours=2)))
    assert Cuts(shop.lake, "first").read_all() == [cut]
    assert shop.ids("first", "a", cut.tables["public", "a"]) == {0, 10}


def test_the_newest_cut_names_the_newest_versions_after_maintenance(shop: Shop) -> None:
    """Otherwise each run would search for changes of the replica since the cut."""
    for end in (10, 20, 30):
        shop.all(end)
    shop.maintain()
    for name in NAMES:
        newest = Cuts(shop.lake, name).read_all()[-1].tables
        assert newest == {("public", t): shop.local.version(shop.replica(name, t)) for t in TABLES}


def test_superseded_states_are_deleted_and_needed_ones_stay(shop: Shop) -> None:
    definition = Definition((("id", "bigint"),), ("id",), Layout(1, (), 1, ()))
    for lsn in range(10):
        for state in (SyncState.DATA_SYNC, SyncState.READY):
            TableStates(shop.lake, "first").append([TableState("public", "a", state, lsn, definition)])
    TableStates(shop.lake, "first").append([TableState("public", "a", SyncState.SET_ASIDE, 9, reason="why")])
    TableStates(shop.lake, "first").append([TableState("public", "c", SyncState.INITIALIZE)])
    path, before = shop.lake.paths.table_states("first"), TableStates(shop.lake, "first").read_newest()
    assert len(shop.local.rows(path)) > 20
    for _ in range(2):
        shop.maintain()
        # "b" keeps the commit that "a" is in, too; "a" keeps its newest commit, and the last one with a definition.
        assert len(shop.local.rows(path)) == 5
        assert TableStates(shop.lake, "first").read_newest() == before
    assert before["public", "a"].definition == definition
    TableStates(shop.lake, "first").append([TableState("public", "c", SyncState.READY, 1, definition)])
    assert (
        TableStates(shop.lake, "first").read_newest()["public", "c"].version > before["public", "c"].version
    )


def test_superseded_rows_of_the_slot_stream_and_the_subscription_are_deleted(shop: Shop) -> None:
    for number in range(5):
        SlotStreamRecord(shop.lake, FEED).record_deleted_lsn(100 + number)
        SlotStreamRecord(shop.lake, FEED).record_cluster("cluster", number, given_up=False)
        SubscriptionRecord(shop.lake, "first").disable(f"reason {number}")
        SubscriptionRecord(shop.lake, "first").enable()
    SlotStreamRecord(shop.lake, FEED).record_deleted_lsn(200)
    SubscriptionRecord(shop.lake, "first").disable("the last one")
    row, state = (
        SlotStreamRecord(shop.lake, FEED).read_newest_cluster(),
        SubscriptionRecord(shop.lake, "first").read_state(),
    )
    for _ in range(2):
        shop.maintain()
        assert len(shop.local.rows(shop.lake.paths.slot_stream("shop"))) == 2
        assert len(shop.local.rows(shop.lake.paths.subscription("first"))) == 1
        assert SlotStreamRecord(shop.lake, FEED).read_newest_cluster() == row
        assert SlotStreamRecord(shop.lake, FEED).read_deleted_lsn() == 200
        assert SubscriptionRecord(shop.lake, "first").read_state() == state


def test_a_state_that_is_written_during_maintenance_stays(shop: Shop, monkeypatch) -> None:
    """Between the choice of rows and their deletion, another process writes a row that is based on the newest one."""
    superseded = maintenance.make_superseded_condition
    base = shop.local.version(shop.lake.paths.table_states("first"))

    def writing(counting: set[int]) -> str | None:
        condition = superseded(counting)
        TableStates(shop.lake, "first").append(
            [TableState("public", "a", SyncState.SET_ASIDE, 1, reason="why")]
        )
        return condition

    monkeypatch.setattr(maintenance, "make_superseded_condition", writing)
    maintain_subscription(shop.subscriptions[0], shop.lake, AT_ONCE, print)
    states = TableStates(shop.lake, "first").read_newest()
    assert [states["public", t].state for t in TABLES] == [SyncState.SET_ASIDE, SyncState.READY]
    with pytest.raises(OvertakenError):
        TableStates(shop.lake, "first").append([TableState("public", "a", SyncState.READY, 1)], base)


def test_logs_of_records_are_kept_for_hours_and_logs_of_tables_as_long_as_their_versions(shop: Shop) -> None:
    shop.all(10)
    name = "delta.logRetentionDuration"
    DeltaTable(shop.replica("first", "b")).alter.set_table_properties({name: "interval 90 days"})
    shop.maintain(Retention(None, None, timedelta(days=3)))
    kept = {path: DeltaTable(path).metadata().configuration.get(name) for path in shop.paths()}
    records = [
        shop.lake.paths.change_log("shop"),
        shop.lake.paths.transformed_slices("first"),
        shop.lake.paths.cuts("second"),
    ]
    assert {kept[path] for path in records} == {"interval 2 hours"}
    tables = [shop.replica("first", "a"), shop.lake.paths.change_history("first", "public", "a")]
    assert {kept[path] for path in tables} == {"interval 72 hours"}
    assert kept[shop.replica("first", "b")] == "interval 90 days"
    shop.maintain(Retention(None, None, timedelta(days=4)))
    assert DeltaTable(tables[0]).metadata().configuration[name] == "interval 96 hours"


def test_unchanged_tables_may_be_left_out(shop: Shop) -> None:
    for end in (10, 20, 30):
        shop.all(end)
    done = maintain_subscription(shop.subscriptions[0], shop.lake, AT_ONCE, print, {("public", "a")})
    paths = {table.path for table in done}
    assert {shop.replica("first", "a"), shop.lake.paths.transformed_slices("first")} <= paths
    assert not {shop.replica("first", "b"), shop.lake.paths.change_history("first", "public", "b")} & paths
    (newest,) = {frozenset(cut.tables.items()) for cut in Cuts(shop.lake, "first").read_all()[-1:]}
    assert newest == {(("public", t), shop.local.version(shop.replica("first", t))) for t in TABLES}


def test_no_deletion_is_recorded_if_there_was_nothing_to_delete(shop: Shop) -> None:
    """A cut may be later than the copies without any slice. A subscription that has transformed no slice then lacks none."""
    for name in NAMES:
        shop.apply(name, 50)
    shop.local.append(shop.lake.paths.change_log("shop"), CHANGE_LOG_SCHEMA.empty_table(), 50)
    shop.maintain()
    assert SlotStreamRecord(shop.lake, FEED).read_deleted_lsn() == 0


class Died(BaseException):
    """Simulates the end of the process."""


def test_maintenance_can_die_anywhere(tmp_path_factory, monkeypatch) -> None:
    again = maintenance._Maintainer._retry
    for steps in count(0, 12):
        shop = Shop(tmp_path_factory.mktemp("lake"))
        shop.all(10)
        shop.receive(20)
        shop.transform("first", 20)
        left = iter(range(steps))

        def dying(self: object, path: str, work: Callable, left=left) -> int:
            if next(left, None) is None:
                raise Died
            return again(self, path, work)

        with monkeypatch.context() as killed:
            killed.setattr(maintenance._Maintainer, "_retry", dying)
            try:
                shop.maintain()
                died = False
            except Died:
                died = True
        for cut in Cuts(shop.lake, "first").read_all():
            assert {len(shop.ids("first", t, v)) for (_, t), v in cut.tables.items()} == {2}
        shop.maintain()
        assert shop.local.slices(shop.lake.paths.change_log("shop"), 0) == [20]
        assert shop.slices(shop.lake.paths.change_history("first", "public", "a")) == {20}
        assert shop.slices(shop.lake.paths.change_history("second", "public", "a")) == set()
        if not died:
            return


def test_positions_outlive_the_log(shop: Shop) -> None:
    """Delta's log is cleaned up after a checkpoint, and Delta may be configured to forget transaction identifiers."""
    shop.all(10)
    shop.maintain()
    forgetful = {
        "delta.logRetentionDuration": "interval 0 seconds",
        "delta.setTransactionRetentionDuration": "interval 0 seconds",
    }
    for path in shop.paths():
        table, position = DeltaTable(path), shop.local.position(path)
        table.alter.set_table_properties(forgetful)
        table = DeltaTable(path)
        table.create_checkpoint()
        table.cleanup_metadata()
        assert len(list(Path(path, "_delta_log").glob("*.json"))) <= 1
        assert shop.local.position(path) == position


def test_delta_itself_keeps_old_versions_for_the_same_time(shop: Shop) -> None:
    shop.all(10)
    shop.maintain(replace(AT_ONCE, versions=timedelta(days=40)))
    assert DeltaTable(shop.replica("first", "a")).metadata().configuration == {
        "delta.deletedFileRetentionDuration": "interval 960 hours",
        "delta.logRetentionDuration": "interval 960 hours",
    }


def test_an_apply_that_compaction_overtook_begins_again(shop: Shop) -> None:
    path, attempts = shop.replica("first", "a"), []
    shop.apply("first", 10)

    def merge() -> None:
        with shop.lake.access.translate_errors(path):
            table = DeltaTable(path)
            if not attempts:
                shop.maintain(replace(AT_ONCE, versions=timedelta(hours=2)))
            attempts.append(table.version())
            source = pa.table({"key": [10]})
            table.merge(source, "t.id = s.key", "s", "t").when_matched_delete().execute()

    retry_after_conflict(merge)()
    assert len(attempts) == 2
    assert shop.ids("first", "a") == {0}


def test_sparks_jobs_name_the_table_that_is_maintained(tmp_path: Path) -> None:
    names = []

    def note_name() -> SparkSession:
        names.append(get_job_name())
        raise RuntimeError("no session")

    lake = Lake(str(tmp_path), note_name)
    path = lake.paths.replica("first", "public", "a")
    # Only Spark maintains a table with partitions.
    write_deltalake(path, pa.table({"id": [1], "day": [1]}), partition_by=["day"])
    with (
        maintenance._open_maintainer(FEED, "first", lake, AT_ONCE) as maintainer,
        pytest.raises(RuntimeError, match="no session"),
    ):
        maintainer.compact(path)
    assert names == [("first", "maintenance of first/public/a")]


def test_the_costs_of_maintenance_are_counted(shop: Shop) -> None:
    for end in (10, 20, 30):
        shop.receive(end)
        for name in NAMES:
            shop.transform(name, end)
            shop.apply(name, end)
    with measure_work() as work:
        maintain_slot_stream(FEED, shop.lake, shop.subscriptions, AT_ONCE, print)
    assert work.engine_text == "driver"
    assert work.task_count > 0
    with measure_work() as work:
        maintain_subscription(shop.subscriptions[0], shop.lake, AT_ONCE, print)
    assert min(work.task_count, work.written_bytes, work.seconds) > 0
