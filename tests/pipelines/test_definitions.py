"""The definitions in a project with others: names do not clash, no source is asked while they load, and runs succeed or fail rightly."""

from __future__ import annotations

import logging
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

import pgsieve
from pgsieve.assets.initial_sync import initial_sync_asset, range_tags
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.translator import AssetKind, DagsterNames, PgsieveAsset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines import definitions
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from tests.fixtures.shop import Shop

#: An address that neither answers nor refuses: a connection would wait until its timeout.
SILENT = """
lake: ./lake
sources: {shop: {conninfo: "host=203.0.113.1 dbname=shop connect_timeout=60"}}
subscriptions: {sales: {source: shop, publications: [p]}}
"""


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    path = tmp_path / "pgsieve.yaml"
    path.write_text(SILENT)
    return path


def test_the_web_interface_prints_no_warning_of_dagsters_own_parameters(
    silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSIEVE_CONFIG", str(silent))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", dg.BetaWarning)
        loaded = definitions.defs()
        assert isinstance(loaded, dg.Definitions)
        assert loaded.get_repository_def().sensor_defs
    assert [str(warning.message) for warning in caught if warning.category is dg.BetaWarning] == []


def _keys(defs: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}


def _names(defs: dg.Definitions) -> set[str]:
    return {each.name for some in (defs.jobs, defs.schedules, defs.sensors) for each in some or []}


@dg.asset
def mine(lake: dg.ResourceParam[str]) -> None: ...


def test_definitions_merge_into_a_project_with_an_executor_and_a_lake(silent: Path, tmp_path: Path) -> None:
    own = dg.Definitions(
        assets=[mine],
        jobs=[
            dg.define_asset_job("shop_increments", [mine]),
            dg.define_asset_job("shop_maintenance", [mine]),
        ],
        resources={"lake": "mine"},
        executor=dg.multiprocess_executor,
    )
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "pgsieve.yaml").write_text(
        SILENT.replace("shop:", "app:").replace("sales", "copy").replace("source: shop", "source: app")
    )
    second = pgsieve.build_definitions(tmp_path / "second" / "pgsieve.yaml", prefix="second")
    merged = dg.Definitions.merge(own, pgsieve.build_definitions(silent), second)
    dg.Definitions.validate_loadable(merged)
    assert merged.executor is dg.multiprocess_executor
    assert set(merged.resources or {}) == {
        "lake",
        *("pgsieve_lake", "pgsieve_spark", "second_lake", "second_spark"),
    }
    assert {"mine", "shop/change_log", "sales/cut", "app/change_log", "copy/cut"} <= _keys(merged)
    theirs = _names(merged) - {"shop_increments", "shop_maintenance"}
    assert all(name.startswith(("pgsieve_", "second_")) for name in theirs)
    with pytest.raises(PgsieveError, match="cannot begin a name"):
        pgsieve.build_definitions(silent, prefix="my-own")


def test_definitions_alone_keep_their_names(silent: Path) -> None:
    defs = build_ui_definitions(load_config(silent))
    assert defs.executor is dg.in_process_executor
    assert _names(defs) == {
        "shop_increments",
        "shop_increments_schedule",
        "shop_maintenance",
        "shop_maintenance_schedule",
        "shop_slot_alarm",
        "shop_slot_lag",
        "sales_new_tables",
        "sales_copies",
        "published_tables",
    }
    assert all(each.description for each in (*defs.jobs, *defs.schedules, *defs.sensors))


