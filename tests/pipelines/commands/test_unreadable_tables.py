"""A table that the role may not read waits. Once it may be read, the next run copies it, as the built-in subscription does."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Shop, built_in_subscription

_REASON = "permission denied for table public.orders; {}; it is copied by the first run after that is mended"


@pytest.fixture
def reader(shop: Shop, subscriber_server: EmbeddedServer) -> Iterator[tuple[str, psycopg.Connection]]:
    """A role that may read all tables except `orders`, and a database with a built-in subscription of that role."""
    conninfo = shop.written["sources"]["shop"]["conninfo"]
    name = conninfo_to_dict(conninfo)["dbname"]
    role = f"reader_of_{name}"
    shop.database.execute(f"create role {role} login replication")
    shop.database.execute(f"grant select on notes, stock to {role}")
    conninfo = make_conninfo(conninfo, user=role)
    shop.configure(
        sources={"shop": {"conninfo": conninfo}},
        subscriptions={"one": {"source": "shop", "publications": ["p"], "row_filter": "publisher"}},
    )
    with built_in_subscription(shop, subscriber_server, "p", ("orders", "notes")) as subscriber:
        yield role, subscriber
    shop.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    shop.database.execute(f"drop owned by {role}; drop role {role}")


def _rows(shop: Shop, table: str) -> list[tuple[int, int]]:
    rows = shop.table("one", table).to_pyarrow_table()
    return sorted(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))


def _state(shop: Shop) -> tuple[str, str | None]:
    state = TableStates(shop.lake, "one").read_newest()["public", "orders"]
    return state.state, state.reason


@pytest.mark.drawn
def test_an_unreadable_table_is_copied_once_it_may_be_read(
    shop: Shop, reader: tuple[str, psycopg.Connection]
) -> None:
    role, subscriber = reader
    reason = _REASON.format(f"GRANT SELECT ON public.orders TO {role}")
    for number in (10, 11):
        code, output = shop.cli("run")
        assert code == 1, output
        assert reason in output
        assert _state(shop) == (SyncState.INITIALIZE, reason)
        assert _rows(shop, "notes")[:4] == [(n, n) for n in range(1, 5)]
        for table in ("orders", "notes"):
            shop.database.execute(f"insert into {table} values ({number}, 0)")
    # A copy by name waits, too.
    assert shop.cli("resync", "one", "public.orders")[0] == 1
    assert _state(shop) == (SyncState.INITIALIZE, reason)
    shop.database.execute(f"grant select on orders to {role}")
    shop.database.execute("update orders set n = 7 where id = 10; insert into orders values (12, 0)")
    code, output = shop.cli("run")
    assert code == 0, output
    assert _state(shop) == (SyncState.READY, None)
    for table, ids in (("orders", [2, 3, 4, 10, 11, 12]), ("notes", [1, 2, 3, 4, 10, 11])):
        select = f"select id, n from {table} order by id"
        wait_until(
            lambda select=select, ids=ids: [r[0] for r in subscriber.execute(select)] == ids,
            lambda table=table: f"the built-in subscription lacks rows of {table}",
        )
        assert _rows(shop, table) == subscriber.execute(select).fetchall()
