"""Invented traffic of a shop: its tables, publications of them, and a writer that changes some rows twice a second.

In: an empty database
Out: transactions with INSERT, UPDATE and DELETE. Some of them change a row so that a row filter matches it from now on,
     or no longer. Some change a partitioned table.

After an error of the server, the writer goes on.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from pgsieve.resources.postgres.sessions import Conninfo

_TABLES = """
create schema shop;
create table shop.customers (id int primary key, name text not null, region text not null, since date not null);
create table shop.orders (
  id bigint generated always as identity primary key, customer int not null references shop.customers,
  region text not null, status text not null default 'new', amount numeric(10, 2) not null,
  placed_at timestamptz not null default now());
alter table shop.orders replica identity full;
create table shop.order_lines (order_id bigint, line int, article text, quantity int, primary key (order_id, line));
create table shop.events (id bigint generated always as identity, at timestamptz not null default now(), kind text,
  customer int, primary key (id, at)) partition by range (at);
create table shop.events_past partition of shop.events for values from (minvalue) to ('2026-01-01');
create table shop.events_present partition of shop.events for values from ('2026-01-01') to (maxvalue);
insert into shop.customers select i, 'Customer ' || i, (array['EMEA', 'AMER', 'APAC'])[1 + i % 3], date '2024-01-01' + i
  from generate_series(1, 200) i;
insert into shop.orders (customer, region, amount) select 1 + i % 200, (array['EMEA', 'AMER', 'APAC'])[1 + (i % 200 + 1) % 3],
  (i * 37 % 50000) / 100.0 from generate_series(1, 1000) i;
insert into shop.order_lines select o.id, l, 'article ' || (o.id + l) % 40, 1 + (o.id * l) % 5
  from shop.orders o, generate_series(1, 2) l;
create publication sales for table shop.orders where (region = 'EMEA'), shop.customers (id, name, region);
create publication everything for tables in schema shop with (publish_via_partition_root = true);
"""

_REGIONS = ("EMEA", "AMER", "APAC")

#: Statements, each with its weight. A transaction executes one of them, chosen at random by the weights.
_WEIGHTED_STATEMENTS: tuple[tuple[int, str], ...] = (
    (
        6,
        (
            "with placed as (insert into shop.orders (customer, region, amount) select c.id, c.region, %(amount)s"
            " from shop.customers c where c.id = %(customer)s returning id)"
            " insert into shop.order_lines select id, l, 'article ' || l * 7 %% 40, l from placed, generate_series(1, 2) l"
        ),
    ),
    (
        4,
        (
            "update shop.orders set status = (array['paid', 'packed', 'shipped'])[1 + %(customer)s %% 3] where id in"
            " (select id from shop.orders order by id desc limit 20) and id %% 5 = %(customer)s %% 5"
        ),
    ),
    (4, "insert into shop.events (kind, customer) select 'visit', %(customer)s from generate_series(1, 3)"),
    (2, "update shop.customers set region = %(region)s where id = %(customer)s"),
    (
        1,
        "update shop.orders set region = %(region)s where id = (select max(id) from shop.orders where customer = %(customer)s)",
    ),
    (
        1,
        (
            "with gone as (delete from shop.orders where id = (select min(id) from shop.orders) returning id)"
            " delete from shop.order_lines where order_id in (select id from gone)"
        ),
    ),
)


def make_tables(connection: psycopg.Connection[Any]) -> None:
    """Create the shop's tables with their first rows, and two publications."""
    connection.execute(_TABLES)


@contextmanager
def write_traffic(conninfo: str, interval_seconds: float = 0.5) -> Iterator[Callable[[], int]]:
    """Within the block, a thread commits a transaction each time this number of seconds has passed.

    Yields a function that returns how many transactions there were so far.
    """
    stop_event, count = threading.Event(), 0

    def write_transactions() -> None:
        nonlocal count
        random_numbers = random.Random(0)  # noqa: S311 - invented traffic
        weights, statements = zip(*_WEIGHTED_STATEMENTS, strict=True)
        while not stop_event.is_set():
            try:
                with Conninfo(conninfo).connect(application_name="traffic") as connection:
                    while not stop_event.wait(interval_seconds):
                        connection.execute(
                            random_numbers.choices(statements, weights)[0],
                            {
                                "customer": random_numbers.randint(1, 200),
                                "region": random_numbers.choice(_REGIONS),
                                "amount": random_numbers.randint(100, 50_000) / 100,
                            },
                        )
                        count += 1
            except psycopg.Error:
                stop_event.wait(1)

    writer_thread = threading.Thread(target=write_transactions, name="traffic", daemon=True)
    writer_thread.start()
    try:
        yield lambda: count
    finally:
        stop_event.set()
        writer_thread.join(10)
