"""Measures up to which size the driver is faster than Spark: `python benchmarks/small_limit.py 1 2 4 8 16 32 64`.

In: sizes in MiB. For each size a table of this size is copied; then it gets as many bytes of changes, measured
as pgoutput sends them, two thirds of them INSERTs. Three engines do both, each by a process of `pgsieve run`
with a lake of its own: the driver, a Spark that the process starts, and the warm engine. Out, as medians of
`--rounds` rounds: wall clock; in brackets CPU of the process and of a JVM that it starts (not of the warm
engine); the peak memory of the process; and the size from which on Spark takes less time, or the driver more
than 600 MB.
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
#: About the bytes of a row or change as pgoutput sends it.
_ROW_BYTES = 170
_MEMORY_LIMIT_BYTES = 600_000_000
#: The engines, with their settings: the small limit, and whether a warm engine is used.
ENGINES: Mapping[str, tuple[int, str]] = {
    "driver": (1024 * MIB, "off"),
    "Spark, cold": (-1, "off"),
    "Spark, warm": (-1, "start"),
}


@dataclass(frozen=True)
class Cost:
    """The cost of a run: wall clock, CPU of its process and of the JVM that it started, and peak memory in bytes."""

    seconds: float
    cpu: float
    memory: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s ({self.cpu:.1f}), {self.memory / 1e6:.0f} MB"


class Site:
    """A table, and a lake for each engine."""

    def __init__(self, server: EmbeddedServer, folder: Path, name: str) -> None:
        self._server, self._folder, self._name = server, folder, name
        self._conninfo = server.conninfo(dbname=name)
        with psycopg.connect(server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {name}")
        for number, (small, engine) in enumerate(ENGINES.values()):
            content = {
                "lake": f"./lake_{name}_{number}",
                "spark": {
                    "engine": engine,
                    "conf": {"spark.pgsieve.smallBytes": str(small), "spark.ui.enabled": "false"},
                },
                "sources": {f"{name}_{number}": {"conninfo": self._conninfo}},
                "subscriptions": {"sub": {"source": f"{name}_{number}", "publications": ["p"]}},
            }
            self._path(number).write_text(yaml.safe_dump(content))

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}_{number}.yaml"

    def costs(self, mebibytes: int) -> dict[str, Mapping[str, Cost]]:
        """The costs by engine, of a copy of this size and of as many bytes of changes."""
        rows = mebibytes * MIB // _ROW_BYTES
        with psycopg.connect(self._conninfo, autocommit=True) as database:
            database.execute(f"create table t {COLUMNS}")
            database.execute(f"insert into t select {ROW} from generate_series(1, {rows}) i")
            database.execute("vacuum (freeze, analyze) t")
            database.execute("create publication p for table t")
            copy = self._run_each()
            changes(database, "t", rows * 4 // 3, after=rows)
            return {"copy": copy, "changes": self._run_each()}

    def _run_each(self) -> dict[str, Cost]:
        return {engine: run(self._path(number)) for number, engine in enumerate(ENGINES)}

    def end(self) -> None:
        """Stop the warm engine."""
        path = self._path(list(ENGINES).index("Spark, warm"))
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
    """The peak memory of a process in bytes; 0 once it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def median(costs: Sequence[Cost]) -> Cost:
    """The median times of runs, and the largest of their peak memories."""
    return Cost(
        statistics.median(c.seconds for c in costs),
        statistics.median(c.cpu for c in costs),
        max(c.memory for c in costs),
    )


def show(medians: Mapping[tuple[int, str], Mapping[str, Cost]], work: str) -> None:
    """Print each engine's costs of the copies, or of the changes, and the sizes from which on Spark wins."""
    of_work = {size: costs for (size, done), costs in sorted(medians.items()) if done == work}
    table = Table(f"{work}, MiB", *ENGINES, "memory: driver", *list(ENGINES)[1:])
    for size, costs in of_work.items():
        table.add_row(
            str(size),
            *(f"{cost.seconds:.1f} s ({cost.cpu:.1f})" for cost in costs.values()),
            *(f"{cost.memory / 1e6:.0f} MB" for cost in costs.values()),
        )
    Console(width=130).print(table)
    for engine in list(ENGINES)[1:]:
        first = next(
            (size for size, costs in of_work.items() if costs["driver"].seconds > costs[engine].seconds), None
        )
        print(
            f"{engine}: less time than the driver's from {first} MiB on"
            if first
            else f"{engine}: never less time"
        )
    first = next(
        (size for size, costs in of_work.items() if costs["driver"].memory > _MEMORY_LIMIT_BYTES), None
    )
    print(
        f"the driver: more than 600 MB from {first} MiB on" if first else "the driver: never more than 600 MB"
    )


def main(sizes: Sequence[int], rounds: int) -> None:
    """Measure these sizes, and print two tables."""
    taken = dict[tuple[int, str], list[Mapping[str, Cost]]]()
    with (
        tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as folder,
        EmbeddedServer(Path(folder) / "data", settings={**SETTINGS, "fsync": "off"}) as server,
    ):
        Site(server, Path(folder), "first").costs(1)  # Starts the warm engine.
        for each in range(rounds):
            for size in sizes:
                site = Site(server, Path(folder), f"s{size}_{each}")
                for work, costs in site.costs(size).items():
                    taken.setdefault((size, work), []).append(costs)
                    shown = "; ".join(f"{engine} {cost}" for engine, cost in costs.items())
                    print(f"{work} of {size} MiB: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)
        site.end()
    medians = {
        key: {engine: median([costs[engine] for costs in each]) for engine in ENGINES}
        for key, each in taken.items()
    }
    for work in ("copy", "changes"):
        show(medians, work)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.sizes, arguments.rounds)
