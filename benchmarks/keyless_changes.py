"""What changes of a table without a key cost, beside the same changes of one with a key, in the same run.

Two tables of `--rows` rows get the same `--changes`, half of them UPDATEs, the others INSERTs and DELETEs; the one without a key
has REPLICA IDENTITY FULL. Apply alone is measured, one table at a time: wall clock, processor time of this process (and its threads), and
the most memory that it has had until then. What executors of another `--master` take is in the seconds alone.

    python benchmarks/keyless_changes.py --rows 2000000 --changes 1000000
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import yaml
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import project
from pgsieve.resources.postgres.embedded import EmbeddedServer

_SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "autovacuum": "off",
    "synchronous_commit": "off",
}
_ROW = "i, 'customer ' || i % 1000, (i % 97) / 4.0, now(), array[i % 7, null]"
_COLUMNS = "(id bigint, customer text, amount double precision, at timestamptz, tags int[])"


def _quiet(_: str) -> None:
    """A log that says nothing."""


def _change(source: psycopg.Connection, table: str, rows: int, changes: int) -> None:
    """The same changes of any table."""
    half, quarter = changes // 2, changes // 4
    every = rows // changes
    source.execute(
        f"update {table} set amount = amount + 1 where id % {every * 2} = 0 and id <= {half * every * 2}"
    )
    source.execute(f"delete from {table} where id % {every * 4} = 1 and id <= {quarter * every * 4}")
    source.execute(f"insert into {table} select {_ROW} from generate_series({rows + 1}, {rows + quarter}) i")


def _applied(
    folder: Path, publisher: EmbeddedServer, table: str, change: Callable[[], None], master: str
) -> list[str]:
    """Copy a table, change it, and apply that: what the apply took."""
    path = folder / f"{table}.yaml"
    written = {
        "lake": f"./{table}",
        "sources": {table: {"conninfo": publisher.conninfo()}},
        "subscriptions": {table: {"source": table, "publications": [table]}},
        "spark": {"master": master},
    }
    path.write_text(yaml.safe_dump(written))
    declared = project(load_config(path))
    subscription, lake = declared.subscriptions[table], declared.lake.open()
    copy_tables(subscription, lake, tables_to_copy(subscription, lake), _quiet)
    change()
    drain(subscription.feed, lake, [subscription], _quiet)
    transform(subscription, lake, _quiet)
    wall, processor = time.monotonic(), time.process_time()
    result = apply(subscription, lake, _quiet)
    wall, processor = time.monotonic() - wall, time.process_time() - processor
    (applied,) = result.tables.values()
    assert not applied.problem, applied.problem
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return [f"{wall:.1f}", f"{processor:.1f}", str(memory)]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--master", default="local[2]")
    options = parser.parse_args()
    shown = Table("table", "seconds", "processor time", "memory (MiB)")
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "publisher", settings=_SETTINGS) as publisher:
            source = psycopg.connect(publisher.conninfo(), autocommit=True)
            for table, identity in (("keyed", "add primary key (id)"), ("keyless", "replica identity full")):
                source.execute(f"create table {table} {_COLUMNS}")
                source.execute(
                    f"insert into {table} select {_ROW} from generate_series(1, {options.rows}::bigint) i"
                )
                source.execute(
                    f"alter table {table} {identity}; create publication {table} for table {table}"
                )
                change = partial(_change, source, table, options.rows, options.changes)
                shown.add_row(table, *_applied(folder, publisher, table, change, options.master))
    Console().print(shown)


if __name__ == "__main__":
    main()
