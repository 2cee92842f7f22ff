"""Copies as runs of Dagster: tables are listed before their copy, and a copy that leaves one out fails after the others."""

from __future__ import annotations

import dagster as dg

import pgsieve
from pgsieve.assets.initial_sync import initial_sync_asset, range_tags
from pgsieve.assets.translator import DagsterNames
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.pipelines.project import build_project
from tests.fixtures.dagster_runs import red_assets, run_increments, stale_assets
from tests.fixtures.shop import Shop


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
    assert run_increments(shop, dagster).success
    assert (red_assets(shop, dagster), stale_assets(shop, dagster)) == (set(), [])
