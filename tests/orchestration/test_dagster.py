"""The whole graph on a real Dagster instance: a run, a scheduled run, a backfill, and a failed check."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.pipelines.commands.check import check
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.commands.results import SubscriptionRun
from pgsieve.pipelines.commands.run import run
from pgsieve.pipelines.commands.status import status
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.definitions import build_ui_definitions, register_tables
from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import drop_slots

pytestmark = pytest.mark.spark


class _Quiet:
    def start(self, task: str) -> None: ...

    def tell(self, line: str) -> None: ...

    def finish(self, task: str) -> None: ...


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    name = "orchestration"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(publisher_server.conninfo(dbname=name), autocommit=True) as connection:
            connection.execute("create table items (id int primary key, region text, amount numeric(10,2))")
            connection.execute("create table notes (id int primary key, note text)")
            connection.execute("insert into items select i, 'EMEA', i from generate_series(1, 10) i")
            connection.execute("insert into notes select i, 'n' from generate_series(1, 5) i")
            connection.execute("alter table items replica identity full")
            connection.execute("create publication p for table items where (region = 'EMEA'), notes")
            connection.execute(
                "comment on table notes is 'What clerks wrote'; comment on column notes.note is 'Free text'"
            )
            yield connection
            drop_slots(connection)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="module")
def config(
    database: psycopg.Connection, publisher_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    folder = tmp_path_factory.mktemp("orchestration")
    written = {
        "lake": "./lake",
        "spark": {"master": "local[2]", "conf": dict(SMALL_DATA)},
        "sources": {"shop": {"conninfo": publisher_server.conninfo(dbname="orchestration")}},
        "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(written))
    return load_config(path)


@pytest.fixture(scope="module")
def first_run(config: Config) -> SubscriptionRun:
    """The first run, which copies the tables. Each test begins with replicas, whichever tests run."""
    return run(config, config.select([]), _Quiet()).subscriptions[0]


def _through_spark(config: Config) -> Config:
    """The same configuration, but Spark writes every table, however small."""
    written = yaml.safe_load(config.path.read_text())
    written["spark"]["conf"]["spark.pgsieve.smallBytes"] = "-1"
    path = config.path.with_name("spark.yaml")
    path.write_text(yaml.safe_dump(written))
    return load_config(path)


def _untargeted(config: Config) -> Iterator[dg.AssetCheckKey]:
    """The checks of all runs that do not belong to their table's newest materialization. Dagster shows them as not evaluated."""
    with open_instance(config) as dagster:
        keys = [
            dg.AssetCheckKey(dg.AssetKey(["sales", "public", table]), name)
            for table in ("items", "notes")
            for name in ("sync_state", "freshness")
        ]
        newest = {
            r.asset_entry.asset_key: r.asset_entry.last_materialization_record
            for r in dagster.get_asset_records([key.asset_key for key in keys])
        }
        executions = dagster.event_log_storage.get_latest_asset_check_execution_by_key(keys)
        for key in keys:
            evaluation = executions[key].evaluation if key in executions else None
            target, last = evaluation and evaluation.target_materialization_data, newest[key.asset_key]
            if target is None or last is None or target.storage_id != last.storage_id:
                yield key


def test_a_run_materialises_the_graph_and_a_second_changes_nothing(
    config: Config, database: psycopg.Connection, first_run: SubscriptionRun
) -> None:
    assert {(t.name, t.rows) for t in first_run.copied} == {("items", 10), ("notes", 5)}
    assert first_run.changed
    assert set(_untargeted(config)) == set()
    database.execute("insert into items values (11, 'EMEA', 1), (12, 'APAC', 2)")
    database.execute("update items set region = 'APAC' where id = 1")
    second = run(config, config.select([]), _Quiet()).subscriptions[0]
    assert [(t.name, t.inserted, t.updated, t.deleted) for t in second.tables] == [("items", 1, 0, 1)]
    third = run(config, config.select([]), _Quiet()).subscriptions[0]
    assert not third.changed
    assert third.cut_version == second.cut_version
    report = status(config)
    assert [(t.state, t.rows) for t in report.subscriptions[0].tables] == [("ready", 10), ("ready", 5)]
    assert report.slots[0].exists
    assert check(config, config.select([]), _Quiet()).equal
    assert check(_through_spark(config), config.select([]), _Quiet()).equal


