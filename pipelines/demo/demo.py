"""`pgsieve demo`: replays the row filter examples of PostgreSQL's manual, and then copies a large table.

In: a folder, or None for a temporary one
Out: a `DemoReport`

Two embedded PostgreSQL servers are started. The first one publishes, and the second one subscribes with CREATE
SUBSCRIPTION. pgsieve replicates the same publications into Delta tables, both with `row_filter: pipeline` (pgsieve
filters) and with `row_filter: publisher` (PostgreSQL filters). After each step the three results are compared. The
statements are those of the PostgreSQL documentation, 29.4.7. The large table (module `at_size`) comes last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

import psycopg
import yaml

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.commands.run import run
from pgsieve.pipelines.config.model import Config, SubscriptionConfig, load_config
from pgsieve.pipelines.demo.at_size import measure_large_table
from pgsieve.pipelines.demo.results import ComparedTable, DemoReport
from pgsieve.pipelines.demo.servers import execute_all, make_demo_folder, open_session, start_servers
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.stores.embedded_s3 import BUCKET, REGION, run_embedded_s3
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import quote, quote_literal

_TABLES = """
create table t1(a int, b int, c text, primary key(a, c));
create table t2(d int, e int, f int, primary key(d));
create table t3(g int, h int, i int, primary key(g));
create table parent(a int primary key) partition by range(a);
create table child partition of parent default
"""

_PUBLICATIONS = """
create publication p1 for table t1 where (a > 5 and c = 'NSW');
create publication p2 for table t1, t2 where (e = 99);
create publication p3 for table t2 where (d = 10), t3 where (g = 10);
create publication p4 for table parent where (a < 5), child where (a >= 5) with (publish_via_partition_root = true)
"""

_FIRST_ROWS = """
insert into t1 values (1, 101, 'NSW'), (10, 110, 'NSW');
insert into t2 values (10, 99, 1), (11, 98, 2), (12, 99, 3);
insert into t3 values (10, 1, 1), (11, 2, 2);
insert into parent values (1), (8)
"""


@dataclass(frozen=True)
class Step:
    """A step of the demo.

    - `statements`: the statements of the step
    - `tables`: the tables to show after the step
    - `publications`: statements that change publications, to be executed before `statements`
    """

    title: str
    statements: str
    tables: tuple[str, ...]
    publications: str | None = None


STEPS = (
    Step("the initial sync copies the rows that match", _FIRST_ROWS, ("t1", "t2", "t3", "parent")),
    Step(
        "INSERTs of 2 to 9: only rows that match are replicated",
        "insert into t1 values (2, 102, 'NSW'); insert into t1 values (3, 103, 'QLD');"
        " insert into t1 values (4, 104, 'VIC'); insert into t1 values (5, 105, 'ACT');"
        " insert into t1 values (6, 106, 'NSW'); insert into t1 values (7, 107, 'NT');"
        " insert into t1 values (8, 108, 'QLD'); insert into t1 values (9, 109, 'NSW');"
        " insert into parent values (2), (4), (6); insert into child values (3), (5), (7)",
        ("t1", "parent"),
    ),
    Step(
        "UPDATE of 6 stays UPDATE, of 2 becomes INSERT, of 9 becomes DELETE",
        "update t1 set b = 999 where a = 6; update t1 set a = 555 where a = 2; update t1 set c = 'VIC' where a = 9",
        ("t1",),
    ),
    Step(
        "publish_via_partition_root = false: the row filter of the partition counts",
        "truncate parent; insert into parent values (2), (4), (6); insert into child values (3), (5), (7)",
        ("child",),
        "drop publication p4;"
        " create publication p4 for table parent, child where (a >= 5) with (publish_via_partition_root = false)",
    ),
)

#: Maps each subscription to its publications.
_PUBLICATIONS_BY_SUBSCRIPTION = {"s1": ("p1", "p4"), "s23": ("p2", "p3")}
#: Maps each table to the subscription whose replica is shown. Subscription s23 has t1, too, but without a row filter.
_SUBSCRIPTION_BY_TABLE = {"t1": "s1", "parent": "s1", "child": "s1", "t2": "s23", "t3": "s23"}
_MODES = ("pipeline", "publisher")

#: Settings of Spark for tables with few rows. For these, Spark would take longer to compile code than to read the rows.
SMALL_DATA = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

#: How long PostgreSQL's subscriptions may take to apply all changes.
_MAX_WAIT_SECONDS = 60.0
#: The number of rows of the large table. After its copy, half as many changes are applied.
ROWS = 1_000_000

ShowStep = Callable[[str, Sequence[ComparedTable]], None]


def demo(
    folder: Path | None,
    progress: Progress,
    show_step: ShowStep,
    *,
    on_s3: bool = False,
    rows: int = ROWS,
    without_spark: bool = False,
) -> DemoReport:
    """Run the demo. All its files are in `folder`, or in a temporary folder, which is not deleted.

    - `on_s3`: true if the lake is on an embedded S3 server
    - `rows`: the number of rows of the large table; 0 leaves the table out
    - `without_spark`: true if threads do the work of Spark for the large table

    Raises SparkUnavailableError if Java is missing, EmbeddedS3Error if the S3 server is not installed, and the error of
    a run that fails.
    """
    start_time = monotonic()
    spark = {"master": "threads[*]" if without_spark else "local[*]"}
    if rows and not without_spark:
        _check_java()
    demo_folder = make_demo_folder(folder)
    with ExitStack() as stack:
        progress.start("start two PostgreSQL servers")
        publisher, subscriber = (
            EmbeddedServer(demo_folder / "publisher"),
            EmbeddedServer(demo_folder / "subscriber"),
        )
        stack.enter_context(start_servers(publisher, subscriber))()
        progress.finish("start two PostgreSQL servers")
        store_settings = stack.enter_context(_run_s3_server(demo_folder)) if on_s3 else {}
        config = _write_configuration(demo_folder, publisher, store_settings)
        compared_tables = _replay_steps(config, publisher, subscriber, progress, show_step)
        size_report = (
            measure_large_table(demo_folder, (publisher, subscriber), spark, store_settings, rows, progress)
            if rows
            else None
        )
    return DemoReport(
        config=config.path,
        lake=config.lake,
        tables=compared_tables,
        seconds=monotonic() - start_time,
        sized=size_report,
    )


def _replay_steps(
    config: Config,
    publisher: EmbeddedServer,
    subscriber: EmbeddedServer,
    progress: Progress,
    show_step: ShowStep,
) -> tuple[ComparedTable, ...]:
    """Replay the manual's examples step by step. Returns the comparisons of tables after each step."""
    comparisons: list[ComparedTable] = []
    with ExitStack() as stack:
        publisher_session = stack.enter_context(open_session(publisher))
        execute_all(publisher_session, _TABLES + ";" + _PUBLICATIONS)
        session_by_subscription = {
            name: stack.enter_context(_create_database(subscriber, name))
            for name in _PUBLICATIONS_BY_SUBSCRIPTION
        }
        for step_number, step in enumerate(STEPS):
            if step.publications:
                execute_all(publisher_session, step.publications)
                session_by_subscription["s1"].execute("alter subscription s1 refresh publication")
                _wait_for_subscriber(publisher_session, session_by_subscription["s1"])
            execute_all(publisher_session, step.statements)
            if step_number == 0:
                _create_subscriptions(session_by_subscription, publisher)
            if failures := run(config, _find_shown_subscriptions(config, step), progress).failures:
                raise failures[0].error
            for subscriber_session in session_by_subscription.values():
                _wait_for_subscriber(publisher_session, subscriber_session)
            tables = [
                comparison
                for table in step.tables
                for comparison in _compare(
                    config, table, publisher_session, session_by_subscription[_SUBSCRIPTION_BY_TABLE[table]]
                )
            ]
            show_step(step.title, tables)
            comparisons += tables
        for name, subscriber_session in session_by_subscription.items():
            subscriber_session.execute(f"drop subscription {quote(name)}")
    return tuple(comparisons)


