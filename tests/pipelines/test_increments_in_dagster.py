"""Increments as runs of Dagster: what they evaluate and show, and which of them fail, once for each problem."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import dagster as dg
import psycopg
import pytest

import pgsieve
from pgsieve.assets.initial_sync import range_tags
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from tests.fixtures.dagster_runs import (
    evaluated_checks,
    materialised_assets,
    red_assets,
    run_increments,
    stale_assets,
)
from tests.fixtures.shop import Shop


def test_an_increment_evaluates_its_checks_and_names_its_figures_consistently(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.copy()
    first, second = run_increments(shop, dagster), run_increments(shop, dagster)
    assert first.success
    assert second.success
    steps = {"shop/change_log", "one/table_changes", "one/cut", "two/table_changes", "two/cut"}
    assert materialised_assets(first) == steps | {"one/public/orders", "one/public/notes", "two/public/stock"}
    assert materialised_assets(second) == steps
    for result in (first, second):
        assert evaluated_checks(result) == {
            ("shop/change_log", "slot_health"): True,
            **{(f"{s}/cut", check): True for s in ("one", "two") for check in ("sync_state", "freshness")},
        }
        figures = {
            event.asset_key.to_user_string(): {
                name for name, value in event.materialization.metadata.items()
                if isinstance(value.value, int | float)
            }
            for event in result.get_asset_materialization_events()
        }  # fmt: skip
        assert {"lag in bytes", "slices", "seconds"} <= figures["shop/change_log"]
        assert {"inserts before", "inserts after", "seconds"} <= figures["one/table_changes"]
        assert {"lag in seconds", "seconds", "tables", "inserted", "updated", "deleted"} <= figures["one/cut"]
    orders = dg.AssetKey(["one", "public", "orders"])
    for check in ("sync_state", "freshness"):
        record = dagster.event_log_storage.get_asset_check_execution_history(
            dg.AssetCheckKey(orders, check), limit=9
        )
        assert len(record) == 1, "a table without changes is evaluated again"
        evaluation = record[0].event.dagster_event.asset_check_evaluation_data  # type: ignore[union-attr]
        assert evaluation.passed


def _set_aside(shop: Shop, subscription: str, table: str, reason: str) -> None:
    state = TableStates(shop.lake, subscription).read_newest()["public", table]
    TableStates(shop.lake, subscription).append([replace(state, state=SyncState.SET_ASIDE, reason=reason)])


class _Alerts:
    """A project's own sensor of failed runs: what it was called with."""

    def __init__(self, dagster: dg.DagsterInstance) -> None:
        self._dagster = dagster
        self._cursor: str | None = None
        self.since()

    def since(self) -> list[str]:
        """The messages of failed runs since the last tick; the first tick only begins."""
        messages = list[str]()

        @dg.run_failure_sensor(monitor_all_code_locations=True)
        def alert(context: dg.RunFailureSensorContext) -> None:
            messages.append(context.failure_event.message or "")

        while True:
            before = self._cursor
            with dg.build_sensor_context(self._dagster, cursor=before) as context:
                self._cursor = alert.evaluate_tick(context).cursor or before
            if self._cursor == before or before is None:
                return messages


