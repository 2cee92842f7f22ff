"""A slot belongs to one lake. Another lake takes it over only on request, and no slot keeps WAL for ended transactions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from pgsieve.decoding.lsn import parse_lsn

if TYPE_CHECKING:
    from tests.fixtures.shop import Shop


@pytest.mark.drawn
@pytest.mark.parametrize("row_filter", ["pipeline", "publisher"])
def test_another_lake_takes_a_slot_over_only_on_request(shop: Shop, tmp_path: Path, row_filter: str) -> None:
    """It takes long: many commands of two lakes."""
    written = shop.written["subscriptions"].items()
    shop.configure(subscriptions={name: {**each, "row_filter": row_filter} for name, each in written})
    assert shop.cli("run")[0] == 0
    first, second = shop.written["lake"], str(tmp_path / "second")
    shop.configure(lake=second)
    shop.database.execute("insert into orders values (5)")
    before = shop.on_server()
    others = [("validate",), ("resync", "one"), ("status",), ("drop", "one", "--delete-tables")]
    for command in [("run",), *(others if row_filter == "pipeline" else [])]:
        code, output = shop.cli(*command)
        message = " ".join(output.split())
        assert code in {1, 2}, (command, output)
        assert "exists, and the lake" in message, (command, output)
        assert "--take-over`" in message, (command, output)
    assert shop.on_server() == before

    # The first lake has lost nothing.
    shop.configure(lake=first)
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders")[-1] == 5

    shop.configure(lake=second)
    assert shop.cli("run", "--take-over")[0] == 0
    shop.database.execute("insert into orders values (6)")
    # The take-over is recorded.
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders")[-1] == 6
    assert shop.cli("check")[0] == 0

    # The first lake, or a copy of it, does not take the slot back without a request, and reads nothing from it.
    shop.configure(lake=first)
    before = shop.on_server()
    more = [("run",), ("drop", "two", "--delete-tables")] if row_filter == "pipeline" else []
    for command in [("resync", "one"), ("drop", "one"), *more]:
        code, output = shop.cli(*command)
        message = " ".join(output.split())
        assert code == 2, (command, output)
        assert "the changes between are lost" in message, (command, output)
        way_out = "--leave-slot`" if command[0] == "drop" else "`pgsieve resync one --take-over`"
        assert way_out in message, (command, output)
    assert shop.on_server() == before
    if row_filter == "pipeline":
        code, output = shop.cli("resync", "one", "--take-over")
        assert code == 0, output
        assert shop.ids("one", "orders")[-1] == 6
        shop.configure(lake=second)
        assert "--take-over`" in shop.cli("resync", "one")[1]
        assert shop.cli("drop", "one", "--leave-slot")[0] == 0


@pytest.mark.drawn
def test_the_next_run_frees_wal_that_was_kept_for_an_ended_transaction(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    with psycopg.connect(shop.database.info.dsn, password=shop.database.info.password) as long:
        long.execute("insert into orders values (7)")
        shop.database.execute("create table noise (t text)")
        shop.database.execute("insert into noise select repeat('x', 1000) from generate_series(1, 20000)")
        shop.database.execute("checkpoint")
        assert shop.cli("run")[0] == 0
        long.commit()
    shop.database.execute("checkpoint")
    assert shop.cli("run")[0] == 0
    row = shop.database.execute(
        "select confirmed_flush_lsn::text, restart_lsn::text from pg_replication_slots"
        " where database = current_database()"
    ).fetchone()
    assert row is not None
    confirmed, restart = map(parse_lsn, row)
    assert confirmed - restart < 1024 * 1024
