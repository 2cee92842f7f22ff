"""Measures a run without changes, by the number of tables: `python benchmarks/idle_tables.py 1 100`.

In: numbers of tables. Out: for each number the median time of some runs, each a process of its own, and the
difference to the smallest number. The tables are empty, so this is the fixed cost of a run. With `--uri` the lake has
a `file://` address, which only Spark reaches.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import yaml

from pgsieve.resources.postgres.embedded import EmbeddedServer

ROUNDS = 3


def main() -> None:
    """Measure with each of the given numbers of tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, default=[1, 1000])
    parser.add_argument("--uri", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(
            Path(folder) / "data", settings={"fsync": "off", "max_locks_per_transaction": "1024"}
        ) as server,
    ):
        measured = {
            number: _idle_seconds(server, Path(folder), number, is_uri=options.uri)
            for number in options.numbers
        }
    least = measured[min(measured)]
    for number, seconds in measured.items():
        print(f"{number:6d} tables: {seconds:5.2f} s, {seconds - least:+.2f} s")


def _idle_seconds(server: EmbeddedServer, folder: Path, number: int, *, is_uri: bool) -> float:
    name = f"tables_{number}"
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
    conninfo = server.conninfo(dbname=name)
    with psycopg.connect(conninfo, autocommit=True) as database:
        for table in range(number):
            database.execute(f"create table t{table} (id int primary key, n int)")
        database.execute("create publication p for all tables")
    path = folder / name / "pgsieve.yaml"
    path.parent.mkdir()
    content = {
        "lake": (path.parent / "lake").as_uri() if is_uri else "./lake",
        "sources": {name: {"conninfo": conninfo}},
        "subscriptions": {"sub": {"source": name, "publications": ["p"]}},
    }
    path.write_text(yaml.safe_dump(content))
    for _ in range(2):  # the copies, then their cut
        _run(path)
    return statistics.median(_run(path) for _ in range(ROUNDS))


def _run(path: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pgsieve.pipelines.command_line.cli", "-c", str(path), "run"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