@pytest.mark.usefixtures("first_run")
def test_the_web_interface_offers_every_published_table_for_a_copy(config: Config) -> None:
    with open_instance(config) as dagster:
        dagster.delete_dynamic_partition("sales_tables", "public.notes")
        register_tables(config, dagster)
        assert set(dagster.get_dynamic_partitions("sales_tables")) == {"public.items", "public.notes"}


@pytest.mark.usefixtures("first_run")
def test_the_graph_has_the_documented_assets_and_checks(config: Config) -> None:
    defs = build_ui_definitions(config)
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert keys == {
        "sales/initial_sync",
        "shop/change_log",
        "sales/table_changes",
        "sales/public/items",
        "sales/public/notes",
        "shop/tables/public/items",
        "shop/tables/public/notes",
        "sales/cut",
        "sales/maintenance",
        "shop/change_log_maintenance",
    }
    upstream = {
        child.to_user_string(): {p.to_user_string() for p in graph.get(child).parent_keys}
        for child in graph.get_all_asset_keys()
    }
    assert upstream["shop/change_log"] == {"sales/initial_sync"}
    assert upstream["sales/table_changes"] == {"shop/change_log"}
    assert upstream["sales/public/items"] == {"sales/table_changes", "shop/tables/public/items"}
    assert upstream["sales/cut"] == {"sales/table_changes", "sales/public/items", "sales/public/notes"}
    checks = {(c.asset_key.to_user_string(), c.name) for c in graph.asset_check_keys}
    assert ("sales/public/items", "subscriber_consistency") in checks
    assert ("sales/public/items", "sync_state") in checks
    assert ("shop/change_log", "slot_health") in checks


@pytest.mark.usefixtures("first_run")
def test_the_schedules_run_applies_new_changes(config: Config, database: psycopg.Connection) -> None:
    database.execute("insert into notes values (100, 'scheduled')")
    defs = build_ui_definitions(config)
    schedule = defs.resolve_schedule_def("shop_increments_schedule")
    with open_instance(config) as dagster:
        tick = schedule.evaluate_tick(dg.build_schedule_context(dagster))
        assert len(tick.run_requests) == 1
        result = defs.resolve_job_def(schedule.job_name).execute_in_process(
            instance=dagster, run_config=tick.run_requests[0].run_config, tags=tick.run_requests[0].tags
        )
        assert result.success
        (event,) = [
            e
            for e in result.get_asset_materialization_events()
            if e.asset_key == dg.AssetKey(["sales", "public", "notes"])
        ]
    metadata = {key: value.value for key, value in event.materialization.metadata.items()}
    assert metadata["inserted"] == 1
    assert metadata["dagster/row_count"] == 6
    assert metadata["dagster/table_name"] == "public.notes"
    columns = [(c.name, c.description) for c in metadata["dagster/column_schema"].columns]
    assert columns == [("id", None), ("note", "Free text")]
    assert metadata["comment"] == "What clerks wrote"
    assert metadata["row filter"] == "none"


@pytest.mark.drawn
@pytest.mark.usefixtures("first_run")
def test_a_backfill_copies_the_chosen_table_and_leaves_the_others(
    config: Config, database: psycopg.Connection
) -> None:
    """It takes long: a backfill and runs of the whole graph."""
    database.execute("insert into items values (50, 'EMEA', 5)")
    before = {t.name: t.version for t in status(config).subscriptions[0].tables}
    defs = build_ui_definitions(config)
    with open_instance(config) as dagster:
        result = dg.materialize(
            [defs.resolve_assets_def(dg.AssetKey(["sales", "initial_sync"]))],
            instance=dagster,
            tags={
                "dagster/asset_partition_range_start": "public.items",
                "dagster/asset_partition_range_end": "public.items",
            },
        )
        assert result.success
        events = {e.asset_key.to_user_string(): e for e in result.get_asset_materialization_events()}
    assert set(events) == {"sales/initial_sync", "sales/public/items"}
    (copied,) = events["sales/initial_sync"].materialization.metadata["tables"].records
    assert (copied.data["table"], copied.data["problem"]) == ("public.items", "")
    assert run(config, config.select([]), _Quiet()).subscriptions[0].problems == ()
    after = {t.name: t.version for t in status(config).subscriptions[0].tables}
    assert after["items"] > before["items"]
    assert after["notes"] == before["notes"]
    assert check(config, config.select([]), _Quiet()).equal


