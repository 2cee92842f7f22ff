"""The newest row of a record is the one that was written last, whatever the clocks of its writers say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.operations.clustering import Clusterings
from pgsieve.assets.steps.records.catalogs import CATALOG_SCHEMA, Catalogs
from pgsieve.assets.steps.records.cuts import CUT_SCHEMA, Cut, Cuts
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.subscription_state import (
    SUBSCRIPTION_SCHEMA,
    SubscriptionRecord,
    SubscriptionState,
)
from pgsieve.assets.steps.records.table_states import (
    TABLE_STATES,
    SyncState,
    TableState,
    TableStates,
    find_newest_version,
)
from pgsieve.assets.steps.slot_consumption.slot import record_dropped_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.skip import Skip
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from pgsieve.resources.postgres.alterations import CatalogFingerprint
from pgsieve.resources.postgres.source import Source
from tests.fixtures.lakes import no_session
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.shop import Shop

DAY = timedelta(days=1)
FEED = SlotStream("shop", Source("shop", ""), "shop", "shop", False, {"sub": ("p",)})


class _Ahead(datetime):
    """The clock of a host that is one day fast."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> _Ahead:
        late = datetime.now(tz) + DAY
        return cls.combine(late.date(), late.timetz())


@contextmanager
def fast_clock() -> Iterator[None]:
    """In the block, pgsieve writes as on a host whose clock is one day fast."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("pgsieve.") and getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", _Ahead)
        yield


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(str(tmp_path), no_session)


def state(lake: Lake, table: str = "t") -> str:
    return TableStates(lake, "sub").read_newest()["public", table].state


def test_a_state_counts_after_one_of_a_fast_clock(lake: Lake) -> None:
    with fast_clock():
        TableStates(lake, "sub").append([TableState("public", "t", SyncState.DATA_SYNC)])
    assert state(lake) == SyncState.DATA_SYNC
    TableStates(lake, "sub").append([TableState("public", "t", SyncState.READY, 7)])
    assert state(lake) == SyncState.READY


def test_a_subscription_is_enabled_and_skips_after_a_fast_clock(lake: Lake) -> None:
    with fast_clock():
        SubscriptionRecord(lake, "sub").write_state(SubscriptionState(skip_lsn=5))
        SubscriptionRecord(lake, "sub").disable("an error")
    assert SubscriptionRecord(lake, "sub").enable()
    assert SubscriptionRecord(lake, "sub").read_state() == SubscriptionState(skip_lsn=5)
    SubscriptionRecord(lake, "sub").write_state(SubscriptionState(skip_lsn=6))
    assert SubscriptionRecord(lake, "sub").read_state().skip_lsn == 6


@pytest.mark.parametrize("change", ["deleted", "clustered", "skipped"])
def test_what_another_process_records_of_a_subscription_meanwhile_stays(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Maintenance and commands change the state of a subscription beside a run, without its lock."""
    record, read_state = SubscriptionRecord(lake, "sub"), SubscriptionRecord.read_state
    clusterings = Clusterings(record)
    clusterings.note(("public", "t"), ["a"], [(7, 1)])
    record.write_state(SubscriptionState(folders="f"))

    def read_and_be_overtaken(self: SubscriptionRecord) -> SubscriptionState:
        state = read_state(self)
        monkeypatch.setattr(SubscriptionRecord, "read_state", read_state)
        record.disable("an error")
        return state

    monkeypatch.setattr(SubscriptionRecord, "read_state", read_and_be_overtaken)
    changes = {"deleted": partial(record.record_deleted_lsn, 9), "clustered": clusterings.save}
    one = Subscription("sub", FEED)
    changes.get(change, partial(Skip(one, lake).set_lsn, None))()
    assert record.read_state().reason == "an error"
    expected = {"deleted": (9, None), "clustered": (0, '[["public", "t", ["a"], 7]]')}
    state = record.read_state()
    assert (state.deleted_up_to, state.clustered) == expected.get(change, (0, None))


def test_a_slot_stream_begins_after_a_host_with_a_fast_clock_gave_it_up(lake: Lake) -> None:
    with fast_clock():
        record_dropped_slot(lake, FEED)
    SlotStreamRecord(lake, FEED).record_cluster("1", 1, given_up=False)
    assert SlotStreamRecord(lake, FEED).read_newest_cluster()["given_up"] is False


