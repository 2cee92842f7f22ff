"""A slot that is missing, ahead or invalidated, and another cluster: the commands that the error names copy everything again. No JVM."""

from __future__ import annotations

import itertools
from typing import Any

import psycopg
import pytest

from pgsieve.assets.steps.slot_consumption.slot import OtherClusterError
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.slot import SlotAheadError, SlotError, SlotMissingError
from pgsieve.resources.postgres.wal import read_system_identifier
from tests.fixtures.servers import new_server
from tests.fixtures.shop import Shop

_numbers = itertools.count(1)


def _dropped(shop: Shop, slot: str) -> None:
    shop.database.execute("select pg_drop_replication_slot(%s)", [slot])


def _created_again(shop: Shop, slot: str) -> None:
    _dropped(shop, slot)
    shop.database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])


@pytest.mark.drawn
@pytest.mark.parametrize(("lose", "error"), [(_dropped, SlotMissingError), (_created_again, SlotAheadError)])
def test_the_command_that_a_lost_slot_names_copies_everything_again(
    shop: Shop, lose: Any, error: type[SlotError]
) -> None:
    shop.copy()
    lose(shop, shop.written["sources"]["shop"]["slot"])
    shop.database.execute("insert into orders values (5, 5)")
    shop.database.execute("insert into stock values (5, 5)")
    # If a slot is ahead of Delta, another lake may have read it.
    take_over = error is SlotAheadError
    option = " --take-over" * take_over
    refused = [shop.copy, lambda: shop.resync("one", "public.orders")]
    for lost in [*refused, *([lambda: shop.resync("one")] if take_over else [])]:
        with pytest.raises(error) as raised:
            lost()
        assert f"`pgsieve resync one{option}` and `pgsieve resync two{option}`" in str(raised.value.hint)
    report = shop.resync("one", take_over=take_over)
    assert report.lost is not None
    assert len(report.tables) == 2
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    assert shop.state("two", "stock") == "to be copied"
    shop.resync("two")
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]
    shop.copy()


def test_an_invalidated_slot_names_the_command_that_copies_everything_again(
    postgres_version: int, shop: Shop
) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"}
    with (
        new_server(postgres_version, settings) as server,
        psycopg.connect(server.conninfo(), autocommit=True) as database,
    ):
        database.execute("create table orders (id int primary key)")
        database.execute("create publication p for table orders")
        source = {"conninfo": server.conninfo(), "slot": "lost", "capture": "lost"}
        shop.configure(sources={"shop": source}, subscriptions={"one": shop.written["subscriptions"]["one"]})
        shop.copy()
        for _ in range(4):
            database.execute("create table if not exists noise (a text)")
            database.execute("insert into noise select repeat('x', 1000) from generate_series(1, 10000)")
            database.execute("select pg_switch_wal()")
        database.execute("checkpoint")
        database.execute("insert into orders values (1)")
        with pytest.raises(SlotError, match="can no longer access replication slot") as raised:
            shop.copy()
        assert str(raised.value.hint).startswith("raise max_slot_wal_keep_size, then")
        assert "`pgsieve resync one`" in str(raised.value.hint)
        assert shop.resync("one").lost is not None
        assert shop.ids("one", "orders") == [1]
        if postgres_version >= 18:
            database.execute("alter system set idle_replication_slot_timeout = '1s'")
            database.execute("select pg_reload_conf(), pg_sleep(2)")
            database.execute("checkpoint")
            with pytest.raises(SlotError, match="it has been invalidated") as raised:
                shop.copy()
            assert str(raised.value.hint).startswith(
                "raise idle_replication_slot_timeout, or run more often, then"
            )


def test_another_cluster_is_an_error_that_names_both_and_resync_begins_from_scratch(
    shop: Shop, publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer
) -> None:
    shop.copy()
    identifiers = []
    for server in (publisher_server, subscriber_server):
        with psycopg.connect(server.conninfo()) as connection:
            identifiers.append(read_system_identifier(connection))
    name = f"elsewhere_{next(_numbers)}"
    with psycopg.connect(subscriber_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        conninfo = subscriber_server.conninfo(dbname=name)
        before = shop.written["sources"]
        shop.configure(sources={"shop": {**before["shop"], "conninfo": conninfo}})
        with psycopg.connect(conninfo, autocommit=True) as database:
            for table in ("orders", "notes", "stock"):
                database.execute(f"create table {table} (id int primary key)")
            database.execute("insert into orders values (7)")
            database.execute("create publication p for table orders, notes")
            database.execute("create publication q for table stock")
            for refused in (shop.copy, lambda: shop.resync("one"), lambda: shop.drop("one")):
                with pytest.raises(OtherClusterError) as raised:
                    refused()
                assert all(identifier in raised.value.message for identifier in identifiers)
                assert "`pgsieve drop one --leave-slot --delete-tables`" in str(raised.value.hint)
            for subscription in ("one", "two"):
                shop.drop(subscription, leave_slot=True, delete_tables=True)
            shop.copy()
            assert shop.ids("one", "orders") == [7]
            for subscription in ("one", "two"):
                shop.drop(subscription)
        admin.execute(f"drop database {name} with (force)")
