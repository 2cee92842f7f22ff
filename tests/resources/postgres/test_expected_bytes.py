"""Estimates of what a slot will deliver, beside what tables and WAL of a real server hold."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.resources.postgres.expected_bytes import estimate_bytes
from pgsieve.resources.postgres.slot import create_slot
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server

pytestmark = pytest.mark.slow

_TABLES = """
create table orders (id int primary key, t text) partition by range (id);
create table orders_1 partition of orders for values from (0) to (1000);
create table orders_2 partition of orders for values from (1000) to (2000);
create table "Other's" (id int primary key, t text);
create publication p for table orders, "Other's" with (publish_via_partition_root);
insert into orders select i, repeat('x', 1000) from generate_series(0, 1999) i;
"""


@pytest.fixture
def database(postgres_version: int) -> Iterator[psycopg.Connection]:
    with (
        new_server(postgres_version, TEST_SETTINGS) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
    ):
        yield connection


def _of_slot(database: psycopg.Connection) -> int:
    return estimate_bytes(database, "s", ["p"])


def _size(database: psycopg.Connection, *tables: str) -> int:
    return sum(
        database.execute("select pg_table_size(%s::regclass)", [table]).fetchone()[0] for table in tables
    )


def test_without_a_slot_the_largest_table_counts_with_its_partitions(database: psycopg.Connection):
    database.execute(_TABLES)
    assert _of_slot(database) == _size(database, "orders_1", "orders_2") > 2_000_000
    assert estimate_bytes(database, "s", [], [("public", "Other's")]) == _size(database, '"Other\'s"')
    assert estimate_bytes(database, "s", ["missing"], [("public", "missing")]) == 0


def test_a_locked_table_is_not_waited_for(database: psycopg.Connection, postgres_version: int):
    database.execute(_TABLES)
    with psycopg.connect(database.info.dsn) as other:
        other.execute("lock table orders_1, orders_2")
        assert _of_slot(database) < 100_000


def test_a_slot_has_the_part_of_its_wal_that_the_most_written_table_wrote(database: psycopg.Connection):
    database.execute(_TABLES)
    database.execute("create table unpublished (id int primary key, t text)")
    create_slot(database, "shop", "s")
    database.execute("insert into unpublished select i, repeat('y', 1000) from generate_series(1, 8000) i")
    wait_until(lambda: _rows_written(database) == 10_000, lambda: "the statistics lack rows")
    assert _of_slot(database) == pytest.approx(_wal(database) / 8 * 2 / 10, rel=0.05)
    database.execute("update orders set t = repeat('z', 1000)")
    wait_until(lambda: _rows_written(database) == 12_000, lambda: "the statistics lack rows")
    assert _of_slot(database) == pytest.approx(_wal(database) / 8 * 4 / 12, rel=0.05)


def _wal(database: psycopg.Connection) -> int:
    """The bytes of WAL that wait in the slot."""
    waiting = "select pg_current_wal_insert_lsn() - confirmed_flush_lsn from pg_replication_slots"
    return int(database.execute(waiting).fetchone()[0])


def _rows_written(database: psycopg.Connection) -> int:
    if database.info.server_version >= 150000:
        database.execute("select pg_stat_force_next_flush()")
    return database.execute(
        "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_user_tables"
    ).fetchone()[0]
