"""A table waits whose capture publication pgsieve may not alter. The others go on; once its owner has acted, it is copied."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Quiet, Shop, built_in_subscription


@pytest.fixture
def reader(shop: Shop) -> Iterator[Shop]:
    """A shop that a role reads which owns nothing. The capture publications are made by the owner of the tables."""
    conninfo = shop.written["sources"]["shop"]["conninfo"]
    role = f"reader_of_{conninfo_to_dict(conninfo)['dbname']}"
    shop.database.execute(f"create role {role} login replication")
    shop.database.execute(f"alter default privileges in schema public grant select on tables to {role}")
    shop.database.execute(f"grant select on all tables in schema public to {role}")
    source = {**shop.written["sources"]["shop"], "conninfo": make_conninfo(conninfo, user=role)}
    shop.configure(sources={"shop": source})
    yield shop
    shop.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    shop.database.execute(f"drop owned by {role}; drop role {role}")


@pytest.fixture
def subscriber(reader: Shop, subscriber_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    """A database with a built-in subscription to publication q, by the same role."""
    with built_in_subscription(reader, subscriber_server, "q", ("stock", "added")) as connection:
        yield connection


def _capture(shop: Shop, *, drops: bool = True) -> None:
    """Let the owner run the SQL that `pgsieve validate` prints, perhaps without the statements that drop a table."""
    for statement in validate(load_config(shop.path)).statements:
        if drops or " drop table " not in statement.lower():
            shop.database.execute(statement)


def _state(shop: Shop, subscription: str, table: str) -> TableState:
    return TableStates(shop.lake, subscription).read_newest()["public", table]


def _sql(shop: Shop, subscription: str, table: str) -> str:
    """The SQL for the owner, from the reason for which a table waits."""
    state = _state(shop, subscription, table)
    assert state.state == SyncState.INITIALIZE
    reason = rf"the slot does not send the changes of table public\.{table}: pgsieve may not alter its capture publications"
    pattern = f"{reason}; have their owner run: (.*); it is copied by the first run after that is mended"
    match = re.fullmatch(pattern, state.reason or "")
    assert match is not None, state.reason
    return match[1]


def test_a_table_waits_for_the_owner_and_no_other_does(reader: Shop, subscriber: psycopg.Connection) -> None:
    """The rows are those of a built-in subscription. A run without Dagster's would take as long."""
    _capture(reader)
    reader.run_command(0)
    execute = reader.database.execute
    execute("create table added (id int primary key, n int); insert into added values (1, 1)")
    execute("alter publication q add table added")
    subscriber.execute("alter subscription builtin refresh publication")
    for number in (10, 11):
        for table in ("orders", "notes", "stock", "added"):
            execute(f"insert into {table} values ({number}, 0)")
        output = reader.run_command(1)
        assert _sql(reader, "two", "added") in output
        assert [reader.ids("one", table)[-1] for table in ("orders", "notes")] == [number, number]
        assert reader.ids("two", "stock")[-1] == number
    # A copy by name waits, too.
    assert reader.cli("resync", "two", "public.added")[0] == 1
    sql = _sql(reader, "two", "added")
    execute("insert into added values (12, 0)")
    execute(sql)
    execute("insert into added values (13, 0); insert into stock values (13, 0)")
    reader.run_command(0)
    execute("insert into added values (14, 0)")
    reader.run_command(0)
    for table in ("stock", "added"):
        rows = execute(f"select id, n from {table} order by id").fetchall()
        wait_until(
            lambda table=table, rows=rows: (
                subscriber.execute(f"select id, n from {table} order by id").fetchall() == rows
            ),
            lambda table=table: f"the built-in subscription lacks rows of {table}",
        )
        assert reader.pairs("two", table) == rows


def test_a_ready_table_waits_before_the_slot_lacks_its_changes(reader: Shop) -> None:
    """The run that finds it dies after it has read the slot. The owner acts before the next one."""
    _capture(reader)
    reader.run_command(0)
    execute = reader.database.execute
    execute("alter publication q set (publish = 'insert, update')")
    project = build_project(load_config(reader.path))
    (stream,) = project.slot_streams.values()
    drain_slot(stream, project.lake.open(), (), lambda _: None)
    execute("update stock set n = 7 where id = 1; update notes set n = 7 where id = 1")
    drain_slot(stream, project.lake.open(), (), lambda _: None)
    execute(_sql(reader, "two", "stock"))
    execute("update stock set n = 8 where id = 2")
    reader.run_command(0)
    execute("update stock set n = 9 where id = 3")
    reader.run_command(0)
    assert reader.pairs("two", "stock") == [(1, 7), (2, 8), (3, 9), (4, 4)]
    assert reader.pairs("one", "notes") == [(1, 7), (2, 2), (3, 3), (4, 4)]