def _check_java() -> None:
    """Raise SparkUnavailableError if there is no Java. The hint says how to run the demo without it."""
    try:
        SparkEngine().check_java()
    except SparkUnavailableError as error:
        raise SparkUnavailableError(
            error.message,
            hint="install a JDK or JRE 17 or 21, or set JAVA_HOME; or run the demo without Spark: `pgsieve demo --without-spark`",
        ) from None


@contextmanager
def _run_s3_server(demo_folder: Path) -> Iterator[Mapping[str, Any]]:
    """Within the block, run an S3 server with its data in the folder; yields `lake` and `storage` for pgsieve.yaml."""
    access_key, secret_key = token_hex(10), token_hex(20)
    with run_embedded_s3(demo_folder / "s3", access_key, secret_key) as url:
        storage = {
            "endpoint": url,
            "region": REGION,
            "access_key_id": access_key,
            "secret_access_key": secret_key,
        }
        yield {"lake": f"s3://{BUCKET}/demo", "storage": storage}


def _write_configuration(
    demo_folder: Path, publisher: EmbeddedServer, store_settings: Mapping[str, Any]
) -> Config:
    """Write pgsieve.yaml, and load it. It has each of the manual's subscriptions in both modes of `row_filter`."""
    subscriptions = {
        f"{name}_{mode}": {"source": "demo", "publications": list(publications), "row_filter": mode}
        for name, publications in _PUBLICATIONS_BY_SUBSCRIPTION.items()
        for mode in _MODES
    }
    content = {
        "lake": "./lake",
        "spark": {"master": "local[*]", "conf": SMALL_DATA},
        "sources": {"demo": {"conninfo": publisher.conninfo()}},
        "subscriptions": subscriptions,
        **store_settings,
    }
    path = demo_folder / "pgsieve.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_config(path)


