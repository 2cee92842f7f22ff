"""resync, skip, enable and drop in every state of a subscription. Copies are small and need no JVM."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.records.subscription_state import SubscriptionDisabledError, SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.slot import OtherClusterError
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.skip import enable
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.slot import SlotAheadError, SlotError, SlotInUseError, SlotMissingError
from pgsieve.resources.postgres.wal import read_system_identifier
from tests.fixtures.servers import new_server
from tests.fixtures.shop import Shop
from tests.fixtures.terminal import shown_on_a_terminal

_numbers = itertools.count(1)


# resync


@pytest.mark.drawn
@pytest.mark.spark
def test_an_altered_row_filter_copies_nothing_until_a_resync_which_says_what_changed(
    shop: Shop,
) -> None:
    shop.copy()
    shop.database.execute("alter publication p set table orders where (id > 2), notes")
    shop.copy()
    assert shop.ids("one", "orders") == [2, 3, 4], "copied rows stay"
    expected = "row filter: (id > 1) → (id > 2)"
    assert {t.name: t.since_copy for t in status(load_config(shop.path)).subscriptions[0].tables} == {
        "orders": (expected,),
        "notes": (),
    }
    received = validate(load_config(shop.path)).subscriptions[0].tables
    assert {t.name: t.since_copy for t in received} == {"orders": (expected,), "notes": ()}
    notes = shop.table("one", "notes").version()

    report = shop.resync("one")
    assert [(t.name, t.changes) for t in report.tables] == [("orders", (expected,))]
    assert shop.ids("one", "orders") == [3, 4]
    assert shop.table("one", "notes").version() == notes
    assert shop.resync("one").tables == (), "there is nothing left to do"


@pytest.mark.drawn
def test_a_named_table_is_copied_again_on_an_idle_server(shop: Shop) -> None:
    shop.copy()
    for _ in range(2):
        before = {name: shop.table("one", name).version() for name in ("orders", "notes")}
        report = shop.resync("one", "public.orders")
        assert report.run is not None
        assert [(t.name, t.rows) for t in report.run.copied] == [("orders", 3)]
        assert shop.table("one", "orders").version() > before["orders"]
        assert shop.table("one", "notes").version() == before["notes"]


@pytest.mark.drawn
def test_a_set_aside_table_that_left_its_publication_is_no_longer_a_problem(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    states = TableStates(shop.lake, "one")
    state = states.read_newest()["public", "notes"]
    states.append([replace(state, state=SyncState.SET_ASIDE, reason="a value")])
    code, output = shop.cli("run")
    assert code == 1
    assert "public.notes is set aside: a value" in output
    code, output = shop.cli("status")
    assert code == 0
    assert "up to date except 1 table; " in output
    assert output.count("up to date; ") == 1
    shop.database.execute("alter publication p drop table notes")
    code, output = shop.cli("run")
    assert (code, "a value" in output) == (0, False), output


@pytest.mark.drawn
def test_a_table_that_comes_back_during_a_run_is_copied_by_the_next(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    shop.database.execute("alter publication p drop table notes")
    assert shop.cli("run")[0] == 0
    shop.database.execute("delete from notes where id = 1; alter publication p add table notes")
    shop.database.execute("insert into notes values (1, 5)")
    # Simulates a run that looked for tables to copy before the table came back.
    project = build_project(load_config(shop.path))
    one, lake = project.subscriptions["one"], project.lake.open()
    drain_slot(one.slot_stream, lake, [one], no_log)
    transform(one, lake, no_log)
    assert "insert_exists" in str(apply(one, lake, no_log).tables["public", "notes"].problem)
    assert shop.state("one", "notes") == "not replicated any more"
    code, output = shop.cli("run")
    assert code == 0, output
    assert shop.ids("one", "notes") == [1, 2, 3, 4]
    assert shop.cli("check")[0] == 0


@pytest.mark.spark
def test_resync_brings_back_a_table_that_is_set_aside(shop: Shop) -> None:
    shop.copy()
    (notes,) = [s for s in TableStates(shop.lake, "one").read_newest().values() if s.table == "notes"]
    TableStates(shop.lake, "one").append([replace(notes, state=SyncState.SET_ASIDE, reason="a value")])
    shop.database.execute("alter publication p drop table notes")
    shop.database.execute("alter publication p add table notes where (id > 3)")
    shop.copy()
    assert shop.state("one", "notes") == "set aside"
    (table,) = shop.resync("one").tables
    assert (table.state, table.changes) == ("set aside: a value", ("row filter: every row → (id > 3)",))
    assert shop.state("one", "notes") == "ready"
    assert shop.ids("one", "notes") == [4]


@pytest.mark.drawn
def test_resync_copies_a_subscription_that_has_never_run(shop: Shop) -> None:
    report = shop.resync("one")
    assert {(t.name, t.state) for t in report.tables} == {
        ("orders", "not copied yet"),
        ("notes", "not copied yet"),
    }
    assert shop.ids("one", "orders") == [2, 3, 4]


def test_resync_of_an_unknown_table_lists_the_known_ones(shop: Shop) -> None:
    code, output = shop.cli("resync", "one", "public.stock")
    assert code == 2
    assert 'subscription "one" has no table "public"."stock" [42P01]' in output
    assert '"public"."notes", "public"."orders"' in output
    code, output = shop.cli("resync", "one", "orders")
    assert code == 2
    assert "SCHEMA.TABLE" in output


def test_a_table_is_left_to_the_process_that_follows_the_slot(shop: Shop) -> None:
    shop.copy()
    slot = shop.written["sources"]["shop"]["slot"]
    conninfo = shop.written["sources"]["shop"]["conninfo"]
    with _read(conninfo, slot):
        report = shop.resync("one", "public.orders")
    assert report.followed
    assert TableStates(shop.lake, "one").read_newest()["public", "orders"].state == SyncState.INITIALIZE
    assert TableStates(shop.lake, "one").read_newest()["public", "notes"].state != SyncState.INITIALIZE


@contextmanager
def _read(conninfo: str, slot: str) -> Iterator[None]:
    """In the block, another process reads the slot."""
    walsender = psycopg.connect(conninfo, autocommit=True, replication="database")
    try:
        options = f"(proto_version '1', publication_names '{slot}')"
        walsender.pgconn.send_query(f"START_REPLICATION SLOT {slot} LOGICAL 0/0 {options}".encode())
        walsender.pgconn.get_result()
        yield
    finally:
        walsender.close()


# a lost slot, and another cluster


def _dropped(shop: Shop, slot: str) -> None:
    shop.database.execute("select pg_drop_replication_slot(%s)", [slot])


def _created_again(shop: Shop, slot: str) -> None:
    _dropped(shop, slot)
    shop.database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])


@pytest.mark.drawn
@pytest.mark.parametrize(("lose", "error"), [(_dropped, SlotMissingError), (_created_again, SlotAheadError)])
def test_the_command_that_a_lost_slot_names_copies_everything_again(
    shop: Shop, lose: Any, error: type[SlotError]
) -> None:
    shop.copy()
    lose(shop, shop.written["sources"]["shop"]["slot"])
    shop.database.execute("insert into orders values (5, 5)")
    shop.database.execute("insert into stock values (5, 5)")
    # If a slot is ahead of Delta, another lake may have read it.
    take_over = error is SlotAheadError
    option = " --take-over" * take_over
    refused = [shop.copy, lambda: shop.resync("one", "public.orders")]
    for lost in [*refused, *([lambda: shop.resync("one")] if take_over else [])]:
        with pytest.raises(error) as raised:
            lost()
        assert f"`pgsieve resync one{option}` and `pgsieve resync two{option}`" in str(raised.value.hint)
    report = shop.resync("one", take_over=take_over)
    assert report.lost is not None
    assert len(report.tables) == 2
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    assert shop.state("two", "stock") == "to be copied"
    shop.resync("two")
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    shop.copy()


def test_an_invalidated_slot_names_the_command_that_copies_everything_again(
    postgres_version: int, shop: Shop
) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with (
        new_server(postgres_version, settings) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as database,
    ):
        database.execute("create table orders (id int primary key)")
        database.execute("create publication p for table orders")
        source = {"conninfo": server.conninfo(), "slot": "lost", "capture": "lost"}
        shop.configure(sources={"shop": source}, subscriptions={"one": shop.written["subscriptions"]["one"]})
        shop.copy()
        for _ in range(4):
            database.execute("create table if not exists noise (a text)")
            database.execute("insert into noise select repeat('x', 1000) from generate_series(1, 10000)")
            database.execute("select pg_switch_wal()")
        database.execute("checkpoint")
        database.execute("insert into orders values (1)")
        with pytest.raises(SlotError, match="can no longer access replication slot") as raised:
            shop.copy()
        assert str(raised.value.hint).startswith("raise max_slot_wal_keep_size, then")
        assert "`pgsieve resync one`" in str(raised.value.hint)
        assert shop.resync("one").lost is not None
        assert shop.ids("one", "orders") == [1]
        if postgres_version >= 18:
            database.execute("alter system set idle_replication_slot_timeout = '1s'")
            database.execute("select pg_reload_conf(), pg_sleep(2)")
            database.execute("checkpoint")
            with pytest.raises(SlotError, match="it has been invalidated") as raised:
                shop.copy()
            assert str(raised.value.hint).startswith(
                "raise idle_replication_slot_timeout, or run more often, then"
            )


def test_another_cluster_is_an_error_that_names_both_and_resync_begins_from_scratch(
    shop: Shop, publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer
) -> None:
    shop.copy()
    identifiers = []
    for server in (publisher_server, subscriber_server):
        with psycopg.connect(server.conninfo()) as connection:
            identifiers.append(read_system_identifier(connection))
    name = f"elsewhere_{next(_numbers)}"
    with psycopg.connect(subscriber_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        conninfo = subscriber_server.conninfo(dbname=name)
        before = shop.written["sources"]
        shop.configure(sources={"shop": {**before["shop"], "conninfo": conninfo}})
        with psycopg.connect(conninfo, autocommit=True) as database:
            for table in ("orders", "notes", "stock"):
                database.execute(f"create table {table} (id int primary key)")
            database.execute("insert into orders values (7)")
            database.execute("create publication p for table orders, notes")
            database.execute("create publication q for table stock")
            for refused in (shop.copy, lambda: shop.resync("one"), lambda: shop.drop("one")):
                with pytest.raises(OtherClusterError) as raised:
                    refused()
                assert all(identifier in raised.value.message for identifier in identifiers)
                assert "`pgsieve drop one --leave-slot --delete-tables`" in str(raised.value.hint)
            for subscription in ("one", "two"):
                shop.drop(subscription, leave_slot=True, delete_tables=True)
            shop.copy()
            assert shop.ids("one", "orders") == [7]
            for subscription in ("one", "two"):
                shop.drop(subscription)
        admin.execute(f"drop database {name} with (force)")


# check


def test_dagster_shows_what_a_check_has_applied_found_and_repaired(shop: Shop) -> None:
    def materialised(name: str) -> dg.AssetMaterialization:
        event = dagster.get_latest_materialization_event(dg.AssetKey(["one", *name.split(".")]))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization

    def checked(check: str) -> tuple[bool, bool]:
        """Whether the check has passed, and whether it is about the newest materialization."""
        key = dg.AssetKey(["one", "public", "notes"])
        check_key = dg.AssetCheckKey(key, check)
        record = dagster.event_log_storage.get_latest_asset_check_execution_by_key([check_key])[check_key]
        assert record.evaluation is not None
        target = record.evaluation.target_materialization_data
        assert target is not None
        newest = dagster.fetch_materializations(key, limit=1).records[0]
        return record.evaluation.passed, target.storage_id == newest.storage_id

    config = load_config(shop.path)
    with open_instance(config) as dagster:
        shop.run()
        orders = materialised("public.orders")
        shop.database.execute("insert into notes values (5, 5)")
        assert shop.cli("check")[0] == 0
        assert materialised("public.orders") == orders, "it has not changed"
        entries = materialised("public.notes").metadata
        assert (entries["inserted"].value, entries["dagster/row_count"].value) == (1, 5)
        assert "dagster/column_schema" in entries
        assert checked("subscriber_consistency") == checked("sync_state") == (True, True)
        cut = materialised("cut").metadata["LSN"].value
        assert cut == entries["LSN"].value
        shop.run()
        assert materialised("public.notes").metadata == entries, "nothing is left to report"

        shop.table("one", "notes").delete("id = 1")
        assert shop.cli("check")[0] == 1
        assert checked("subscriber_consistency") == (False, True)

        # The check in the web interface applies changes, too.
        shop.database.execute("insert into notes values (6, 6)")
        defs = build_ui_definitions(config)
        (checks,) = [c for c in defs.asset_checks or [] if c.node_def.name == "one_consistency"]
        dg.materialize(
            [checks],
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
            instance=dagster,
        )
        assert materialised("public.notes").metadata["inserted"].value == 1
        assert checked("subscriber_consistency") == (False, True)


@pytest.mark.drawn
@pytest.mark.spark
def test_dagster_shows_the_rows_of_a_repair(shop: Shop) -> None:
    with open_instance(load_config(shop.path)) as dagster:
        shop.run()
        shop.table("one", "notes").delete("id = 1")
        assert shop.cli("check", "--repair")[0] == 1
        event = dagster.get_latest_materialization_event(dg.AssetKey(["one", "public", "notes"]))
        assert event is not None
        assert event.asset_materialization is not None
        entries = event.asset_materialization.metadata
        assert (entries["inserted"].value, entries["dagster/row_count"].value) == (1, 4)


def test_names_are_printed_as_sql_has_them(shop: Shop) -> None:
    shop.database.execute("""
    create schema "Logi Stik"; create table "Logi Stik"."Order Lines" (id int primary key);
    create publication odd for table "Logi Stik"."Order Lines" where (id > 0) with (publish = 'insert');
    """)
    shop.configure(subscriptions={"odd": {"source": "shop", "publications": ["odd"]}})
    shop.copy()
    code, output = shop.cli("check")
    assert code == 0
    assert 'comparing "Logi Stik"."Order Lines" of odd: started' in output
    shop.database.execute('alter publication odd set table "Logi Stik"."Order Lines" where (erf(id) < 2)')
    code, output = shop.cli("validate")
    assert code == 1
    assert 'row filter of "Logi Stik"."Order Lines" cannot be evaluated' in output


def test_a_check_counts_the_rows_that_differ_on_each_side(shop: Shop) -> None:
    shop.database.execute("create table log (n int); insert into log values (1), (1), (2)")
    shop.database.execute("alter publication q add table log")
    shop.copy()
    notes, log = shop.table("one", "notes"), shop.table("two", "log")
    notes.delete("id = 1")
    notes.update(updates={"n": "n + 10"}, predicate="id in (2, 3)")
    notes.update(updates={"id": "40"}, predicate="id = 4")
    log.update(updates={"n": "3"}, predicate="n = 2")
    code, output = shop.cli("check")
    assert code == 1
    assert (
        "one public.notes: 2 rows only at the publisher; 1 row only in the replica; 2 rows with other values;"
        " differing keys (id)=("
    ) in output
    assert (
        "two public.log: 1 row only at the publisher; 1 row only in the replica; differing keys a row"
        in output
    )
    code, output = shop.cli("check", "--json")
    counts = {
        table["name"]: (table["only_publisher"], table["only_replica"], table["different"])
        for table in json.JSONDecoder().raw_decode(output)[0]["tables"]
    }
    assert counts == {"orders": (0, 0, 0), "notes": (2, 1, 2), "stock": (0, 0, 0), "log": (1, 1, 0)}


def test_repair_copies_the_tables_that_the_next_run_would_copy(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("alter table notes add column c int default (random() * 10)::int")
    assert shop.cli("check", "one")[0] == 1
    code, printed = shop.cli("check", "--repair", "one")
    assert code == 0, printed
    assert len(shop.ids("one", "notes", "c")) == 4


# drop


def test_drop_leaves_only_objects_that_others_created_or_need(shop: Shop) -> None:
    capture = shop.written["sources"]["shop"]["capture"]
    shop.copy()
    assert shop.on_server() == ([capture], ["p", "q", capture, f"{capture}_i"])
    report = shop.drop("one")
    assert (report.slot, report.publications, report.kept_for) == (None, (capture,), ("two",))
    assert shop.on_server() == ([capture], ["p", "q", f"{capture}_i"])
    report = shop.drop("two")
    assert (report.slot, report.publications) == (capture, (f"{capture}_i",))
    assert shop.on_server() == ([], ["p", "q"])
    assert shop.ids("one", "orders") == [2, 3, 4], "the replicas stay"
    for name in ("one", "two"):
        assert shop.drop(name).slot is None, "there is nothing left to do"


def test_a_kept_slot_captures_only_the_tables_of_other_subscriptions(shop: Shop) -> None:
    shop.database.execute("alter publication q set (publish = 'insert, update, delete, truncate')")
    capture = shop.written["sources"]["shop"]["capture"]
    shop.copy()
    assert shop.drop("one").altered == (capture,)
    tables = shop.database.execute(
        "select tablename from pg_publication_tables where pubname = %s", [capture]
    )
    assert tables.fetchall() == [("stock",)]


def test_drop_works_although_another_subscriptions_publication_is_missing(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("drop publication q")
    report = shop.drop("one")
    assert report.kept_for == ("two",)
    assert report.altered == report.publications == (), "what the other one needs is unknown"
    shop.database.execute("create publication q for table stock with (publish = 'insert')")
    shop.copy()
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_drop_keeps_a_capture_publication_that_pgsieve_did_not_create(shop: Shop) -> None:
    capture = shop.written["sources"]["shop"]["capture"]
    shop.database.execute(f"create publication {capture} for table orders, notes")
    shop.copy()
    shop.drop("one")
    report = shop.drop("two")
    assert report.publications == (f"{capture}_i",)
    assert f"publication {capture}, which pgsieve did not create" in (report.left or "")
    assert shop.on_server()[1] == ["p", "q", capture]


def test_a_dropped_subscription_begins_from_scratch(shop: Shop) -> None:
    for _ in range(2):
        shop.copy()
        for name in ("one", "two"):
            shop.drop(name)
        assert shop.state("one", "orders") == "not replicated any more"
        shop.database.execute("insert into orders select max(id) + 1, 0 from orders")
    shop.copy()
    assert shop.ids("one", "orders") == [2, 3, 4, 5, 6]


def test_drop_deletes_the_tables_on_request(shop: Shop) -> None:
    shop.copy()
    folder = Path(shop.lake.uri)
    assert shop.drop("one", delete_tables=True).folders == (str(folder / "one"),)
    assert not (folder / "one").exists()
    assert (folder / "two").exists()
    assert shop.drop("two", delete_tables=True).folders == (
        str(folder / "two"),
        str(folder / "_pgsieve" / "shop"),
    )
    assert shop.drop("two", delete_tables=True).folders == ()
    shop.copy()
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_without_the_server_drop_needs_leave_slot(shop: Shop) -> None:
    shop.copy()
    before = shop.written["sources"]
    shop.configure(sources={"shop": {**before["shop"], "conninfo": "host=127.0.0.1 port=1 dbname=x"}})
    with pytest.raises(SourceUnreachableError) as raised:
        shop.drop("one")
    assert "--leave-slot" in str(raised.value.hint)
    report = shop.drop("one", leave_slot=True)
    assert (report.slot, report.kept_for) == (None, ("two",))
    slot = before["shop"]["slot"]
    assert shop.drop("two", leave_slot=True).left == f"replication slot {slot} and the publications {slot}*"
    shop.configure(sources=before)
    shop.copy()
    assert shop.ids("one", "orders") == [2, 3, 4]


@pytest.mark.drawn
def test_a_slot_in_use_is_not_dropped(shop: Shop) -> None:
    shop.copy()
    shop.drop("two")
    slot = shop.written["sources"]["shop"]["slot"]
    conninfo = shop.written["sources"]["shop"]["conninfo"]
    with _read(conninfo, slot), pytest.raises(SlotInUseError):
        shop.drop("one")
    assert shop.state("one", "orders") == "ready"
    assert shop.drop("one").slot == slot


def test_a_drop_needs_the_subscription_in_the_file(shop: Shop) -> None:
    shop.copy()
    code, output = shop.cli("drop", "three")
    assert (code, "allowed here: one, two" in output) == (2, True)
    shop.configure(subscriptions={"two": shop.written["subscriptions"]["two"]})
    code, output = shop.cli("drop", "one")
    assert code == 2
    assert "put it back" in output


def test_a_subscriptions_own_slot_is_dropped_with_it(shop: Shop) -> None:
    own = {**shop.written["subscriptions"]["one"], "row_filter": "publisher"}
    shop.configure(subscriptions={"one": own})
    shop.copy()
    assert shop.on_server() == (["pgsieve_shop_one"], ["p", "q"])
    assert shop.drop("one").slot == "pgsieve_shop_one"
    assert shop.on_server() == ([], ["p", "q"])


# skip, and disabled subscriptions


@pytest.mark.drawn
def test_an_lsn_to_skip_is_kept_shown_and_cleared(shop: Shop) -> None:
    shop.copy()
    assert shop.cli("skip", "one", "7f/0") == (0, "one: will skip the transaction finished at LSN 7F/0\n")
    assert shop.skip("one", "7F/1") == "7F/1"
    one, two = status(load_config(shop.path)).subscriptions
    assert (one.skip_lsn, two.skip_lsn) == ("7F/1", None)
    for _ in range(2):
        assert shop.skip("one", "none") is None
        assert status(load_config(shop.path)).subscriptions[0].skip_lsn is None


@pytest.mark.parametrize(
    ("lsn", "error"),
    [("0/0", psycopg.errors.InvalidParameterValue), ("x", psycopg.errors.InvalidTextRepresentation)],
)
def test_an_invalid_lsn_is_refused_as_by_postgresql(shop: Shop, lsn: str, error: type[psycopg.Error]) -> None:
    subscription = "connection 'dbname=x' publication p with (connect = false)"
    shop.database.execute(f"create subscription skipping {subscription}".encode())
    with pytest.raises(error) as refused:
        shop.database.execute(f"alter subscription skipping skip (lsn = '{lsn}')".encode())
    shop.database.execute("alter subscription skipping set (slot_name = none)")
    shop.database.execute("drop subscription skipping")
    with pytest.raises(PgsieveError) as raised:
        shop.skip("one", lsn)
    expected = (refused.value.diag.message_primary, refused.value.sqlstate)
    assert (raised.value.message, raised.value.sqlstate) == expected


@pytest.mark.drawn
@pytest.mark.spark
def test_a_disabled_subscription_is_refused_until_it_is_enabled_and_the_others_continue(shop: Shop) -> None:
    shop.copy()
    SubscriptionRecord(shop.lake, "one").disable("a value, in the transaction finished at 0/10")
    shop.database.execute("create table later (id int primary key)")
    shop.database.execute("alter publication p add table later")
    shop.database.execute("alter publication q add table later")
    for refused in (lambda: shop.run("one"), lambda: shop.resync("one")):
        with pytest.raises(SubscriptionDisabledError) as raised:
            refused()
        assert "finished at 0/10" in raised.value.message
        assert "`pgsieve enable one`" in str(raised.value.hint)
    assert shop.cli("run", "one")[0] == 2
    code, output = shop.cli("run")
    assert code == 1
    assert 'subscription "one" is disabled' in output
    assert shop.state("two", "later") == "ready"
    assert ("public", "later") not in TableStates(shop.lake, "one").read_newest()
    found_one = status(load_config(shop.path)).subscriptions[0]
    assert (found_one.enabled, found_one.reason) == (False, "a value, in the transaction finished at 0/10")
    assert shop.cli("enable", "one") == (0, "one: enabled\n")
    assert shop.cli("enable", "one") == (0, "one: was enabled already\n")
    shop.copy()
    assert shop.state("one", "later") == "ready"


@pytest.mark.parametrize("is_conflict", [True, False])
def test_the_commands_that_a_disabled_subscription_names_bring_it_back(shop: Shop, is_conflict: bool) -> None:
    """A conflict is found after its transaction was transformed. Then only a copy helps, and not `skip`."""
    shop.configure(
        subscriptions={"two": {"source": "shop", "publications": ["q"], "disable_on_error": True}},
    )
    shop.database.execute("alter table stock add price numeric(4, 2)")
    shop.copy()
    applied_lsn = shop.run().subscriptions[0].to_lsn
    if is_conflict:
        shop.database.execute("delete from stock where id = 1")
        shop.database.execute("insert into stock values (1, 9)")
    else:
        shop.database.execute("insert into stock values (9, 9, 'NaN')")
    shop.database.execute("insert into stock values (5, 5)")
    code, output = shop.cli("run", "two")
    assert code == 1, output
    assert f"two: nothing new: everything up to LSN {applied_lsn} is already applied" in output

    code, output = shop.cli("run", "two")
    assert code == 2
    reason, hint = output.split("hint: ")
    named, *in_reason = re.findall(r"`pgsieve (.*?)`", reason)
    enabling, running = re.findall(r"`pgsieve (.*?)`", hint)
    assert (enabling, in_reason, running) == ("enable two", [], "run two")
    assert named.split()[:2] == (["resync", "two"] if is_conflict else ["skip", "two"])
    for command in (enabling, named, running):
        code, output = shop.cli(*command.split())
        assert code == 0, output
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]


def test_the_check_of_a_table_that_is_set_aside_or_disabled_fails_with_the_reason(shop: Shop) -> None:
    def evaluated() -> dict[str, tuple[bool, str | None]]:
        defs = build_ui_definitions(load_config(shop.path))
        (checks,) = [c for c in defs.asset_checks or [] if c.node_def.name == "one_sync_state"]
        result = dg.materialize(
            [checks],
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
            raise_on_error=False,
        )
        evaluations = result.get_asset_check_evaluations()
        return {e.asset_key.path[-1]: (e.passed, e.description) for e in evaluations}

    shop.copy()
    assert evaluated() == {"orders": (True, None), "notes": (True, None)}
    notes = TableStates(shop.lake, "one").read_newest()["public", "notes"]
    TableStates(shop.lake, "one").append([replace(notes, state=SyncState.SET_ASIDE, reason="a value")])
    assert evaluated() == {"orders": (True, None), "notes": (False, "a value")}
    SubscriptionRecord(shop.lake, "one").disable("another value")
    assert evaluated() == {"orders": (False, "another value"), "notes": (False, "another value")}


def test_a_subscription_that_never_failed_is_enabled_already(shop: Shop) -> None:
    config = load_config(shop.path)
    assert not enable(config, config.subscriptions["one"])


def test_drop_deletes_the_disabled_state_and_the_lsn_to_skip(shop: Shop) -> None:
    shop.copy()
    shop.skip("one", "7F/0")
    SubscriptionRecord(shop.lake, "one").disable("a value")
    shop.drop("one")
    state = SubscriptionRecord(shop.lake, "one").read_state()
    assert (state.enabled, state.skip_lsn) == (True, None)
    SubscriptionRecord(shop.lake, "one").write_state(state)
    assert SubscriptionRecord(shop.lake, "one").read_state() == state


@pytest.mark.drawn
def test_messages_on_a_terminal_have_separate_lines(shop: Shop) -> None:
    """Dagster puts a pipe between a step and the terminal. Without a separate line, a message would continue the running task's line."""
    code, shown = shown_on_a_terminal("-m", "pgsieve", "-c", str(shop.path), "run", "two", seconds=120)
    assert code == 0, shown.decode()
    assert b"copy 1 table of two" in shown, "the task's line is missing"
    lines = re.findall(rb"([^\n]*)public\.stock: 4 rows copied in", shown)
    assert len(lines) == 1
    assert lines[0].endswith(b"\x1b[2K"), shown.decode()
