"""The tables of a subscription: cuts at which all agree, and errors that stop only one table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, QueryBuilder

from pgsieve.assets.steps.apply import by_files
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.subscription_state import SubscriptionDisabledError, SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import parse_lsn
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.lakes import no_session
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.servers import drop_slots

pytestmark = pytest.mark.spark

_numbers = itertools.count(1)


@dataclass
class _Replicated:
    """A database with one subscription to its publication `p`, in one of the modes."""

    database: psycopg.Connection
    subscription: Subscription
    lake: Lake

    def copy(self, names: list[tuple[str, str]] | None = None) -> list[CopyResult]:
        wanted = find_tables_to_copy(self.subscription, self.lake) if names is None else names
        return copy_tables(self.subscription, self.lake, wanted, _quiet)

    def increment(self) -> ApplyResult:
        drain_slot(self.subscription.slot_stream, self.lake, [self.subscription], _quiet)
        transform(self.subscription, self.lake, _quiet)
        return apply(self.subscription, self.lake, _quiet)

    def rows(self, table: str, version: int | None = None) -> list[dict[str, object]]:
        path = self.lake.paths.replica("sub", "public", table)
        query = QueryBuilder().register("t", DeltaTable(path, version=version)).execute("select * from t")
        return list(pa.table(query.read_all()).to_pylist())


def _quiet(_: str) -> None:
    pass


@pytest.fixture(params=["pipeline", "publisher"])
def replicated(
    publisher_server: EmbeddedServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[_Replicated]:
    name, filtered = f"isolation_{next(_numbers)}", request.param == "publisher"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        conninfo = publisher_server.conninfo(dbname=name)
        slot_stream = SlotStream(
            name=name,
            source=Source("publisher", conninfo),
            slot=name,
            capture=name,
            filtered=filtered,
            subscriptions={"sub": ("p",)},
        )
        lake = Lake(str(tmp_path / "lake"), lambda: engine().session)
        with psycopg.connect(conninfo, autocommit=True) as database:
            yield _Replicated(database, Subscription("sub", slot_stream, copy_data=True), lake)
            drop_slots(database)
        admin.execute(f"drop database {name} with (force)")


def test_every_cut_equals_one_moment_of_the_publisher(replicated: _Replicated) -> None:
    database = replicated.database
    for table in ("checking", "savings"):
        database.execute(f"create table {table} (id int primary key, amount int not null)")
        database.execute(f"insert into {table} select i, 100 from generate_series(1, 4) i")
    database.execute("create publication p for table checking, savings")
    replicated.copy()
    cuts = []
    for amount in range(1, 5):
        with database.transaction():
            database.execute("update checking set amount = amount - %s where id = %s", [amount, amount])
            database.execute("update savings set amount = amount + %s where id = %s", [amount, amount])
        # A cut includes unchanged tables at their present version.
        database.execute("insert into checking values (%s, 0)", [10 + amount])
        replicated.increment()
        cut = Cuts(replicated.lake, replicated.subscription.name).read_last()
        assert cut is not None
        cuts.append(cut)
    assert [c.lsn for c in cuts] == sorted({c.lsn for c in cuts})
    for number, cut in enumerate(cuts, 1):
        rows = {name: replicated.rows(name[1], version) for name, version in cut.tables.items()}
        assert sum(row["amount"] for of_table in rows.values() for row in of_table) == 800
        assert len(rows["public", "checking"]) == 4 + number


def test_a_table_with_an_impossible_value_is_set_aside_and_the_others_continue(
    replicated: _Replicated,
) -> None:
    database = replicated.database
    database.execute("create table prices (id int primary key, price numeric(8,2))")
    database.execute("create table notes (id int primary key, note text)")
    database.execute("insert into prices values (1, 1)")
    database.execute("create publication p for table prices, notes")
    replicated.copy()
    database.execute("insert into prices values (2, 'NaN')")
    database.execute("insert into notes values (1, 'goes on')")
    replicated.increment()
    state = TableStates(replicated.lake, "sub").read_newest()["public", "prices"]
    assert state.state == SyncState.SET_ASIDE
    assert 'column "price"' in (state.reason or "")
    assert "in the row with key (id)=(2)" in (state.reason or "")
    assert "NaN" not in (state.reason or "").replace("NaN or", "")
    assert replicated.rows("notes") == [{"id": 1, "note": "goes on"}]
    assert [row["id"] for row in replicated.rows("prices")] == [1]

    database.execute("insert into notes values (2, 'again')")
    replicated.increment()
    assert len(replicated.rows("notes")) == 2
    assert find_tables_to_copy(replicated.subscription, replicated.lake) == [], (
        "it is copied without a request"
    )

    database.execute("update prices set price = 2 where id = 2")
    (copied,) = replicated.copy([("public", "prices")])
    assert copied.problem is None
    database.execute("insert into prices values (3, 3)")
    replicated.increment()
    assert TableStates(replicated.lake, "sub").read_newest()["public", "prices"].state == SyncState.READY
    assert sorted(row["id"] for row in replicated.rows("prices")) == [1, 2, 3]
    assert len(replicated.rows("notes")) == 2


def test_a_table_that_cannot_be_copied_is_set_aside_and_the_others_are_copied(
    replicated: _Replicated,
) -> None:
    database = replicated.database
    database.execute("create table prices (id int primary key, price numeric(8,2))")
    database.execute("create table notes (id int primary key, note text)")
    database.execute("insert into prices values (1, 'NaN')")
    database.execute("insert into notes values (1, 'copied')")
    database.execute("create publication p for table prices, notes")
    problems = {c.table: c.problem for c in replicated.copy()}
    assert problems["notes"] is None
    assert 'column "price"' in (problems["prices"] or "")
    assert "in the row with key (id)=(1)" in (problems["prices"] or "")
    assert replicated.rows("notes") == [{"id": 1, "note": "copied"}]


def test_the_reason_names_the_transaction_that_set_a_table_aside(replicated: _Replicated) -> None:
    database = replicated.database
    database.execute(
        'create schema "Shop"; create table "Shop"."Old: prices" (id int primary key, price numeric(8,2))'
    )
    database.execute('create publication p for table "Shop"."Old: prices"')
    replicated.copy()
    database.execute('insert into "Shop"."Old: prices" values (1, 1)')
    before = read_current_lsn(database)
    database.execute("""insert into "Shop"."Old: prices" values (2, 'NaN')""")
    after = read_current_lsn(database)
    database.execute("""insert into "Shop"."Old: prices" values (3, 'NaN')""")
    replicated.increment()
    reason = TableStates(replicated.lake, "sub").read_newest()["Shop", "Old: prices"].reason or ""
    ((finished, types),) = re.findall(
        r"in the transaction finished at (\S+); set `types: (.*)` in pgsieve.yaml .*; `pgsieve resync sub '\"Shop\"\.",
        reason,
    )
    assert yaml.safe_load(types) == {'"Shop"."Old: prices".price': "string"}
    assert before <= parse_lsn(finished) < after


@pytest.mark.parametrize("replicated", ["pipeline"], indirect=True)
def test_failing_row_filters_set_their_tables_aside_without_showing_a_value(
    replicated: _Replicated,
) -> None:
    database = replicated.database
    filters = {
        "sums": ("2147483000 + a > 5", "integer out of range [22003]"),
        "ratios": ("b / (a - 700000 - 77777) > 1", "division by zero [22012]"),
        "casts": ("(a * 1e300::float8) * (a * 1e300::float8) > 5", "overflow [22003]"),
    }
    for table in filters:
        database.execute(f"create table {table} (id int primary key, a int, b numeric)")
        database.execute(f"alter table {table} replica identity full")
    database.execute("create table notes (id int primary key, note text)")
    tables = ", ".join(f"{table} where ({row_filter})" for table, (row_filter, _) in filters.items())
    database.execute(f"create publication p for table {tables}, notes")
    replicated.copy()
    for table in filters:
        database.execute(f"insert into {table} values (1, 0, 2)")
        database.execute(f"insert into {table} values (2, 777777, 2)")
    database.execute("insert into notes values (1, 'goes on')")
    replicated.increment()
    states = TableStates(replicated.lake, "sub").read_newest()
    for table, (_, text) in filters.items():
        reason = states["public", table].reason or ""
        assert states["public", table].state == SyncState.SET_ASIDE
        assert text in reason
        assert "finished at" in reason
        assert "777777" not in reason
    assert replicated.rows("notes") == [{"id": 1, "note": "goes on"}]


def test_with_disable_on_error_a_failed_copy_disables_the_subscription_until_it_is_enabled(
    replicated: _Replicated,
) -> None:
    database = replicated.database
    replicated.subscription = replace(replicated.subscription, disable_on_error=True)
    database.execute("create table prices (id int primary key, price numeric(8,2))")
    database.execute("create table notes (id int primary key, note text)")
    database.execute("insert into prices values (1, 'NaN')")
    database.execute("create publication p for table prices, notes")
    replicated.copy()
    state = SubscriptionRecord(replicated.lake, "sub").read_state()
    assert not state.enabled
    assert 'column "price"' in (state.reason or "")
    with pytest.raises(SubscriptionDisabledError):
        replicated.copy()
    with pytest.raises(SubscriptionDisabledError):
        replicated.increment()
    database.execute("update prices set price = 1")
    assert SubscriptionRecord(replicated.lake, "sub").enable()
    assert [(c.table, c.problem) for c in replicated.copy()] == [("prices", None)]
    replicated.increment()
    assert [row["id"] for row in replicated.rows("prices")] == [1]


def test_with_disable_on_error_very_many_changes_are_examined_and_applied_by_parts_of_the_keys(
    replicated: _Replicated, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, parted = replicated.database, LakeSettings(-1, thread_count=2, min_parted_changes=0)
    replicated.lake = Lake(replicated.lake.uri, no_session, parted)
    replicated.subscription = replace(replicated.subscription, disable_on_error=True)
    database.execute("create table prices (id int primary key, price int); create table notes (note text)")
    database.execute("alter table notes replica identity full")
    database.execute("insert into prices select i, i from generate_series(1, 5) i")
    database.execute("insert into notes select i % 3 from generate_series(1, 5) i")
    database.execute("create publication p for table prices, notes")
    replicated.copy()
    database.execute("insert into prices values (6, 6), (7, 7); update prices set id = 8 where id = 1")
    database.execute("delete from prices where id in (2, 7); update prices set price = -1 where id = 3")
    database.execute("update notes set note = 'changed' where note = '1'; delete from notes where note = '0'")
    with monkeypatch.context() as without_driver:
        without_driver.setattr(by_files, "make_keyed_changes", None)
        without_driver.setattr(by_files, "read_digests", None)
        replicated.increment()
    rows = sorted((row["id"], row["price"]) for row in replicated.rows("prices"))
    assert rows == [(3, -1), (4, 4), (5, 5), (6, 6), (8, 1)]
    assert sorted(str(row["note"]) for row in replicated.rows("notes")) == ["2", "2", "changed", "changed"]
    # The replica keeps a row that the publisher deletes meanwhile, so an INSERT of its key is a conflict.
    database.execute("alter publication p set (publish = 'insert, update'); delete from prices where id = 4")
    database.execute("insert into notes values ('before')")
    replicated.increment()
    with database.transaction():
        database.execute("insert into notes values ('with the conflict')")
        database.execute("insert into prices values (4, 44), (9, 9)")
    result = replicated.increment()
    assert result.tables["public", "prices"].insert_exists == 1
    assert not SubscriptionRecord(replicated.lake, "sub").read_state().enabled
    assert sorted((row["id"], row["price"]) for row in replicated.rows("prices")) == rows
    assert len(replicated.rows("notes")) == 5


def test_a_table_with_columns_that_delta_cannot_have_is_set_aside_and_the_others_are_copied(
    replicated: _Replicated,
) -> None:
    database = replicated.database
    database.execute("""create table cased (id int primary key, "Note" text, note text)""")
    database.execute("create table bare (); create table beside (id int primary key)")
    database.execute("insert into cased values (1, 'a', 'b'); insert into beside values (1)")
    database.execute("create publication p for table cased, bare, beside with (publish = 'insert')")
    problems = {copied.table: copied.problem for copied in replicated.copy()}
    assert problems["beside"] is None
    assert 'columns "Note" and "note" differ in case alone' in str(problems["cased"])
    assert "no column is published" in str(problems["bare"])
    states = {
        name[1]: state.state for name, state in TableStates(replicated.lake, "sub").read_newest().items()
    }
    assert states == {"cased": SyncState.SET_ASIDE, "bare": SyncState.SET_ASIDE, "beside": SyncState.READY}
