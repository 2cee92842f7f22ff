"""`pgsieve run` without Java: few changes of any kind need none."""

from __future__ import annotations

import json
import os
import signal

import polars as pl
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError

from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.resources.failpoints import VARIABLE, Failpoint
from tests.fixtures import commands
from tests.fixtures.s3_server import S3Server
from tests.fixtures.shop import Shop

pytestmark = pytest.mark.slow


def run_without_java(shop: Shop, *arguments: str) -> str:
    """Run a command, by default `run`, as a process without Java. Return its output."""
    environment = {**os.environ, "JAVA_HOME": "/none"}
    done = commands.run("-c", str(shop.path), *(arguments or ["run"]), environment=environment)
    expected_code = 1 if "--repair" in arguments else 0  # A repair says so by its exit code.
    assert done.returncode == expected_code, done.stdout + done.stderr
    return done.stdout


def test_a_run_with_few_changes_needs_no_java(shop: Shop) -> None:
    """It takes long: two commands, each a process."""
    shop.database.execute("create table log (id int, n int)")
    shop.database.execute("alter table log replica identity full")
    shop.database.execute("insert into log values (1, 1), (1, 1), (2, 2)")
    shop.database.execute("alter publication p add table log")
    run_without_java(shop)
    assert shop.ids("one", "orders") == [2, 3, 4]
    for changes in (
        "insert into orders values (5, 5), (6, 6); update orders set id = 7 where id = 5",
        "update orders set id = 0 where id = 6; update orders set id = 8 where id = 1; delete from orders where id = 4",
        "update notes set id = id + 10 where id < 3; delete from notes where id = 3",
        "truncate stock; insert into stock values (9, 9)",
        "delete from log where ctid = '(0,1)'; update log set id = 3 where id = 2; insert into log values (4, 4)",
    ):
        shop.database.execute(changes)
    run_without_java(shop)
    assert shop.ids("one", "orders") == [2, 3, 7, 8]
    assert shop.ids("one", "notes") == [4, 11, 12]
    assert shop.ids("one", "log") == [1, 3, 4]
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 9]


@pytest.mark.parametrize("small_bytes", [8 * 1024 * 1024, -1])
def test_altered_columns_need_no_java(shop: Shop, small_bytes: int) -> None:
    """It takes long: five commands, each a process."""
    execute, conf = shop.database.execute, {"spark.pgsieve.smallBytes": str(small_bytes)}
    shop.configure(spark={"master": "threads[2]", "conf": conf})
    execute("create table places (id int primary key, a int, b int); insert into places values (1, 2, 3)")
    execute("alter publication p add table places")
    run_without_java(shop)
    for statements in (
        # The replica is rewritten.
        "alter table places add d int default 4, drop a; insert into places values (2, 3, 4)",
        "alter table places rename d to a; update places set b = 5 where id = 1",
        # It is copied, with the columns in another order. The slice of the first of these alterations has no changes.
        "alter table places rename a to c; alter table places rename b to a; alter table places rename c to b",
        "alter table places drop a, add a int default 6; insert into places values (7, 8, 9)",
    ):
        execute(statements)
        run_without_java(shop)
        rows, cursor = shop.table("one", "places").to_pyarrow_table(), execute("select * from places")
        assert rows.column_names == [column.name for column in cursor.description or ()], statements
        assert sorted(tuple(row.values()) for row in rows.to_pylist()) == sorted(cursor), statements


def test_a_small_copy_needs_no_java_if_its_rows_cannot_pass_through_delta_rs(shop: Shop) -> None:
    """A column has a name that delta-rs reserves, so the copy is written as files."""
    shop.database.execute('create table reserved (id int primary key, "__delta_rs_a" int)')
    shop.database.execute(
        "insert into reserved values (1, 1), (2, null); alter publication p add table reserved"
    )
    run_without_java(shop, "run", "one")
    assert shop.ids("one", "reserved") == [1, 2]


