"""Measures what a copy and a catch-up cost the driver and the executors of a cluster, step by step.

The workload is that of `replication.py`: a table of `--rows` rows is copied, then `--changes` wait in the
slot, two thirds of them INSERTs. The cluster is Spark's standalone one, by default with two workers of one
core each beside the driver; `--master` may name another one on this machine. `--lose` kills that many
executors during the transformation and the apply of the changes. `--history scd2` keeps versions of rows too. At
the end each row is compared with the publisher's.

CPU is that of this process, of its JVM (with the JVMs of the two workers, which only start executors), and of
the executors with their Python. *Results* are the bytes that tasks sent to the driver, from Spark's event
log. *Shuffled* are the bytes that tasks read from the shuffle and wrote to it; *written* are the bytes of
the files that tasks wrote.

    python benchmarks/scale.py --rows 2000000 --changes 10000000 --lose 2
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import psycopg
import yaml
from replication import COLUMNS, ROW, SETTINGS, changes, quiet
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.checks.consistency import check_consistency
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.work import Work, measure_work

_CLUSTER = "local-cluster[2,1,2048]"
_TICKS = os.sysconf("SC_CLK_TCK")
_EXECUTOR = b"CoarseGrainedExecutorBackend"


@dataclass(frozen=True)
class Process:
    """A process: its parent's id, its command line, and its own CPU seconds.

    Those of its ended children are left out: they were counted while the children ran.
    """

    parent: int
    command: bytes
    cpu: float


def processes() -> dict[int, Process]:
    """All processes, by their ids."""
    running = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            cpu = sum(map(int, fields[11:13])) / _TICKS
            running[int(folder.name)] = Process(int(fields[1]), (folder / "cmdline").read_bytes(), cpu)
    return running


def executors() -> list[int]:
    """The ids of the JVMs of this process's executors."""
    running = processes()
    return [
        number
        for number, process in running.items()
        if _EXECUTOR in process.command
        and b"java" in process.command
        and _kind(number, running) == "executors"
    ]


class Clock:
    """The CPU of the driver's Python, of its JVM, and of the executors; that of ended processes is included."""

    def __init__(self) -> None:
        self._seen = dict[int, tuple[str, float]]()
        self._ended = Event()
        Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self.seconds()

    def seconds(self) -> Counter[str]:
        """The seconds so far."""
        running = processes()
        for number, process in running.items():
            if kind := _kind(number, running):
                self._seen[number] = kind, process.cpu
        seconds = Counter[str]()
        for kind, cpu in list(self._seen.values()):
            seconds[kind] += cpu
        return seconds

    def stop(self) -> None:
        """End the thread that watches the processes."""
        self._ended.set()


def _kind(number: int, running: Mapping[int, Process]) -> str | None:
    """The kind of a process that this process has started; None for any other."""
    kind = "driver" if number == os.getpid() else None
    while number in running and number != os.getpid():
        if _EXECUTOR in running[number].command:
            kind = "executors"
        elif b"SparkSubmit" in running[number].command:
            kind = kind or "JVM"
        number = running[number].parent
    return kind if number == os.getpid() else None


@dataclass(frozen=True)
class Cost:
    """The cost of a step: seconds, CPU seconds by kind of process, Spark's work, and the time of its end."""

    seconds: float
    cpu: Counter[str]
    work: Work
    until: float


@contextmanager
def kill_executors(number: int) -> Iterator[None]:
    """Kill this many executors during the block, one every two seconds."""
    ended, lost = Event(), list[int]()

    def kill() -> None:
        while len(lost) < number and not ended.wait(2):
            chosen = [pid for pid in executors() if pid not in lost]
            if chosen:
                os.kill(chosen[0], signal.SIGKILL)
                lost.append(chosen[0])

    thread = Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if number:
            print(f"executors lost: {len(lost)}", flush=True)


def results(log: Path, costs: Mapping[str, Cost]) -> dict[str, Counter[str]]:
    """Each step's jobs, tasks, failed tasks, and bytes of results and of the shuffle, by the times of the event log."""
    counts_of: dict[str, Counter[str]] = {name: Counter() for name in costs}
    for file in log.rglob("events_*"):
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            kind = event["Event"]
            if kind == "SparkListenerJobStart":
                _counts_at(counts_of, costs, event["Submission Time"])["jobs"] += 1
            elif kind == "SparkListenerTaskEnd":
                counts = _counts_at(counts_of, costs, event["Task Info"]["Finish Time"])
                counts["tasks"] += 1
                counts["failed"] += event["Task End Reason"]["Reason"] != "Success"
                metrics = event.get("Task Metrics") or {}
                counts["results"] += metrics.get("Result Size", 0)
                read = metrics.get("Shuffle Read Metrics") or {}
                counts["shuffle read"] += read.get("Remote Bytes Read", 0) + read.get("Local Bytes Read", 0)
                written = metrics.get("Shuffle Write Metrics") or {}
                counts["shuffle written"] += written.get("Shuffle Bytes Written", 0)
    return counts_of


