"""The large table of the demo, which has a row filter and partitions: its first copy, and a catch-up after changes.

In: two servers, a folder, and a number of rows
Out: how many seconds CREATE SUBSCRIPTION and pgsieve take for the copy and for the catch-up, and whether `check` finds
     a difference. Raises the error of a run that fails.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psycopg
import yaml

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.commands.check import check
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.commands.run import run
from pgsieve.pipelines.config.model import Config, load_config
from pgsieve.pipelines.demo.results import LargeTableReport, LargeTableStep
from pgsieve.pipelines.demo.servers import execute_all, open_session
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import quote_literal

_DATABASE = "at_size"
_MAX_WAIT_SECONDS = 600.0

_TABLE = """
create table orders(id bigint, region text, customer int, amount numeric(12,2), at timestamptz, note text,
  primary key(id, region)) partition by hash(id);
create table orders_0 partition of orders for values with (modulus 2, remainder 0);
create table orders_1 partition of orders for values with (modulus 2, remainder 1)
"""
_PUBLICATION = "create publication at_size for table orders where (region <> 'APAC') with (publish_via_partition_root = true)"
_ROW = (
    "i, (array['EMEA','AMER','APAC','LATAM'])[1 + i % 4], i % 10000, (i % 100000) / 7.0, now(),"
    " 'note number ' || i || ' some more text for row'"
)


def measure_large_table(
    demo_folder: Path,
    servers: tuple[EmbeddedServer, EmbeddedServer],
    spark: Mapping[str, Any],
    store_settings: Mapping[str, Any],
    row_count: int,
    progress: Progress,
) -> LargeTableReport:
    """Let CREATE SUBSCRIPTION and pgsieve each copy the table, and then apply about half as many changes as it has rows.

    `store_settings` has the keys `lake` and `storage` of pgsieve.yaml; it is empty if the lake is in the folder.
    """
    publisher, _ = servers
    with ExitStack() as stack:
        publisher_session, subscriber_session = (
            stack.enter_context(_create_database(server)) for server in servers
        )
        task = f"make {quantity(row_count, 'row')}"
        progress.start(task)
        execute_all(
            publisher_session,
            f"insert into orders select {_ROW} from generate_series(1, {row_count}) i; {_PUBLICATION}",
        )
        execute_all(publisher_session, "analyze orders; checkpoint")
        progress.finish(task)
        config = _write_configuration(demo_folder, publisher, spark, store_settings)
        engine = build_project(config).lake.engine
        if engine.threads is None:
            # A machine has to fetch the jars only once, so the time for that is not measured.
            engine.fetch_jars()
        conninfo = quote_literal(publisher.conninfo(dbname=_DATABASE))
        start_time = monotonic()
        subscriber_session.execute(
            f"create subscription {_DATABASE} connection {conninfo} publication {_DATABASE}"
        )
        _wait_for_subscriber(publisher_session, subscriber_session)
        copy_step = _measure_step("first copy", row_count, monotonic() - start_time, config, progress)
        subscriber_session.execute(f"alter subscription {_DATABASE} disable")
        _wait_until(
            publisher_session, f"select not active from pg_replication_slots where slot_name = '{_DATABASE}'"
        )
        change_count = _commit_changes(publisher_session, row_count)
        start_time = monotonic()
        subscriber_session.execute(f"alter subscription {_DATABASE} enable")
        _wait_for_subscriber(publisher_session, subscriber_session)
        apply_step = _measure_step("catch-up", change_count, monotonic() - start_time, config, progress)
        report = check(config, config.select([]), progress)
        for failure in report.failures:
            raise failure.error
        subscriber_session.execute(f"drop subscription {_DATABASE}")
    return LargeTableReport((copy_step, apply_step), report.equal)


def _create_database(server: EmbeddedServer) -> psycopg.Connection[Any]:
    """Create a database with the table; returns a session there."""
    with open_session(server) as connection:
        connection.execute(f"create database {_DATABASE}")
    connection = open_session(server, dbname=_DATABASE)
    execute_all(connection, _TABLE)
    return connection


def _write_configuration(
    demo_folder: Path, publisher: EmbeddedServer, spark: Mapping[str, Any], store_settings: Mapping[str, Any]
) -> Config:
    """Write the configuration file for the large table, and load it."""
    content = {
        "lake": f"./lake_{_DATABASE}",
        "spark": dict(spark),
        "sources": {_DATABASE: {"conninfo": publisher.conninfo(dbname=_DATABASE)}},
        "subscriptions": {"orders": {"source": _DATABASE, "publications": [_DATABASE]}},
        **({**store_settings, "lake": f"{store_settings['lake']}_{_DATABASE}"} if store_settings else {}),
    }
    # The file is in the folder of the demo's pgsieve.yaml, so that both use the same records of Dagster.
    path = demo_folder / f"{_DATABASE}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_config(path)


def _commit_changes(publisher_session: psycopg.Connection[Any], row_count: int) -> int:
    """Commit about half as many changes as there are rows, in a hundred transactions; returns the number of changes.

    About half of the changes are INSERTs, and one in ten is a DELETE. The others are UPDATEs, some of which move a row
    out of the row filter.
    """
    inserts, updates, deletes = row_count // 400, row_count // 500, row_count // 2000
    publisher_session.execute(
        f"do $$ declare k bigint; begin for b in 0..99 loop k := b * {row_count // 100};"
        f" insert into orders select {_ROW} from generate_series({row_count} + b * {inserts} + 1, {row_count} + (b + 1) * {inserts}) i;"
        f" update orders set amount = amount + 1, region = case when id % 50 = 0 then 'APAC' else region end"
        f" where id > k and id <= k + {updates};"
        f" delete from orders where id > k + {updates} and id <= k + {updates + deletes}; commit; end loop; end $$"
    )
    return 100 * (inserts + updates + deletes)


def _measure_step(
    title: str, count: int, subscriber_seconds: float, config: Config, progress: Progress
) -> LargeTableStep:
    """Measure how long pgsieve takes for the rows or changes for which PostgreSQL's subscriber took `subscriber_seconds`."""
    start_time = monotonic()
    summary = run(config, config.select([]), progress)
    for failure in summary.failures:
        raise failure.error
    (cost,) = (subscription_run.spent for subscription_run in summary.subscriptions)
    return LargeTableStep(title, count, subscriber_seconds, monotonic() - start_time, cost)


def _wait_for_subscriber(
    publisher_session: psycopg.Connection[Any], subscriber_session: psycopg.Connection[Any]
) -> None:
    """Wait until PostgreSQL's subscriber has copied its table and applied all changes."""
    _wait_until(subscriber_session, "select bool_and(srsubstate = 'r') from pg_subscription_rel")
    row = publisher_session.execute("select pg_current_wal_lsn()::text").fetchone()
    assert row is not None
    _wait_until(
        publisher_session,
        "select coalesce(bool_or(replay_lsn >= pg_lsn "
        f"'{row[0]}'), false) from pg_stat_replication where application_name = '{_DATABASE}'",
    )


def _wait_until(connection: psycopg.Connection[Any], query: str) -> None:
    """Repeat a query until it returns true. Raises PgsieveError if that takes too long."""
    deadline = monotonic() + _MAX_WAIT_SECONDS
    while (row := connection.execute(query).fetchone()) is None or not row[0]:
        if monotonic() > deadline:
            raise PgsieveError("the built-in subscription did not catch up", hint="run the demo again")
        sleep(0.02)