def test_a_cut_and_a_state_are_ordered_by_the_cuts_versions(lake: Lake) -> None:
    TableStates(lake, "sub").append([TableState("public", "t", SyncState.READY, 1)])
    before = TableStates(lake, "sub").read_newest()
    seen = find_newest_version(before.values())
    Cuts(lake, "sub").append(Cut(9, {("public", "t"): 3}, datetime.now(UTC) + DAY, seen))
    Cuts(lake, "sub").append(Cut(9, {("public", "t"): 4}, datetime.now(UTC), seen))
    with fast_clock():
        TableStates(lake, "sub").append([TableState("public", "t", SyncState.READY, 8)])
    newest = Cuts(lake, "sub").read_all()[-1]
    assert newest.tables == {("public", "t"): 4}
    assert newest.has_state(before["public", "t"])
    copied = TableStates(lake, "sub").read_newest()["public", "t"]
    assert not newest.has_state(copied)
    cut = Cut(10, {}, datetime.now(UTC), copied.version)
    assert cut.has_state(copied)
    cut.refuse_earlier_states(TableStates(lake, "sub"))
    max(Path(TableStates(lake, "sub").path, "_delta_log").glob("*.json")).unlink()
    with pytest.raises(DamagedTableError, match="put back to an earlier version"):
        cut.refuse_earlier_states(TableStates(lake, "sub"))


def test_the_later_of_two_catalogs_of_one_lsn_counts(lake: Lake) -> None:
    nothing = Catalog(tables={}, publications={}, server_version=180000)
    for digest in ("b", "a", "c", "b"):
        Catalogs(lake, FEED).append(5, 3, CatalogFingerprint(digest, ""), nothing, 5)
        assert Catalogs(lake, FEED).is_recorded(CatalogFingerprint(digest, ""))


def test_the_order_outlives_compaction_and_vacuum(lake: Lake) -> None:
    for number in range(5):
        TableStates(lake, "sub").append(
            [
                TableState("public", "t", SyncState.READY, number),
                TableState("public", "u", SyncState.SET_ASIDE),
            ],
        )
    path = lake.paths.table_states("sub")
    make_table_maintenance(lake, path).compact()
    make_table_maintenance(lake, path).vacuum(0)
    assert len(DeltaTable(path).file_uris()) == 1
    assert TableStates(lake, "sub").read_newest()["public", "t"].lsn == 4
    TableStates(lake, "sub").append([TableState("public", "t", SyncState.READY, 5)])
    assert TableStates(lake, "sub").read_newest()["public", "t"].lsn == 5


def test_a_table_with_two_states_in_one_commit_has_the_last_one(lake: Lake) -> None:
    TableStates(lake, "sub").append(
        [TableState("public", "t", SyncState.DATA_SYNC), TableState("public", "t", SyncState.READY)],
    )
    assert state(lake) == SyncState.READY


