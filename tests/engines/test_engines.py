"""Other Sparks than a local session: a standalone cluster of two workers, and a Spark Connect server.

Both are real, started from the pyspark wheel. The cluster's Python cannot import pgsieve: nothing may lean on
driver and executors sharing a process, a working folder or an import path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
import yaml

from resources.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots
from tests.fixtures.spark_servers import (
    SMALL_DATA,
    SPARK_HOME,
    connect_server,
    free_port,
    process,
    python_without_pgsieve,
    wait_for,
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    name = "engines"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(publisher_server.conninfo(dbname=name), autocommit=True) as connection:
            connection.execute("create table items (id int primary key, region text)")
            connection.execute("insert into items select i, 'EMEA' from generate_series(1, 10) i")
            connection.execute("create publication p for table items where (id > 3)")
            yield connection
            drop_slots(connection)
        admin.execute(f"drop database {name} with (force)")


def _replicates(
    folder: Path, server: EmbeddedServer, database: psycopg.Connection, master: str, conf: dict[str, str]
) -> None:
    """Initial sync, increments and the consistency check, each in a process of its own."""
    path = folder / "pgsieve.yaml"
    written = {
        "lake": "./lake",
        # No table is so small that the executors are left out.
        "spark": {"master": master, "conf": {**conf, "spark.pgsieve.smallBytes": "-1"}},
        "sources": {"shop": {"conninfo": server.conninfo(dbname="engines")}},
        "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
    }
    path.write_text(yaml.safe_dump(written))

    def pgsieve(command: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK"))}
        done = subprocess.run(
            [sys.executable, "-m", "pipelines.cli", "--verbose", command, "-c", str(path)],
            cwd=CHECKOUT,
            env=clean,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "7" in pgsieve("run")
    database.execute("insert into items values (11, 'EMEA'), (1000, 'APAC')")
    database.execute("update items set id = 20 where id = 4")
    database.execute("update items set region = 'x' where id = 5")
    database.execute("delete from items where id = 6")
    pgsieve("run")
    pgsieve("check")


def test_a_standalone_cluster_of_two_workers_replicates(
    server_folder: Path, publisher_server: EmbeddedServer, database: psycopg.Connection, tmp_path: Path
) -> None:
    port = free_port()
    java = [str(SPARK_HOME / "bin" / "spark-class")]
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:
        master = [
            *java,
            f"{deploy}.master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--webui-port",
            str(free_port()),
        ]
        stack.enter_context(process(master, tmp_path / "master"))
        wait_for(port)
        for number in range(2):
            worker = [
                *(*java, f"{deploy}.worker.Worker", "--cores", "1", "--memory", "1g", "--host", "127.0.0.1"),
                *("--webui-port", str(free_port()), f"spark://127.0.0.1:{port}"),
            ]
            stack.enter_context(process(worker, tmp_path / f"worker_{number}"))
        executors = python_without_pgsieve(tmp_path)
        conf = {
            "spark.pyspark.python": str(executors),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "800m",
            "spark.cores.max": "2",
            **SMALL_DATA,
            "spark.executor.extraJavaOptions": SMALL_DATA["spark.driver.extraJavaOptions"],
        }
        _replicates(tmp_path, publisher_server, database, f"spark://127.0.0.1:{port}", conf)


@pytest.mark.long  # tests/faults has the same Spark
def test_a_spark_connect_server_replicates(
    server_folder: Path, publisher_server: EmbeddedServer, database: psycopg.Connection, tmp_path: Path
) -> None:
    with connect_server(tmp_path / "connect", python_without_pgsieve(tmp_path)) as master:
        _replicates(tmp_path, publisher_server, database, master, {})
