"""Measures a run with few changes, by the number of tables: `python benchmarks/small_changes.py 1 5 200`.

In: numbers of tables. Out: for each number the medians of some runs, each a process of its own. Runs with an
update, a delete and an insert in every table alternate with runs without changes. Printed are wall clock, in
brackets CPU, which other work on the machine changes less, and the peak memory of a process. Without `--java`
a run that starts a JVM fails, as so few changes should need none.
"""

import os
import resource
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
ROWS = 1000


def main(numbers: list[int], *, java: bool) -> None:
    """Measure with each of these numbers of tables."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(
            Path(folder) / "data", settings={"fsync": "off", "max_locks_per_transaction": "1024"}
        ) as server,
    ):
        for number in numbers:
            few, nothing = _measure(server, Path(folder), number, java=java)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            wall, cpu = (few[i] - nothing[i] for i in range(2))
            print(
                f"{number:6d} tables: {few[0]:6.2f} s ({few[1]:.2f}), nothing to do {nothing[0]:5.2f} s ({nothing[1]:.2f}),"
                f" {wall:+.2f} s ({cpu:+.2f}); at most {peak:,.0f} MB so far; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )


#: Seconds of a run: wall clock and CPU.
Seconds = tuple[float, float]


def _measure(server: EmbeddedServer, folder: Path, number: int, *, java: bool) -> tuple[Seconds, Seconds]:
    name = f"tables_{number}"
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
    conninfo = server.conninfo(dbname=name)
    with psycopg.connect(conninfo, autocommit=True) as database:
        for table in range(number):
            database.execute(f"create table t{table} (id int primary key, n int, c text)")
            database.execute(
                f"insert into t{table} select i, i, 'row ' || i from generate_series(1, {ROWS}) i"
            )
        database.execute("create publication p for all tables")
        path = folder / name / "pgsieve.yaml"
        path.parent.mkdir()
        content = {
            "lake": "./lake",
            "sources": {name: {"conninfo": conninfo}},
            "subscriptions": {"sub": {"source": name, "publications": ["p"]}},
        }
        path.write_text(yaml.safe_dump(content))
        for _ in range(2):  # the copies, then their cut
            _run(path, java=java)
        few, nothing = [], []
        for each in range(ROUNDS):
            for table in range(number):
                database.execute(f"update t{table} set n = n + 1 where id = {10 + each}")
                database.execute(f"delete from t{table} where id = {20 + each}")
                database.execute(f"insert into t{table} values ({2 * ROWS + each}, 0, 'new')")
            few.append(_run(path, java=java))
            nothing.append(_run(path, java=java))
        return _median(few), _median(nothing)


def _median(runs: list[Seconds]) -> Seconds:
    wall, cpu = zip(*runs, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def _run(path: Path, *, java: bool) -> Seconds:
    began, used = time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "pgsieve.pipelines.command_line.cli", "-c", str(path), "run"]
    environment = dict(os.environ) if java else {**os.environ, "JAVA_HOME": "/none"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began, _cpu_seconds() - used


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    tables = [int(number) for number in sys.argv[1:] if number != "--java"]
    main(tables or [1, 5, 200], java="--java" in sys.argv)
