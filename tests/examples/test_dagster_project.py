"""The example project as a user has it: its definitions load without the database, and its assets read a cut, and data loaded by dlt."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import dagster as dg
import psycopg
import pyarrow.parquet as pq
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "dagster_project"
DATABASE = "example_project"
TABLES = """
create table customers (id int primary key, region text);
create table orders (id int primary key, customer_id int, amount numeric(10,2));
insert into customers values (1, 'EMEA'), (2, 'APAC'), (3, null);
insert into orders values (1, 1, 10.50), (2, 1, 4.50), (3, 2, 7);
create publication sales for table orders, customers where (region is not null);
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the project whose module can be imported."""
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)  # dlt reads .dlt/config.toml here, which disables its telemetry
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop_analytics"]:
        del sys.modules[name]


@pytest.fixture
def database(
    publisher_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psycopg.Connection]:
    conninfo = publisher_server.conninfo(dbname=DATABASE)
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {DATABASE}")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(TABLES)
            monkeypatch.setenv("SHOP_DATABASE", conninfo)
            yield connection
            drop_slots(connection)
        admin.execute(f"drop database {DATABASE} with (force)")


def test_the_project_loads_without_its_database(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "host=203.0.113.1 dbname=shop connect_timeout=60")
    defs = import_module("shop_analytics.definitions").defs()
    dg.Definitions.validate_loadable(defs)
    assert set(defs.resources) == {"dlt_pipelines", "lake", "pgsieve_lake", "pgsieve_spark"}
    assert defs.executor is dg.multiprocess_executor
    assert {"shop_increments", "pgsieve_shop_increments"} <= {job.name for job in defs.jobs}


def test_the_projects_own_asset_reads_all_replicas_at_a_cut(
    project: Path, database: psycopg.Connection
) -> None:
    defs = import_module("shop_analytics.definitions").defs()
    with dg.DagsterInstance.ephemeral() as dagster:
        # The sensor requests a copy of tables without a replica.
        sensor = defs.resolve_sensor_def("pgsieve_sales_new_tables")
        with dg.build_sensor_context(dagster, resources=defs.resources, definitions=defs) as context:
            tick = sensor.evaluate_tick(context)
        for addition in tick.dynamic_partitions_requests:
            dagster.add_dynamic_partitions(addition.partitions_def_name, addition.partition_keys)
        (request,) = tick.run_requests
        copy = defs.resolve_implicit_global_asset_job_def().get_subset(
            asset_selection={dg.AssetKey(["sales", "initial_sync"])}
        )
        assert copy.execute_in_process(instance=dagster, tags=request.tags).success

        asset = dg.AssetKey("revenue_by_region")
        evaluated = dg.evaluate_automation_conditions(defs, dagster)
        assert evaluated.get_num_requested(asset) == 0
        assert defs.resolve_job_def("pgsieve_shop_increments").execute_in_process(instance=dagster).success
        evaluated = dg.evaluate_automation_conditions(defs, dagster, cursor=evaluated.cursor)
        assert evaluated.get_num_requested(asset) == 1, "the new cut requests no run"

        changes = dagster.get_latest_materialization_event(dg.AssetKey(["sales", "table_changes"]))
        assert changes is not None
        version = changes.asset_materialization.tags["dagster/data_version"]
        assert version == "appended", "another version would make every idle replica unsynced"
        plans = defs.resolve_implicit_global_asset_job_def().get_subset(
            asset_selection={dg.AssetKey("dlt_sales_plans_targets")}
        )
        assert plans.execute_in_process(instance=dagster).success
        own = defs.resolve_job_def("shop_increments").execute_in_process(instance=dagster)
        assert own.success
        assert all(check.passed for check in own.get_asset_check_evaluations())
    revenue = pq.read_table(project / "warehouse" / "revenue_by_region.parquet").to_pylist()
    assert [(row["region"], float(row["amount_sum"])) for row in revenue] == [("APAC", 7.0), ("EMEA", 15.0)]
    met = pq.read_table(project / "warehouse" / "targets_met.parquet").to_pylist()
    assert [row["region"] for row in met] == ["APAC"], "the replica does not join the table that dlt loaded"
