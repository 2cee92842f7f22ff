"""Measures the consistency check of a large table, compared with a check of all rows.

The table is that of `benchmarks/replication.py`, with `--rows` rows. It is copied and checked. Then another
writer changes one cell of the replica, and the check must name the key of its row. The check of all rows
compares every row of both sides in Spark, as the check does if segments do not help. Prints the seconds and
this process's peak RSS of each. Needs about 4 GB of disk at the full 10,000,000 rows.

    python benchmarks/consistency.py --rows 10000000
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import psycopg
from deltalake import DeltaTable
from replication import COLUMNS, ROW, SETTINGS, configuration, quiet
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.checks.consistency import check_consistency, hold_at_one_lsn
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.postgres.embedded import EmbeddedServer


@contextmanager
def measure(results: dict[str, tuple[float, int]], name: str) -> Iterator[None]:
    """Add the seconds of a block and this process's peak memory during the block, without Spark's."""
    ended, peak = threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(0.05):
            peak[0] = max(peak[0], psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - started
        ended.set()
        watcher.join()
    results[name] = seconds, peak[0]
    print(f"{name}: {seconds:.1f} s, {peak[0] / 2**20:.0f} MiB", flush=True)


def copy_without_spark(path: Path) -> None:
    """Copy the table without Spark, in a process of its own, because the copy has all rows in memory."""
    project = build_project(load_config(path))
    lake = Lake(project.lake.uri, lambda: project.lake.engine.session, LakeSettings(sys.maxsize))
    subscription = project.subscriptions["s_checked"]
    (copied,) = copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), quiet)
    assert copied.problem is None, copied


def main() -> None:
    """Copy, check, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--skip-peer", action="store_true")
    options = parser.parse_args()
    results: dict[str, tuple[float, int]] = {}
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=SETTINGS) as publisher:
            with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
                source.execute(f"create table checked {COLUMNS}")
                source.execute(f"insert into checked select {ROW} from generate_series(1, {options.rows}) i")
                source.execute("vacuum (freeze, analyze) checked")
                source.execute("create publication checked for table checked")
            path = configuration(folder, publisher, "checked", {})
            copying = multiprocessing.get_context("spawn").Process(target=copy_without_spark, args=(path,))
            copying.start()
            copying.join()
            assert copying.exitcode == 0
            project = build_project(load_config(path))
            subscription, lake = project.subscriptions["s_checked"], project.lake.open()
            print(f"{options.rows:,} rows, load average {os.getloadavg()[0]:.1f}", flush=True)
            with measure(results, "by segments, equal"):
                (check,) = check_consistency(subscription, lake, quiet)
            assert check.equal
            assert check.replica_rows == options.rows
            replica = DeltaTable(lake.paths.replica("s_checked", "public", "checked"))
            replica.update(updates={"note": "'corrupt'"}, predicate=f"id = {options.rows // 3}")
            with measure(results, "by segments, one cell differs"):
                (check,) = check_consistency(subscription, lake, quiet)
            key = f"(id)=({options.rows // 3})"
            assert set(check.keys) == {f"{key} missing from the replica", f"{key} only in the replica"}
            if not options.skip_peer:
                with hold_at_one_lsn(subscription, lake, quiet) as moment:
                    sides = replace(moment.make_sides(("public", "checked")), row_hash=None)
                    with measure(results, "all rows, by Spark"):
                        assert sides.compare().counts.total == 2
    table = Table("what", "seconds", "peak RSS, MiB", "ratio to all rows")
    peer = results.get("all rows, by Spark")
    for what, (seconds, peak) in results.items():
        ratio = f"{seconds / peer[0]:.2f}" if peer else ""
        table.add_row(what, f"{seconds:.1f}", f"{peak / 2**20:.0f}", ratio)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
