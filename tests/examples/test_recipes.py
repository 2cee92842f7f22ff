"""Files of deploy/ and examples/ that people copy: files that need no other program are run, the others are checked in parts."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
import yaml
from deltalake import DeltaTable
from psycopg.conninfo import conninfo_to_dict

from pgsieve.pipelines.config.model import load_config
from pgsieve.resources.lake.jars import list_delta_packages, list_s3_packages
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.embedded_s3 import run_embedded_s3
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import own_database
from tests.fixtures.spark_servers import free_port
from tests.test_docs import accepted

ROOT = Path(__file__).parents[2]
DEPLOY, EXAMPLES = ROOT / "deploy", ROOT / "examples"
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text(encoding="utf-8"))["services"]


@contextmanager
def _database(server: EmbeddedServer) -> Iterator[tuple[psycopg.Connection, dict[str, str]]]:
    """The database of the composition, and the environment variables by which its services reach it."""
    where = conninfo_to_dict(server.conninfo())
    with own_database(server, "shop") as owner:
        try:
            owner.execute((DEPLOY / "compose/shop.sql").read_text(encoding="utf-8"))
            yield owner, {"POSTGRES_HOST": str(where["host"]), "POSTGRES_PORT": str(where["port"])}
        finally:
            owner.execute("DROP OWNED BY pgsieve; DROP ROLE pgsieve")


@contextmanager
def _replicated(server: EmbeddedServer, folder: Path) -> Iterator[tuple[psycopg.Connection, dict[str, str]]]:
    """The composition's project in a folder, with its lake there, and the environment of its commands."""
    written = yaml.safe_load((DEPLOY / "compose/pgsieve.yaml").read_text(encoding="utf-8"))
    del written["storage"]
    (folder / "pgsieve.yaml").write_text(yaml.safe_dump({**written, "lake": "./lake"}))
    with _database(server) as (owner, variables):
        own = {**COMPOSE["follow"]["environment"], **variables}
        environment = {
            **os.environ,
            **own,
            "DAGSTER_HOME": str(folder),
            "PGSIEVE_CONFIG": str(folder / "pgsieve.yaml"),
        }
        yield owner, environment


def _port(arguments: list[str], option: str) -> tuple[list[str], int]:
    """The arguments with a free port instead of the container's."""
    port = free_port()
    place = arguments.index(option) + 1
    return [*arguments[:place], str(port), *arguments[place + 1 :]], port


