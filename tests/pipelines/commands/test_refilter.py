"""`pgsieve refilter` builds replicas from other replicas if these certainly have the rows; it reads no row of the publisher. No JVM."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from typer.testing import CliRunner

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations import refilter as refiltering
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.slot import forget_copies
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.pipelines.command_line import cli
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.servers import drop_slots, own_database

pytestmark = pytest.mark.slow

_numbers = itertools.count(1)
WIDE = {"tables": [{"table": "public.orders"}, {"table": "public.notes"}]}


def _quiet(_: str) -> None:
    pass


@dataclass
class Views:
    """A source with a whole subscription `all`, and subscriptions that are defined later. Its role has lost the right to read rows."""

    database: psycopg.Connection
    path: Path
    written: dict[str, Any]
    layouts: dict[str, Any] = field(default_factory=dict)

    def define(self, **where: Mapping[str, Any]) -> None:
        """Define publications in pgsieve.yaml, with a subscription each."""
        self.written["sources"]["shop"]["publications"] = {"all": WIDE, **where}
        self.written["subscriptions"] = {
            name: {"source": "shop", "publications": [name], "layout": self.layouts.get(name, {})}
            for name in ("all", *where)
        }
        self.path.write_text(yaml.safe_dump(self.written))

    def lay_out(self, name: str, **layout: Any) -> None:
        self.written["subscriptions"][name]["layout"] = layout
        self.path.write_text(yaml.safe_dump(self.written))

    def run(self, name: str) -> None:
        project = build_project(load_config(self.path))
        subscription, lake = project.subscriptions[name], project.lake.open()
        copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), _quiet)
        drain_slot(subscription.slot_stream, lake, [subscription], _quiet)
        transform(subscription, lake, _quiet)
        apply(subscription, lake, _quiet)

    def refilter(self, *arguments: str, code: int = 0) -> dict[str, tuple[str | None, str | None]]:
        """By table, the replica that it is built from, or the reason why not."""
        report = self.report(*arguments, code=code)
        return {table["name"]: (table["source"], table["reason"]) for table in report["tables"]}

    def report(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """What `refilter` reports as JSON."""
        command = ["-c", str(self.path), "refilter", *arguments, "--json"]
        done = CliRunner().invoke(cli.app, command, prog_name="pgsieve")
        assert done.exit_code == code, done.stdout + done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def present_lsn(self) -> int:
        """The LSN at which the publisher's WAL ends, as far as it is flushed."""
        ((lsn,),) = self.database.execute("select pg_current_wal_flush_lsn()::text").fetchall()
        return parse_lsn(lsn)

    def validated(self, name: str) -> tuple[dict[str, str | None], str | None]:
        """By table, the subscription that it can be built from, and the earliest moment that can be read, according to `validate`."""
        done = CliRunner().invoke(cli.app, ["-c", str(self.path), "validate", "--json"])
        received = next(s for s in json.loads(done.stdout)["subscriptions"] if s["subscription"] == name)
        return {table["name"]: table["refilter_from"] for table in received["tables"]}, received[
            "oldest_moment"
        ]

    def rows(self, name: str, table: str = "orders") -> list[tuple[Any, ...]]:
        lake = build_project(load_config(self.path)).lake.open()
        rows = query_table(
            lake.delta_rs.open_table(lake.paths.replica(name, "public", table)), "select * from t order by 1"
        )
        return [tuple(row.values()) for row in rows.to_pylist()]

    def change(self, number: int) -> None:
        """Insert, delete and update rows; change regions and keys."""
        self.database.execute(
            f"insert into orders values ({number}, 'EMEA', {number}), ({number + 1}, 'APAC', {number});"
            f"update orders set region = 'APAC' where id = {number - 8};"
            f"update orders set region = 'EMEA', amount = 5 where id = {number - 7};"
            f"update orders set id = {number + 2} where id = {number - 6};"
            f"delete from orders where id = {number - 5}"
        )

    def published(self, where: str) -> list[tuple[Any, ...]]:
        """The rows that a copy would have now."""
        return self.database.execute(f"select * from orders where {where} order by id").fetchall()