def test_a_lake_of_an_earlier_version_continues(lake: Lake) -> None:
    local, long_ago = lake.delta_rs, datetime(2020, 1, 1, tzinfo=UTC)
    assert local is not None

    def write(path: str, schema: pa.Schema, *rows: dict[str, object]) -> None:
        for row in rows:
            local.append(path, pa.Table.from_pylist([row], schema))

    common = {"schema": "public", "table": "t", "lsn": 1}
    write(
        lake.paths.table_states("sub"),
        TABLE_STATES,
        {**common, "state": SyncState.READY, "at": long_ago + DAY},
        {**common, "state": SyncState.DATA_SYNC, "at": long_ago},
    )
    write(
        lake.paths.subscription("sub"),
        SUBSCRIPTION_SCHEMA,
        {"enabled": True, "at": long_ago + DAY},
        {"enabled": False, "at": long_ago},
    )
    former = pa.schema([field for field in CUT_SCHEMA if field.name != "states"])
    at, tables = long_ago + 2 * DAY, [('"public"."t"', 4)]
    write(lake.paths.cuts("sub"), former, {"lsn": 2, "at": at, "tables": tables})
    former = pa.schema(list(CATALOG_SCHEMA)[:4])
    write(
        lake.paths.catalogs("shop"),
        former,
        {"lsn": 5, "digest": "a", "catalog": "{}", "subscriptions": ["sub"]},
    )

    kept = TableStates(lake, "sub").read_newest()["public", "t"]
    assert kept.state == SyncState.READY
    assert SubscriptionRecord(lake, "sub").read_state().enabled
    assert Cuts(lake, "sub").read_all()[-1].has_state(kept)
    assert not Catalogs(lake, FEED).is_recorded(CatalogFingerprint("a", "")), (
        "an old lake cannot say what it has recorded"
    )

    TableStates(lake, "sub").append([TableState("public", "t", SyncState.SET_ASIDE)])
    SubscriptionRecord(lake, "sub").disable("an error")
    nothing = Catalog(tables={}, publications={}, server_version=180000)
    Catalogs(lake, FEED).append(5, 3, CatalogFingerprint("b", ""), nothing, 5)
    assert state(lake) == SyncState.SET_ASIDE
    assert not SubscriptionRecord(lake, "sub").read_state().enabled
    assert Catalogs(lake, FEED).is_recorded(CatalogFingerprint("b", ""))
    assert (
        not Cuts(lake, "sub").read_all()[-1].has_state(TableStates(lake, "sub").read_newest()["public", "t"])
    )
    Cuts(lake, "sub").append(Cut(2, {("public", "t"): 5}, at - DAY, 0))
    assert Cuts(lake, "sub").read_all()[-1].tables == {("public", "t"): 5}


def test_writers_at_once_lose_no_row_and_have_one_order(lake: Lake) -> None:
    writers, each, path = 4, 5, lake.paths.table_states("sub")
    together = threading.Barrier(writers)

    def write(writer: int) -> None:
        together.wait()
        for number in range(each):
            TableStates(lake, "sub").append([TableState("public", f"t{writer}", SyncState.READY, number)])

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    rows = lake.records.rows(path)
    assert len({row["version"] for row in rows}) == len(rows) == writers * each
    assert {s.lsn for s in TableStates(lake, "sub").read_newest().values()} == {each - 1}


@pytest.mark.drawn
@pytest.mark.spark
def test_a_table_is_copied_once_although_a_host_with_a_fast_clock_wrote(shop: Shop) -> None:
    with fast_clock():
        shop.copy()
        SubscriptionRecord(shop.lake, "one").disable("an error")
        SubscriptionRecord(shop.lake, "one").enable()
        TableStates(shop.lake, "one").append([TableState("public", "orders", SyncState.DATA_SYNC)])
    shop.database.execute("insert into stock values (5, 5)")
    summary = shop.run()
    assert not summary.failures
    copied = [(s.name, table.name) for s in summary.subscriptions for table in s.copied]
    assert copied == [("one", "orders")]
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    shop.database.execute("insert into stock values (6, 6)")
    code, printed = shop.cli("run")
    assert code == 0, printed
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5, 6]


@pytest.mark.drawn
@pytest.mark.spark
def test_in_a_lake_at_a_uri_writers_at_once_lose_no_row_and_have_one_order(tmp_path: Path) -> None:
    """It takes long because Spark starts, and every write is a job."""
    lakes = [Lake(tmp_path.as_uri(), engine().session.newSession) for _ in range(2)]
    path, each = lakes[0].paths.table_states("sub"), 2
    former = pa.Table.from_pylist(
        [{"schema": "public", "table": "t0", "state": SyncState.DATA_SYNC, "at": datetime.now(UTC) + DAY}],
        TABLE_STATES,
    )
    lakes[0].records.append(path, former)
    together = threading.Barrier(2)

    def write(writer: int) -> None:
        together.wait()
        for number in range(each):
            TableStates(lakes[writer], "sub").append(
                [TableState("public", f"t{writer}", SyncState.READY, number)]
            )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    written = [row["version"] for row in lakes[0].records.rows(path) if row["version"] is not None]
    assert len(set(written)) == len(written) == 2 * each
    assert {s.lsn for s in TableStates(lakes[0], "sub").read_newest().values()} == {each - 1}
    assert state(lakes[1], "t0") == SyncState.READY