@pytest.mark.parametrize("small_bytes", [8 * 1024 * 1024, -1])
def test_a_repair_needs_no_java(shop: Shop, small_bytes: int) -> None:
    """It takes long: four commands, each a process."""
    shop.configure(spark={"master": "threads[2]", "conf": {"spark.pgsieve.smallBytes": str(small_bytes)}})
    shop.database.execute("create table log (id int, n int); alter table log replica identity full")
    shop.database.execute("insert into log values (1, 1), (1, 1), (2, 2); alter publication p add table log")
    run_without_java(shop)
    shop.table("one", "notes").update({"n": "-1"}, predicate="id = 1")
    shop.table("one", "orders").delete("id = 2")
    shop.table("one", "log").update({"n": "0"}, predicate="id = 1")
    run_without_java(shop, "check", "--repair")
    assert shop.ids("one", "orders") == [2, 3, 4]
    rows = shop.table("one", "log").to_pyarrow_table().to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [(1, 1), (1, 1), (2, 2)]
    run_without_java(shop, "check")


@pytest.mark.drawn
def test_no_change_of_a_larger_replica_needs_java(shop: Shop) -> None:
    """It takes long: nine commands, each a process."""
    shop.database.execute("create table large (id int primary key, f float8, note text, doc text)")
    shop.database.execute("alter table large alter doc set storage external")
    shop.database.execute(
        "insert into large select i, i, md5(i::text), repeat(i::text, 600) from generate_series(1, 5000) i"
    )
    shop.database.execute("create table rates (rate float8, day int[], n int, primary key (rate, day))")
    shop.database.execute("insert into rates select i, array[i, null], i from generate_series(0, 2000) i")
    shop.database.execute("alter publication p add table large, rates")
    # Every write counts as large.
    shop.configure(spark={"master": "threads[2]", "conf": {"spark.pgsieve.smallBytes": -1}})
    run_without_java(shop)
    for changes in (
        "update large set note = 'new' where id = 7; delete from large where id = 8",
        "update large set id = id + 30000 where id % 7 = 0; update large set note = 'unsent' where id % 5 = 0",
        (
            "update rates set n = -n where rate < 100; update rates set rate = '-0' where rate = 0;"
            " delete from rates where rate = 2000"
        ),
        (
            "begin; truncate large; insert into large values (1, 'nan', 'again', 'doc'), (2, 1, 'other', null);"
            " update large set id = 3 where id = 2; commit"
        ),
    ):
        shop.database.execute(changes)
        run_without_java(shop)
        run_without_java(shop, "check")


@pytest.mark.drawn
@pytest.mark.parametrize("place", ["folder", pytest.param("s3", marks=pytest.mark.long)])
def test_rows_of_a_large_replica_are_marked_and_checked_without_java(
    request: pytest.FixtureRequest, shop: Shop, place: str
) -> None:
    """It takes long: four commands, each a process."""
    if place == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        shop.configure(lake=request.getfixturevalue("s3_folder"), storage=dict(server.storage))
    run_without_java(shop)
    # Treat the replica as large.
    shop.configure(
        spark={
            "master": "threads[2]",
            "conf": {"spark.pgsieve.smallBytes": "-1", "spark.pgsieve.rewrittenBytes": "-1"},
        }
    )
    shop.database.execute("update orders set n = 12 where id in (2, 4)")
    run_without_java(shop)
    shop.database.execute("delete from orders where id = 3; insert into orders values (9, 9)")
    run_without_java(shop)
    lake = shop.lake
    path = lake.paths.replica("one", "public", "orders")
    assert any(name.startswith("deletion_vector_") for name in lake.store.list_file_names(path))
    rows = lake.records.rows(path)
    assert sorted((row["id"], row["n"]) for row in rows) == [(2, 12), (4, 12), (9, 9)]
    shop.configure(spark={})
    run_without_java(shop, "check")
    if place == "folder":
        # What docs/reading.md says about deletion vectors.
        assert sorted(pl.scan_delta(path).collect()["id"]) == [2, 4, 9]
        with pytest.raises(DeltaProtocolError, match="deletionVectors"):
            DeltaTable(path).to_pyarrow_dataset()