@pytest.fixture
def views(publisher_server: EmbeddedServer, tmp_path: Path) -> Iterator[Views]:
    name = f"views_{next(_numbers)}"
    with own_database(publisher_server, name) as database:
        database.execute(
            f"create role {name} login replication; grant create, temporary on database {name} to {name};"
            f"grant usage, create on schema public to {name};"
            "create table orders (id int primary key, region text not null, amount int);"
            "insert into orders select i, (array['EMEA', 'APAC', 'AMER'])[i % 3 + 1], i from generate_series(1, 30) i;"
            "create table notes (id int primary key, note text, more text);"
            "insert into notes values (0, 'none', 'x'), (1, 'one', 'y');"
            "alter table orders replica identity full; alter table notes alter note set storage external;"
            f"alter table orders owner to {name}; alter table notes owner to {name}"
        )
        source = {
            "conninfo": publisher_server.conninfo(dbname=name, user=name),
            "slot": name,
            "capture": name,
        }
        written = {"lake": "./lake", "spark": {"master": "threads[1]"}, "sources": {"shop": source}}
        made = Views(database, tmp_path / "pgsieve.yaml", written)
        try:
            made.define()
            made.run("all")
            database.execute(f"revoke select on orders, notes from {name}")
            yield made
        finally:
            drop_slots(database)
            database.execute(f"drop owned by {name} cascade; drop role {name}")