def test_a_root_goes_on_while_its_leaf_waits_for_another_subscription(reader: Shop) -> None:
    """The tree was captured as its root. For the subscription to a leaf it has to be captured as its leaves."""
    execute = reader.database.execute
    execute("create table tree (id int primary key, n int) partition by range (id)")
    execute("create table low partition of tree for values from (0) to (100)")
    execute("create table high partition of tree for values from (100) to (200)")
    execute("create publication r for table tree with (publish_via_partition_root)")
    execute("create publication l for table low, stock")
    subscriptions = {"root": {"source": "shop", "publications": ["r"]}}
    reader.configure(subscriptions=subscriptions)
    _capture(reader)
    execute("insert into tree values (1, 1), (101, 1)")
    reader.run_command(0)
    # None of the tables of the new subscription is captured.
    reader.configure(subscriptions=subscriptions | {"leaf": {"source": "shop", "publications": ["l"]}})
    execute("insert into tree values (2, 1), (102, 1)")
    reader.run_command(1)
    execute("insert into tree values (3, 1), (103, 1); update tree set n = 2 where id = 1")
    reader.run_command(1)
    assert reader.pairs("root", "tree") == [(1, 2), (2, 1), (3, 1), (101, 1), (102, 1), (103, 1)]
    assert _state(reader, "root", "tree").state == SyncState.READY
    # One statement creates the publication that lacks both tables. The root leaves the other one.
    assert _sql(reader, "leaf", "low").startswith(_sql(reader, "leaf", "stock"))
    execute(_sql(reader, "leaf", "low"))
    execute("insert into tree values (4, 1); insert into stock values (5, 5)")
    reader.run_command(0)
    execute("update tree set n = 3 where id in (1, 103)")
    reader.run_command(0)
    assert reader.pairs("root", "tree") == [(1, 3), (2, 1), (3, 1), (4, 1), (101, 1), (102, 1), (103, 3)]
    assert reader.pairs("leaf", "low") == [(1, 3), (2, 1), (3, 1), (4, 1)]
    assert reader.ids("leaf", "stock") == [1, 2, 3, 4, 5]


def test_a_table_of_a_publication_in_the_configuration_waits(reader: Shop) -> None:
    """The publisher cannot decide for such a publication. It takes long: five runs of three subscriptions."""
    source = reader.written["sources"]["shop"]
    reader.configure(
        sources={"shop": {**source, "publications": {"own": {"tables": [{"table": "public.stock"}]}}}},
        subscriptions={
            **reader.written["subscriptions"],
            "three": {"source": "shop", "publications": ["own"]},
        },
    )
    _capture(reader)
    reader.run_command(0)
    reader.configure(
        sources={
            "shop": {
                **source,
                "publications": {
                    "own": {"tables": [{"table": "public.stock"}, {"table": "public.notes_two"}]}
                },
            }
        }
    )
    reader.database.execute(
        "create table notes_two (id int primary key, n int); insert into notes_two values (1, 1)"
    )
    reader.run_command(1)
    reader.database.execute("insert into notes_two values (2, 2); insert into stock values (5, 5)")
    reader.run_command(1)
    assert reader.ids("three", "stock") == reader.ids("two", "stock") == [1, 2, 3, 4, 5]
    reader.database.execute(_sql(reader, "three", "notes_two"))
    reader.database.execute("insert into notes_two values (3, 3)")
    reader.run_command(0)
    reader.database.execute("update notes_two set n = 9")
    reader.run_command(0)
    assert reader.pairs("three", "notes_two") == [(1, 9), (2, 9), (3, 9)]


