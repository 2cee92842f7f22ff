"""Replicas in the Hive metastore of the pyspark wheel: registered, described and unregistered by name; other tables are untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import yaml
from deltalake import DeltaTable

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import commands
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import drop_slots

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def database(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database registered")
        with psycopg.connect(publisher_server.conninfo(dbname="registered"), autocommit=True) as connection:
            connection.execute("create table orders (id int primary key, note text)")
            connection.execute("""create table "Items" (id int primary key, note text)""")
            connection.execute("insert into orders values (1, 'a'), (2, 'b')")
            connection.execute("comment on table orders is 'what was ordered'")
            connection.execute("comment on column orders.note is 'it''s `free` text'")
            connection.execute("""create publication p for table orders, "Items" """)
            yield connection
            drop_slots(connection)
        admin.execute("drop database registered with (force)")


class Pgsieve:
    """Runs commands, with a metastore in a folder. `names` is the template of names."""

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._source = folder, source
        self.conf = {
            **SMALL_DATA,
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore_db;create=true",
        }

    def configure(self, names: str) -> Path:
        """Write pgsieve.yaml, and return its path."""
        written = {
            "lake": "./a lake",
            "spark": {"master": "local[2]", "conf": self.conf},
            "catalog": {"names": names},
            "sources": {"shop": {"conninfo": self._source}},
            "subscriptions": {"sales": {"source": "shop", "publications": ["p"]}},
        }
        path = self._folder / "pgsieve.yaml"
        path.write_text(yaml.safe_dump(written))
        return path

    def __call__(self, *command: str, names: str, ends: int = 0, **environment: str) -> str:
        path = self.configure(names)
        done = commands.run(
            *("--verbose", *command, "-c", str(path)),
            folder=self._folder,
            environment={**os.environ, **environment},
        )
        assert done.returncode == ends, done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def following(self, names: str) -> Iterator[Path]:
        """Run `pgsieve run --follow` for the block, then send SIGTERM. Yields the file of its output."""
        log = self._folder / "follow.log"
        command = [sys.executable, "-m", "pgsieve", "run", "--follow", "-c", str(self.configure(names))]
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield log
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=120) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()

    def registered(self) -> set[str]:
        """The names in the catalog that pgsieve has registered, or is about to register."""
        folder = self._folder / "a lake/sales/_registered"
        if not DeltaTable.is_deltatable(str(folder)):
            return set()
        return set(map(str, DeltaTable(folder).to_pyarrow_table()["name"].to_pylist()))

    def sql(self, *statements: str) -> list[str]:
        """The rows of the statements, run in a session of the same metastore that pgsieve did not start."""
        program = (
            "import sys, json\n"
            "from pgsieve.resources.lake.session import SparkEngine\n"
            "spark = SparkEngine(master='local[2]', spark_config=json.loads(sys.argv[1])).session\n"
            "rows = [row for statement in sys.argv[2:] for row in spark.sql(statement).collect()]\n"
            "print('rows', json.dumps([str(tuple(row)) for row in rows]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(self.conf), *statements],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        rows: list[str] = json.loads(done.stdout.rpartition("rows ")[2])
        return rows


@pytest.mark.drawn
@pytest.mark.spark
def test_replicas_are_registered_described_and_unregistered_and_nothing_else_is_touched(
    tmp_path: Path, publisher_server: EmbeddedServer, database: psycopg.Connection
) -> None:
    """It takes long: four JVMs, one after the other, because a Hive metastore in a folder allows one process."""
    pgsieve = Pgsieve(tmp_path, publisher_server.conninfo(dbname="registered"))
    names = "{subscription}.{schema}_{table}"
    pgsieve("run", names=names)
    # Nothing is new, so no session is needed. Comments follow later.
    database.execute("comment on table orders is 'ordered'")
    pgsieve("run", names=names, JAVA_HOME="/none")
    replica = DeltaTable(str(tmp_path / "a lake/sales/public/orders"))
    assert replica.metadata().description == "ordered"
    assert replica.schema().fields[1].metadata == {"comment": "it's `free` text"}
    comments = pgsieve.sql(
        "select id, note from sales.public_orders order by id",
        "create table sales.others (a int) using parquet",
    )
    assert comments == ["(1, 'a')", "(2, 'b')"]
    removed = pgsieve("drop", "sales", names=names)
    assert "removed: `sales`.`public_orders` of the catalog" in removed
    assert pgsieve.sql("show tables in sales") == ["('sales', 'others', False)"]
    assert replica.version() >= 0


@pytest.mark.long
@pytest.mark.usefixtures("database")
def test_a_name_in_use_in_the_catalog_is_refused_and_its_table_stays(
    tmp_path: Path, publisher_server: EmbeddedServer
) -> None:
    """It takes long: each command starts a JVM with a Hive metastore."""
    pgsieve = Pgsieve(tmp_path, publisher_server.conninfo(dbname="registered"))
    pgsieve.sql("create database taken", "create table taken.public_orders (a int) using parquet")
    names = "taken.{schema}_{table}"
    refused = pgsieve("run", names=names, ends=2)
    assert "the catalog has `taken`.`public_orders` already, and pgsieve did not register it" in refused
    assert "choose other `names`" in refused
    pgsieve("drop", "sales", names=names)
    assert pgsieve.sql("show tables in taken") == ["('taken', 'public_orders', False)"]


@pytest.mark.long
def test_followers_copies_by_dagster_and_maintenance_register_existing_replicas(
    tmp_path: Path, publisher_server: EmbeddedServer, database: psycopg.Connection
) -> None:
    """It takes long: a follower and several commands, each with a JVM and a Hive metastore."""
    pgsieve = Pgsieve(tmp_path, publisher_server.conninfo(dbname="registered"))
    pgsieve.sql("create database followed", "create table followed.items (a int) using parquet")
    with pgsieve.following("followed.{table}") as log:
        # A name in use ends no run.
        wait_until(
            lambda: "the catalog has `followed`.`Items` already" in log.read_text(), log.read_text, 240
        )
        database.execute("create table late (id int primary key)")
        database.execute("insert into late values (7)")
        database.execute("alter publication p add table late")
        database.execute("insert into orders values (3, 'c')")
        wait_until(lambda: any("late" in name for name in pgsieve.registered()), log.read_text, 240)
    path = pgsieve.configure("copied.{table}")
    materialize = [
        *("dagster", "asset", "materialize", "-m", "pgsieve.pipelines.definitions"),
        *("--select", 'key:"sales/initial_sync"', "--partition", "public.late"),
    ]
    home = str(tmp_path / ".pgsieve/dagster")
    subprocess.run(
        [str(Path(sys.executable).with_name(materialize[0])), *materialize[1:]],
        cwd=tmp_path,
        env={**os.environ, "PGSIEVE_CONFIG": str(path), "DAGSTER_HOME": home},
        check=False,
    )
    pgsieve("maintain", names="maintained.{table}")
    rows = pgsieve.sql(
        "select id, (select count(*) from followed.orders), (select count(*) from copied.items),"
        " (select count(*) from maintained.orders) from followed.late join copied.late using (id)"
    )
    assert rows == ["(7, 3, 0, 3)"]
