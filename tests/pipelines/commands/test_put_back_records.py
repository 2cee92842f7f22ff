"""A change history, or a table of pgsieve's own, that lost its newest entry is damaged: a cut names its later version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fixtures.shop import Shop


def _newest_entry(table: Path) -> Path:
    return max((table / "_delta_log").glob("*.json"))


@pytest.mark.drawn
def test_missing_newest_entries_are_damage_until_a_resync(shop: Shop) -> None:
    """It may take long: many commands on several damaged tables."""
    assert shop.cli("run")[0] == 0
    shop.database.execute("alter table orders add x int")
    shop.database.execute("insert into orders values (5, 5, 5); insert into stock values (5, 5)")
    assert shop.cli("run")[0] == 0
    lake, number = Path(shop.lake.uri), 6
    slot_stream, one = lake / "_pgsieve" / "shop", lake / "one"
    for table in (slot_stream / "catalogs", slot_stream / "altered", one / "_transformed"):
        entry = _newest_entry(table)
        whole = entry.read_bytes()
        entry.unlink()
        shop.database.execute(
            f"insert into orders values ({number}, 1, 1); insert into stock values ({number}, 1)"
        )
        code, output = shop.cli("run")
        message = " ".join(output.split())
        assert code == 2, output
        assert f'"{table}": it was put back to an earlier version' in message
        assert "`pgsieve resync`" in message
        # Damage to one subscription's tables does not affect the others.
        assert shop.ids("two", "stock")[-1] == (number if table.parent == one else 5), output
        entry.write_bytes(whole)
        number += 1
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders")[-1] == number - 1

    # With two damaged tables, the one that stops everything is reported first.
    _newest_entry(one / "_changes" / "public" / "orders").unlink()
    entry = _newest_entry(slot_stream / "feed")
    entry.unlink()
    shop.database.execute("insert into orders values (20, 1, 1)")
    assert shop.cli("run")[0] == 2
    code, output = shop.cli("resync", "two")
    assert code == 0, output
    code, output = shop.cli("run")
    assert code == 0, output
    assert shop.ids("one", "orders")[-1] == 20
    shop.database.execute("insert into orders values (21, 1, 1)")
    assert shop.cli("run")[0] == 0
    _newest_entry(one / "_changes" / "public" / "orders").unlink()
    shop.database.execute("insert into orders values (22, 1, 1)")
    code, output = shop.cli("run")
    assert code == 1, output
    assert "back to an earlier version; `pgsieve resync one public.orders`" in " ".join(output.split())
    assert shop.cli("resync", "one", "public.orders")[0] == 0
    shop.database.execute("insert into orders values (23, 1, 1)")
    assert shop.cli("run")[0] == 0
    assert shop.cli("check")[0] == 0