@pytest.mark.drawn
@pytest.mark.usefixtures("first_run")
def test_the_consistency_check_fails_on_a_replica_that_was_tampered_with(config: Config) -> None:
    """It takes long: runs of the whole graph and of its checks."""
    defs = build_ui_definitions(config)
    lake = defs.resources["pgsieve_lake"]
    assert isinstance(lake.engine, SparkEngine)
    path = lake.open().paths.replica("sales", "public", "items")
    lake.engine.session.sql(f"update delta.`{path}` set amount = amount + 1 where id = 5")
    with open_instance(config) as dagster:
        result = dg.materialize(
            list(defs.asset_checks or []),
            instance=dagster,
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
            raise_on_error=False,
        )
        evaluated = result.get_asset_check_evaluations()
        evaluations = {
            e.asset_key.to_user_string(): e for e in evaluated if e.check_name == "subscriber_consistency"
        }
        synced = {e.asset_key.to_user_string(): e.passed for e in evaluated if e.check_name == "sync_state"}
    assert synced == {"sales/public/items": True, "sales/public/notes": True}
    assert not evaluations["sales/public/items"].passed
    assert set(evaluations["sales/public/items"].metadata["keys"].value) == {
        "(id)=(5) missing from the replica",
        "(id)=(5) only in the replica",
    }
    assert "(id)=(5) missing from the replica" in evaluations["sales/public/items"].description
    assert evaluations["sales/public/notes"].passed
    for compared in (config, _through_spark(config)):
        report = check(compared, compared.select([]), _Quiet())
        assert {t.name: (t.equal, len(t.differing_keys)) for t in report.tables} == {
            "items": (False, 2),
            "notes": (True, 0),
        }
    mended = check(config, config.select([]), _Quiet(), is_repair_requested=True).tables
    assert {t.name: t.repaired for t in mended} == {"items": (1, 1), "notes": None}
    assert check(config, config.select([]), _Quiet()).equal


@pytest.mark.long
@pytest.mark.usefixtures("first_run")
def test_a_followed_subscription_gets_changes_as_they_arrive_until_it_is_stopped(
    config: Config, database: psycopg.Connection
) -> None:
    """It takes long: a follower with a JVM, whose connection is cut."""
    run(config, config.select([]), _Quiet())
    lake, log = Path(config.lake), config.path.with_name("follow.log")

    def replicated(rows: int) -> bool:
        assert process.poll() is None, log.read_text()
        return DeltaTable(lake / "sales" / "public" / "notes").count() == rows

    (before,) = database.execute("select count(*) from notes").fetchone()
    command = [
        sys.executable,
        "-m",
        "pgsieve.pipelines.command_line.cli",
        "run",
        "--follow",
        "--config",
        str(config.path),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: _is_followed(database), log.read_text)
        database.execute("insert into notes values (1001, 'at once')")
        wait_until(lambda: replicated(before + 1), log.read_text, seconds=180)
        # The connection is cut; transactions in progress are sent again.
        with database.transaction():
            database.execute(
                "insert into notes select i, repeat('x', 1000) from generate_series(2001, 3000) i"
            )
            database.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
        wait_until(lambda: replicated(before + 1001), log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert not run(config, config.select([]), _Quiet()).problems
    assert check(config, config.select([]), _Quiet()).equal


def _is_followed(database: psycopg.Connection) -> bool:
    return database.execute(
        "select active from pg_replication_slots where slot_type = 'logical'"
    ).fetchone() == (True,)
