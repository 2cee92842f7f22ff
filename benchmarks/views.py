"""Measures reading a replica as of an earlier moment, and filtering a replica again.

    python benchmarks/views.py 1000000 --changes 100000

In: a number of rows, and of changes. Out, as wall clock and in brackets processor time: a copy; an apply of
the changes; all rows as of a cut before the changes, and as of a moment in their middle, for which half of
the changes are applied to a clone; the rows that a new filter accepts, made from the replica, and by a copy.
Needs no Java: threads do the large writes.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replication import COLUMNS, ROW, SETTINGS
from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.moments.moment import Moment
from pgsieve.assets.steps.moments.reading import find_tables
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.lsn import parse_lsn
from pgsieve.pipelines.commands.refilter import refilter
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import Project, build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer

_WHERE = "status <> 'new'"


def _ignore_line(_: str) -> None:
    pass


class _NoProgress:
    """Progress without output."""

    def start(self, task: str) -> None: ...

    def tell(self, line: str) -> None: ...

    def finish(self, task: str) -> None: ...


@contextmanager
def _timed(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{what}: {time.perf_counter() - wall:.2f} s ({time.process_time() - cpu:.2f})")


def _prepare_apply(project: Project, name: str) -> Callable[[], object]:
    """Drain and transform the new changes; returns a function that applies them."""
    subscription, lake = project.subscriptions[name], project.lake.open()
    drain_slot(subscription.slot_stream, lake, [subscription], _ignore_line)
    transform(subscription, lake, _ignore_line)
    return lambda: apply(subscription, lake, _ignore_line)


def _copy(project: Project, name: str) -> None:
    subscription, lake = project.subscriptions[name], project.lake.open()
    copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), _ignore_line)


def _write_configuration(folder: Path, conninfo: str, *views: str) -> Path:
    """A pgsieve.yaml with a subscription of all rows, and filtered views."""
    of_all = {"all": {"tables": [{"table": "public.t"}]}}
    filtered = {view: {"tables": [{"table": "public.t", "where": _WHERE}]} for view in views}
    path = folder / "pgsieve.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "lake": "./lake",
                "spark": {"master": "threads[2]"},
                "sources": {"shop": {"conninfo": conninfo, "publications": of_all | filtered}},
                "subscriptions": {
                    name: {"source": "shop", "publications": [name]} for name in (*of_all, *filtered)
                },
            }
        )
    )
    return path


def _lsn(database: psycopg.Connection) -> int:
    row = database.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def main(options: argparse.Namespace) -> None:
    """Measure a table with this many rows."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-")))
        settings = {**SETTINGS, "synchronous_commit": "on", "fsync": "off"}
        server = stack.enter_context(EmbeddedServer(folder / "data", settings=settings))
        database = stack.enter_context(psycopg.connect(server.conninfo(), autocommit=True))
        database.execute(f"create table t {COLUMNS}")
        database.execute("alter table t replica identity full")
        database.execute(f"insert into t select {ROW} from generate_series(1, {options.rows}) i")
        config = load_config(_write_configuration(folder, server.conninfo()))
        with _timed("a copy"):
            _copy(build_project(config), "all")
        _prepare_apply(build_project(config), "all")()
        before, every = _lsn(database), max(options.rows // options.changes, 1)
        database.execute(f"update t set qty = qty + 1 where id % {2 * every} = 0")
        amid = _lsn(database)
        database.execute(f"update t set qty = qty + 1 where id % {2 * every} = {every}")
        apply_all = _prepare_apply(build_project(config), "all")
        with _timed("an apply of the changes"):
            apply_all()
        lake = build_project(config).lake.open()
        for what, lsn in (("before the changes", before), ("amid the changes", amid)):
            with _timed(f"all rows as of {what}"):
                (table,) = find_tables(Moment(lake, "all", lsn))
                rows = sum(batch.num_rows for batch in table.read_batches())
            assert rows == options.rows
        config = load_config(_write_configuration(folder, server.conninfo(), "filtered", "copied"))
        with _timed("a view, filtered again"):
            (done,) = refilter(
                config, config.subscriptions["filtered"], (), None, _NoProgress(), is_plan_only=False
            ).tables
        assert done.source == "all", done.reason
        with _timed("a view, copied"):
            _copy(build_project(config), "copied")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=int)
    parser.add_argument("--changes", type=int, default=100_000)
    main(parser.parse_args())
