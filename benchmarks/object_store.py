"""Measures a lake on S3, compared with the same lake in a folder in the same run.

In: the number of tables without changes, the number of rows of the initial sync and the catch-up, and the
milliseconds that each request waits. Out: the seconds in a folder, on a local S3 server, and on this server
with the wait, and their ratios; the processor time of the runs with their JVM, which other work on the
machine changes less; and with the wait also the number of requests. The server is SeaweedFS; a proxy adds the
wait. Each command is a process of its own. The lakes take turns, and alternate in being the first. Each run is
printed to stderr at its end, with the load average.

    python benchmarks/object_store.py --tables 50 --rows 2000000 --wait 30
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replication import COLUMNS, ROW, SETTINGS, changes
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.s3_proxy import S3Proxy, s3_proxy
from tests.fixtures.s3_server import BUCKET, S3Server, new_s3_server

FOLDER, DISTANT = "folder", "far"


@dataclass(frozen=True, slots=True)
class Run:
    """A run's seconds, processor seconds, and requests through the proxy."""

    wall: float
    processor: float
    requests: int


class Lakes:
    """The same subscription on several lakes, each with a slot of its own."""

    def __init__(
        self, folder: Path, server: EmbeddedServer, stores: dict[str, S3Server | None], proxy: S3Proxy | None
    ) -> None:
        self._folder, self._server, self._stores, self._proxy = folder, server, stores, proxy
        self.runs: dict[str, dict[str, list[Run]]] = {}

    def configure(self, name: str) -> None:
        """Write a pgsieve.yaml for each lake, with a subscription to the database's publication."""
        for place, store in self._stores.items():
            source = f"{name}_{place}"
            content = {
                "lake": f"s3://{BUCKET}/{source}" if store else f"./lake_{source}",
                "sources": {source: {"conninfo": self._server.conninfo(dbname=name)}},
                "subscriptions": {"sub": {"source": source, "publications": ["p"]}},
            }
            if store:
                content["storage"] = dict(store.storage)
            (self._folder / f"{source}.yaml").write_text(yaml.safe_dump(content))

    def run(self, name: str, what: str | None) -> None:
        """Execute `pgsieve run` on each lake in turn; `what` names the measurement, None measures nothing.

        The order alternates, because the first run finds less in the caches.
        """
        places = list(self._stores)
        if len(self.runs.get(what or "", {}).get(FOLDER, ())) % 2:
            places.reverse()
        for place in places:
            path = self._folder / f"{name}_{place}.yaml"
            asked = self._requests()
            run = Run(*run_as_process(path), self._requests() - asked)
            print(
                f"{what or 'before'}, {place}: {run.wall:.1f} s, processor {run.processor:.1f} s, "
                f"{run.requests} requests, load average {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
            )
            if what:
                self.runs.setdefault(what, {}).setdefault(place, []).append(run)

    def _requests(self) -> int:
        return len(self._proxy.answered) if self._proxy else 0


def run_as_process(configuration: Path) -> tuple[float, float]:
    """The seconds of a `pgsieve run` as a process, and its processor seconds, with its JVMs."""
    command = [sys.executable, "-m", "pgsieve", "-c", str(configuration), "run"]
    began, used = time.perf_counter(), _ended_cpu_seconds()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # A JVM ends a moment after the run that started it, so its time is not in `_ended_cpu_seconds`.
    jvms = dict[int, float]()
    while process.poll() is None:
        jvms |= _jvm_cpu_seconds(process.pid)
        time.sleep(0.2)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - began, _ended_cpu_seconds() - used + sum(jvms.values())