def test_no_source_is_asked_while_definitions_load(silent: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1 port={server.getsockname()[1]}"
        silent.write_text(SILENT.replace("203.0.113.1", address).replace("=60", "=2"))
        dg.Definitions.validate_loadable(pgsieve.build_definitions(silent))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_one_key_switches_schedules_sensors_and_freshness_policies_on(silent: Path) -> None:
    def running() -> tuple[set[str], bool]:
        defs = build_ui_definitions(load_config(silent))
        on = {s.name for s in defs.schedules or [] if s.default_status is dg.DefaultScheduleStatus.RUNNING}
        on |= {s.name for s in defs.sensors or [] if s.default_status is dg.DefaultSensorStatus.RUNNING}
        cut = defs.resolve_asset_graph().get(dg.AssetKey(["sales", "cut"]))
        return on, cut.freshness_policy is not None

    assert running() == ({"published_tables"}, False), "this sensor starts no run"
    silent.write_text(f"{SILENT}dagster: {{automation: true}}\n")
    names = {"shop_increments_schedule", "shop_maintenance_schedule", "sales_new_tables", "shop_slot_lag"}
    assert running() == ({*names, "published_tables"}, True)


@pytest.mark.drawn
def test_tables_are_known_from_the_stored_state_and_then_from_the_lake(shop: Shop) -> None:
    def described() -> dict[str, str]:
        """The row filter that each replica shows."""
        specs = pgsieve.build_definitions(shop.path).resolve_asset_graph()
        keys = [k for k in specs.get_all_asset_keys() if "public" in k.path and "tables" not in k.path]
        return {k.path[-1]: (specs.get(k).description or "").partition("Row filter: ")[2] for k in keys}

    assert described() == {}
    config = load_config(shop.path)
    assert shop.cli("refresh-defs-state") == (0, "")
    everything = {"orders": "(id > 1)", "notes": "none", "stock": "none"}
    assert described() == everything
    shop.copy()
    (config.state_folder / "published.json").unlink()
    assert described() == everything, "the catalog in the lake is not used"
    shop.database.execute("create table later (id int primary key); alter publication q add table later")
    assert described() == everything, "a source is asked"
    shop.copy()
    assert described() == {**everything, "later": "none"}, "the newer record of a run is not used"


def test_an_unknown_row_filter_is_not_shown_as_none(shop: Shop) -> None:
    own: dict[str, Any] = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={"three": own})
    shop.copy()
    stock = TableStates(shop.lake, "three").read_newest()["public", "stock"]
    assert stock.definition is not None
    unknown = replace(stock, definition=replace(stock.definition, published=None))
    key = dg.AssetKey(["three", "public", "stock"])
    for state, row_filter in ((stock, "none"), (unknown, "not known before the source has been read")):
        TableStates(shop.lake, "three").append([state])
        node = pgsieve.build_definitions(shop.path).resolve_asset_graph().get(key)
        assert (node.description or "").endswith(f"Row filter: {row_filter}")