def _counts_at(
    counts_of: Mapping[str, Counter[str]], costs: Mapping[str, Cost], milliseconds: int
) -> Counter[str]:
    step = next((name for name, cost in costs.items() if milliseconds <= cost.until * 1000), None)
    return Counter() if step is None else counts_of[step]


def run(folder: Path, publisher: EmbeddedServer, options: argparse.Namespace) -> None:
    """Copy, change, catch up, compare; print the costs."""
    (events := folder / "events").mkdir()
    with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
        source.execute(f"create table scale {COLUMNS}")
        source.execute(f"insert into scale select {ROW} from generate_series(1, {options.rows}) i")
        source.execute("vacuum (freeze, analyze) scale")
        source.execute("create publication scale for table scale where (id % 16 < 15)")
        subscription, lake = open_lake(folder, publisher, options, events)
        costs, clock = dict[str, Cost](), Clock()

        def step(name: str, act: Callable[[], object], lost: int = 0) -> None:
            before, began = clock.seconds(), time.monotonic()
            with measure_work() as work, kill_executors(lost):
                act()
            costs[name] = Cost(time.monotonic() - began, clock.seconds() - before, work, time.time())
            print(f"{name}: {costs[name].seconds:.1f} s", flush=True)

        step("Spark's start", lambda: lake.spark.range(1).collect())
        step("copy", lambda: copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), quiet))
        changes(source, "scale", options.changes * 4 // 3, after=options.rows)
        step("change log", lambda: drain_slot(subscription.slot_stream, lake, [subscription], quiet))
        step("transformation", lambda: transform(subscription, lake, quiet), options.lose // 2)
        step("apply", lambda: apply(subscription, lake, quiet), options.lose - options.lose // 2)
        for result in check_consistency(subscription, lake, quiet):
            assert result.equal, result
        print("each row is the publisher's", flush=True)
        clock.stop()
    lake.spark.stop()
    show(costs, results(events, costs))


def open_lake(
    folder: Path, publisher: EmbeddedServer, options: argparse.Namespace, events: Path
) -> tuple[Subscription, Lake]:
    """A subscription with a row filter, and its lake, on a cluster with an event log.

    Spark runs even small work.
    """
    history = {"history": options.history} if options.history else {}
    content = {
        "lake": "./lake",
        "sources": {"scale": {"conninfo": publisher.conninfo()}},
        "subscriptions": {"scale": {"source": "scale", "publications": ["scale"], **history}},
        "spark": {
            "master": options.master,
            "conf": {
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": events.as_uri(),
                "spark.eventLog.compress": "false",
                "spark.driver.host": "127.0.0.1",
                "spark.driver.memory": "2g",
                "spark.executor.memory": "1g",
                "spark.pgsieve.smallBytes": "-1",
            },
        },
    }
    (path := folder / "pgsieve.yaml").write_text(yaml.safe_dump(content))
    project = build_project(load_config(path))
    return project.subscriptions["scale"], project.lake.open()


def show(costs: Mapping[str, Cost], counts_of: Mapping[str, Counter[str]]) -> None:
    """Print the table."""
    shuffle = ("shuffle read", "shuffle written")
    columns = (
        "jobs",
        "tasks",
        "failed",
        "results, KiB",
        *(f"{kind}, MiB" for kind in shuffle),
        "written, MiB",
    )
    table = Table("step", "seconds", "CPU: driver", "JVM", "executors", *columns)
    for name, cost in costs.items():
        counts = counts_of[name]
        table.add_row(
            name,
            *(
                f"{seconds:.1f}"
                for seconds in (cost.seconds, *(cost.cpu[k] for k in ("driver", "JVM", "executors")))
            ),
            *(str(counts[kind]) for kind in ("jobs", "tasks", "failed")),
            f"{counts['results'] / 1024:.0f}",
            *(f"{counts[kind] / 1024**2:.1f}" for kind in shuffle),
            f"{cost.work.written_bytes / 1024**2:.1f}",
        )
    Console(width=130).print(table)


def main() -> None:
    """Measure on an embedded server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--master", default=_CLUSTER)
    parser.add_argument("--lose", type=int, default=0)
    parser.add_argument("--history", choices=["scd2"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=SETTINGS) as publisher:
            run(folder, publisher, options)


if __name__ == "__main__":
    main()
