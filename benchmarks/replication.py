"""Measures initial sync and catch-up, compared with PostgreSQL's own subscription in the same run.

The workload is a table of ten columns, with about 100 bytes of text per row. Initial sync copies `--rows`
rows. Catch-up applies changes that wait in the slot: half as many inserts, in 100 transactions, and a quarter
as many updates, in 50. A peek of the slot alone is measured, too. pgsieve is measured warm (in a session that
has done the same twice, with half the rows) and cold (the whole process, `pgsieve run`). The built-in
subscription is CREATE SUBSCRIPTION with default options on a second embedded server. Prints wall clock
seconds, and their ratio to the built-in subscription's. Needs about 3 GB of disk at the full 2,000,000 rows.

`--master` is Spark's, as in pgsieve.yaml: local, or a standalone cluster that runs already. With `--engine
start` the runs use a warm engine, and its memory is printed, too. `threads[N]` is for comparison: the same
functions in threads of the process, without Spark.

    python benchmarks/replication.py --rows 2000000 --master local[*] --engine start
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
import yaml
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from pgsieve.assets.steps.apply.replica_tables import apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.slot_consumption.appending import make_peek_options
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.pipelines.commands.engine import status, stop
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query, read_messages
from pgsieve.resources.postgres.wal import read_current_lsn

SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "synchronous_commit": "off",
}
COLUMNS = (
    "(id bigint primary key, customer_id int not null, status text not null, amount numeric(12,2),"
    " created_at timestamptz, note text, qty int, price float8, flag bool, tenant int not null)"
)
ROW = (
    "i, i % 10000, (array['new','paid','shipped','done'])[1 + i % 4], (i % 100000) / 7.0, now(),"
    " 'note number ' || i || ' some more text for row', i % 50, i / 3.0, i % 2 = 0, i % 16"
)


def quiet(_: str) -> None:
    """A log without output."""


def changes(connection: psycopg.Connection, table: str, rows: int, after: int | None = None) -> None:
    """Commit the changes of the catch-up; new keys follow `after`, by default the number of rows."""
    inserts, updates, key = rows // 2 // 100, rows // 4 // 50, rows if after is None else after
    insert = f"insert into {table} select {ROW} from generate_series({key} + b*{inserts} + 1, {key} + (b+1)*{inserts}) i"
    update = (
        f"update {table} set status = 'upd', amount = amount + 1"
        f" where id between {key} + b*{2 * updates} + 1 and {key} + b*{2 * updates} + {updates}"
    )
    for statement, times in ((insert, 100), (update, 50)):
        connection.execute(f"do $$ begin for b in 0..{times - 1} loop {statement}; commit; end loop; end $$")


def wait(done: Callable[[], bool]) -> None:
    """Poll until the built-in subscription is `done`."""
    while not done():
        time.sleep(0.02)


@contextmanager
def timed(results: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of a block to the results."""
    started = time.monotonic()
    yield
    results[name] = time.monotonic() - started
    print(f"{name}: {results[name]:.2f} s", flush=True)


def builtin(
    publisher: EmbeddedServer, subscriber: EmbeddedServer, rows: int, results: dict[str, float]
) -> None:
    """Measure PostgreSQL's own subscription."""
    with (
        psycopg.connect(publisher.conninfo(), autocommit=True) as source,
        psycopg.connect(subscriber.conninfo(), autocommit=True) as target,
    ):
        target.execute(f"create table builtin {COLUMNS}")
        with timed(results, "built-in: initial sync"):
            target.execute(f"create subscription s connection '{publisher.conninfo()}' publication builtin")
            wait(
                lambda: target.execute(
                    "select bool_and(srsubstate = 'r') from pg_subscription_rel"
                ).fetchone()[0]
            )
        target.execute("alter subscription s disable")
        wait(lambda: not source.execute("select bool_or(active) from pg_replication_slots").fetchone()[0])
        changes(source, "builtin", rows)
        lsn = source.execute("select pg_current_wal_lsn()::text").fetchone()[0]
        reached = f"select coalesce(bool_or(replay_lsn >= '{lsn}'), false) from pg_stat_replication"
        with timed(results, "built-in: catch-up"):
            target.execute("alter subscription s enable")
            wait(lambda: source.execute(reached).fetchone()[0])
        target.execute("drop subscription s")


def peek(subscription: Subscription, results: dict[str, float], phase: str) -> None:
    """Measure the slot alone: read its changes, and drop them."""
    slot_stream = subscription.slot_stream
    with slot_stream.source.connect() as connection:
        options, end = make_peek_options(slot_stream, [slot_stream.slot]), read_current_lsn(connection)
        query = peek_query(slot_stream.slot, end, options, connection.info.server_version)
    with timed(results, f"pgsieve {phase}:   the slot's peek alone"):
        for _ in read_messages(slot_stream.source.make_executor_conninfo(), query):
            pass


