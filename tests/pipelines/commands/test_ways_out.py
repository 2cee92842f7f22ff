"""Every reason for which a table is set aside, or waits, names a way out. The tests follow each, and it works. No JVM."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import NOT_SMALL
from tests.fixtures.servers import TEST_SETTINGS, new_server
from tests.fixtures.shop import Shop, shop_on
from tests.fixtures.spark_servers import SMALL_DATA

pytestmark = pytest.mark.usefixtures("orchestrator")

#: Follows the way out of a reason. It gets the match of the reason's pattern.
Way: TypeAlias = Callable[["_Site", re.Match[str]], None]


@dataclass
class _Site:
    """The shop, and a publication of one table per trouble, some with row filters."""

    shop: Shop
    filters: dict[str, str]

    def publish(self, **filters: str) -> None:
        """Publish the tables with these row filters from now on. An empty one lets every row pass."""
        self.filters.update(filters)
        tables = [t.table + (f" where ({f})" if (f := self.filters.get(t.table)) else "") for t in TROUBLES]
        self.shop.database.execute(f"alter publication p set table orders, {', '.join(tables)}")

    def set_types(self, types: dict[str, str]) -> None:
        """Add `types` to those in pgsieve.yaml."""
        subscriptions = self.shop.written["subscriptions"]
        one = subscriptions["one"]
        merged = {**one.get("types", {}), **types}
        self.shop.configure(subscriptions={**subscriptions, "one": {**one, "types": merged}})

    def folder(self, table: str) -> Path:
        return Path(self.shop.lake.paths.replica("one", "public", table))

    def state(self, table: str) -> SyncState:
        return TableStates(self.shop.lake, "one").read_newest()["public", table].state

    def sql(self, statements: str) -> None:
        for statement in statements.split(";"):
            self.shop.database.execute(statement)


def _types_of_reason(site: _Site, reason: re.Match[str]) -> None:
    site.set_types(yaml.safe_load(reason["types"]))


def _nothing(_site: _Site, _reason: re.Match[str]) -> None:
    """Do nothing: the command alone is the way out."""


def _filtered(table: str, row_filter: str) -> Way:
    return lambda site, _: site.publish(**{table: row_filter})


def _done(statements: str) -> Way:
    return lambda site, _: site.sql(statements)


def _conflict(site: _Site) -> None:
    folder = site.folder("conflicting")
    (row,) = DeltaTable(folder).to_pyarrow_table().to_pylist()
    write_deltalake(
        folder,
        pa.Table.from_pylist([{**row, "id": 2}], DeltaTable(folder).to_pyarrow_table().schema),
        mode="append",
    )
    site.sql("insert into conflicting values (2, 5)")


def _put_back(site: _Site) -> None:
    DeltaTable(site.folder("restored")).delete()
    DeltaTable(site.folder("restored")).restore(0)


def _cut_off(site: _Site) -> None:
    (file,) = site.folder("torn").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:10])
    site.sql("update torn set n = 9")


def _constrained(site: _Site) -> None:
    DeltaTable(site.folder("bounded")).alter.add_constraint({"small": "id < 100"})
    site.sql("insert into bounded values (200, 1)")


@dataclass(frozen=True)
class _Trouble:
    """A table, its trouble after the copy, the reason, and the way out. Without a trouble it cannot be copied as it is."""

    table: str
    columns: str
    says: str
    way: Way
    rows: str = "(1, 1)"
    row_filter: str = ""
    trouble: Callable[[_Site], None] | str | None = None


_TYPES = r"set `types: (?P<types>\{.*?\})` in pgsieve.yaml for PostgreSQL's own text; `"
TROUBLES: Sequence[_Trouble] = (
    _Trouble("nan_copied", "id int primary key, n numeric(10,2)", _TYPES, _types_of_reason, "(1, 'NaN')"),
    _Trouble(
        "nan_sent",
        """id int primary key, "Price: it's" numeric(10,2)""",
        r"finished at [0-9A-F/]+; " + _TYPES,
        _types_of_reason,
        trouble="insert into nan_sent values (2, 'NaN')",
    ),
    _Trouble(
        "zero_copied",
        "id int primary key, n int",
        r'cannot read table "public\.zero_copied" where \(\(10 / id\) > 0\) \(division by zero\); alter the row filter, or correct the value',
        _filtered("zero_copied", "id <> 0"),
        "(0, 0)",
        "10 / id > 0",
    ),
    _Trouble(
        "zero_sent",
        "id int primary key, n int",
        r"row filter \(\(10 / id\) > 0\): division by zero \[22012\], .*; alter the row filter, or correct the row",
        _done("delete from zero_sent where id = 0"),
        row_filter="10 / id > 0",
        trouble="insert into zero_sent values (0, 0)",
    ),
    _Trouble(
        "bare", "", "no column is published.*; publish a column", _done("alter table bare add id int"), ""
    ),
    _Trouble(
        "cased",
        'id int primary key, "Note" int, note int',
        "differ in case alone.*; rename one, or",
        _done('alter table cased rename "Note" to other'),
        "(1, 1, 1)",
    ),
    _Trouble(
        "conflicting",
        "id int primary key, n int",
        "conflict=insert_exists",
        _nothing,
        trouble=_conflict,
    ),
    _Trouble(
        "vanished",
        "id int primary key, n int",
        "is gone; `",
        _nothing,
        trouble=lambda site: shutil.rmtree(site.folder("vanished")),
    ),
    _Trouble("restored", "id int primary key, n int", "was put back", _nothing, trouble=_put_back),
    _Trouble(
        "torn", "id int primary key, n int", "is not a complete Parquet file", _nothing, trouble=_cut_off
    ),
    _Trouble(
        "bounded", "id int primary key, n int", "failed validation check", _nothing, trouble=_constrained
    ),
    _Trouble(
        "beyond",
        "id int primary key, b text",
        "quote_ident.*; use row_filter: publisher; it is copied by the first run",
        _filtered("beyond", "id > 0"),
        "(1, 'x')",
        "quote_ident(b) = 'x' and id > 0",
    ),
)
#: A type whose values the server cannot print.
_MUTE = """
create type mute;
create function mute_in(cstring) returns mute language internal strict immutable as 'int4in';
create function mute_out(mute) returns cstring language internal strict stable as 'enum_out';
create function mute_send(mute) returns bytea language internal strict stable as 'int4send';
create type mute (input = mute_in, output = mute_out, send = mute_send, internallength = 4, passedbyvalue)
"""


@pytest.mark.drawn
def test_the_way_out_of_each_reason_restores_its_table(shop: Shop) -> None:
    """It takes half a minute: a separate command copies each table, and asks for every state."""
    site = _Site(shop, {t.table: t.row_filter for t in TROUBLES})
    shop.database.execute("drop publication p; create publication p")
    for each in TROUBLES:
        site.sql(f"create table {each.table} ({each.columns})")
        if each.rows:
            site.sql(f"insert into {each.table} values {each.rows}")
        site.sql(f"alter table {each.table} replica identity full")
    site.publish()
    code, printed = shop.cli("run", "one")
    assert code == 1, printed
    sent = {each.table: each.trouble for each in TROUBLES if each.trouble is not None}
    assert {site.state(table) for table in sent} == {SyncState.READY}, printed
    for trouble in sent.values():
        if isinstance(trouble, str):
            site.sql(trouble)
        elif trouble is not None:
            trouble(site)
    for number in (20, 21):
        site.sql(f"insert into orders values ({number}, 1)")
        code, printed = shop.cli("run", "one")
        assert code == 1, printed
        assert number in shop.ids("one", "orders"), "one table's trouble stops another table"
    for each in TROUBLES:
        (reason,) = re.findall(rf"^problem: public\.{each.table} is (.*)$", printed, re.MULTILINE)
        match = re.search(each.says, reason)
        assert match, (each.table, reason)
        each.way(site, match)
        commands = re.findall(r"`pgsieve (.*?)`", reason)
        for command in commands or ["run one"]:
            code, done = shop.cli(*shlex.split(command))
            assert site.state(each.table) == SyncState.READY, (each.table, reason, done)
    for command in ("run", "check"):
        code, printed = shop.cli(command)
        assert code == 0, printed


@pytest.mark.drawn
def test_the_way_out_of_a_subscriptions_reason_restores_its_tables(shop: Shop, tmp_path: Path) -> None:
    """It takes long: a dozen commands for layouts, modes, versions of rows, and values that the server cannot print."""
    shop.database.execute("""
    create schema a; create table a.same (id int primary key); create schema b; create table b.same (id int primary key);
    create publication flat for table a.same, b.same, notes;
    create table spelled (id int primary key, b text); alter table spelled replica identity full;
    insert into spelled values (1, 'x'), (2, 'y');
    create publication filtered for table spelled where (quote_ident(b) = 'x'), notes""")
    shop.database.execute(f"""{_MUTE};
    create table copied (id int primary key, m mute); insert into copied values (1, '1');
    create table sent (id int primary key, m mute); create publication printed for table copied, sent""")
    subscriptions: dict[str, dict[str, Any]] = {
        "flat": {"layout": {"folders": "{table}"}, "publications": ["flat"]},
        "filtered": {"publications": ["filtered"]},
        "versions": {"history": "scd2", "publications": ["p"]},
        "printed": {"publications": ["printed"]},
    }

    def configured(name: str, **changes: Any) -> None:
        subscriptions[name].update(changes)
        shop.configure(subscriptions={n: {"source": "shop", **s} for n, s in subscriptions.items()})

    def states(subscription: str) -> dict[str, str]:
        newest = TableStates(shop.lake, subscription).read_newest().values()
        return {f"{s.schema}.{s.table}": s.state.value for s in newest}

    configured("flat")
    code, printed = shop.cli("run")
    assert code == 1, printed
    assert states("flat") == {"a.same": "i", "b.same": "i", "public.notes": "r"}
    assert states("filtered") == {"public.spelled": "i", "public.notes": "r"}
    assert states("versions") == {"public.orders": "r", "public.notes": "r"}
    assert "rename one of them, or take it out of the publications" in printed
    assert "or change `folders` in pgsieve.yaml after `pgsieve drop flat`" in printed
    assert "use row_filter: publisher; it is copied by the first run after that is mended" in printed
    assert states("printed") == {"public.copied": "e", "public.sent": "r"}
    assert "correct the value at the publisher, or leave its column out by a column list; `pgsieve" in printed
    versions = Path(shop.lake.paths.row_versions("versions", "public", "orders", 0))
    for file in versions.glob("*.parquet"):
        file.write_bytes(file.read_bytes()[:10])
    shop.database.execute("update orders set n = 20 where id = 2; alter table b.same rename to other")
    shop.database.execute("insert into sent values (1, '1')")  # the column is sent in binary format
    code, printed = shop.cli("run")
    assert code == 1, printed
    assert states("flat") == {"a.same": "r", "b.other": "r", "public.notes": "r", "b.same": "x"}
    assert states("filtered") == {"public.spelled": "i", "public.notes": "r"}
    assert states("versions") == {"public.orders": "e", "public.notes": "r"}
    assert "is not a complete Parquet file; move its folder elsewhere: " in printed
    assert states("printed") == {"public.copied": "e", "public.sent": "e"}
    assert "fell back to binary format, because the server cannot print the value as text: correct" in printed
    # A copy makes other files anew, not those of earlier versions, and says so.
    code, printed = shop.cli("resync", "versions", "public.orders")
    assert (code, states("versions")) == (1, {"public.orders": "e", "public.notes": "r"}), printed
    assert "a copy of the table begins a new one; `pgsieve resync versions public.orders`" in printed
    versions.rename(tmp_path / "damaged")
    shop.database.execute("delete from copied; delete from sent")
    for command in ("resync versions public.orders", "resync printed"):
        code, printed = shop.cli(*command.split())
        assert code == 0, printed
    shop.database.execute("update orders set n = 30 where id = 2")
    configured("filtered", row_filter="publisher")
    assert shop.cli("drop", "flat")[0] == 0
    configured("flat", layout={"folders": "{schema}_{table}"})
    for command in ("run", "check"):
        code, printed = shop.cli(command)
        assert code == 0, printed
    assert {state for each in subscriptions for state in states(each).values()} <= {"r", "x"}
    rows = DeltaTable(versions).to_pyarrow_table(columns=["id", "n", "is_current"]).to_pylist()
    assert sorted((r["n"], r["is_current"]) for r in rows if r["id"] == 2) == [(20, False), (30, True)]


def _reason(printed: str, table: str) -> str:
    """What a run says of a table."""
    (reason,) = re.findall(rf"^problem: public\.{table} is (.*)$", printed, re.MULTILINE)
    return reason


@pytest.mark.drawn
def test_a_replica_of_another_cluster_makes_room_as_the_reason_says(
    publisher_server: EmbeddedServer, postgres_version: int, shop: Shop, tmp_path: Path
) -> None:
    """The subscription was dropped and its tables were left; the source is another cluster now, whose WAL is shorter."""
    del publisher_server, shop.written["subscriptions"]["two"]
    shop.configure()
    (tmp_path / "other").mkdir()
    with new_server(postgres_version, TEST_SETTINGS) as server, shop_on(server, tmp_path / "other") as other:
        lsn = "select pg_current_wal_insert_lsn() - '0/0'"

        def is_behind() -> bool:
            (here,), (there,) = (each.database.execute(lsn).fetchone() for each in (shop, other))
            return bool(here < there + 100_000_000)

        while is_behind():
            shop.database.execute("create table if not exists filler (i int)")
            shop.database.execute("insert into filler values (1)")
            shop.database.execute("select pg_switch_wal()")
        for command in ("run", "drop one"):
            assert shop.cli(*command.split())[0] == 0
        shop.configure(sources=other.written["sources"])
        code, printed = shop.cli("run")
        assert code == 2, printed
        assert (
            "replicate it into another `lake`, or begin from scratch: `pgsieve drop one --leave-slot"
            in printed
        )
        shop.configure(lake="./elsewhere")
        code, printed = shop.cli("run")
        assert (code, shop.ids("one", "orders")) == (0, [2, 3, 4]), printed
        assert shop.cli("drop", "one")[0] == 0
        # Without the claim it is the replicas that say so.
        shop.configure(lake="./lake")
        shutil.rmtree(Path(shop.lake.uri) / "_pgsieve")
        code, printed = shop.cli("run")
        assert code == 1, printed
        says = r"its replica holds changes up to [0-9A-F/]+, but the publisher is only at [0-9A-F/]+; replicate another"
        assert re.search(says, _reason(printed, "orders")), printed
        for command in ("drop one --delete-tables", "run", "check"):
            code, printed = shop.cli(*command.split())
            assert code == 0, printed
        assert shop.ids("one", "orders") == [2, 3, 4]


@pytest.mark.drawn
def test_a_row_filter_of_a_generated_column_is_evaluated_as_the_reason_says(tmp_path: Path) -> None:
    """Before PostgreSQL 18 old rows come without such a column, though it may be the replica identity."""
    tables = ("full_rows", "inserted")
    with new_server(16, TEST_SETTINGS) as server, shop_on(server, tmp_path) as shop:
        for table in tables:
            shop.database.execute(
                f"create table {table} (a int, g int generated always as (a * 2) stored primary key)"
            )
            shop.database.execute(f"insert into {table} values (1), (-1)")
            shop.database.execute(f"create publication {table} for table {table} where (g > 0)")
        shop.configure(subscriptions={"one": {"source": "shop", "publications": list(tables)}})
        code, printed = shop.cli("run")
        assert code == 1, printed
        for table in tables:
            reason = _reason(printed, table)
            assert (
                "use REPLICA IDENTITY FULL, or publish only inserts; it is copied by the first run" in reason
            )
        shop.database.execute("alter table full_rows replica identity full")
        shop.database.execute("alter publication inserted set (publish = 'insert')")
        code, printed = shop.cli("run")
        assert code == 0, printed
        shop.database.execute("update full_rows set a = a * 10")
        for table in tables:
            shop.database.execute(f"insert into {table} values (7), (-7)")
        for command in ("run", "check"):
            code, printed = shop.cli(command)
            assert code == 0, printed
        assert shop.ids("one", "full_rows", "a") == [7, 10]
        assert shop.ids("one", "inserted", "a") == [1, 7]


@pytest.mark.long
@pytest.mark.spark
def test_a_column_of_a_name_that_a_merge_of_delta_uses_is_renamed_as_the_reason_says(shop: Shop) -> None:
    """Only a MERGE by Spark has such names, as of a replica with the user's constraint: one Spark for each of five commands."""
    shop.database.execute(
        "create table marked (id int, _row_dropped_ int); alter table marked replica identity full"
    )
    shop.database.execute("insert into marked values (1, 1), (2, 2); alter publication p add table marked")
    shop.configure(spark={"conf": {**SMALL_DATA, **NOT_SMALL}})
    code, printed = shop.cli("run", "one")
    assert code == 0, printed
    shop.table("one", "marked").alter.add_constraint({"positive": "id > 0"})
    shop.database.execute("delete from marked where id = 2; insert into marked values (3, 3)")
    code, printed = shop.cli("run", "one")
    assert code == 1, printed
    reason = _reason(printed, "marked")
    assert (
        "rename the column, or publish a column list without it; `pgsieve resync one public.marked`" in reason
    )
    shop.database.execute("alter table marked rename _row_dropped_ to dropped")
    code, printed = shop.cli("resync", "one", "public.marked")
    assert code == 0, printed
    shop.database.execute("delete from marked where id = 1; insert into marked values (4, 4)")
    for command in ("run", "check"):
        code, printed = shop.cli(command, "one")
        assert code == 0, printed
    assert shop.ids("one", "marked") == [3, 4]
