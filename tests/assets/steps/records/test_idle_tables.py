"""Unchanged tables are not read: a run with nothing to do opens the same number of tables, however many there are. No JVM."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply.damaged_tables import set_aside_damaged_tables
from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates, find_newest_version
from pgsieve.assets.steps.subscription import Definition, SlotStream, Subscription
from pgsieve.decoding.publications.evolution import Layout
from pgsieve.resources.lake.delta import tables as delta
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.source import Source
from tests.fixtures.lakes import no_session

SUBSCRIPTION = Subscription("sub", SlotStream("shop", Source("shop", ""), "shop", "shop", False, {"sub": ()}))
DEFINITION = Definition((("id", "bigint"),), ("id",), Layout(1, (), 1, ()))


def lake_of(folder: Path, tables: int) -> Lake:
    """A lake of ready tables, all of them in a cut."""
    lake = Lake(str(folder), no_session)
    assert lake.delta_rs is not None
    names = [("public", f"t{number}") for number in range(tables)]
    TableStates(lake, "sub").append([TableState(*name, SyncState.READY, 1, DEFINITION) for name in names])
    for name in names:
        for position in (None, 1):
            lake.delta_rs.write(lake.paths.replica("sub", *name), pa.table({"id": [0]}), Commit(position))
    versions = {name: lake.delta_rs.version(lake.paths.replica("sub", *name)) for name in names}
    states = find_newest_version(TableStates(lake, "sub").read_newest().values())
    Cuts(lake, "sub").append(Cut(1, versions, datetime.now(UTC), states))
    return lake


def opened(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many Delta tables a run of another process opens when there is nothing to apply."""
    paths: list[str] = []

    class Counted(DeltaTable):
        def __init__(self, path: str, **options: object) -> None:
            paths.append(path)
            super().__init__(path, **options)

    delta.share_tables.cache_clear()
    lake = Lake(lake.uri, no_session)
    with monkeypatch.context() as patch:
        patch.setattr(delta, "DeltaTable", Counted)
        set_aside_damaged_tables(SUBSCRIPTION, lake, Cuts(lake, SUBSCRIPTION.name).read_last(), set())
        assert ReplicaProgress(SUBSCRIPTION, lake).find_tables_beyond_cut() == set()
        assert ReplicaProgress(SUBSCRIPTION, lake).find_applied_lsn() == 1
    return len(paths)


def test_the_number_of_opened_tables_does_not_depend_on_idle_tables(tmp_path: Path, monkeypatch) -> None:
    few, many = (opened(lake_of(tmp_path / str(number), number), monkeypatch) for number in (1, 20))
    assert 0 < few == many


def test_a_missing_replica_is_noticed_although_it_is_idle(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, 3)
    shutil.rmtree(lake.paths.replica("sub", "public", "t1"))
    DeltaTable(lake.paths.replica("sub", "public", "t2")).restore(0)
    set_aside_damaged_tables(SUBSCRIPTION, lake, Cuts(lake, SUBSCRIPTION.name).read_last(), set())
    states = TableStates(lake, "sub").read_newest()
    assert [states["public", f"t{n}"].state for n in range(3)] == [
        SyncState.READY,
        SyncState.SET_ASIDE,
        SyncState.SET_ASIDE,
    ]
    assert "is gone" in (states["public", "t1"].reason or "")
    assert "earlier version" in (states["public", "t2"].reason or "")


def test_states_are_read_once_for_each_version(tmp_path: Path, monkeypatch) -> None:
    lake, read = lake_of(tmp_path, 1), []
    rows = lake.records.rows
    monkeypatch.setattr(lake.records, "rows", lambda *given: read.append(given) or rows(*given))
    states = TableStates(lake, "sub").read_newest()
    states.clear()  # the caller's own copy
    assert TableStates(lake, "sub").read_newest().keys() == {("public", "t0")}
    assert read == []
    other = Lake(str(tmp_path), no_session)  # simulates another process
    TableStates(other, "sub").append([TableState("public", "t0", SyncState.SET_ASIDE, 1, DEFINITION, "why")])
    assert TableStates(lake, "sub").read_newest()["public", "t0"].state == SyncState.SET_ASIDE


def test_states_of_a_recreated_table_are_its_own(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, 1)
    before = TableStates(lake, "sub").read_newest()
    version = lake.records.version(lake.paths.table_states("sub"))
    shutil.rmtree(lake.paths.table_states("sub"))
    TableStates(lake, "sub").append([TableState("public", "other", SyncState.READY, 1, DEFINITION)])
    assert lake.records.version(lake.paths.table_states("sub")) == version
    assert TableStates(lake, "sub").read_newest().keys() != before.keys()