def test_a_follower_goes_on_and_copies_the_table_when_the_owner_has_acted(reader: Shop) -> None:
    """It takes long: after each change of a publication, the follower ends its stream and begins again."""
    _capture(reader)
    reader.run_command(0)
    execute = reader.database.execute
    execute("create table added (id int primary key, n int); insert into added values (1, 1)")
    steps = iter(
        (
            lambda: execute("alter publication q add table added; insert into stock values (5, 5)"),
            lambda: execute("insert into added values (2, 2); insert into stock values (6, 6)"),
            lambda: execute(_sql(reader, "two", "added")),
            lambda: execute("insert into added values (3, 3); insert into stock values (7, 7)"),
        )
    )
    config = load_config(reader.path)
    problems: list[str] = []

    def tell(summary: RunSummary) -> None:
        problems.extend(problem for each in summary.subscriptions for problem in each.problems)
        state = _state(reader, "two", "added").state
        if state == SyncState.READY and reader.ids("two", "stock")[-1] == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        elif (step := next(steps, None)) is not None:
            step()

    late = threading.Timer(60, os.kill, [os.getpid(), signal.SIGTERM])
    late.start()
    try:
        next(steps)()
        assert follow(config, config.select([]), Quiet(), tell) == ()
    finally:
        late.cancel()
    assert any("have their owner run" in problem for problem in problems)
    reader.run_command(0)
    assert reader.pairs("two", "added") == [(1, 1), (2, 2), (3, 3)]
    assert reader.ids("two", "stock") == [1, 2, 3, 4, 5, 6, 7]


def test_without_any_capture_publication_nothing_is_read(reader: Shop) -> None:
    output = reader.run_command(2)
    assert "cannot prepare the capture publication" in output
    assert "permission denied for database" in output


def test_a_table_of_another_owner_stops_no_table_of_the_roles_own(reader: Shop) -> None:
    """The role owns the capture publications, but ALTER PUBLICATION needs the owner of each table, too."""
    name = reader.written["sources"]["shop"]["slot"]
    role, execute = f"reader_of_{name}", reader.database.execute
    execute(f"grant create on database {name} to {role}")
    execute("create table a (id int primary key); create table b (id int primary key)")
    for table in ("orders", "notes", "stock", "b"):
        execute(f"alter table {table} owner to {role}")
    reader.run_command(0)
    execute("alter publication q add table a, b")
    execute("insert into a values (1); insert into b values (1); insert into stock values (5, 5)")
    reader.run_command(1)
    assert (reader.ids("two", "b"), reader.ids("two", "stock")) == ([1], [1, 2, 3, 4, 5])
    assert _sql(reader, "two", "a") == f'alter publication "{name}_i" add table only "public"."a"'
    execute(_sql(reader, "two", "a"))
    reader.run_command(0)
    assert reader.ids("two", "a") == [1]


@pytest.mark.parametrize(("first", "drops"), [("root", True), ("root", False), ("leaf", True)])
def test_a_root_and_its_leaf_have_all_rows_whichever_is_captured_first(
    reader: Shop, first: str, *, drops: bool
) -> None:
    """The owner runs the SQL that `validate` prints. Without the statement that drops the root, the leaf has to wait."""
    execute = reader.database.execute
    execute("create table tree (id int primary key, n int) partition by range (id)")
    execute("create table low partition of tree for values from (0) to (100)")
    execute("create table high partition of tree for values from (100) to (200)")
    execute("create publication r for table tree with (publish_via_partition_root)")
    execute("create publication l for table low")
    every = {
        "root": {"source": "shop", "publications": ["r"]},
        "leaf": {"source": "shop", "publications": ["l"]},
    }
    execute("insert into tree values (1, 1), (101, 1)")
    reader.configure(subscriptions={first: every[first]})
    _capture(reader)
    reader.run_command(0)
    reader.configure(subscriptions=every)
    _capture(reader, drops=drops)
    rows = [(1, 1), (101, 1)]
    for number in (2, 3):
        execute(f"insert into tree values ({number}, {number}), ({number + 100}, {number})")
        rows += [(number, number), (number + 100, number)]
        code, _ = reader.cli("run")
        present = {
            name: reader.pairs(name, table)
            for name, table in (("root", "tree"), ("leaf", "low"))
            if _state(reader, name, table).state == SyncState.READY
        }
        assert present.get("root", sorted(rows)) == sorted(rows)
        assert present.get("leaf", []) in ([row for row in sorted(rows) if row[0] < 100], [])
        assert code == (0 if len(present) == 2 else 1)
    if not drops:
        execute(_sql(reader, "leaf", "low"))
    execute("insert into tree values (4, 4); update tree set n = 9 where id in (1, 101)")
    reader.run_command(0)
    execute("delete from tree where id = 2")
    reader.run_command(0)
    assert reader.pairs("root", "tree") == [(1, 9), (3, 3), (4, 4), (101, 9), (102, 2), (103, 3)]
    assert reader.pairs("leaf", "low") == [(1, 9), (3, 3), (4, 4)]
