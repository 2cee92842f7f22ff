"""Measures the cost of each option of a replica: `python benchmarks/choices.py 500000 --changes 100000`.

In: a number of rows. Out: the processor time of a plain replica, and the ratio of each option to it: metadata
columns, soft deletes, a history from the first row (`initial`), versions of rows (`scd2`), a row filter, and
the same filter without counts of the operations that UPDATEs become. The steps are the copy, the
transformation and the apply; the changes are appends, evenly spaced updates, and a mix of both with deletes.
All subscriptions read one slot. In each of `--rounds` rounds they take turns in another order; a ratio is the
median of all rounds. Needs no Java: threads do the large writes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replication import COLUMNS, ROW, SETTINGS, quiet
from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.changes.sent_as import Origin
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer

#: The subscription of the process's first copy, which takes longer and is not measured.
_FIRST = "first"
_PLAIN, _FILTER_WITHOUT_COUNTS = "plain", "filter_uncounted"
_METADATA = (
    "commit_lsn",
    "ordinal",
    "commit_time",
    "operation",
    "source_table",
    "applied_at",
    "copy_lsn",
    "copy_time",
)
_FILTERED: Mapping[str, Any] = {"publications": ["filtered"]}
#: By choice: the options of its subscription.
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    _PLAIN: {},
    "metadata": {"layout": {"columns": {kind: f"_{kind}" for kind in _METADATA}}},
    "soft": {"layout": {"deletes": "soft"}},
    "initial": {"history": {"initial": True}},
    "scd2": {"history": "scd2"},
    "filter": _FILTERED,
    _FILTER_WITHOUT_COUNTS: _FILTERED,
}
#: Seconds of processor time by step.
_Seconds = dict[str, float]


def _statements(rows: int, changes: int, number: int) -> Mapping[str, list[str]]:
    """The statements of a round, by the kind of change."""
    first, step = rows + 1 + number * 2 * changes, max(rows // changes, 1)
    append = f"insert into t select {ROW} from generate_series({first}, {first + changes - 1}) i"
    later = f"insert into t select {ROW} from generate_series({first + changes}, {first + changes + changes // 2}) i"
    update = f"update t set qty = qty + 1 where id % {step} = {number % step} and id <= {rows}"
    delete = f"delete from t where id >= {first} and id < {first + changes // 4}"
    return {"appends": [append], "updates": [update], "mixed": [later, update, delete]}


def _cpu_seconds_of(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _copy_seconds(subscription: Subscription, project: Project) -> _Seconds:
    lake = project.lake.open()
    tables = find_tables_to_copy(subscription, lake)
    return {"copy": _cpu_seconds_of(lambda: copy_tables(subscription, lake, tables, quiet))}


def _apply_seconds(subscription: Subscription, project: Project) -> _Seconds:
    lake = project.lake.open()
    with patch.object(Origin, "add_counts") if subscription.name == _FILTER_WITHOUT_COUNTS else nullcontext():
        transformed = _cpu_seconds_of(lambda: transform(subscription, lake, quiet))
    return {"transform": transformed, "apply": _cpu_seconds_of(lambda: apply(subscription, lake, quiet))}


@contextmanager
def _database_and_project(options: argparse.Namespace) -> Iterator[tuple[psycopg.Connection, Project]]:
    """A database with the table, and a project with a subscription for each choice."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-")))
        server = stack.enter_context(EmbeddedServer(folder / "data", settings={**SETTINGS, "fsync": "off"}))
        database = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))
        database.execute(f"create table t {COLUMNS}")
        database.execute(f"insert into t select {ROW} from generate_series(1, {options.rows}) i")
        database.execute("create publication t for table t")
        database.execute("create publication filtered for table t where (id % 2 = 0)")
        subscribed = {"source": "shop", "publications": ["t"]}
        path = folder / "pgsieve.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "lake": "./lake",
                    "spark": {"master": "threads[2]"},
                    "sources": {"shop": {"conninfo": server.conninfo()}},
                    "subscriptions": {
                        name: {**subscribed, **_CHOICES.get(name, {})}
                        for name in (_FIRST, _PLAIN, *options.choices)
                    },
                }
            )
        )
        yield database, build_project(load_config(path))


def main(options: argparse.Namespace) -> None:
    """Measure, and print the ratios."""
    measured = defaultdict[str, dict[str, list[_Seconds]]](lambda: defaultdict(list))
    with _database_and_project(options) as (database, project):
        (slot_stream,) = project.slot_streams.values()
        names = [_PLAIN, *options.choices]

        def measure(kind: str, work: Callable[[Subscription, Project], _Seconds]) -> None:
            names.append(names.pop(0))
            for name in names:
                measured[kind][name].append(work(project.subscriptions[name], project))

        _copy_seconds(project.subscriptions[_FIRST], project)
        measure("copy", _copy_seconds)
        drain_slot(slot_stream, project.lake.open(), list(project.subscriptions.values()), quiet)
        for name in names:
            _apply_seconds(project.subscriptions[name], project)
        for number in range(options.rounds):
            for kind, statements in _statements(options.rows, options.changes, number).items():
                for statement in statements:
                    database.execute(statement)
                drain_slot(slot_stream, project.lake.open(), list(project.subscriptions.values()), quiet)
                measure(kind, _apply_seconds)
    for kind, by_name in measured.items():
        for step in by_name[_PLAIN][0]:
            plain = [each[step] for each in by_name[_PLAIN]]
            ratios = {
                name: statistics.median(each[step] / one for each, one in zip(rounds, plain, strict=True))
                for name, rounds in by_name.items()
            }
            shown = ", ".join(f"{name} {ratios[name]:.2f}" for name in options.choices)
            print(f"{kind}, {step}: plain {statistics.median(plain):.2f} s; {shown}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = [name for name in _CHOICES if name != _PLAIN]
    parser.add_argument("rows", type=int)
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--choices", nargs="+", choices=others, default=others)
    main(parser.parse_args())
