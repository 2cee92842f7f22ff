"""Successful and failed runs leave no password and no cell value where it does not belong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake
from psycopg.conninfo import make_conninfo

from pgsieve.pipelines.demo.demo import SMALL_DATA
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots

PASSWORD = "pa'ss \\ w\"ord ${x} %41 =ü"
#: The part of a secret that survives any quoting.
PLANTED_PASSWORD = 'w"ord ${x} %41 =ü'
CELL = "cell-4711-value"
#: Too large for chr(), whose error message shows it.
NUMBER = "1987654321"


@pytest.fixture
def conninfo(publisher_server: EmbeddedServer) -> Iterator[str]:
    """A database with values that cannot be copied, filtered or applied. Each of them is a secret."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("create database secrets")
        made = publisher_server.conninfo(dbname="secrets")
        with psycopg.connect(made, autocommit=True) as database:
            for table in ("fine", "uncopied", "unfiltered", "unapplied"):
                database.execute(
                    f"create table {table} (id int primary key, note text, amount numeric(20, 2))"
                )
                database.execute(f"insert into {table} values (1, '{CELL}', 1)")
            database.execute(f"update uncopied set amount = 'NaN', note = '{CELL}'")
            database.execute(f"update unfiltered set id = {NUMBER}")
            database.execute("create publication p for table fine, uncopied, unapplied")
            database.execute(
                "create publication q for table unfiltered where (chr(id) <> 'a') with (publish = 'insert')"
            )
            yield made
            drop_slots(database)
        admin.execute("drop database secrets with (force)")


def _configuration(
    folder: Path, conninfo: str, secrets: dict[str, str] | None = None, *, by_spark: bool = False
) -> Path:
    secrets = {"password": PASSWORD} if secrets is None else secrets
    source = {"conninfo": (make_conninfo(conninfo, **secrets) if secrets else conninfo).replace("${", "$${")}
    written = {
        "lake": "./lake",
        "spark": {"conf": {**SMALL_DATA, **({"spark.pgsieve.smallBytes": "-1"} if by_spark else {})}},
        "sources": {"shop": source},
        "subscriptions": {
            "sales": {"source": "shop", "publications": ["p"]},
            "own": {"source": "shop", "publications": ["q"], "row_filter": "publisher"},
        },
    }
    path = folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(written))
    return path


class Pgsieve:
    """Runs the command line. Records its output, and the command lines of its processes."""

    def __init__(self, config: Path) -> None:
        self._config, self._printed, self._titles = config, b"", set[bytes]()

    @property
    def seen(self) -> bytes:
        return self._printed + b"\n".join(self._titles)

    def __call__(self, *command: str, environment: dict[str, str] | None = None) -> int:
        started = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pgsieve.pipelines.command_line.cli",
                "--verbose",
                *command,
                "-c",
                str(self._config),
            ],
            env={**os.environ, "DAGSTER_HOME": "", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=[over])
        watching.start()
        printed, _ = started.communicate()
        over.set()
        watching.join()
        self._printed += printed
        return started.returncode

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    line = process.read_bytes()
                except OSError:
                    continue
                if b"pgsieve.pipelines.command_line.cli" in line or b"java" in line or b"pyspark" in line:
                    self._titles.add(line.replace(b"\0", b" "))


def _files(folder: Path) -> Iterator[Path]:
    """All files, except the configuration and the tables that hold rows."""
    rows = {"change_log", "_changes", "public"}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "pgsieve.yaml" and rows.isdisjoint(path.parts):
            yield path


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize(
    "all_by_spark", [False, pytest.param(True, marks=pytest.mark.long)], ids=["one_by_spark", "all_by_spark"]
)
def test_secrets_are_left_nowhere(tmp_path: Path, conninfo: str, all_by_spark: bool) -> None:
    """It takes long: each command is a process whose children are watched, and some start a JVM."""
    pgsieve = Pgsieve(_configuration(tmp_path, conninfo, by_spark=all_by_spark))
    pgsieve("validate")
    assert pgsieve("run", "sales") == 1, "uncopied is set aside"
    with psycopg.connect(conninfo, autocommit=True) as database:
        database.execute(f"insert into unapplied values (2, '{CELL}', 'NaN')")
        database.execute(f"insert into fine values (2, '{CELL}', 2)")
    _configuration(tmp_path, conninfo, by_spark=True)
    assert pgsieve("run", "sales") == 1, "unapplied is set aside"
    _configuration(tmp_path, conninfo, by_spark=all_by_spark)
    assert pgsieve("run", "own") == 1, "the publisher cannot evaluate the filter"
    row = {"id": pa.array([3], pa.int32()), "note": [CELL], "amount": pa.array([3], pa.decimal128(20, 2))}
    write_deltalake(str(tmp_path / "lake/sales/public/fine"), pa.table(row), mode="append")
    assert pgsieve("check", "sales") == 1, "fine differs"
    assert pgsieve("status") == 0
    assert pgsieve("maintain") == 0
    gone = {"PGHOST": "127.0.0.1", "PGPASSWORD": PASSWORD}
    _configuration(tmp_path, "port=1 dbname=secrets")
    assert pgsieve("run", environment=gone) == 2, "no server"
    _configuration(tmp_path, "postgresql://me:qxzj@zjqx@127.0.0.1:1/shop", {})
    assert pgsieve("run") == 2, "libpq mistakes a part of the password for the host"
    written = b"".join(path.read_bytes() for path in _files(tmp_path))
    seen = pgsieve.seen
    assert b"set aside" in seen
    assert b"java" in seen
    for secret in (PASSWORD, PLANTED_PASSWORD, CELL, NUMBER, "qxzj", "zjqx"):
        for form in {secret, repr(secret)[1:-1], secret.replace("'", "\\'").replace('"', '\\"')}:
            assert form.encode() not in seen
            assert form.encode() not in written
