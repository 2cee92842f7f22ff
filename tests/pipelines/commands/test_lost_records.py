"""pgsieve's own tables without their folders: a loss that pgsieve does not notice costs no row; any other loss is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from pgsieve.assets.steps.records import table_states
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.lake.delta.tables import share_tables
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.shop import Shop

#: Tables that pgsieve creates again without a message.
UNNOTICED: dict[str, Callable[[Lake], str]] = {
    "_table_states": lambda lake: lake.paths.table_states("one"),
    "_transformed": lambda lake: lake.paths.transformed_slices("one"),
    "_subscription": lambda lake: lake.paths.subscription("one"),
    "_cuts": lambda lake: lake.paths.cuts("one"),
    "catalogs": lambda lake: lake.paths.catalogs("shop"),
    "slices": lambda lake: lake.paths.slices("shop"),
}
_CHANGES = "insert into {0} values ({1}, 0); update {0} set n = n + 1; delete from {0} where id = {1} - 9"


def _pgsieve(shop: Shop, *arguments: str) -> tuple[int, str]:
    # Simulates another process, which has no table open and has read nothing.
    share_tables.cache_clear()
    table_states._STATES_BY_PATH.clear()
    return shop.cli(*arguments)


def _begun(shop: Shop) -> None:
    assert _pgsieve(shop, "run")[0] == 0
    shop.database.execute(_CHANGES.format("orders", 10))
    assert _pgsieve(shop, "run")[0] == 0


def _remove(path: str) -> None:
    shutil.rmtree(path)
    share_tables.cache_clear()


def _is_equal(shop: Shop) -> None:
    code, output = _pgsieve(shop, "check")
    assert (code, "every table equals the publisher" in output) == (0, True), output


@pytest.mark.drawn
@pytest.mark.parametrize(
    "record",
    [
        "_table_states",
        *(pytest.param(each, marks=pytest.mark.long) for each in UNNOTICED if each != "_table_states"),
    ],
)
def test_an_unnoticed_loss_of_a_record_costs_no_row(shop: Shop, record: str) -> None:
    _begun(shop)
    shop.database.execute(_CHANGES.format("orders", 11))
    shop.database.execute("alter publication q add table notes")
    _remove(UNNOTICED[record](shop.lake))
    shop.database.execute(_CHANGES.format("notes", 11))
    code, output = _pgsieve(shop, "run")
    assert code == 0, output
    assert ("copy 2 tables of one" in output) == (record == "_table_states"), output
    _is_equal(shop)
    assert set(TableStates(shop.lake, "one").read_newest()) == {("public", "orders"), ("public", "notes")}


@pytest.mark.drawn
def test_a_change_log_without_its_clusters_record_is_refused_until_everything_is_copied(shop: Shop) -> None:
    _begun(shop)
    path = shop.lake.paths.slot_stream("shop")
    _remove(path)
    shop.database.execute(_CHANGES.format("orders", 11))
    for _ in range(2):
        code, output = _pgsieve(shop, "run")
        assert code == 2, output
        assert f'"{path}" is gone' in output
        assert "`pgsieve resync one` and `pgsieve resync two`" in output
    assert _pgsieve(shop, "resync", "one")[0] == 0
    assert _pgsieve(shop, "run")[0] == 0
    slot_stream = build_project(load_config(shop.path)).subscriptions["one"].slot_stream
    assert SlotStreamRecord(shop.lake, slot_stream).read_newest_cluster()["system_identifier"]
    _is_equal(shop)
