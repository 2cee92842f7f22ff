"""Which moments can be read, and the reasons for those that cannot."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.moments import restore as restoring
from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.moments.reading import find_tables
from pgsieve.assets.steps.moments.restore import restore_tables
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.operations.maintenance import Retention, maintain_subscription
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import own_database

pytestmark = pytest.mark.slow

_numbers = itertools.count(1)
FOREVER = Retention(None, None, timedelta(days=7))


def _quiet(_: str) -> None:
    pass


@dataclass
class Counters:
    """A table `t` with two counters, and its replica. Each commit increments the first counter."""

    database: psycopg.Connection
    subscription: Subscription
    lake: Lake

    def add(self) -> int:
        """Commit once. Return the LSN after it."""
        self.database.execute("update t set n = n + 1 where id = 1")
        return self.lsn()

    def lsn(self) -> int:
        row = self.database.execute("select pg_current_wal_flush_lsn()").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def run(self) -> None:
        copy_tables(self.subscription, self.lake, find_tables_to_copy(self.subscription, self.lake), _quiet)
        drain_slot(self.subscription.slot_stream, self.lake, [self.subscription], _quiet)
        transform(self.subscription, self.lake, _quiet)
        apply(self.subscription, self.lake, _quiet)

    def read(self, lsn: int) -> list[dict[str, object]]:
        (table,) = find_tables(Moment(self.lake, "sub", lsn))
        return query_table(table.open_table(), "select * from t order by id").to_pylist()

    def n(self, lsn: int) -> object:
        return self.read(lsn)[0]["n"]

    def refusal(self, lsn: int) -> str:
        with pytest.raises(MomentError) as refused:
            find_tables(Moment(self.lake, "sub", lsn))
        assert refused.value.hint
        return refused.value.message

    def maintain(self, retention: Retention) -> None:
        maintain_subscription(self.subscription, self.lake, retention, _quiet)


@pytest.fixture
def counters(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Counters]:
    name = f"counters_{next(_numbers)}"
    with own_database(publisher_server, name) as database:
        database.execute("create table t (id int primary key, n int not null, x int)")
        database.execute("insert into t values (1, 0), (2, 100); create publication p for table t")
        slot_stream = SlotStream(
            name,
            Source("counters", publisher_server.conninfo(dbname=name)),
            name,
            name,
            False,
            {"sub": ("p",)},
        )
        yield Counters(
            database, Subscription("sub", slot_stream), Lake(str(tmp_path), lambda: engine().session)
        )


def test_a_moment_within_a_slice_is_read_by_its_lsn_or_its_time(counters: Counters) -> None:
    before = counters.lsn()
    counters.run()
    first = counters.lsn()
    lsns = [counters.add() for _ in range(5)]
    counters.run()
    assert [counters.n(lsn) for lsn in (first, *lsns)] == [0, 1, 2, 3, 4, 5]
    history = counters.lake.delta_rs.read_all_rows(
        counters.lake.paths.change_history("sub", "public", "t")
    ).to_pylist()
    times = sorted(row["commit_time"] for row in history)
    # Up to a time, and before an LSN.
    assert [counters.n(Moment.from_user_input(counters.lake, "sub", time).lsn) for time in times[:-1]] == [
        1,
        2,
        3,
        4,
    ]
    assert counters.n(Moment.from_user_input(counters.lake, "sub", times[1].isoformat()).lsn) == 2
    assert counters.n(Moment.from_user_input(counters.lake, "sub", format_lsn(lsns[2])).lsn) == 3
    # Reading changes neither the replica nor its history nor the cuts; a second reading costs the same.
    assert counters.lake.records.version(counters.lake.paths.replica("sub", "public", "t")) == 1
    for moment, reason in {
        times[-1]: "no commit after that time has been replicated",
        datetime(2020, 1, 1, tzinfo=UTC): "the first change that is kept, at LSN",
        datetime(2020, 1, 1): "has no time zone",  # noqa: DTZ001 - it is refused
        "yesterday": "neither an LSN nor a time",
    }.items():
        with pytest.raises(MomentError, match=reason):
            Moment.from_user_input(counters.lake, "sub", moment)
    assert "has not been read yet" in counters.refusal(counters.lsn() + (1 << 32))
    assert "no table was copied by" in counters.refusal(before)
    with pytest.raises(MomentError, match='no data of a subscription "other"'):
        find_tables(Moment(counters.lake, "other", before))


def test_moments_before_the_retention_are_refused(counters: Counters) -> None:
    counters.run()
    early = counters.add()
    counters.add()
    counters.run()
    left = Path(counters.lake.uri, "_pgsieve/.moments", f"pgsieve-{os.geteuid()}-killed")
    left.mkdir(mode=0o700, parents=True)
    counters.maintain(FOREVER)
    assert not left.exists()
    assert counters.n(early) == 1
    counters.maintain(Retention(None, timedelta(), timedelta(days=7)))
    assert "are deleted, as `retention.changes` says" in counters.refusal(early)
    cut = Cuts(counters.lake, "sub").read_all()[-1]
    assert counters.n(cut.lsn) == 2
    late = counters.add()
    counters.add()
    counters.run()
    assert counters.n(late) == 3
    # A lake whose maintenance ran before deletions were recorded.
    record = SubscriptionRecord(counters.lake, "sub")
    lake = counters.lake
    lake.records.append_versioned(
        record.path,
        lake.delta_rs.read_all_rows(record.path).slice(0, 1).drop_columns(["version", "deleted_up_to"]),
    )
    assert record.read_state().deleted_up_to is None
    assert "it is not recorded which changes are deleted" in counters.refusal(late)
    counters.maintain(FOREVER)
    assert "are deleted" in counters.refusal(late)
    newest = counters.add()
    counters.add()
    counters.run()
    assert counters.n(newest) == 5


@pytest.mark.parametrize("initial", [False, True])
def test_a_table_that_was_copied_again_has_a_gap_before(counters: Counters, *, initial: bool) -> None:
    """If a history begins with a copy, that copy is not a slice of changes."""
    kept = HistoryChoices(HistoryChoice(initial=initial))
    counters.subscription = replace(counters.subscription, histories=kept)
    counters.run()
    followed = counters.add()
    counters.add()
    counters.run()
    states, name = TableStates(counters.lake, "sub"), ("public", "t")
    states.append([states.read_newest()[name].with_problem("sub", "it is set aside")])
    missed = counters.add()
    counters.run()
    assert states.read_newest()[name].state == SyncState.SET_ASIDE
    refusal = counters.refusal(missed)
    assert "it was set aside (it is set aside; `pgsieve resync" in refusal
    assert "it has not been copied since: its changes in between are lost" in refusal
    states.leave_to_next_copy([name])
    counters.run()
    again = states.read_newest()[name].lsn
    later = counters.add()
    counters.run()
    counters.maintain(FOREVER)
    assert counters.n(followed) == 1
    assert f"it was copied at {format_lsn(again)}" in counters.refusal(missed)
    assert [counters.n(lsn) for lsn in (again, later)] == [3, 4]


def test_a_table_that_a_later_cut_lacks_is_read_or_refused(counters: Counters) -> None:
    """The run that finds out that a table has to be copied again writes a cut without it, perhaps at the same LSN."""
    database, subscription, lake = counters.database, counters.subscription, counters.lake
    database.execute("create table u (id int primary key, n int); alter publication p add table u")
    counters.run()
    within = counters.add()
    counters.add()
    counters.run()
    at_cut = Cuts(lake, "sub").read_all()[-1].lsn
    states, name = TableStates(lake, "sub"), ("public", "t")
    states.leave_to_next_copy([name], "it has other columns")
    apply(subscription, lake, _quiet)
    *_, former, cut = Cuts(lake, "sub").read_all()
    assert (former.lsn, cut.lsn, set(former.tables) - set(cut.tables)) == (at_cut, at_cut, {name})

    def n(lsn: int) -> object:
        (table,) = find_tables(Moment(lake, "sub", lsn), only_table=name)
        return query_table(table.open_table(), "select * from t order by id").to_pylist()[0]["n"]

    assert [n(within), n(at_cut)] == [1, 2]
    assert {table.name for table in find_tables(Moment(lake, "sub", at_cut))} == {name, ("public", "u")}
    missed = counters.add()
    database.execute("insert into u values (1, 1)")
    drain_slot(subscription.slot_stream, lake, [subscription], _quiet)
    transform(subscription, lake, _quiet)
    apply(subscription, lake, _quiet)
    later = Cuts(lake, "sub").read_all()[-1].lsn
    for lsn in (missed, later):
        refusal = counters.refusal(lsn)
        assert "it had to be copied again (it has other columns); it has not been copied" in refusal
    counters.run()
    again = states.read_newest()[name].lsn
    assert [n(within), n(at_cut), n(again)] == [1, 2, 3]
    assert f"it was copied at {format_lsn(again)}" in counters.refusal(later)
    # A table that has left the publications is not refused.
    database.execute("alter publication p drop table t; insert into u values (2, 2)")
    counters.run()
    (table,) = find_tables(Moment(lake, "sub", Cuts(lake, "sub").read_all()[-1].lsn))
    assert table.name == ("public", "u")


@pytest.mark.drawn
@pytest.mark.spark
def test_the_columns_are_those_of_the_replica_at_that_moment(counters: Counters) -> None:
    """Each alteration rewrites the replica without a new position. The history has all columns."""
    counters.run()
    lsns = [counters.add()]
    counters.add()
    for alteration in ("add column y int default 7", "rename column x to z", "drop column z"):
        counters.run()
        counters.database.execute(f"alter table t {alteration}")
        counters.run()
        lsns.append(counters.add())
        counters.add()
    counters.run()
    counters.maintain(FOREVER)
    assert [counters.read(lsn)[0] for lsn in lsns] == [
        {"id": 1, "n": 1, "x": None},
        {"id": 1, "n": 3, "x": None, "y": 7},
        {"id": 1, "n": 5, "z": None, "y": 7},
        {"id": 1, "n": 7, "y": 7},
    ]


def test_a_moment_beyond_a_conflict_is_refused_as_the_replica_was(counters: Counters) -> None:
    counters.run()
    # Only the replica has this row.
    counters.database.execute("alter publication p set (publish = 'insert, update')")
    counters.run()
    counters.database.execute("delete from t where id = 2")
    deleted = counters.lsn()
    counters.database.execute("insert into t values (2, 5)")
    counters.run()
    assert len(counters.read(deleted)) == 2
    beyond = counters.add()
    counters.run()
    assert "already exists" in counters.refusal(beyond) or "set aside" in counters.refusal(beyond)


def test_a_folder_gets_the_tables_of_a_moment_and_keeps_them(counters: Counters, tmp_path: Path) -> None:
    counters.run()
    early = counters.add()
    counters.add()
    counters.run()
    lake, folder = counters.lake, tmp_path.parent / f"{tmp_path.name}_restored"
    (table,) = restore_tables(Moment(lake, "sub", early), str(folder))
    assert (table.path, table.change_count) == (f"{folder}/sub/public/t", 1)
    # The folder has plain Delta tables, without files of pgsieve.
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()) == [
        "sub",
        "sub/public",
        "sub/public/t",
        "sub/public/t/_delta_log",
    ]
    for moment in (Retention(timedelta(), timedelta(), timedelta(hours=2)), FOREVER):
        counters.maintain(moment)
    shutil.rmtree(lake.uri)
    restored = query_table(DeltaTable(table.path), "select * from t order by id").to_pylist()
    assert [row["n"] for row in restored] == [1, 100]


def test_refused_targets_of_a_restore(
    counters: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters.run()
    lsn, lake = Cuts(counters.lake, "sub").read_all()[-1].lsn, counters.lake
    half = tmp_path.parent / f"{tmp_path.name}_half"
    (half / "_pgsieve").mkdir(parents=True)
    (half / "_pgsieve" / "mark").touch()
    for folder, reason in {
        str(half): "is not empty",
        f"{lake.uri}/restored": "is within the lake",
        str(Path(lake.uri).parent): "the lake is within it",
        "hdfs://nowhere/restored": "Spark alone reaches one of them",
    }.items():
        with pytest.raises(MomentError, match=reason):
            restore_tables(Moment(lake, "sub", lsn), folder)

    def failing(*arguments: Any) -> None:
        brought(*arguments)
        assert {path.name for path in refused.iterdir()} == {"sub", "_pgsieve"}
        raise LakeError("no room")

    brought, refused = restoring.clone_up_to, tmp_path.parent / f"{tmp_path.name}_refused"
    monkeypatch.setattr(restoring, "clone_up_to", failing)
    with pytest.raises(LakeError, match="no room"):
        restore_tables(Moment(lake, "sub", lsn), str(refused))
    assert list(refused.iterdir()) == []