@pytest.fixture
def dagster() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def _increments(shop: Shop, dagster: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    defs = pgsieve.build_definitions(shop.path)
    job = defs.resolve_job_def("pgsieve_shop_increments")
    return job.execute_in_process(instance=dagster, raise_on_error=False)


def _materialised(result: dg.ExecuteInProcessResult) -> set[str]:
    return {e.asset_key.to_user_string() for e in result.get_asset_materialization_events()}


def _evaluated(result: dg.ExecuteInProcessResult) -> dict[tuple[str, str], bool]:
    return {
        (e.asset_key.to_user_string(), e.check_name): e.passed for e in result.get_asset_check_evaluations()
    }


def test_an_increment_evaluates_its_checks_and_names_its_figures_consistently(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.copy()
    first, second = _increments(shop, dagster), _increments(shop, dagster)
    assert first.success
    assert second.success
    steps = {"shop/change_log", "one/table_changes", "one/cut", "two/table_changes", "two/cut"}
    assert _materialised(first) == steps | {"one/public/orders", "one/public/notes", "two/public/stock"}
    assert _materialised(second) == steps
    for result in (first, second):
        assert _evaluated(result) == {
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


def _red(shop: Shop, dagster: dg.DagsterInstance) -> set[str]:
    """The assets that Dagster's pages show as failed, because of their last run or a check that each run evaluates."""
    graph = pgsieve.build_definitions(shop.path).resolve_asset_graph()
    red = set()
    for key in graph.materializable_asset_keys:
        planned = dagster.get_latest_planned_materialization_info(key)
        run = dagster.get_run_by_id(planned.run_id) if planned else None
        made = dagster.get_latest_materialization_event(key)
        if run and run.is_failure and (made is None or made.run_id != run.run_id):
            red.add(key.to_user_string())
    last = dagster.event_log_storage.get_latest_asset_check_execution_by_key(sorted(graph.asset_check_keys))
    for key, check in last.items():
        if isinstance(check.evaluation, dg.AssetCheckEvaluation) and not check.evaluation.passed:
            red.add(f"{key.asset_key.to_user_string()}:{key.name}")
    return red


def _stale(shop: Shop, dagster: dg.DagsterInstance) -> list[str]:
    """The assets of an increment that Dagster calls "unsynced"."""
    graph = pgsieve.build_definitions(shop.path).resolve_asset_graph()
    resolver = CachingStaleStatusResolver(dagster, graph, LoadingContextForTest(dagster))
    made = [k for k in graph.materializable_asset_keys if k.path[-1] not in {"maintenance", "initial_sync"}]
    return [
        f"{key.to_user_string()}: {cause.reason}" for key in made for cause in resolver.get_stale_causes(key)
    ]


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
    assert _increments(shop, dagster).success
    assert (_red(shop, dagster), _stale(shop, dagster)) == (set(), [])
    alerts = _Alerts(dagster)
    _set_aside(shop, "one", "notes", "a value")
    shop.database.execute("insert into orders values (20, 1)")
    result = _increments(shop, dagster)
    assert not result.success
    steps = {"shop/change_log", "one/table_changes", "two/table_changes", "two/cut"}
    assert _materialised(result) == steps | {"one/public/orders"}
    assert _evaluated(result)["one/cut", "sync_state"] is False
    assert _evaluated(result)["two/cut", "sync_state"] is True
    (failed,) = result.get_step_failure_events()
    failure = failed.step_failure_data
    assert failed.step_key == "pgsieve_one_replica_tables"
    assert failure.user_failure_data is not None
    assert failure.user_failure_data.description == ("subscription one: public.notes is set aside: a value")
    assert "`pgsieve resync one TABLE`" in str(failure.user_failure_data.metadata["what to do"].value)
    notes = {"one/public/notes", "one/public/notes:sync_state", "one/public/notes:freshness"}
    red = {"one/cut", "one/cut:sync_state"} | notes
    assert _red(shop, dagster) == red
    assert len(alerts.since()) == 1
    # The command reports the table by its exit code each time.
    assert shop.cli("run", "one")[0] == 1
    alerts.since()
    for _ in range(2):
        shop.database.execute("insert into orders select max(id) + 1, 1 from orders")
        again = _increments(shop, dagster)
        assert again.success, "the same failure is reported twice"
        assert _materialised(again) == steps | {"one/public/orders"}
        assert _red(shop, dagster) - {"one/cut"} == red - {"one/cut"}
        assert alerts.since() == []
    _set_aside(shop, "two", "stock", "another value")
    one = pgsieve.build_definitions(shop.path).resolve_job_def("pgsieve_shop__one_increments")
    assert one.execute_in_process(instance=dagster, raise_on_error=False).success, (
        "it fails for another subscription's table"
    )
    assert not _increments(shop, dagster).success
    assert len(alerts.since()) == 1
    assert "two/public/stock" in _red(shop, dagster)
    # One table is copied again in the web interface, the other one by a command.
    dagster.add_dynamic_partitions("one_tables", ["public.notes"])
    copies = pgsieve.build_definitions(shop.path).resolve_job_def("pgsieve_one_copies")
    assert copies.execute_in_process(instance=dagster, tags=range_tags(["public.notes"])).success
    assert "one/public/notes" not in _red(shop, dagster)
    assert shop.cli("resync", "two")[0] == 0
    assert _increments(shop, dagster).success
    assert (_red(shop, dagster), _stale(shop, dagster)) == (set(), [])


def test_materialising_a_set_aside_table_gives_its_reason_and_the_other_tables(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.copy()
    assert _increments(shop, dagster).success
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
            assert _materialised(result) == {"one/public/orders"} & {k.to_user_string() for k in chosen}
            assert {r for r in _red(shop, dagster) if ":" not in r} - {"one/cut"} == {"one/public/notes"}


def test_a_copy_that_leaves_a_table_out_fails_after_the_others(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.database.execute("create table odd (id int primary key, n numeric)")
    shop.database.execute("insert into odd values (1, 12345678901234567890123456789012345678901)")
    shop.database.execute("alter publication q add table odd")
    shop.configure(
        subscriptions={
            "two": {"source": "shop", "publications": ["q"], "types": {"public.odd.n": "decimal(38,0)"}}
        }
    )
    tables = ["public.odd", "public.stock"]
    dagster.add_dynamic_partitions("two_tables", tables)
    config = load_config(shop.path)
    asset = initial_sync_asset(build_project(config).subscriptions["two"], DagsterNames())
    result = dg.materialize(
        [asset],
        instance=dagster,
        resources=build_ui_definitions(config).resources,
        tags=range_tags(tables),
        raise_on_error=False,
    )
    assert not result.success
    events = result.get_asset_materialization_events()
    assert [(e.asset_key.to_user_string(), e.partition) for e in events] == [
        ("two/initial_sync", "public.stock"),
        ("two/public/stock", None),
    ]
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_tables_are_listed_before_the_copy_which_materialises_the_replicas(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    assert shop.cli("refresh-defs-state") == (0, "")
    defs = pgsieve.build_definitions(shop.path)

    def tick(name: str) -> dg.SensorExecutionData:
        with dg.build_sensor_context(dagster, resources=defs.resources, definitions=defs) as context:
            return defs.resolve_sensor_def(f"pgsieve_{name}").evaluate_tick(context)

    for addition in tick("published_tables").dynamic_partitions_requests:
        dagster.add_dynamic_partitions(addition.partitions_def_name, list(addition.partition_keys))
    listed = {name: sorted(dagster.get_dynamic_partitions(f"{name}_tables")) for name in ("one", "two")}
    assert listed == {"one": ["public.notes", "public.orders"], "two": ["public.stock"]}
    assert not tick("published_tables").dynamic_partitions_requests
    asked = tick("one_new_tables")
    (request,) = asked.run_requests or []
    assert not asked.dynamic_partitions_requests
    job = defs.resolve_job_def("pgsieve_one_copies")
    assert "subscription one" in (job.description or "")
    assert {j.name for j in defs.resolve_sensor_def("pgsieve_one_new_tables").jobs} == {job.name}
    result = job.execute_in_process(instance=dagster, tags=request.tags)
    made = {
        e.asset_key.to_user_string(): e.materialization.metadata
        for e in result.get_asset_materialization_events()
    }
    assert made.keys() == {"one/initial_sync", "one/public/orders", "one/public/notes"}
    orders = made["one/public/orders"]
    assert (orders["dagster/row_count"].value, orders["row filter"].value) == (3, "(id > 1)")
    (source,) = orders["dagster/column_lineage"].value.deps_by_column["id"]
    assert source.asset_key == dg.AssetKey(["shop", "tables", "public", "orders"])
    (request,) = tick("two_new_tables").run_requests or []
    assert (
        defs.resolve_job_def("pgsieve_two_copies")
        .execute_in_process(instance=dagster, tags=request.tags)
        .success
    )
    assert _increments(shop, dagster).success
    assert (_red(shop, dagster), _stale(shop, dagster)) == (set(), [])


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
        assert _increments(shop, dagster).success
        record = dagster.get_latest_materialization_event(dg.AssetKey(["one", "public", "tree"]))
        assert record is not None
        assert record.asset_materialization is not None
        partitions = record.asset_materialization.metadata["changes came through"].value
        assert partitions == 'public."tree B c", public."tree a"'


def test_a_disabled_subscription_fails_one_run(shop: Shop, dagster: dg.DagsterInstance) -> None:
    shop.copy()
    SubscriptionRecord(shop.lake, "one").disable("an error")
    assert [_increments(shop, dagster).success for _ in range(3)] == [False, True, True]
    assert "one/cut:sync_state" in _red(shop, dagster)
    SubscriptionRecord(shop.lake, "one").enable()
    assert _increments(shop, dagster).success
    SubscriptionRecord(shop.lake, "one").disable("an error")
    assert not _increments(shop, dagster).success, "the second error is not reported"


def test_the_run_in_which_an_error_disables_a_subscription_shows_that_with_its_changes(
    shop: Shop, dagster: dg.DagsterInstance
) -> None:
    shop.configure(subscriptions={"two": {"source": "shop", "publications": ["q"], "disable_on_error": True}})
    shop.database.execute("alter table stock add price numeric(4, 2)")
    shop.copy()
    shop.database.execute("insert into stock values (9, 9, 'NaN')")
    assert not _increments(shop, dagster).success
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
    result = _increments(shop, dagster)
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
        result = _increments(shop, dagster)
        ending.join()
    assert result.success
    messages = [entry.user_message for entry in dagster.all_logs(result.run_id) if not entry.is_dagster_event]
    (waiting,) = [line for line in messages if line.startswith("waiting for")]
    assert f'waiting for "slot {slot}" of source "shop": held by ' in waiting
    assert logging.getLogger("pgsieve").level == level, "the level is not restored"


def test_a_translator_changes_keys_and_their_dependents(silent: Path) -> None:
    class Mine(pgsieve.PgsieveTranslator):
        def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
            spec = super().get_asset_spec(data)
            if data.kind is AssetKind.CHANGE_LOG:
                spec = spec.replace_attributes(deps=[dg.AssetKey("upstream")])
            return spec.replace_attributes(key=spec.key.with_prefix("raw"), owners=["team:data"])

    defs = pgsieve.build_definitions(silent, translator=Mine())
    graph = defs.resolve_asset_graph()
    assert all(k.path[0] == "raw" for k in graph.materializable_asset_keys)
    changes = graph.get(dg.AssetKey(["raw", "sales", "table_changes"]))
    assert {k.to_user_string() for k in changes.parent_keys} == {"raw/shop/change_log"}
    assert changes.owners == ["team:data"]
    log = graph.get(dg.AssetKey(["raw", "shop", "change_log"]))
    assert {k.to_user_string() for k in log.parent_keys} == {"upstream", "raw/sales/initial_sync"}

    class Same(pgsieve.PgsieveTranslator):
        def get_asset_spec(self, data: PgsieveAsset) -> dg.AssetSpec:
            return super().get_asset_spec(data).replace_attributes(key=dg.AssetKey("same"))

    with pytest.raises(PgsieveError, match="one key, same"):
        pgsieve.build_definitions(silent, translator=Same())
