"""`pgsieve resync` in every state of a table, and tables that a run copies again. Copies are small and need no JVM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.log import no_log
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.commands.validate import validate
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop


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
    with shop.slot_reader():
        report = shop.resync("one", "public.orders")
    assert report.followed
    assert TableStates(shop.lake, "one").read_newest()["public", "orders"].state == SyncState.INITIALIZE
    assert TableStates(shop.lake, "one").read_newest()["public", "notes"].state != SyncState.INITIALIZE