@pytest.mark.drawn
@pytest.mark.parametrize("summary", ["present", "of an earlier version"])
def test_many_tables_with_few_changes_each_need_no_java(
    shop: Shop, summary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long: four commands, each a process. Together the tables have more changes than the small limit."""
    shop.configure(spark={"engine": "off", "conf": {"spark.pgsieve.smallBytes": "20000"}})
    shop.written["subscriptions"]["one"]["disable_on_error"] = True
    tables = [f"few_{number}" for number in range(12)]
    for table in tables:
        shop.database.execute(f"create table {table} (id int primary key, note text)")
        shop.database.execute(f"alter publication p add table {table}")
    shop.configure()
    run_without_java(shop)
    for table in tables:
        rows = "select i, repeat('x', 100) from generate_series(1, 40) i"
        shop.database.execute(f"insert into {table} {rows}")
    shop.database.execute("truncate notes")
    if summary == "of an earlier version":
        # The run appends the slice, and stops. Then the summary becomes that of a version that counted no bytes.
        monkeypatch.setenv(VARIABLE, Failpoint.SLICE_SUMMARIZED)
        killed = commands.run("-c", str(shop.path), "run", "one")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        monkeypatch.delenv(VARIABLE)
        DeltaTable(shop.lake.paths.slices("shop")).update(updates={"relation_bytes": "null"})
    (one,) = json.loads(run_without_java(shop, "run", "one", "--json"))["subscriptions"]
    assert one["spent"]["engine"] == "driver"
    for table in tables:
        assert len(shop.ids("one", table)) == 40
    assert shop.ids("one", "notes") == []
    for changes in TransformedSlices(shop.lake, "one").read_slices(0).values():
        assert all(change.size < 20_000 for change in changes)


@pytest.mark.drawn
def test_the_changes_of_a_table_decide_on_its_runner_and_not_the_slice(shop: Shop) -> None:
    """It takes long: three commands, each a process. If a row filter rejects most of many changes, the apply has few."""
    shop.configure(spark={"engine": "off", "conf": {"spark.pgsieve.smallBytes": "40000"}})
    shop.database.execute("create table bulk (id int primary key, n int, note text)")
    shop.database.execute("alter publication q add table bulk where (id <= 20)")
    run_without_java(shop)
    # Both subscriptions share one slice; most of its changes belong to the other one.
    shop.database.execute("insert into bulk select i, i, repeat('x', 100) from generate_series(1, 2000) i")
    shop.database.execute("insert into orders values (5, 5); update orders set n = 7 where id = 2")
    run_without_java(shop, "run", "one", "--json")
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    shop.database.execute("insert into stock values (9, 9)")
    shop.configure(spark={"master": "threads[2]", "conf": {"spark.pgsieve.smallBytes": "40000"}})
    (two,) = json.loads(run_without_java(shop, "run", "two", "--json"))["subscriptions"]
    # This process applies the small table; threads decode the messages of the large one.
    assert two["spent"]["engine"] == "driver + threads"
    assert two["spent"]["tasks"] > 0
    assert two["spent"]["bytes"] > 0
    assert shop.ids("two", "stock")[-1] == 9
    assert len(shop.ids("two", "bulk")) == 20
    (bulk,) = (
        c for s in TransformedSlices(shop.lake, "two").read_slices(0).values() for c in s if c.table == "bulk"
    )
    assert (bulk.received_counts_by_operation["insert"], bulk.sent_counts["insert"]) == (2000, 20)
    assert 20 * 100 < bulk.size < 20 * 1000
