"""Measures the part of an apply that checks whether the key of an INSERT already has a row.

A replica of `--rows` rows, whose files executors wrote, gets batches of inserts: with growing keys, which no
file can contain, and with keys in between (`random`), for which the key columns of all files are read. Keys
are bigint, and uuid as text. Each batch is applied with the check and without it, in turn, on copies of the
same replica. Prints the median seconds of both, and their ratio.

    python benchmarks/key_conflicts.py --rows 2000000
"""

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch
from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.embedded import EmbeddedServer

SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "autovacuum": "off",
    "synchronous_commit": "off",
}
#: The batches, by the number of their rows.
BATCHES = {"small": 1_000, "large": 200_000}
#: The key of row n. Only every tenth number is used, so that there are free keys in between.
KEYS = {"bigint": "n::bigint", "uuid": "lpad(to_hex(n), 12, '0') || '-0000-0000-0000-000000000000'"}


def quiet(_: str) -> None:
    """A log without output."""


def subscriptions(folder: Path, publisher: EmbeddedServer) -> tuple[Subscription, Lake]:
    """One subscription to all tables."""
    path = folder / "pgsieve.yaml"
    content = {
        "lake": "./lake",
        "sources": {"bench": {"conninfo": publisher.conninfo()}},
        "subscriptions": {"s": {"source": "bench", "publications": ["pub"]}},
    }
    path.write_text(yaml.safe_dump(content))
    project = build_project(load_config(path))
    return project.subscriptions["s"], project.lake.open()


def seconds(subscription: Subscription, lake: Lake, *, with_check: bool) -> float:
    """Apply the pending changes in a copy of the lake, with the check or without it."""
    copy = Path(f"{lake.uri}_copy")
    shutil.copytree(lake.uri, copy)
    copied = Lake(str(copy), lambda: lake.spark)
    started = time.monotonic()
    with nullcontext() if with_check else mock.patch.object(ConflictSearch, "refuse"):
        result = apply(subscription, copied, quiet)
    taken = time.monotonic() - started
    assert not any(applied.problem for applied in result.tables.values()), result
    shutil.rmtree(copy)
    return taken


def make_tables(source: psycopg.Connection[Any], rows: int) -> None:
    """Make a published table with this many rows for each kind of key."""
    for table, key in KEYS.items():
        source.execute(
            f'create table "{table}" (k {"bigint" if table == "bigint" else "text"} primary key, v text)'
        )
        source.execute(
            f"insert into \"{table}\" select {key}, 'value ' || n from generate_series(10, {rows}::bigint * 10, 10) n"
        )
    source.execute("create publication pub for all tables")


def main() -> None:
    """Measure each kind of key and of batch, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    shown = Table("key", "batch", "keys", "without", "with the check", "ratio")
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=SETTINGS) as publisher:
            source = psycopg.connect(publisher.conninfo(), autocommit=True)
            make_tables(source, options.rows)
            subscription, lake = subscriptions(folder, publisher)
            copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), quiet)
            end = options.rows * 10
            for table, key in KEYS.items():
                for digit, (batch, rows) in enumerate(BATCHES.items(), start=1):
                    between = f"(random() * {options.rows - 1})::bigint * 10 + {digit}"
                    for where, numbers in (
                        ("growing", f"generate_series({end} + 1, {end} + {rows}) n"),
                        (
                            "random",
                            f"(select distinct {between} as n from generate_series(1, {rows})) as made",
                        ),
                    ):
                        source.execute(f"insert into \"{table}\" select {key}, 'value' from {numbers}")
                        end += rows if where == "growing" else 0
                        drain_slot(subscription.slot_stream, lake, [subscription], quiet)
                        transform(subscription, lake, quiet)
                        seconds(subscription, lake, with_check=True)
                        taken = {True: [], False: []}
                        for _ in range(options.times):
                            for with_check in (False, True):
                                taken[with_check].append(seconds(subscription, lake, with_check=with_check))
                        apply(subscription, lake, quiet)
                        without, checked = (
                            statistics.median(taken[with_check]) for with_check in (False, True)
                        )
                        shown.add_row(
                            table,
                            f"{batch} ({rows:,})",
                            where,
                            f"{without:.3f}",
                            f"{checked:.3f}",
                            f"{checked / without:.2f}",
                        )
                        print(
                            table,
                            batch,
                            where,
                            f"{without:.3f} {checked:.3f} {checked / without:.2f}",
                            flush=True,
                        )
            source.close()
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