def steps(subscription: Subscription, lake: object, results: dict[str, float], phase: str) -> None:
    """Measure the steps of a catch-up, after an extra peek of the slot."""
    peek(subscription, results, phase)
    with timed(results, f"pgsieve {phase}: catch-up"):
        with timed(results, f"pgsieve {phase}:   change_log"):
            drain_slot(subscription.slot_stream, lake, [subscription], quiet)
        with timed(results, f"pgsieve {phase}:   table_changes"):
            transform(subscription, lake, quiet)
        with timed(results, f"pgsieve {phase}:   replica tables"):
            apply(subscription, lake, quiet)


def configuration(folder: Path, publisher: EmbeddedServer, name: str, spark: Mapping[str, str]) -> Path:
    """A pgsieve.yaml with one subscription to the publication of the same name."""
    path = folder / f"{name}.yaml"
    content = {
        "lake": f"./lake_{name}",
        "spark": dict(spark),
        "sources": {name: {"conninfo": publisher.conninfo()}},
        "subscriptions": {f"s_{name}": {"source": name, "publications": [name]}},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def warm(
    folder: Path, publisher: EmbeddedServer, rows: int, results: dict[str, float], spark: Mapping[str, str]
) -> None:
    """Measure the steps in a session that has done them twice."""
    for name, size, measured in (
        ("warmup1", rows // 2, {}),
        ("warmup2", rows // 2, {}),
        ("warm", rows, results),
    ):
        project = build_project(load_config(configuration(folder, publisher, name, spark)))
        subscription, lake = project.subscriptions[f"s_{name}"], project.lake.open()
        phase = "warm" if measured is results else "(warm-up)"
        with timed(measured, f"pgsieve {phase}: initial sync"):
            copy_tables(subscription, lake, find_tables_to_copy(subscription, lake), quiet)
        with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
            changes(source, name, size)
        steps(subscription, lake, measured, phase)
        replicated = lake.count_rows(lake.paths.replica(subscription.name, "public", name))
        assert replicated == size + size // 2 // 100 * 100, replicated
        with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
            source.execute(f"select pg_drop_replication_slot('{subscription.slot_stream.slot}')")


def cold(
    folder: Path, publisher: EmbeddedServer, rows: int, results: dict[str, float], spark: Mapping[str, str]
) -> None:
    """Measure `pgsieve run` as a process: for the rows, for the changes, and without changes."""
    path = configuration(folder, publisher, "cold", spark)
    command = [sys.executable, "-m", "pgsieve.pipelines.command_line.cli", "run", "-c", str(path)]

    def run() -> None:
        subprocess.run(
            command,
            check=True,
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    with timed(results, "pgsieve cold: initial sync"):
        run()
    with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
        changes(source, "cold", rows)
    with timed(results, "pgsieve cold: catch-up"):
        run()
    with timed(results, "pgsieve cold: nothing to do"):
        run()


def main() -> None:
    """Measure all three, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--skip-cold", action="store_true")
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--engine", choices=("off", "use", "start"), default="off")
    options = parser.parse_args()
    spark = {"master": options.master, "engine": options.engine}
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pgsieve-benchmark-") as name:
        folder = Path(name)
        publisher = EmbeddedServer(folder / "publisher", settings=SETTINGS)
        subscriber = EmbeddedServer(folder / "subscriber", settings=SETTINGS)
        with publisher, subscriber:
            with psycopg.connect(publisher.conninfo(), autocommit=True) as source:
                for table, size in (("builtin", 1), ("warmup1", 2), ("warmup2", 2), ("warm", 1), ("cold", 1)):
                    source.execute(f"create table {table} {COLUMNS}")
                    source.execute(
                        f"insert into {table} select {ROW} from generate_series(1, {options.rows // size}) i"
                    )
                    source.execute(f"vacuum (freeze, analyze) {table}")
                    source.execute(f"create publication {table} for table {table}")
            print(f"{options.rows:,} rows, {spark}, load average {os.getloadavg()[0]:.1f}", flush=True)
            builtin(publisher, subscriber, options.rows, results)
            warm(folder, publisher, options.rows, results, spark)
            if not options.skip_cold:
                if options.master.startswith("spark:"):  # Its executors have all of the cluster's cores.
                    SparkSession.active().stop()
                cold(folder, publisher, options.rows, results, spark)
            if options.engine == "start":
                config = load_config(configuration(folder, publisher, "warm", spark))
                engine_bytes = status(config).resident_bytes
                print(f"the warm engine and its Python workers: {engine_bytes // 1024**2:,} MiB of memory")
                stop(config)
    table = Table("what", "seconds", "ratio to the built-in subscription")
    for what, seconds in results.items():
        peer = results.get("built-in: " + what.rpartition(": ")[2].strip())
        table.add_row(
            what,
            f"{seconds:.2f}",
            "" if peer is None or what.startswith("built-in") else f"{seconds / peer:.2f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
