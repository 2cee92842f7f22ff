"""A run's table, its JSON and Dagster's pages show what row filters make of UPDATEs, and by which partitions changes came."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from pgsieve.assets import runless_events
from pgsieve.pipelines.commands.in_process import open_instance
from pgsieve.pipelines.config.model import load_config
from tests.fixtures.shop import Shop

_EVALUATED = "evaluated by the publisher"
_UPDATES = ("updates_sent_as_insert", "updates_sent_as_update", "updates_sent_as_delete", "updates_not_sent")


def _counted(shown: dict[str, Any]) -> tuple[Any, ...]:
    came = tuple(shown[name] for name in ("inserts", "updates", "deletes"))
    return shown["name"], shown["source"], shown["row_filter"], came, tuple(shown[name] for name in _UPDATES)


def _metadata_of_runs(shop: Shop, *key: str) -> list[dict[str, Any]]:
    """The metadata of an asset's materializations, the newest first."""
    with open_instance(load_config(shop.path)) as dagster:
        records = dagster.fetch_materializations(dg.AssetKey(key), limit=10).records
    made = [record.asset_materialization for record in records]
    return [{name: value.value for name, value in one.metadata.items()} for one in made if one is not None]


def _metadata(shop: Shop, *key: str) -> dict[str, Any]:
    return _metadata_of_runs(shop, *key)[0]


def _numeric(metadata: dict[str, Any]) -> set[str]:
    """The names of the numbers that Dagster plots, without the lag, which a copy does not measure."""
    return {name for name, value in metadata.items() if isinstance(value, int | float)} - {"lag in seconds"}


@pytest.mark.drawn
def test_results_of_updates_are_counted_by_table_row_filter_and_partition(shop: Shop) -> None:
    shop.database.execute("""
        create table tree (k int primary key, n int) partition by range (k);
        create table low partition of tree for values from (0) to (10);
        create table "High" partition of tree for values from (10) to (20);
        create table whole (k int primary key) partition by range (k);
        create table part_1 partition of whole for values from (0) to (10);
        create table part_2 partition of whole for values from (10) to (20);
        create table part_3 partition of whole for values from (20) to (30);
        create publication r for table tree where (k <> 5), whole with (publish_via_partition_root);
        create publication leaves for table tree with (publish = 'insert, delete')
    """)
    subscriptions = shop.written["subscriptions"]
    subscriptions["one"]["publications"] = ["p", "r"]
    subscriptions["two"]["publications"] = ["q", "leaves"]
    shop.configure()
    code, output = shop.cli("validate", "--json")
    assert code == 0, output
    assert {
        (each["name"], *changes["relations"]): changes["updates_sent_as"]
        for subscription in json.loads(output)["subscriptions"]
        for each in subscription["tables"]
        for changes in each["changes"]
    } == {
        ("notes", "public.notes"): ["update"],
        ("orders", "public.orders"): ["delete", "insert", "update", "nothing"],
        ("tree", 'public."High"', "public.low"): ["delete", "insert", "update", "nothing"],
        ("whole", "public.part_1", "public.part_2", "public.part_3"): ["update"],
        ("stock", "public.stock"): ["nothing"],
        ("High", 'public."High"'): ["nothing"],
        ("low", "public.low"): ["nothing"],
    }
    assert (
        "UPDATEs: sent as DELETE, INSERT, UPDATE, or not sent, as (id > 1) decides; each run"
        in shop.cli("validate")[1]
    )
    assert shop.cli("run")[0] == 0

    shop.database.execute("""
        update orders set id = 10 where id = 1; update orders set id = 1 where id = 2; update orders set n = 0 where id > 2;
        update orders set n = 0 where id = 1; update orders set id = 0 where id = 1; insert into orders values (-1, 0);
        delete from orders where id = 4;
        insert into tree values (1, 1), (5, 5), (15, 15); update tree set n = 0; update tree set k = 6 where k = 5;
        update stock set n = 0; insert into whole values (1), (2), (12)
    """)
    code, output = shop.cli("run", "--json")
    assert code == 0, output
    one, two = json.JSONDecoder().raw_decode(output)[0]["subscriptions"]
    assert [_counted(each) for each in one["transformed"]] == [
        ("orders", "public.orders", "(id > 1)", (1, 7, 1), (1, 3, 1, 2)),
        ("tree", 'public."High"', "(k <> 5)", (1, 1, 0), (0, 1, 0, 0)),
        ("tree", "public.low", "(k <> 5)", (2, 3, 0), (1, 1, 0, 1)),
        ("whole", "public.whole", None, (3, 0, 0), (0, 0, 0, 0)),
    ]
    assert [_counted(each) for each in two["transformed"]] == [
        ("High", 'public."High"', None, (1, 1, 0), (0, 0, 0, 1)),
        ("low", "public.low", None, (2, 3, 0), (0, 0, 0, 3)),
    ], "its publication of leaves sends no UPDATE, and the UPDATEs of stock are not captured"

    tree, together = _metadata(shop, "one", "public", "tree"), _metadata(shop, "one", "table_changes")
    names = [
        f"UPDATEs {became}" for became in ("sent as INSERT", "sent as UPDATE", "sent as DELETE", "not sent")
    ]
    assert [tree[name] for name in (*names, "relations", "partitions")] == [1, 2, 0, 1, 2, 2]
    assert [together[name] for name in (*names, "relations", "partitions")] == [2, 5, 1, 3, 4, 4]
    assert _metadata(shop, "one", "cut")["partitions"] == 4
    whole = _metadata(shop, "one", "public", "whole")
    assert [whole[name] for name in ("relations", "partitions")] == [1, 2], "it is captured as its root"
    assert {record.data["through"] for record in tree["UPDATE transformation"].records} == {
        "public.low",
        'public."High"',
    }
    assert tree.keys() >= _metadata(shop, "one", "public", "orders").keys()

    shop.database.execute("update orders set n = 1 where id < 1")
    code, output = shop.cli("run")
    assert code == 0, output
    assert [line.split() for line in output.splitlines() if "orders" in line] == [
        ["public.orders", "public.orders", "2", "0", "0", "0", "2", "(id", ">", "1)"]
    ], "no other number shows UPDATEs that are not sent"


