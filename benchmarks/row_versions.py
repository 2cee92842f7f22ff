"""The cost of versions of rows: `python benchmarks/row_versions.py 1000000 --changes 200000`.

In: a number of rows. Out: for appends, for evenly spaced updates, and for a mix of both with deletes, the
time of an apply without and with versions, and the versions' share: wall clock, in brackets processor time;
the median of `--rounds`. Both subscriptions read one slot, and take turns. Only the apply is measured. Needs
no Java: threads do the large writes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import psycopg
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replication import COLUMNS, ROW, SETTINGS
from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import Project, project
from pgsieve.resources.postgres.embedded import EmbeddedServer

_PLAIN, _VERSIONED = "plain", "versions"


def _quiet(_: str) -> None:
    pass


def _statements(rows: int, changes: int, number: int) -> dict[str, list[str]]:
    """The statements of a round, by kind."""
    first, step = rows + 1 + number * 2 * changes, max(rows // changes, 1)
    append = f"insert into t select {ROW} from generate_series({first}, {first + changes - 1}) i"
    later = f"insert into t select {ROW} from generate_series({first + changes}, {first + changes + changes // 2}) i"
    update = f"update t set qty = qty + 1 where id % {step} = {number % step} and id <= {rows}"
    delete = f"delete from t where id >= {first} and id < {first + changes // 4}"
    return {"appends": [append], "updates": [update], "mixed": [later, update, delete]}


def _applied(declared: Project) -> dict[str, tuple[float, float]]:
    """The wall clock and processor seconds of each subscription's apply of the new changes."""
    (feed,) = declared.feeds.values()
    drain(feed, declared.lake.open(), list(declared.subscriptions.values()), _quiet)
    took = {}
    for name, subscription in declared.subscriptions.items():
        lake = declared.lake.open()
        transform(subscription, lake, _quiet)
        wall, cpu = time.perf_counter(), time.process_time()
        apply(subscription, lake, _quiet)
        took[name] = time.perf_counter() - wall, time.process_time() - cpu
    return took


def main(options: argparse.Namespace) -> None:
    """Measure a table with this many rows."""
    measured = defaultdict[str, list[dict[str, tuple[float, float]]]](list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-")))
        server = stack.enter_context(EmbeddedServer(folder / "data", settings={**SETTINGS, "fsync": "off"}))
        database = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))
        database.execute(f"create table t {COLUMNS}")
        database.execute(f"insert into t select {ROW} from generate_series(1, {options.rows}) i")
        database.execute("create publication t for table t")
        subscribed = {"source": "shop", "publications": ["t"]}
        path = folder / "pgsieve.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "lake": "./lake",
                    "spark": {"master": "threads[2]"},
                    "sources": {"shop": {"conninfo": server.conninfo()}},
                    "subscriptions": {_PLAIN: subscribed, _VERSIONED: {**subscribed, "history": "scd2"}},
                }
            )
        )
        declared = project(load_config(path))
        for subscription in declared.subscriptions.values():
            lake = declared.lake.open()
            copy_tables(subscription, lake, tables_to_copy(subscription, lake), _quiet)
        _applied(declared)
        for number in range(options.rounds):
            for kind, statements in _statements(options.rows, options.changes, number).items():
                for statement in statements:
                    database.execute(statement)
                measured[kind].append(_applied(declared))
    for kind, rounds in measured.items():
        (plain, plain_cpu), (versions, versions_cpu) = (
            [statistics.median(each[name][i] for each in rounds) for i in (0, 1)]
            for name in (_PLAIN, _VERSIONED)
        )
        print(
            f"{kind}: plain {plain:.2f} s ({plain_cpu:.2f}), with versions {versions:.2f} s ({versions_cpu:.2f}):"
            f" {versions / plain:.2f}x; the versions alone {(versions - plain) / plain:.2f}x"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args())
