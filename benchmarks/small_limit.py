"""Where the driver is faster than Spark, and what memory it takes: `python benchmarks/small_limit.py 1 2 4 8 16 32 64`.

In: sizes in MiB. Of each a table is copied, and then gets as many bytes of changes, two thirds of them INSERTs, as pgoutput sends
them. `pgsieve run` as a process does either three times, into lakes of their own: in its own thread, with a session of Spark's that
it starts, and with one of a warm engine. Out, as medians of `--rounds`: wall clock and, in brackets, CPU of the process, with the
JVM that it starts (a warm engine's is none of it); the most memory of the process; and from which size on Spark takes less time, or
the driver more than 600 MB.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
import yaml
from replication import COLUMNS, ROW, SETTINGS, changes
from rich.console import Console
from rich.table import Table

from pgsieve.resources.postgres.embedded import EmbeddedServer

MIB = 1024**2
#: The bytes of a row and of a change as pgoutput sends them, about.
_ROW = 170
_MEMORY = 600_000_000
#: The ways that a run may go, with their settings: the small limit, and whether a warm engine is used.
WAYS: Mapping[str, tuple[int, str]] = {
    "driver": (1024 * MIB, "off"),
    "Spark, cold": (-1, "off"),
    "Spark, warm": (-1, "start"),
}


@dataclass(frozen=True)
class Cost:
    """What a run took: wall clock, CPU of its process and of the JVM that it started, memory of the process."""

    seconds: float
    cpu: float
    memory: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({self.cpu:.1f}), {self.memory / 1e6:.0f} MB"


class Site:
    """A table, and a lake for each way."""

    def __init__(self, server: EmbeddedServer, folder: Path, name: str) -> None:
        self._server, self._folder, self._name = server, folder, name
        self._conninfo = server.conninfo(dbname=name)
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {name}")
        for number, (small, engine) in enumerate(WAYS.values()):
            written = {
                "lake": f"./lake_{name}_{number}",
                "spark": {
                    "engine": engine,
                    "conf": {"spark.pgsieve.smallBytes": str(small), "spark.ui.enabled": "false"},
                },
                "sources": {f"{name}_{number}": {"conninfo": self._conninfo}},
                "subscriptions": {"sub": {"source": f"{name}_{number}", "publications": ["p"]}},
            }
            self._path(number).write_text(yaml.safe_dump(written))

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}_{number}.yaml"

    def costs(self, mebibytes: int) -> dict[str, Mapping[str, Cost]]:
        """Of the copy of so much, and of as many changes."""
        rows = mebibytes * MIB // _ROW
        with psycopg.connect(self._conninfo, autocommit=True) as database:
            database.execute(f"create table t {COLUMNS}")
            database.execute(f"insert into t select {ROW} from generate_series(1, {rows}) i")
            database.execute("vacuum (freeze, analyze) t")
            database.execute("create publication p for table t")
            copy = self._each_way()
            changes(database, "t", rows * 4 // 3, after=rows)
            return {"copy": copy, "changes": self._each_way()}

    def _each_way(self) -> dict[str, Cost]:
        return {way: run(self._path(number)) for number, way in enumerate(WAYS)}

    def end(self) -> None:
        """End the warm engine."""
        path = self._path(list(WAYS).index("Spark, warm"))
        subprocess.run([*_COMMAND, "-c", path, "engine", "stop"], check=True, stdout=subprocess.DEVNULL)


_COMMAND = [sys.executable, "-m", "pgsieve.pipelines.command_line.cli"]


def run(path: Path) -> Cost:
    """Run a lake's subscription as a process."""
    began, memory = time.monotonic(), 0
    with subprocess.Popen([*_COMMAND, "-c", path, "run"], stdout=subprocess.DEVNULL) as process:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            memory = max(memory, _memory(process.pid))
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"pgsieve run failed with {process.returncode}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, memory)


def _memory(pid: int) -> int:
    """The most memory that a process has had; 0 once it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def median(costs: Sequence[Cost]) -> Cost:
    """The medians of runs, and the most memory of all."""
    return Cost(
        statistics.median(c.seconds for c in costs),
        statistics.median(c.cpu for c in costs),
        max(c.memory for c in costs),
    )


def show(found: Mapping[tuple[int, str], Mapping[str, Cost]], work: str) -> None:
    """Print what each way took of the copies, or of the changes, and where they cross."""
    of_work = {size: costs for (size, done), costs in sorted(found.items()) if done == work}
    table = Table(f"{work}, MiB", *WAYS, "memory: driver", *list(WAYS)[1:])
    for size, costs in of_work.items():
        table.add_row(
            str(size),
            *(f"{cost.seconds:.1f} s ({cost.cpu:.1f})" for cost in costs.values()),
            *(f"{cost.memory / 1e6:.0f} MB" for cost in costs.values()),
        )
    Console(width=130).print(table)
    for way in list(WAYS)[1:]:
        first = next(
            (size for size, costs in of_work.items() if costs["driver"].seconds > costs[way].seconds), None
        )
        print(
            f"{way}: less time than the driver's from {first} MiB on" if first else f"{way}: never less time"
        )
    first = next((size for size, costs in of_work.items() if costs["driver"].memory > _MEMORY), None)
    print(
        f"the driver: more than 600 MB from {first} MiB on" if first else "the driver: never more than 600 MB"
    )


def main(sizes: Sequence[int], rounds: int) -> None:
    """Measure with these sizes."""
    taken = dict[tuple[int, str], list[Mapping[str, Cost]]]()
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as folder,
        EmbeddedServer(Path(folder) / "data", settings={**SETTINGS, "fsync": "off"}) as server,
    ):
        Site(server, Path(folder), "first").costs(1)  # The warm engine starts.
        for each in range(rounds):
            for size in sizes:
                site = Site(server, Path(folder), f"s{size}_{each}")
                for work, costs in site.costs(size).items():
                    taken.setdefault((size, work), []).append(costs)
                    shown = "; ".join(f"{way} {cost}" for way, cost in costs.items())
                    print(f"{work} of {size} MiB: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)
        site.end()
    found = {
        key: {way: median([costs[way] for costs in each]) for way in WAYS} for key, each in taken.items()
    }
    for work in ("copy", "changes"):
        show(found, work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.sizes, arguments.rounds)