def _find_shown_subscriptions(config: Config, step: Step) -> Sequence[SubscriptionConfig]:
    """The subscriptions, in both modes, whose tables are shown after a step. Only these get the step's changes."""
    names = {_SUBSCRIPTION_BY_TABLE[table] for table in step.tables}
    return config.select([f"{name}_{mode}" for name in sorted(names) for mode in _MODES])


@contextmanager
def _create_database(subscriber: EmbeddedServer, name: str) -> Iterator[psycopg.Connection[Any]]:
    """Create a database for one of PostgreSQL's subscriptions, and open a session there.

    If both subscriptions were in the same database, its table t1 would get each row twice.
    """
    with open_session(subscriber) as connection:
        connection.execute(f"create database {quote(name)}")
    with open_session(subscriber, dbname=name) as connection:
        execute_all(connection, _TABLES)
        yield connection


def _create_subscriptions(
    session_by_subscription: Mapping[str, psycopg.Connection[Any]], publisher: EmbeddedServer
) -> None:
    """Execute CREATE SUBSCRIPTION on the second server."""
    for name, publications in _PUBLICATIONS_BY_SUBSCRIPTION.items():
        names = ", ".join(quote(p) for p in publications)
        session_by_subscription[name].execute(
            f"create subscription {quote(name)} connection {quote_literal(publisher.conninfo())} publication {names}"
        )


def _wait_for_subscriber(
    publisher_session: psycopg.Connection[Any], subscriber_session: psycopg.Connection[Any]
) -> None:
    """Wait until PostgreSQL's subscriptions have copied their tables and applied all changes."""
    lsn_row = publisher_session.execute("select pg_current_wal_lsn()::text").fetchone()
    assert lsn_row is not None
    deadline = monotonic() + _MAX_WAIT_SECONDS
    while True:
        is_synced_row = subscriber_session.execute(
            "select bool_and(srsubstate in ('r', 's')) from pg_subscription_rel"
        ).fetchone()
        is_replayed_row = publisher_session.execute(
            "select count(*) >= %s from pg_stat_replication where replay_lsn >= %s::pg_lsn",
            [len(_PUBLICATIONS_BY_SUBSCRIPTION), lsn_row[0]],
        ).fetchone()
        if is_synced_row and is_synced_row[0] and is_replayed_row and is_replayed_row[0]:
            return
        if monotonic() > deadline:
            raise PgsieveError("the built-in subscription did not catch up", hint="run the demo again")
        sleep(0.05)


def _compare(
    config: Config,
    table: str,
    publisher_session: psycopg.Connection[Any],
    subscriber_session: psycopg.Connection[Any],
) -> list[ComparedTable]:
    """Compare a table of the publisher with PostgreSQL's subscriber, and with pgsieve's replica in each mode."""
    query = f"select * from {quote(table)} order by 1"
    column_names = tuple(column.name for column in publisher_session.execute(query).description or ())

    def read_rows(connection: psycopg.Connection[Any]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(str(value) for value in row) for row in connection.execute(query))

    lake = build_project(config).lake.open()
    comparisons = []
    for mode in _MODES:
        path = lake.paths.replica(f"{_SUBSCRIPTION_BY_TABLE[table]}_{mode}", "public", table)
        replica_rows = sorted(tuple(row.values()) for row in lake.records.rows(path))
        printed_rows = tuple(tuple(str(value) for value in row) for row in replica_rows)
        comparisons.append(
            ComparedTable(
                table,
                mode,
                column_names,
                read_rows(publisher_session),
                printed_rows,
                read_rows(subscriber_session),
            )
        )
    return comparisons
