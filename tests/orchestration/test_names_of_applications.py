"""Table names as applications use them: in the command line, the definitions, the checks, and the web interface with its server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from deltalake import DeltaTable

from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.definitions import build_ui_definitions
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import drop_slots
from tests.fixtures.shop import Shop

pytestmark = [pytest.mark.spark, pytest.mark.drawn("together")]

#: By (schema, table), the asset key. Dagster would turn the last keys into the same name.
TABLES = {
    ("public", "User"): "public/User",
    ("public", "user"): "public/user",
    ("public", "_prisma_migrations"): "public/_prisma_migrations",
    ("public", "order"): "public/order",
    ("public", "v1.2"): "public/v1-2E-2",
    ("public", "Größe"): "public/Gr-F6--DF-e",
    ("public", "order items"): "public/order-20-items",
    ("public", 'the "best", [a...b]'): "public/the-20--22-best-22--2C--20--5B-a-2E--2E--2E-b-5D-",
    ("public", "x" * 63): "public/" + "x" * 63,
    ("public", "表" * 21): "public/" + "-8868-" * 21,
    ("Tenant-7", "User"): "Tenant-2D-7/User",
    ("tenant_8", "User"): "tenant_8/User",
    ("a.b", "c"): "a-2E-b/c",
    ("a", "b.c"): "a/b-2E-c",
    ("a__b", "c"): "a__b/c",
    ("a", "b__c"): "a/b__c",
    ("a_b", "c"): "a_b/c",
    ("a", "b_c"): "a/b_c",
}


def _sql(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


@pytest.fixture(scope="module")
def application(publisher_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    name = "applications"
    conninfo = publisher_server.conninfo(dbname=name)
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name} encoding 'UTF8' template template0")
        with psycopg.connect(conninfo, autocommit=True) as database:
            for schema, table in TABLES:
                database.execute(f"create schema if not exists {_sql(schema)}")
                # Only Spark writes columns whose names Parquet forbids; one table has some.
                text = '"E-Mail ä"' if table == "order items" else "email"
                database.execute(
                    f'create table {_sql(schema, table)} (id int primary key, "createdAt" date, {text} text)'
                )
                database.execute(f"insert into {_sql(schema, table)} values (1, '2024-01-01', 'a')")
            database.execute("create publication all_tables for all tables")
            written: dict[str, Any] = {
                "lake": "./lake",
                "sources": {"App": {"conninfo": conninfo}},
                "subscriptions": {"Mirror": {"source": "App", "publications": ["all_tables"]}},
            }
            shop = Shop(database, written, tmp_path_factory.mktemp("applications") / "pgsieve.yaml")
            shop.configure()
            yield shop
            drop_slots(database)
        admin.execute(f"drop database {name} with (force)")


def _config(application: Shop) -> Config:
    return load_config(application.path)


def _rows(application: Shop, name: tuple[str, str]) -> list[int]:
    path = application.lake.paths.replica("Mirror", *name)
    return sorted(DeltaTable(path).to_pyarrow_table()["id"].to_pylist())


def test_a_run_copies_and_applies_tables_and_prints_their_names(
    application: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long: many commands on all tables."""
    monkeypatch.setenv("COLUMNS", "400")
    (first,) = application.run().subscriptions
    assert {(t.schema, t.name): t.rows for t in first.copied} == dict.fromkeys(TABLES, 1)
    for name in TABLES:
        application.database.execute(f"insert into {_sql(*name)} values (2, '2024-01-02', 'b')")
    (second,) = application.run().subscriptions
    assert {(t.schema, t.name): t.inserted for t in second.tables} == dict.fromkeys(TABLES, 1)
    assert not second.problems
    for name in TABLES:
        assert _rows(application, name) == [1, 2]
    code, printed = application.cli("resync", "Mirror", '"Tenant-7"."User"', 'a."b.c"', "public.user")
    assert code == 0, printed
    assert {'"Tenant-7"."User"', 'a."b.c"', 'public."user"'} <= set(printed.split())
    code, printed = application.cli("status")
    assert code == 0, printed
    assert printed.count("ready") == len(TABLES)
    code, printed = application.cli("check")
    assert code == 0, printed
    assert printed.count("equal") >= len(TABLES)


def test_the_definitions_load_and_name_each_table_as_documented(application: Shop) -> None:
    defs = build_ui_definitions(_config(application))
    dg.Definitions.validate_loadable(defs)
    graph = defs.resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert {f"Mirror/{key}" for key in TABLES.values()} <= keys
    checked = {c.asset_key.to_user_string() for c in graph.asset_check_keys if c.name == "sync_state"}
    assert checked == {"Mirror/cut", *(f"Mirror/{key}" for key in TABLES.values())}
    for key in TABLES.values():
        selected = dg.AssetSelection.from_string(f'key:"Mirror/{key}"').resolve(graph)
        assert [k.to_user_string() for k in selected] == [f"Mirror/{key}"]