@pytest.mark.parametrize("marked", ["all", "emea"])
def test_a_table_that_another_process_marks_meanwhile_is_copied(
    views: Views, marked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that replaces the slot says so, and one that reads it, if the server cannot send a transaction."""
    views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA'"}]})
    lake, rewrite = build_project(load_config(views.path)).lake.open(), refiltering.rewrite

    def rewrite_after_other(*arguments: Any, **named: Any) -> Any:
        forget_copies(lake, [marked])
        return rewrite(*arguments, **named)

    monkeypatch.setattr(refiltering, "rewrite", rewrite_after_other)
    command = ["-c", str(views.path), "refilter", "emea"]
    done = CliRunner().invoke(cli.app, command, prog_name="pgsieve")
    assert (done.exit_code, "another process wrote to it meanwhile" in done.stderr) == (2, True), done.stderr
    monkeypatch.undo()
    state = TableStates(lake, "emea").read_newest()["public", "orders"]
    assert state.state == SyncState.INITIALIZE, state
    views.database.execute("grant select on orders, notes to public")
    views.run("all")
    views.run("emea")
    assert views.rows("emea") == views.published("region = 'EMEA'")


def test_later_filtered_subscriptions_need_no_row_of_the_publisher(views: Views) -> None:
    """A subscriber has the publisher's rows that match the filter, because all operations are published."""
    views.change(100)
    views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA'"}]})
    assert views.refilter("emea", "--plan") == {"orders": ("all", None)}
    assert views.validated("emea") == ({"orders": "all"}, None)
    assert not (views.path.parent / "lake/emea/public").exists()
    views.change(110)
    assert views.refilter("emea") == {"orders": ("all", None)}
    since_copy, oldest = views.validated("all")
    assert since_copy == {"orders": None, "notes": None}
    listed = CliRunner().invoke(cli.app, ["-c", str(views.path), "read", "all", "--at", str(oldest)])
    assert listed.exit_code == 0, listed.stderr
    assert views.rows("emea") == views.published("region = 'EMEA'")
    for number in (120, 130):
        views.change(number)
        views.run("emea")
        assert views.rows("emea") == views.published("region = 'EMEA'")
    # First narrower, from its own rows; then wider, for which only the other replica has the rows.
    for where, source in {"region = 'EMEA' and amount < 20": "emea", "region <> 'AMER'": "all"}.items():
        views.define(emea={"tables": [{"table": "public.orders", "where": where}]})
        assert views.validated("emea")[0] == {"orders": source}
        assert views.refilter("emea") == {"orders": (source, None)}
        assert views.rows("emea") == views.published(where)
        views.change(140 if source == "emea" else 150)
        views.run("emea")
        assert views.rows("emea") == views.published(where)
    # Another table, with fewer columns.
    views.define(emea={"tables": [{"table": "public.notes", "where": "id > 0", "columns": ["id", "note"]}]})
    assert views.refilter("emea", "--from", "all") == {"notes": ("all", None)}
    views.database.execute(
        "update notes set id = 2 where id = 0; update notes set note = 'first' where id = 1"
    )
    views.run("emea")
    assert views.rows("emea", "notes") == [(1, "first"), (2, "none")]


def test_the_plan_names_the_lsn_that_the_replica_gets(views: Views) -> None:
    """A replica of another subscription is brought up to date first. The own one keeps its LSN."""

    def lsns(report: Mapping[str, Any]) -> dict[str, int | None]:
        return {table["name"]: table["lsn"] and parse_lsn(table["lsn"]) for table in report["tables"]}

    wanted = {"table": "public.orders", "where": "region = 'EMEA'"}
    views.define(emea={"tables": [wanted, {"table": "public.late"}]})
    views.database.execute("create table late (id int primary key)")
    views.change(100)
    before = views.present_lsn()
    planned = lsns(views.report("emea", "--plan", code=1))
    made = lsns(views.report("emea", code=1))
    assert planned["orders"] is not None
    assert made["orders"] is not None
    assert before <= planned["orders"] <= made["orders"] <= views.present_lsn()
    assert planned["late"] is made["late"] is None
    lake = build_project(load_config(views.path)).lake.open()
    assert TableStates(lake, "emea").read_newest()["public", "orders"].lsn == made["orders"]
    views.define(emea={"tables": [wanted]})
    views.change(110)
    views.run("emea")
    views.define(emea={"tables": [{**wanted, "where": "region = 'EMEA' and id > 5"}]})
    views.change(120)
    assert views.refilter("emea", "--plan") == {"orders": ("emea", None)}
    planned = lsns(views.report("emea", "--plan"))
    shown = CliRunner().invoke(cli.app, ["-c", str(views.path), "refilter", "emea", "--plan"])
    assert planned["orders"] is not None
    assert format_lsn(planned["orders"]) in shown.stdout
    assert lsns(views.report("emea")) == planned
    assert TableStates(lake, "emea").read_newest()["public", "orders"].lsn == planned["orders"]


def test_an_own_replica_is_filtered_again_before_the_first_run(views: Views) -> None:
    """No change was decoded for it yet, but it has all changes before the LSN at which it was made."""
    wanted = {"table": "public.orders", "where": "region = 'EMEA'"}
    views.change(100)
    views.define(emea={"tables": [wanted]})
    first = views.report("emea")
    views.define(emea={"tables": [{**wanted, "where": "region = 'EMEA' and id > 5"}]})
    views.change(110)
    for arguments in (("--plan",), ()):
        report = views.report("emea", "--from", "emea", *arguments)
        assert [(table["source"], table["lsn"]) for table in report["tables"]] == [("emea", first["lsn"])]
    assert report["lsn"] == first["lsn"]
    views.run("emea")
    assert views.rows("emea") == views.published("region = 'EMEA' and id > 5")


def test_the_plan_refuses_an_own_replica_that_lacks_changes(views: Views) -> None:
    """The former row filter decided these changes; the other replica has all rows."""
    wanted = {"table": "public.orders", "where": "region = 'EMEA'"}
    views.define(emea={"tables": [wanted]})
    assert views.refilter("emea") == {"orders": ("all", None)}
    views.change(100)
    project = build_project(load_config(views.path))
    subscription, lake = project.subscriptions["emea"], project.lake.open()
    drain_slot(subscription.slot_stream, lake, [subscription], _quiet)
    transform(subscription, lake, _quiet)
    views.define(emea={"tables": [{**wanted, "where": "region = 'EMEA' and id > 5"}]})
    for arguments in (("--plan",), ()):
        refused = views.refilter("emea", "--from", "emea", *arguments, code=1)
        assert "changes that are not applied yet" in str(refused["orders"])
    assert views.refilter("emea") == {"orders": ("all", None)}
    assert views.rows("emea") == views.published("region = 'EMEA' and id > 5")
    views.change(110)
    views.run("emea")
    assert views.rows("emea") == views.published("region = 'EMEA' and id > 5")


def test_only_living_rows_of_a_replica_with_soft_deletes_are_used(views: Views) -> None:
    views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA'"}]})
    views.lay_out("all", deletes="soft")
    views.run("all")
    views.change(100)
    assert views.refilter("emea", "--plan") == {"orders": ("all", None)}
    views.database.execute("delete from orders where region = 'EMEA' and id % 2 = 0")
    assert views.refilter("emea") == {"orders": ("all", None)}
    assert any(row[3] for row in views.rows("all")), "the other replica has no deleted rows"
    views.change(110)
    views.run("emea")
    assert views.rows("emea") == views.published("region = 'EMEA'")
    views.lay_out("emea", deletes="soft")
    ((source, reason),) = views.refilter("emea", "--plan", code=1).values()
    assert source is None
    assert "begin with a copy" in str(reason)
    done = CliRunner().invoke(cli.app, ["-c", str(views.path), "refilter", "emea", "--plan"])
    assert "`pgsieve resync emea SCHEMA.TABLE` copies it" in " ".join(done.stdout.split())


def test_uncertain_rows_are_refused_with_the_reason(views: Views) -> None:
    narrow = {"tables": [{"table": "public.orders", "where": "amount > 20"}]}
    views.define(narrow=narrow)
    assert views.refilter("narrow") == {"orders": ("all", None)}
    views.define(
        narrow=narrow,
        wider={"tables": [{"table": "public.orders", "where": "amount > 10"}]},
        every={"tables": [{"table": "public.orders"}, {"table": "public.notes"}]},
    )
    ((source, reason),) = views.refilter("wider", "--from", "narrow", code=1).values()
    assert source is None
    assert "not certain that all wanted rows pass" in str(reason)
    refused = views.refilter("every", "--from", "narrow", "--plan", code=1)
    assert "its row filter left out rows that are wanted" in str(refused["orders"])
    assert "not ready: to be copied" in str(refused["notes"])
    # The publication was different for a while. pgsieve cannot know which rows were published then.
    views.define(narrow={"tables": [{"table": "public.orders", "where": "amount > 25"}]})
    views.run("narrow")
    views.define(
        narrow=narrow, narrower={"tables": [{"table": "public.orders", "where": "amount > 20 and id > 5"}]}
    )
    refused = views.refilter("narrower", "--from", "narrow", "--plan", code=1)
    assert "since its copy its publications were altered" in str(refused["orders"])
    assert views.refilter("narrower") == {"orders": ("all", None)}
    assert views.rows("narrower") == views.published("amount > 20 and id > 5")


def test_a_recreated_table_is_not_built_from_the_former_ones_replica(views: Views) -> None:
    views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA'"}]})
    views.database.execute(
        "drop table orders; create table orders (id int primary key, region text not null, amount int);"
        "alter table orders replica identity full"
    )
    assert views.validated("emea")[0] == {"orders": None}
    ((source, reason),) = views.refilter("emea", "--plan", code=1).values()
    assert source is None
    assert "does not follow the table's present definition yet" in str(reason)


def _dying(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_rewriting() -> None:
    refiltering.rewrite = _dying


@pytest.mark.parametrize("made_before", [False, True])
def test_a_table_of_a_killed_refilter_is_copied_as_the_reason_says(
    views: Views, tmp_path: Path, *, made_before: bool
) -> None:
    """Four commands, each in a process of its own."""
    views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA'"}]})
    if made_before:
        views.refilter("emea")
        views.define(emea={"tables": [{"table": "public.orders", "where": "region = 'EMEA' and id > 5"}]})
    log, environment = tmp_path / "log", {**os.environ, "DAGSTER_HOME": str(tmp_path)}
    command = ["-c", str(views.path), "refilter", "emea", "public.orders"]
    killed = commands.start(command, log, environment=environment, prepare=_die_at_rewriting)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, log.read_text()
    shown = commands.run("-c", str(views.path), "status", "--json", environment=environment)
    states = {s["name"]: s["tables"] for s in json.loads(shown.stdout)["subscriptions"]}
    (table,) = states["emea"]
    assert table["state"] == "to be copied"
    assert table["problem"] == "filtering it again did not end; the next run copies it"
    views.database.execute(f"grant select on orders to {views.written['sources']['shop']['slot']}")
    for action in ("run", "check"):
        done = commands.run("-c", str(views.path), action, "emea", environment=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert views.rows("emea") == views.published(f"region = 'EMEA' and id > {5 if made_before else 0}")


def test_an_unsent_value_is_not_mistaken_for_null(views: Views) -> None:
    few = {"tables": [{"table": "public.notes", "where": "id < 5"}]}
    fewer = {"tables": [{"table": "public.notes", "where": "id < 5 and id > 0"}]}
    views.define(few=few, fewer=fewer)
    assert views.refilter("few") == {"notes": ("all", None)}
    views.database.execute("insert into notes values (3, 'three', 'z')")
    assert views.refilter("fewer", "--from", "few") == {"notes": ("few", None)}
    assert views.rows("fewer", "notes") == [(1, "one", "y"), (3, "three", "z")]
    views.database.execute("insert into notes values (7, repeat('long', 5000), '')")
    # The row starts to match, so it is sent as an INSERT, without the note.
    views.database.execute("update notes set id = 4 where id = 7")
    for present_identity in ("default", "full"):
        views.database.execute(f"alter table notes replica identity {present_identity}")
        views.run("few")
        refused = views.refilter("fewer", "--from", "few", code=1)
        assert "without values that were not sent" in str(refused["notes"]), present_identity
    assert views.refilter("fewer", "--from", "all") == {"notes": ("all", None)}
    assert views.rows("fewer", "notes")[-1] == (4, "long" * 5000, "")


def test_a_filter_on_a_replica_with_plain_names_uses_the_publishers_names(views: Views) -> None:
    role, run = views.written["sources"]["shop"]["slot"], views.database.execute
    run('create table items ("Item No" int primary key, "Kind Of" text)')
    run("insert into items select i, (array['new', 'old'])[i % 2 + 1] from generate_series(1, 9) i")
    run(f"alter table items replica identity full; alter table items owner to {role}")
    wide = {"tables": [{"table": "public.items"}]}
    new = {"tables": [{"table": "public.items", "where": '"Kind Of" = \'new\' and "Item No" > 2'}]}
    views.layouts = {"items": {"names": "snake"}, "new": {"names": "snake"}}
    views.define(items=wide)
    views.run("items")
    run(f"revoke select on items from {role}")
    views.define(items=wide, new=new, other=new)
    refused = views.refilter("other", "--from", "items", "--plan", code=1)
    assert "its columns have other names" in str(refused["items"])
    assert views.refilter("new", "--from", "items") == {"items": ("items", None)}
    assert views.rows("new", "items") == [(4, "new"), (6, "new"), (8, "new")]
    run('update items set "Kind Of" = \'new\' where "Item No" = 5')
    run('update items set "Kind Of" = \'old\' where "Item No" = 6')
    views.run("new")
    assert views.rows("new", "items") == [(4, "new"), (5, "new"), (8, "new")]


def test_a_publication_that_was_altered_for_a_while_is_refused(views: Views) -> None:
    def subscribe(**publications: str) -> None:
        views.written["subscriptions"] = {
            name: {"source": "shop", "publications": [publication]}
            for name, publication in publications.items()
        }
        views.path.write_text(yaml.safe_dump(views.written))

    views.database.execute(
        "create publication p for table orders; create publication q for table orders where (id > 5)"
    )
    views.database.execute(f"grant select on orders to {views.written['sources']['shop']['slot']}")
    subscribe(all="all", served="p", view="q")
    views.run("served")
    assert views.refilter("view", "--from", "served", "--plan") == {"orders": ("served", None)}
    views.database.execute(
        "alter publication p set table orders where (id > 1000); insert into orders values (200, 'EMEA', 1);"
    )
    views.database.execute("alter publication p set table orders")
    views.run("served")
    refused = views.refilter("view", "--from", "served", "--plan", code=1)
    assert "since its copy its publications were altered" in str(refused["orders"])
