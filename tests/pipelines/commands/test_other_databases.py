"""Two configurations with one lake: replicas of one database are never mistaken for those of another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import drop_slots
from tests.fixtures.shop import Shop

_numbers = itertools.count(1)


@pytest.fixture
def other(
    request: pytest.FixtureRequest,
    shop: Shop,
    publisher_server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
) -> Iterator[Shop]:
    """A configuration with the lake and the subscriptions of `shop`, but another source database."""
    server = publisher_server if getattr(request, "param", True) else subscriber_server
    name = f"other_shop_{next(_numbers)}"
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name}")
        with psycopg.connect(server.conninfo(dbname=name), autocommit=True) as database:
            for table in ("orders", "notes", "stock"):
                database.execute(f"create table {table} (id int primary key, n int)")
                database.execute(f"insert into {table} select i, i from generate_series(101, 104) i")
            database.execute(
                "create publication p for table orders, notes; create publication q for table stock"
            )
            subscriptions = {
                subscription: {**settings, "source": "other"}
                for subscription, settings in shop.written["subscriptions"].items()
            }
            source = {"conninfo": server.conninfo(dbname=name), "slot": name, "capture": name}
            written = {**shop.written, "lake": str(tmp_path / "lake"), "sources": {"other": source}}
            (tmp_path / "other").mkdir()
            another = Shop(database, written, tmp_path / "other" / "pgsieve.yaml")
            another.configure(subscriptions=subscriptions)
            yield another
            with another.database as left:  # a test may have created the database again
                drop_slots(left)
        admin.execute(f"drop database {name} with (force)")


@pytest.mark.drawn
@pytest.mark.parametrize("other", [True, False], ids=["of this cluster", "of another"], indirect=True)
def test_the_replicas_of_another_database_are_left_alone(shop: Shop, other: Shop) -> None:
    """It may take long: many commands of two configurations."""
    assert shop.cli("run")[0] == 0
    shop.database.execute("insert into orders values (5)")
    for command in (
        ("validate",),
        ("run",),
        ("resync", "one"),
        ("resync", "one", "public.orders"),
        ("check", "--repair"),
        ("skip", "one", "none"),
        ("enable", "one"),
        ("maintain",),
        ("status",),
        ("drop", "one", "--delete-tables"),
    ):
        code, output = other.cli(*command)
        message = " ".join(output.split())
        assert code in {1, 2}, (command, output)
        assert 'subscription "one": its replicas are of ' in message, (command, output)
        assert "`pgsieve drop one --leave-slot --delete-tables`" in message
    assert other.on_server()[0] == []
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    code, output = shop.cli("check")
    assert (code, "every table equals the publisher" in output) == (0, True), output


@pytest.mark.drawn
@pytest.mark.parametrize(
    "command",
    [
        ("run",),
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (("check",), ("resync", "one", "public.orders"))
        ),
    ],
)
def test_an_existing_slot_brings_no_change_of_another_database(
    shop: Shop, other: Shop, publisher_server: EmbeddedServer, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """This also holds if the tables have the same ids as the copied ones: the database is a copy."""
    names = [each.database.info.dbname for each in (shop, other)]
    for each in (shop, other):
        each.database.close()
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"drop database {names[1]} with (force)")
        admin.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{names[0]}'")
        admin.execute(f"create database {names[1]} template {names[0]}")
    for each, name in zip((shop, other), names, strict=True):
        each.database = psycopg.connect(publisher_server.conninfo(dbname=name), autocommit=True)
    other.configure(lake=str(tmp_path / "another"))
    assert other.cli("run")[0] == 0
    assert shop.cli("run")[0] == 0
    # Its slot is not ahead of the lake.
    other.configure(lake=str(tmp_path / "lake"))
    other.database.execute("insert into orders values (600)")
    shop.database.execute("insert into orders values (5)")
    code, output = other.cli(*command)
    assert code != 0
    assert 'subscription "one": its replicas are of ' in " ".join(output.split())
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4, 5]
    assert shop.cli("check")[0] == 0


@pytest.mark.drawn
def test_a_subscription_of_another_name_shares_the_lake(shop: Shop, other: Shop) -> None:
    """This also holds if the subscription joins a slot that others of its configuration use."""
    subscriptions = other.written["subscriptions"]
    assert shop.cli("run")[0] == 0
    other.configure(subscriptions={"mine": subscriptions["one"]})
    assert other.cli("run")[0] == 0
    other.configure(subscriptions={"mine": subscriptions["one"], "two": subscriptions["two"]})
    other.database.execute("insert into orders values (105)")
    code, output = other.cli("run")
    assert code != 0
    assert 'subscription "two": its replicas are of ' in " ".join(output.split())
    other.configure(subscriptions={"mine": subscriptions["one"]})
    assert other.cli("run")[0] == 0
    assert other.ids("mine", "orders") == [*range(101, 106)]
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


@pytest.mark.drawn
def test_a_released_name_is_free_for_others(shop: Shop, other: Shop) -> None:
    assert shop.cli("run")[0] == 0
    for subscription in ("one", "two"):
        assert other.cli("drop", subscription, "--leave-slot", "--delete-tables")[0] == 0
    assert other.cli("run")[0] == 0
    assert other.ids("one", "orders") == [101, 102, 103, 104]
    assert "its replicas are of " in " ".join(shop.cli("run")[1].split())
    assert other.cli("drop", "one", "--delete-tables")[0] == 0


@pytest.mark.drawn
def test_a_renamed_database_is_the_same_and_a_recreated_one_is_copied(
    shop: Shop, publisher_server: EmbeddedServer
) -> None:
    """It may take long: many commands, and two databases are created."""
    assert shop.cli("run")[0] == 0
    name, source = shop.database.info.dbname, shop.written["sources"]["shop"]
    renamed = {**source, "conninfo": publisher_server.conninfo(dbname=f"{name}_b")}
    shop.database.close()
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
        admin.execute(f"alter database {name} rename to {name}_b")
        shop.configure(sources={"shop": renamed})
        with psycopg.connect(renamed["conninfo"], autocommit=True) as database:
            database.execute("insert into orders values (5)")
            assert "copied" not in shop.cli("run")[1]
            assert shop.ids("one", "orders") == [2, 3, 4, 5]
            # As another source it is copied, because its slot is another one.
            subscriptions = {n: {**s, "source": "store"} for n, s in shop.written["subscriptions"].items()}
            shop.configure(sources={"store": renamed}, subscriptions=subscriptions)
            drop_slots(database)
            assert shop.cli("run")[0] == 0
            assert shop.ids("one", "orders") == [2, 3, 4, 5]
            drop_slots(database)
        admin.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}_b'")
        admin.execute(f"create database {name} template {name}_b")
        admin.execute(f"drop database {name}_b with (force)")
    shop.configure(sources={"store": source})
    shop.database = psycopg.connect(source["conninfo"], autocommit=True)
    shop.database.execute("delete from orders where id = 2")
    shop.cli("resync", "one")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [3, 4, 5]
