"""Other Sparks than a local session: a standalone cluster of two workers, and a Spark Connect server.

Both are real, started from the pyspark wheel. The cluster's Python cannot import pgsieve: nothing may lean on
driver and executors sharing a process, a working folder or an import path.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pyspark
import pytest
import yaml

from resources.embedded import EmbeddedServer
from resources.jars import delta_jars
from resources.spark import delta_package

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SPARK_HOME = Path(pyspark.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[2]
_PATIENCE = 120
#: Ten rows are not worth compiling for.
_SMALL_DATA = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
}
_SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")


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
            connection.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        admin.execute(f"drop database {name} with (force)")


@contextmanager
def _process(command: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with the block, its output in a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK", "SPARK"))}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**clean, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _python_without_pgsieve(folder: Path) -> Path:
    """An interpreter with the installed packages but without this checkout, which is installed as a .pth file."""
    import numpy as np

    site = Path(np.__file__).parents[1]
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{site}"\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    found = subprocess.run(
        [script, "-c", "import numpy, pyarrow; import decoding"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'decoding'" in found.stderr
    return script


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
    port = _free_port()
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
            str(_free_port()),
        ]
        stack.enter_context(_process(master, tmp_path / "master"))
        _wait_for(port)
        for number in range(2):
            worker = [
                *(*java, f"{deploy}.worker.Worker", "--cores", "1", "--memory", "1g", "--host", "127.0.0.1"),
                *("--webui-port", str(_free_port()), f"spark://127.0.0.1:{port}"),
            ]
            stack.enter_context(_process(worker, tmp_path / f"worker_{number}"))
        executors = _python_without_pgsieve(tmp_path)
        conf = {
            "spark.pyspark.python": str(executors),
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "800m",
            "spark.cores.max": "2",
            "spark.driver.extraJavaOptions": _SMALL_JVM,
            "spark.executor.extraJavaOptions": _SMALL_JVM,
            **_SMALL_DATA,
        }
        _replicates(tmp_path, publisher_server, database, f"spark://127.0.0.1:{port}", conf)


def test_a_spark_connect_server_replicates(
    server_folder: Path, publisher_server: EmbeddedServer, database: psycopg.Connection, tmp_path: Path
) -> None:
    port = _free_port()
    jars = delta_jars(delta_package())
    packages = ["--packages", delta_package()] if jars is None else ["--jars", ",".join(jars)]
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": _SMALL_JVM,
        **_SMALL_DATA,
    }
    command = [
        *(
            str(SPARK_HOME / "bin" / "spark-submit"),
            "--master",
            "local[2]",
            "--driver-memory",
            "2g",
            *packages,
        ),
        *(part for key, value in settings.items() for part in ("--conf", f"{key}={value}")),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
    ]
    python = str(_python_without_pgsieve(tmp_path))
    with _process(command, tmp_path / "connect", SPARK_HOME=str(SPARK_HOME), PYSPARK_PYTHON=python):
        _wait_for(port)
        _replicates(tmp_path, publisher_server, database, f"sc://127.0.0.1:{port}", {})