@pytest.mark.drawn
def test_a_set_aside_table_fails_one_run_after_all_other_work_and_only_it_is_red(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    """It takes long: four runs of the graph, and one by the command."""
    shop.copy()
    assert run_increments(shop, dagster).success
    assert (red_assets(shop, dagster), stale_assets(shop, dagster)) == (set(), [])
    alerts = _Alerts(dagster)
    _set_aside(shop, "one", "notes", "a value")
    shop.database.execute("insert into orders values (20, 1)")
    result = run_increments(shop, dagster)
    assert not result.success
    steps = {"shop/change_log", "one/table_changes", "two/table_changes", "two/cut"}
    assert materialised_assets(result) == steps | {"one/public/orders"}
    assert evaluated_checks(result)["one/cut", "sync_state"] is False
    assert evaluated_checks(result)["two/cut", "sync_state"] is True
    (failed,) = result.get_step_failure_events()
    failure = failed.step_failure_data
    assert failed.step_key == "pgsieve_one_replica_tables"
    assert failure.user_failure_data is not None
    assert failure.user_failure_data.description == ("subscription one: public.notes is set aside: a value")
    assert "`pgsieve resync one TABLE`" in str(failure.user_failure_data.metadata["what to do"].value)
    notes = {"one/public/notes", "one/public/notes:sync_state", "one/public/notes:freshness"}
    red = {"one/cut", "one/cut:sync_state"} | notes
    assert red_assets(shop, dagster) == red
    assert len(alerts.since()) == 1
    # The command reports the table by its exit code each time.
    assert shop.cli("run", "one")[0] == 1
    alerts.since()
    for _ in range(2):
        shop.database.execute("insert into orders select max(id) + 1, 1 from orders")
        again = run_increments(shop, dagster)
        assert again.success, "the same failure is reported twice"
        assert materialised_assets(again) == steps | {"one/public/orders"}
        assert red_assets(shop, dagster) - {"one/cut"} == red - {"one/cut"}
        assert alerts.since() == []
    _set_aside(shop, "two", "stock", "another value")
    one = pgsieve.build_definitions(shop.path).resolve_job_def("pgsieve_shop__one_increments")
    assert one.execute_in_process(instance=dagster, raise_on_error=False).success, (
        "it fails for another subscription's table"
    )
    assert not run_increments(shop, dagster).success
    assert len(alerts.since()) == 1
    assert "two/public/stock" in red_assets(shop, dagster)
    # One table is copied again in the web interface, the other one by a command.
    dagster.add_dynamic_partitions("one_tables", ["public.notes"])
    copies = pgsieve.build_definitions(shop.path).resolve_job_def("pgsieve_one_copies")
    assert copies.execute_in_process(instance=dagster, tags=range_tags(["public.notes"])).success
    assert "one/public/notes" not in red_assets(shop, dagster)
    assert shop.cli("resync", "two")[0] == 0
    assert run_increments(shop, dagster).success
    assert (red_assets(shop, dagster), stale_assets(shop, dagster)) == (set(), [])


def test_materialising_a_set_aside_table_gives_its_reason_and_the_other_tables(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.copy()
    assert run_increments(shop, dagster).success
    _set_aside(shop, "one", "notes", "a value")
    defs = pgsieve.build_definitions(shop.path)
    replicas = defs.resolve_assets_def(dg.AssetKey(["one", "cut"]))
    tables = [dg.AssetKey(["one", "public", table]) for table in ("notes", "orders")]
    for chosen in ([*tables, dg.AssetKey(["one", "cut"])], tables, tables[:1]):
        for _ in range(2):
            result = dg.materialize(
                [replicas],
                instance=dagster,
                selection=chosen,
                raise_on_error=False,
            )
            assert not result.success
            assert materialised_assets(result) == {"one/public/orders"} & {k.to_user_string() for k in chosen}
            assert {r for r in red_assets(shop, dagster) if ":" not in r} - {"one/cut"} == {
                "one/public/notes"
            }


def test_a_root_shows_the_partitions_of_its_changes(shop: Shop, dagster: dg.DagsterInstance) -> None:
    shop.database.execute("create table tree (id int, r text, primary key (id, r)) partition by list (r)")
    for value in ("a", "B c", "d"):
        shop.database.execute(f"create table \"tree {value}\" partition of tree for values in ('{value}')")
    shop.database.execute("create publication r for table tree with (publish_via_partition_root)")
    of_source = {"source": "shop", "publications": ["r"]}
    two = shop.written["subscriptions"]["two"]
    for subscriptions in ({"one": of_source}, {"one": of_source, "two": {**two, "publications": ["leaves"]}}):
        if "two" in subscriptions:  # then the slot captures leaves instead of the root
            shop.database.execute('create publication leaves for table "tree d"')
        shop.configure(subscriptions=subscriptions)
        shop.copy()
        shop.database.execute("insert into tree select coalesce(max(id), 0) + 1, 'a' from tree")
        shop.database.execute("insert into tree select max(id) + 1, 'B c' from tree")
        assert run_increments(shop, dagster).success
        record = dagster.get_latest_materialization_event(dg.AssetKey(["one", "public", "tree"]))
        assert record is not None
        assert record.asset_materialization is not None
        partitions = record.asset_materialization.metadata["changes came through"].value
        assert partitions == 'public."tree B c", public."tree a"'


def test_a_disabled_subscription_fails_one_run(shop: Shop, dagster: dg.DagsterInstance) -> None:
    shop.copy()
    SubscriptionRecord(shop.lake, "one").disable("an error")
    assert [run_increments(shop, dagster).success for _ in range(3)] == [False, True, True]
    assert "one/cut:sync_state" in red_assets(shop, dagster)
    SubscriptionRecord(shop.lake, "one").enable()
    assert run_increments(shop, dagster).success
    SubscriptionRecord(shop.lake, "one").disable("an error")
    assert not run_increments(shop, dagster).success, "the second error is not reported"


def test_the_run_in_which_an_error_disables_a_subscription_shows_that_with_its_changes(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.configure(subscriptions={"two": {"source": "shop", "publications": ["q"], "disable_on_error": True}})
    shop.database.execute("alter table stock add price numeric(4, 2)")
    shop.copy()
    shop.database.execute("insert into stock values (9, 9, 'NaN')")
    assert not run_increments(shop, dagster).success
    event = dagster.get_latest_materialization_event(dg.AssetKey(["two", "table_changes"]))
    assert event is not None
    assert event.asset_materialization is not None
    assert "price" in str(event.asset_materialization.metadata["disabled"].value)


def test_a_missing_slot_starts_a_failing_run_once_an_hour(shop: Shop, dagster: dg.DagsterInstance) -> None:
    defs = pgsieve.build_definitions(shop.path)
    sensor = defs.resolve_sensor_def("pgsieve_shop_slot_lag")

    def tick(cursor: str | None) -> tuple[bool, str | None]:
        with dg.build_sensor_context(
            dagster, cursor=cursor, definitions=defs, resources=defs.resources
        ) as context:
            data = sensor.evaluate_tick(context)
            return bool(data.run_requests), data.cursor

    assert tick(None) == (False, ""), "the first run creates the slot"
    shop.copy()
    assert tick(None) == (False, "")
    shop.database.execute("select pg_drop_replication_slot(%s)", [shop.written["sources"]["shop"]["slot"]])
    requested, cursor = tick("")
    assert requested
    assert tick(cursor) == (False, cursor)
    assert tick("2026-01-01T00:00:00+00:00")[0]
    job = defs.resolve_job_def("pgsieve_shop_slot_alarm")
    result = job.execute_in_process(instance=dagster, raise_on_error=False)
    (failed,) = result.get_step_failure_events()
    assert failed.step_failure_data.user_failure_data is not None
    assert "does not exist" in (failed.step_failure_data.user_failure_data.description or "")


def test_a_run_names_the_error_of_its_step_first(shop: Shop, dagster: dg.DagsterInstance) -> None:
    shop.copy()
    shop.database.execute("select pg_drop_replication_slot(%s)", [shop.written["sources"]["shop"]["slot"]])
    result = run_increments(shop, dagster)
    (failed,) = result.get_step_failure_events()
    failure = failed.step_failure_data.user_failure_data
    assert failure is not None
    assert "does not exist, but Delta holds its changes" in (failure.description or "")
    assert {name: value.value for name, value in failure.metadata.items()} == {
        "what to do": "copy every table again: `pgsieve resync one` and `pgsieve resync two`",
        "SQLSTATE": "42704",
    }
    (error,) = [e.event_specific_data.error for e in result.all_events if e.is_job_failure] or [None]
    assert error is None or "does not exist, but Delta" in error.message
    # The command raises the error itself, with its hint and its SQLSTATE.
    code, text = shop.cli("run", "one")
    assert code == 2
    assert "[42704]" in text
    assert "pgsieve resync one" in text


@pytest.mark.drawn
def test_a_steps_reason_to_wait_is_in_the_log_of_its_run(shop: Shop, dagster: dg.DagsterInstance) -> None:
    level = logging.getLogger("pgsieve").level
    shop.copy()
    slot = shop.written["sources"]["shop"]["slot"]
    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"], autocommit=True) as other:
        other.execute("select pg_advisory_lock(hashtextextended(%s, 0))", [f"pgsieve slot {slot}"])
        ending = threading.Timer(3, other.close)
        ending.start()
        result = run_increments(shop, dagster)
        ending.join()
    assert result.success
    messages = [entry.user_message for entry in dagster.all_logs(result.run_id) if not entry.is_dagster_event]
    (waiting,) = [line for line in messages if line.startswith("waiting for")]
    assert f'waiting for "slot {slot}" of source "shop": held by ' in waiting
    assert logging.getLogger("pgsieve").level == level, "the level is not restored"
