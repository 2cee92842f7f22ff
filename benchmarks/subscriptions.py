"""Measures filtered subscriptions that share a slot, by their number.

    python benchmarks/subscriptions.py 1 16 64 --rows 500000

In: numbers of subscriptions. Each subscription has a row filter that pgsieve evaluates; together they receive
every row once. `--rows` INSERTs wait in the slot, in 50 transactions; then one process of `pgsieve run` brings
all subscriptions up to date. In each of `--rounds` rounds the numbers take turns. Out, as medians: wall clock;
in brackets CPU of the run; CPU of the publisher's sessions; the ratios to the first number; and the peak
memory of a run. `--master` is Spark's, as in pgsieve.yaml; with `--engine start` all runs share a warm engine,
whose CPU is not counted.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import yaml
from replication import COLUMNS, ROW, SETTINGS

from pgsieve.resources.postgres.embedded import EmbeddedServer

_TRANSACTIONS = 50
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Site:
    """Some subscriptions with a database of their own, and the measurements of their runs."""

    server: EmbeddedServer
    folder: Path
    number: int
    spark: Mapping[str, str]
    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    publisher_cpu: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of its database, and of its source."""
        return f"subscriptions_{self.number}"

    def begin(self) -> None:
        """Make the empty table, its publications and its replicas."""
        with psycopg.connect(self.server.conninfo(), autocommit=True) as admin:
            admin.execute(f"create database {self.name}")
        with psycopg.connect(self.server.conninfo(dbname=self.name), autocommit=True) as database:
            database.execute(f"create table orders {COLUMNS}")
            for n in range(self.number):
                database.execute(
                    f"create publication p{n} for table orders where (id % {self.number} = {n}) with (publish = 'insert')"
                )
        content = {
            "lake": f"./lake_{self.number}",
            "spark": dict(self.spark),
            "sources": {self.name: {"conninfo": self.server.conninfo(dbname=self.name)}},
            "subscriptions": {
                f"s{n}": {"source": self.name, "publications": [f"p{n}"]} for n in range(self.number)
            },
        }
        self._configuration.write_text(yaml.safe_dump(content))
        self._run()

    def measure(self, rows: int) -> None:
        """Insert this many rows, and replicate them by a run."""
        each = rows // _TRANSACTIONS
        insert = f"insert into orders select {ROW} from generate_series({self.rows} + b*{each} + 1, {self.rows} + (b+1)*{each}) i"
        with psycopg.connect(self.server.conninfo(dbname=self.name), autocommit=True) as database:
            database.execute(
                f"do $$ begin for b in 0..{_TRANSACTIONS - 1} loop {insert}; commit; end loop; end $$"
            )
        self.rows += rows
        publisher, own, began = self._publisher_cpu(), _children_cpu(), time.monotonic()
        self._run()
        self.seconds.append(time.monotonic() - began)
        self.cpu.append(_children_cpu() - own)
        self.publisher_cpu.append(self._publisher_cpu() - publisher)

    def _run(self) -> None:
        self._command("run")

    def end(self) -> None:
        """End the warm engine, if there is one."""
        if self.spark["engine"] == "start":
            self._command("engine", "stop")

    def _command(self, *words: str) -> None:
        command = [sys.executable, "-m", "pgsieve.pipelines.command_line.cli", "-c", str(self._configuration)]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)

    @property
    def _configuration(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    def _publisher_cpu(self) -> float:
        """The CPU seconds of the server's ended sessions."""
        time.sleep(0.5)  # Until the run's sessions have ended.
        pid = int((self.server.data_path / "postmaster.pid").read_text().split()[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / _TICKS


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(numbers: list[int], rows: int, rounds: int, spark: Mapping[str, str]) -> None:
    """Measure with each of these numbers of subscriptions; `spark` is the configuration's."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(Path(folder) / "data", settings={**SETTINGS, "fsync": "off"}) as server,
    ):
        sites = [Site(server, Path(folder), number, spark) for number in numbers]
        for site in sites:
            site.begin()
        for _ in range(rounds):
            for site in sites:
                site.measure(rows)
                print(
                    f"{site.number:3d}: {site.seconds[-1]:.1f} s ({site.cpu[-1]:.1f}), publisher"
                    f" {site.publisher_cpu[-1]:.1f} s, load average {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        sites[0].end()
        first = [statistics.median(values) for values in (sites[0].seconds, sites[0].publisher_cpu)]
        for site in sites:
            wall, publisher = statistics.median(site.seconds), statistics.median(site.publisher_cpu)
            print(
                f"{site.number:4d} subscriptions: {wall:6.2f} s ({statistics.median(site.cpu):.2f}), publisher's CPU"
                f" {publisher:.2f} s; {wall / first[0]:.2f}x the time and {publisher / first[1]:.2f}x the publisher's CPU"
            )
        print(f"at most {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:,.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--engine", choices=("off", "use", "start"), default="off")
    arguments = parser.parse_args()
    spark = {"master": arguments.master, "engine": arguments.engine}
    main(arguments.numbers, arguments.rows, arguments.rounds, spark)
