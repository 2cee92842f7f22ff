"""Other Sparks than a local session: a standalone cluster of two workers, and a Spark Connect server.

Both are real, started from the pyspark wheel by the scripts of deploy/spark. The cluster's Python cannot import pgsieve, so no code may
rely on a process, a working folder or an import path that driver and executors share. With a lake on S3 they share no folder at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.s3_server import S3Server
from tests.fixtures.servers import drop_slots
from tests.fixtures.spark_servers import (
    configured_cluster,
    connect_server,
    python_without_pgsieve,
)

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1800)]

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    name = "engines"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(publisher_server.conninfo(dbname=name), autocommit=True) as connection:
            connection.execute("create table items (id int primary key, region text)")
            connection.execute("insert into items select i, 'EMEA' from generate_series(1, 10) i")
            connection.execute("create table log (line text)")
            connection.execute("alter table log replica identity full")
            connection.execute("insert into log values ('a'), ('a'), (null)")
            connection.execute("create publication p for table items where (id > 3), log")
            yield connection
            drop_slots(connection)
        admin.execute(f"drop database {name} with (force)")


@dataclass(frozen=True)
class _Lake:
    """The address of a lake, and its S3 server; None if the lake is in a folder."""

    address: str
    store: S3Server | None = None

    def delete(self, table: str, where: str) -> None:
        """Damage a replica."""
        options = self.store.delta_rs if self.store else None
        DeltaTable(f"{self.address}/sales/public/{table}", storage_options=options).delete(where)


@pytest.fixture(params=["folder", "s3"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> _Lake:
    if request.param == "folder":
        return _Lake(str(tmp_path / "lake"))
    return _Lake(request.getfixturevalue("s3_folder"), request.getfixturevalue("s3_server"))


class _Pgsieve:
    """Runs commands with a configuration whose Spark is elsewhere."""

    def __init__(
        self, folder: Path, lake: _Lake, server: EmbeddedServer, master: str, conf: dict[str, str]
    ) -> None:
        self._path = folder / "pgsieve.yaml"
        written = {
            "lake": lake.address,
            **({"storage": dict(lake.store.storage)} if lake.store else {}),
            # Every table counts as large, so that executors work on it.
            "spark": {"master": master, "conf": {**conf, "spark.pgsieve.smallBytes": "-1"}},
            "sources": {"shop": {"conninfo": server.conninfo(dbname="engines")}},
            "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
        }
        self._path.write_text(yaml.safe_dump(written))

    def start(self, *command: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK", "SPARK"))}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pgsieve.pipelines.command_line.cli",
                "--verbose",
                *command,
                "-c",
                str(self._path),
            ],
            cwd=CHECKOUT,
            env=clean,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __call__(self, *command: str, ends: int = 0) -> str:
        started = self.start(*command)
        printed, _ = started.communicate(timeout=600)
        assert started.returncode == ends, printed
        return printed


def _replicates(pgsieve: _Pgsieve, lake: _Lake, database: psycopg.Connection) -> None:
    """Initial sync, increments, an added column, a consistency check and a repair, each in a separate process."""
    assert "7" in pgsieve("run")
    _write(database, 11)
    pgsieve("run")
    database.execute("update items set region = 'y' where id = 8")  # no key changes
    database.execute("alter table items add column note text")
    database.execute("update items set note = 'z' where id = 8")
    pgsieve("run")
    pgsieve("check")
    lake.delete("items", "id = 8")
    pgsieve("check", "--repair", ends=1)
    pgsieve("check")


def _write(database: psycopg.Connection, number: int) -> None:
    """Commit changes of every kind, also of keys. Each call's `number` exceeds the one before by at least 3."""
    database.execute("insert into items values (%s, 'EMEA'), (%s, 'APAC')", [number, 1000 + number])
    database.execute("insert into log values ('b'), ('b')")
    database.execute("update log set line = 'c' where ctid = (select min(ctid) from log)")
    database.execute("delete from log where ctid = (select max(ctid) from log)")
    database.execute("update items set id = %s where id = %s", [number + 1, number - 7])
    database.execute("update items set region = 'x' where id = %s", [number - 6])
    database.execute("delete from items where id = %s", [number - 5])


def _lose_executors(folder: Path, ended: threading.Event) -> None:
    """Kill executors of a cluster that run Python, but only four: otherwise the application may wait for new ones forever."""
    lost: set[str] = set()
    while len(lost) < 4 and not ended.wait(0.3):
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (path / "cmdline").read_bytes().split(b"\0")
                is_executor = b"org.apache.spark.executor.CoarseGrainedExecutorBackend" in command and (
                    path / "cwd"
                ).resolve().is_relative_to(folder)
                if is_executor and any(c.read_text() for c in path.glob("task/*/children")):
                    os.kill(int(path.name), signal.SIGKILL)
                    lost.add(path.name)


@pytest.mark.long
def test_a_standalone_cluster_replicates_even_if_executors_are_lost(
    server_folder: Path,
    publisher_server: EmbeddedServer,
    database: psycopg.Connection,
    lake: _Lake,
    tmp_path: Path,
) -> None:
    """It takes long: a cluster starts, and every command starts a session on it."""
    with configured_cluster(tmp_path) as (master, conf):
        pgsieve = _Pgsieve(tmp_path, lake, publisher_server, master, conf)
        _replicates(pgsieve, lake, database)
        _write(database, 14)
        impatient = {**conf, "spark.task.maxFailures": "1"}
        running = _Pgsieve(tmp_path, lake, publisher_server, master, impatient).start("run")
        ended = threading.Event()
        losing = threading.Thread(target=_lose_executors, args=[tmp_path.resolve(), ended])
        losing.start()
        printed, _ = running.communicate(timeout=600)
        ended.set()
        losing.join()
        # Spark may recover from the loss. Otherwise the run ends, and no table is set aside.
        assert running.returncode in {0, 2}, printed
        pgsieve = _Pgsieve(tmp_path, lake, publisher_server, master, conf)
        pgsieve("run")
        assert "set aside" not in pgsieve("status")
        pgsieve("check")


@pytest.mark.drawn
def test_a_run_says_that_it_waits_for_executors(
    publisher_server: EmbeddedServer, database: psycopg.Connection, tmp_path: Path
) -> None:
    """It takes long: pgsieve reports a wait only after twenty seconds."""
    with configured_cluster(tmp_path, workers=0) as (master, conf):
        pgsieve = _Pgsieve(tmp_path, _Lake(str(tmp_path / "lake")), publisher_server, master, conf)
        running = pgsieve.start("run")
        assert running.stdout is not None
        message = next(line for line in running.stdout if "no free executor" in line)
        running.kill()
        running.wait()
    assert "Spark has run nothing for 20 seconds" in message


@pytest.mark.long  # tests/faults uses the same kind of Spark
def test_a_spark_connect_server_replicates(
    server_folder: Path,
    publisher_server: EmbeddedServer,
    database: psycopg.Connection,
    lake: _Lake,
    tmp_path: Path,
) -> None:
    """It takes long: a Spark Connect server starts, and each command is a process."""
    on_s3 = lake.store is not None
    with connect_server(tmp_path / "connect", python_without_pgsieve(tmp_path), on_s3=on_s3) as master:
        _replicates(_Pgsieve(tmp_path, lake, publisher_server, master, {}), lake, database)