@pytest.mark.drawn
def test_the_publisher_is_named_where_it_evaluates_row_filters(shop: Shop) -> None:
    shop.database.execute(
        "create table plain (id int primary key, n int); alter publication p add table plain"
    )
    shop.written["subscriptions"]["one"]["row_filter"] = "publisher"
    shop.configure()
    assert shop.cli("run", "one")[0] == 0
    change = "insert into plain values (1, 1); update plain set n = 2; update orders set n = n + 1"
    shop.database.execute(change)
    code, output = shop.cli("run", "one")
    assert code == 0, output
    assert [line.split() for line in output.splitlines() if line.endswith(_EVALUATED)] == [
        ["public.orders", "public.orders", "3", "0", "3", "0", "0", *_EVALUATED.split()],
        ["public.plain", "public.plain", "1", "0", "1", "0", "0", *_EVALUATED.split()],
    ], "the row with id 1 fails the filter, and the publisher does not send it"

    shop.database.execute("update orders set n = n + 1")
    code, output = shop.cli("run", "one", "--json")
    assert code == 0, output
    (one,) = json.JSONDecoder().raw_decode(output)[0]["subscriptions"]
    assert [_counted(each) for each in one["transformed"]] == [
        ("orders", "public.orders", _EVALUATED, (0, 3, 0), (0, 3, 0, 0))
    ]
    for key in ("public", "orders"), ("table_changes",), ("cut",):
        (record,) = _metadata(shop, "one", *key)["UPDATE transformation"].records
        assert record.data["row filter"] == _EVALUATED


@pytest.mark.drawn
def test_copies_runs_and_idle_runs_have_the_same_numbers(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runless_events, "_REPORTS_PER_FRESHNESS", 1_000_000)
    assert shop.cli("run", "one")[0] == 0
    copied, *earlier = reversed(_metadata_of_runs(shop, "one", "public", "orders"))
    assert [copied[name] for name in ("inserted", "UPDATEs not sent", "relations", "partitions")] == [0] * 4
    shop.database.execute("update orders set n = n + 1")
    assert shop.cli("run", "one")[0] == 0
    changed = _metadata(shop, "one", "public", "orders")
    assert changed["UPDATEs not sent"] == 1
    assert {*map(frozenset, map(_numeric, [copied, *earlier]))} == {frozenset(_numeric(changed))}

    count = len(_metadata_of_runs(shop, "one", "cut"))
    assert shop.cli("run", "one")[0] == 0
    idle, before, *_ = cuts = _metadata_of_runs(shop, "one", "cut")
    assert len(cuts) == count + 1
    assert (idle["UPDATEs not sent"], before["UPDATEs not sent"]) == (0, 1)
    assert {frozenset(_numeric(each)) for each in cuts} == {frozenset(_numeric(before))}