def _ended_cpu_seconds() -> float:
    """Processor time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _jvm_cpu_seconds(pid: int) -> dict[int, float]:
    """Processor time, until now, of the JVMs that a process has started."""
    used = dict[int, float]()
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if child.name() == "java":
                times = child.cpu_times()
                used[child.pid] = times.user + times.system
    return used


def small(lakes: Lakes, server: EmbeddedServer, tables: int, rounds: int) -> None:
    """Measure the initial copy of small tables, runs without changes, and small changes in one table."""
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("create database small")
    with psycopg.connect(server.conninfo(dbname="small"), autocommit=True) as database:
        for table in range(tables):
            database.execute(f"create table t{table} (id int primary key, n int)")
            database.execute(f"insert into t{table} values (1, 1)")
        database.execute("create publication p for all tables")
        lakes.configure("small")
        lakes.run("small", f"first copy, {tables} small tables")
        lakes.run("small", None)
        for number in range(rounds):
            lakes.run("small", f"nothing to do, {tables} tables")
            database.execute(f"insert into t0 values ({number + 2}, 1)")
            database.execute("update t0 set n = n + 1 where id = 1")
            lakes.run("small", f"a small change, {tables} tables")


def large(lakes: Lakes, server: EmbeddedServer, rows: int, rounds: int) -> None:
    """Measure initial sync and catch-up of the workload of `benchmarks/replication.py`, in existing lakes.

    A lake's first run tests a server that is not AWS's S3, so that run copies another table. Each round has a
    table of its own.
    """
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute("create database large")
    with psycopg.connect(server.conninfo(dbname="large"), autocommit=True) as database:
        database.execute("create table first (id int primary key)")
        for number in range(rounds):
            database.execute(f"create table t{number} {COLUMNS}".encode())
            # The rows are inserted before there are slots, which would have to decode them.
            database.execute(f"insert into t{number} select {ROW} from generate_series(1, {rows}) i".encode())
        database.execute("vacuum (freeze, analyze)")
        database.execute("create publication p for table first")
        lakes.configure("large")
        lakes.run("large", "the first run of a lake")
        for number in range(rounds):
            database.execute(f"alter publication p add table t{number}".encode())
            lakes.run("large", f"initial sync, {rows:,} rows")
            changes(database, f"t{number}", rows, rows)
            lakes.run("large", f"catch-up, {rows:,} rows")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=50, help="0: leaves out the runs with small tables")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2_000_000, help="0: leaves out initial sync and catch-up")
    parser.add_argument("--large-rounds", type=int, default=1, help="the number of tables with these rows")
    parser.add_argument(
        "--wait",
        type=float,
        default=30.0,
        help="milliseconds that each request to the distant server waits; 0: no distant server",
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-")))
        store = stack.enter_context(new_s3_server())
        stores: dict[str, S3Server | None] = {FOLDER: None, "s3": store}
        proxy = None
        if options.wait:
            proxy = stack.enter_context(s3_proxy(store.url))
            proxy.delay = options.wait / 1000
            stores[DISTANT] = S3Server(proxy.url)
        server = stack.enter_context(
            EmbeddedServer(folder / "data", settings={**SETTINGS, "max_replication_slots": "20"})
        )
        lakes = Lakes(folder, server, stores, proxy)
        loads = [os.getloadavg()[0]]
        if options.tables:
            small(lakes, server, options.tables, options.rounds)
        if options.rows:
            large(lakes, server, options.rows, options.large_rounds)
        loads.append(os.getloadavg()[0])
    print(
        f"load average {loads[0]:.1f} to {loads[1]:.1f}, {os.cpu_count()} cores; medians, seconds (of the processor)"
    )
    others = list(stores)[1:]
    table = Table("what", *stores, *(f"{place} / {FOLDER}" for place in others), "requests")
    for what, places in lakes.runs.items():
        wall = {place: statistics.median(run.wall for run in runs) for place, runs in places.items()}
        processor = {
            place: statistics.median(run.processor for run in runs) for place, runs in places.items()
        }
        requests = statistics.median(run.requests for run in places[DISTANT]) if DISTANT in places else None
        table.add_row(
            what,
            *(f"{wall[place]:.2f} ({processor[place]:.2f})" for place in stores),
            *(f"{wall[place] / wall[FOLDER]:.2f}" for place in others),
            "" if requests is None else f"{requests:.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