def _answer(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


@pytest.mark.drawn
def test_the_services_of_the_composition_work_together(
    publisher_server: EmbeddedServer, tmp_path: Path
) -> None:
    """The same processes run with the same files and variables. Only hosts and ports are this machine's."""
    service = COMPOSE["follow"]
    given = service["environment"]
    assert COMPOSE["dagster"]["environment"] == given
    accepted(COMPOSE["dagster"]["command"])
    keys = COMPOSE["s3"]["environment"]
    assert keys.items() <= given.items()
    (tmp_path / "pgsieve.yaml").write_bytes((DEPLOY / "compose/pgsieve.yaml").read_bytes())
    with (
        _database(publisher_server) as (owner, server),
        run_embedded_s3(tmp_path / "s3", keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"]) as url,
    ):
        environment = {**os.environ, **given, **server, "S3_ENDPOINT": url}
        environment.pop("DAGSTER_HOME", None)
        validated = commands.run("validate", folder=tmp_path, environment=environment)
        assert validated.returncode == 0, validated.stdout
        follow, port = _port(service["command"], "--metrics-port")
        log = tmp_path / "log"
        follower = commands.start(follow, log, folder=tmp_path, environment=environment)
        options = {**keys, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}

        def orders() -> list[int]:
            path = "s3://lake/replicas/sales/public/orders"
            if not DeltaTable.is_deltatable(path, options):
                return []
            return sorted(DeltaTable(path, storage_options=options).to_pyarrow_table()["id"].to_pylist())

        try:
            wait_until(lambda: orders() == [1, 3], log.read_text, 120)
            owner.execute("UPDATE orders SET region = 'EMEA' WHERE id = 2")
            wait_until(lambda: orders() == [1, 2, 3], log.read_text, 60)
            assert "pgsieve_" in _answer(f"http://127.0.0.1:{port}/metrics")
        finally:
            os.kill(follower.pid or 0, signal.SIGTERM)
            follower.join(60)
        assert follower.exitcode == 0, log.read_text()


@pytest.mark.drawn
def test_a_notebook_and_dbt_read_tables_of_one_cut(
    publisher_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _replicated(publisher_server, tmp_path) as (owner, environment):
        assert commands.run("run", folder=tmp_path, environment=environment).returncode == 0
        lake = tmp_path / "lake/sales"
        read = runpy.run_path(str(EXAMPLES / "dbt/run_at_cut.py"))["versions_at_newest_cut"]
        versions = read(str(lake))
        assert versions.keys() == {"public.customers", "public.orders"}
        owner.execute("INSERT INTO orders VALUES (4, 2, 'EMEA', 100)")
        assert commands.run("run", folder=tmp_path, environment=environment).returncode == 0
    assert read(str(lake)) == {**versions, "public.orders": versions["public.orders"] + 1}
    monkeypatch.setenv("LAKE", str(lake))
    notebook = json.loads((EXAMPLES / "notebook/replica.ipynb").read_text(encoding="utf-8"))
    seen: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the file contains the output of another machine"
            exec("".join(cell["source"]), seen)
    assert [(name, float(amount)) for name, amount in seen["revenue"]] == [("Ada", 14.75), ("Grace", 100.0)]
    assert len(seen["changes"]) == 1


@pytest.mark.long
def test_dbt_builds_its_models_of_the_newest_cut(publisher_server: EmbeddedServer, tmp_path: Path) -> None:
    """Both commands of the README, in an environment of its own, which takes a minute to install."""
    shutil.copytree(EXAMPLES / "dbt", tmp_path / "dbt")
    readme = (tmp_path / "dbt/README.md").read_text(encoding="utf-8")
    (installs,) = re.findall(r"^pip (install .*)$", readme, re.MULTILINE)
    (build,) = re.findall(r"^LAKE=/srv/lake/sales python (run_at_cut.py .*)$", readme, re.MULTILINE)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "own"], check=True)
    python = str(tmp_path / "own/bin/python")
    subprocess.run([python, "-m", "pip", "--quiet", *shlex.split(installs)], check=True)
    with _replicated(publisher_server, tmp_path) as (owner, environment):
        for change, revenue in (
            ("", [("Ada", 14.75)]),
            ("INSERT INTO orders VALUES (4, 2, 'EMEA', 100)", [("Ada", 14.75), ("Grace", 100.0)]),
        ):
            if change:
                owner.execute(change)
            assert commands.run("run", folder=tmp_path, environment=environment).returncode == 0
            built = subprocess.run(
                [python, *shlex.split(build)],
                cwd=tmp_path / "dbt",
                env={**environment, "LAKE": str(tmp_path / "lake/sales")},
                capture_output=True,
                text=True,
                check=False,
            )
            assert built.returncode == 0, built.stdout + built.stderr
            query = "import duckdb; print(duckdb.connect('shop.duckdb').execute('from revenue order by 1').fetchall())"
            shown = subprocess.run(
                [python, "-c", query], cwd=tmp_path / "dbt", capture_output=True, text=True, check=True
            )
            rows = eval(shown.stdout, {"Decimal": float})
            assert [(name, float(amount)) for name, amount in rows] == revenue


@dataclass
class _Operator:
    """A task of Airflow: its command, run as BashOperator does."""

    task_id: str
    bash_command: str
    append_env: bool
    retries: int
    retry_delay: timedelta | None = None
    downstream: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _OPERATORS[self.task_id] = self

    def __rshift__(self, other: _Operator) -> _Operator:
        self.downstream.append(other.task_id)
        return other


_OPERATORS: dict[str, _Operator] = {}


@pytest.mark.drawn
def test_the_commands_of_the_airflow_dag_end_as_its_tasks_expect(
    publisher_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow itself is not installed: its two classes are stand-ins. Four starts of the program."""
    dags = list[tuple[str, dict[str, Any]]]()

    @contextmanager
    def dag(name: str, **options: Any) -> Iterator[None]:
        dags.append((name, options))
        yield

    for module, content in {
        "airflow": {},
        "airflow.sdk": {"DAG": dag},
        "airflow.providers": {},
        "airflow.providers.standard": {},
        "airflow.providers.standard.operators": {},
        "airflow.providers.standard.operators.bash": {"BashOperator": _Operator},
    }.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[module]).update(content)
    runpy.run_path(str(DEPLOY / "airflow/pgsieve_dag.py"))
    assert [name for name, _ in dags] == ["pgsieve_run", "pgsieve_nightly"]
    assert all(options["max_active_runs"] == 1 and not options["catchup"] for _, options in dags)
    assert _OPERATORS["maintain"].downstream == ["check"]
    with _replicated(publisher_server, tmp_path) as (_, environment):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

        def code(task: str) -> int:
            command = ["bash", "-c", _OPERATORS[task].bash_command]
            return subprocess.run(command, env={**environment, "PATH": path}, check=False).returncode

        assert [code(task) for task in ("run", "maintain", "check")] == [0, 0, 0]
        DeltaTable(tmp_path / "lake/sales/public/orders").delete()
        assert code("check") == 1
        assert _OPERATORS["check"].retries == 0, "trying again would find the same"


def test_manifests_use_existing_commands_keys_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser accepts their commands, their pgsieve.yaml loads, and Dagster loads their module."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/follow.yaml").read_text(encoding="utf-8")))
    config, follow, check = documents
    monkeypatch.setenv("SHOP_PASSWORD", "secret")
    (tmp_path / "pgsieve.yaml").write_text(config["data"]["pgsieve.yaml"])
    assert load_config(tmp_path / "pgsieve.yaml").subscriptions.keys() == {"sales"}
    pods = [follow["spec"]["template"]["spec"], check["spec"]["jobTemplate"]["spec"]["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        accepted(container["args"])
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    values = yaml.safe_load((DEPLOY / "kubernetes/dagster-values.yaml").read_text(encoding="utf-8"))
    (location,) = values["dagster-user-deployments"]["deployments"]
    assert location["dagsterApiGrpcArgs"] == ["--module-name", "pgsieve.pipelines.definitions"]
    assert (ROOT / "pipelines/definitions.py").is_file()
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    of_dagster = (DEPLOY / "kubernetes/Dockerfile").read_text(encoding="utf-8")
    assert f"dagster-k8s=={pins['dagster-pyspark']}" in of_dagster, (
        "it is of another release than the other packages"
    )
    assert f"--version {pins['dagster']}" in (DEPLOY / "kubernetes/dagster-values.yaml").read_text()


def test_a_spark_server_is_started_with_the_settings_of_pgsieves_sessions() -> None:
    script = (DEPLOY / "spark/connect-server.sh").read_text(encoding="utf-8")
    sdk = "$sdk"
    for package in (*list_delta_packages().coordinates, *list_s3_packages().coordinates):
        name, _, version = package.rpartition(":")
        assert package in script or (f"{name}:{sdk}" in script and f"sdk={version}" in script), package
    assert f"{log_store.SETTING}={log_store.CLASS}" in script