def test_the_job_and_the_checks_of_dagster_reach_every_table(application: Shop) -> None:
    """It takes long: a job and all checks run on every table."""
    for name in TABLES:
        application.database.execute(f"insert into {_sql(*name)} values (3, '2024-01-03', 'c')")
    config = _config(application)
    defs = build_ui_definitions(config)
    with open_instance(config) as dagster:
        job = defs.resolve_job_def("App_increments")
        result = job.execute_in_process(instance=dagster)
        materialised = {e.asset_key.to_user_string() for e in result.get_asset_materialization_events()}
        assert {f"Mirror/{key}" for key in TABLES.values()} <= materialised
        again = job.execute_in_process(instance=dagster)
        materialised = {e.asset_key.to_user_string() for e in again.get_asset_materialization_events()}
        assert materialised == {"App/change_log", "Mirror/table_changes", "Mirror/cut"}
        checks = dg.materialize(
            list(defs.asset_checks or []),
            instance=dagster,
            resources=defs.resources,
            selection=dg.AssetSelection.all_asset_checks(),
        ).get_asset_check_evaluations()
    for check in ("subscriber_consistency", "freshness", "sync_state"):
        passed = {c.asset_key.to_user_string() for c in checks if c.check_name == check and c.passed}
        assert passed == {f"Mirror/{key}" for key in TABLES.values()}


def test_the_sensor_copies_new_tables_once_in_one_run(application: Shop) -> None:
    new = [("public", "Later, 1"), ("public", "Later.2"), ("tenant_8", "Later")]
    for name in new:
        application.database.execute(f"create table {_sql(*name)} (id int primary key)")
        application.database.execute(f"insert into {_sql(*name)} values (1)")
    config = _config(application)
    defs = build_ui_definitions(config)
    sensor = defs.resolve_sensor_def("Mirror_new_tables")
    with open_instance(config) as dagster:

        def tick() -> dg.SensorExecutionData:
            with dg.build_sensor_context(dagster, resources=defs.resources, definitions=defs) as context:
                return sensor.evaluate_tick(context)

        first, second = tick(), tick()
        (request,) = first.run_requests or []
        assert [r.run_key for r in second.run_requests or []] == [request.run_key]
        for addition in first.dynamic_partitions_requests:
            dagster.add_dynamic_partitions(addition.partitions_def_name, list(addition.partition_keys))
        asset = defs.resolve_assets_def(dg.AssetKey(["Mirror", "initial_sync"]))
        copies = []
        # A tick between the submission and the answer asks again. By then there is nothing left to copy.
        for _ in range(2):
            result = dg.materialize([asset], instance=dagster, tags=request.tags)
            events = result.get_asset_materialization_events()
            whole = [e for e in events if e.asset_key == asset.key]
            copies.append({e.materialization.metadata["dagster/row_count"].value for e in whole})
        assert copies == [{3}, {0}]
        assert [len(DeltaTable(application.lake.paths.replica("Mirror", *n)).history()) for n in new] == [
            1,
            1,
            1,
        ]
        assert not tick().run_requests
    for name in new:
        application.database.execute(f"drop table {_sql(*name)}")


class _Web:
    """The GraphQL interface of a web server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/graphql"

    def __call__(self, query: str, **variables: Any) -> Any:
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert "errors" not in answer, answer
        return answer["data"]

    def assets(self) -> set[str]:
        try:
            nodes = self("{ assetNodes { assetKey { path } } }")["assetNodes"]
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return set()
        return {"/".join(node["assetKey"]["path"]) for node in nodes}


_LAUNCH = """mutation($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""


def test_the_web_interface_shows_the_tables_and_materialises_one(application: Shop) -> None:
    """It takes long: Dagster's web server and code server start, and a run in a separate process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = application.path.with_name("ui.log")
    command = [
        sys.executable,
        "-m",
        "pgsieve.pipelines.command_line.cli",
        "-c",
        str(application.path),
        "ui",
        "--port",
        str(port),
    ]
    environ = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
    try:
        web = _Web(port)
        keys = {f"Mirror/{key}" for key in TABLES.values()}
        wait_until(lambda: keys <= web.assets(), log.read_text, seconds=180)
        application.database.execute("""insert into "Tenant-7"."User" values (4, null, 'd')""")
        (location,) = web(
            "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
        )["repositoriesOrError"]["nodes"]
        chosen = [["App", "change_log"], ["Mirror", "table_changes"], ["Mirror", "Tenant-2D-7", "User"]]
        launched = web(
            _LAUNCH,
            params={
                "selector": {
                    "repositoryName": location["name"],
                    "repositoryLocationName": location["location"]["name"],
                    "pipelineName": "App_increments",
                    "assetSelection": [{"path": path} for path in chosen],
                    "assetCheckSelection": [],
                },
                "mode": "default",
                "runConfigData": {},
            },
        )["launchPipelineExecution"]
        run_id = launched["run"]["runId"]
        status = "query($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"

        def ended() -> bool:
            time.sleep(0.5)
            return web(status, id=run_id)["runOrError"]["status"] in {"SUCCESS", "FAILURE", "CANCELED"}

        wait_until(ended, log.read_text, seconds=180)
        assert web(status, id=run_id)["runOrError"]["status"] == "SUCCESS", log.read_text()
        assert _rows(application, ("Tenant-7", "User")) == [1, 2, 3, 4]
        last = web(
            "query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {"
            " assetMaterializations(limit: 1) { runId } } } }",
            key={"path": chosen[-1]},
        )["assetNodeOrError"]["assetMaterializations"]
        assert last == [{"runId": run_id}]
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
