"""pgsieve's own tables, damaged: a command refuses and names the command that creates them again. Then nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pgsieve.assets.steps.records import table_states
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.shop import Shop

#: By name, the path of each table, and whether its loss makes the subscription's tables be copied again.
RECORDS: dict[str, tuple[Callable[[Lake, str], str], bool]] = {
    "_table_states": (lambda lake, _: lake.paths.table_states("one"), True),
    "_transformed": (lambda lake, _: lake.paths.transformed_slices("one"), True),
    "_subscription": (lambda lake, _: lake.paths.subscription("one"), False),
    "_cuts": (lambda lake, _: lake.paths.cuts("one"), False),
    "feed": (lambda lake, slot_stream: lake.paths.slot_stream(slot_stream), True),
    "catalogs": (lambda lake, slot_stream: lake.paths.catalogs(slot_stream), True),
    "slices": (lambda lake, slot_stream: lake.paths.slices(slot_stream), False),
}


def _without_its_newest_entry(table: Path) -> None:
    max((table / "_delta_log").glob("*.json")).write_text("{nonsense")


def _without_its_files(table: Path) -> None:
    for file in table.glob("*.parquet"):
        file.unlink()


def _with_empty_files(table: Path) -> None:
    for file in table.glob("*.parquet"):
        file.write_bytes(b"")


def _with_garbage_in_its_files(table: Path) -> None:
    for file in table.glob("*.parquet"):
        file.write_bytes(b"PAR1 nothing here PAR1" * 20)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "damage",
    [
        _without_its_newest_entry,
        pytest.param(_without_its_files, marks=pytest.mark.long),
        pytest.param(_with_empty_files, marks=pytest.mark.long),
        pytest.param(_with_garbage_in_its_files, marks=pytest.mark.long),
    ],
)
def test_the_named_command_creates_a_damaged_table_again(shop: Shop, damage: Callable[[Path], None]) -> None:
    """It takes long: five commands for each of pgsieve's own tables."""

    def pgsieve(*arguments: str) -> tuple[int, str]:
        # Simulates another process, which has no table open and has read nothing.
        share_tables.cache_clear()
        table_states._STATES_BY_PATH.clear()
        return shop.cli(*arguments)

    one = {**shop.written["subscriptions"]["one"], "layout": {"folders": "{table}"}}
    shop.configure(subscriptions={**shop.written["subscriptions"], "one": one})
    assert pgsieve("run")[0] == 0
    shop.database.execute("insert into orders values (9, 0); update orders set n = n + 1")
    assert pgsieve("run")[0] == 0
    refused = set()
    for number, (record, (path_of, is_copied)) in enumerate(RECORDS.items(), 10):
        path = path_of(shop.lake, "shop")
        damage(Path(path))
        # `status` shows the other subscription beside the damage of this one.
        assert "public.stock  ready" in pgsieve("status")[1], record
        for table in ("orders", "notes"):
            shop.database.execute(f"insert into {table} values ({number}, 0); update {table} set n = n + 1")
        code, output = pgsieve("run")
        if code == 2:
            refused.add(record)
            assert f'"{path}"' in output, record
            assert "have it made again: `pgsieve resync`" in output, record
        code, output = pgsieve("resync", "one")
        assert code == 0, (record, output)
        assert f"damaged, and begun anew: {path}" in output.replace("\n", "")
        assert ("nothing to resynchronise" not in output) == is_copied, record
        assert pgsieve("run")[0] == 0, record
        code, output = pgsieve("check")
        assert (code, "every table equals the publisher" in output) == (0, True), (record, output)
    # No command notices that a file is missing if no command reads the file.
    unread = set() if damage is _without_its_newest_entry else {"_transformed", "slices"}
    assert refused >= RECORDS.keys() - unread
    assert SubscriptionRecord(shop.lake, "one").read_state().folders == "{table}"


def test_status_shows_the_tables_beside_a_damaged_change_log(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    assert shop.cli("status")[0] == 0
    _without_its_newest_entry(Path(shop.lake.paths.change_log("shop")))
    share_tables.cache_clear()
    code, output = shop.cli("status")
    assert (code, "public.stock  ready" in output, "public.orders  ready" in output) == (2, True, True), (
        output
    )
    assert 'shop/change_log": its log cannot be read' in output.replace("\n", "")


@pytest.mark.drawn
def test_a_subscription_is_dropped_once_its_damaged_state_is_created_again(shop: Shop) -> None:
    assert shop.cli("run")[0] == 0
    _with_garbage_in_its_files(Path(shop.lake.paths.subscription("one")))
    share_tables.cache_clear()
    code, output = shop.cli("drop", "one", "--delete-tables")
    assert (code, "have it made again: `pgsieve resync`" in output) == (2, True), output
    assert shop.cli("resync", "one")[0] == 0
    code, output = shop.cli("drop", "one", "--delete-tables")
    assert (code, Path(shop.lake.uri, "one").exists()) == (0, False), output
