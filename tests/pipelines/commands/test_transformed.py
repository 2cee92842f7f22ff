"""A run's table, its JSON and Dagster's pages show what row filters make of UPDATEs, and by which partitions changes came."""

from __future__ import annotations

import json
from typing import Any

import dagster as dg
import pytest

from pgsieve.pipelines.commands.in_process import instance
from pgsieve.pipelines.config.model import load_config
from tests.fixtures.shop import Shop

_UPDATES = ("updates_sent_as_insert", "updates_sent_as_update", "updates_sent_as_delete", "updates_not_sent")


def _counted(shown: dict[str, Any]) -> tuple[Any, ...]:
    came = tuple(shown[name] for name in ("inserts", "updates", "deletes"))
    return shown["name"], shown["source"], shown["row_filter"], came, tuple(shown[name] for name in _UPDATES)


def _metadata(shop: Shop, *key: str) -> dict[str, Any]:
    with instance(load_config(shop.path)) as dagster:
        event = dagster.get_latest_materialization_event(dg.AssetKey(key))
    assert event is not None
    assert event.asset_materialization is not None
    return {name: value.value for name, value in event.asset_materialization.metadata.items()}


@pytest.mark.drawn
def test_results_of_updates_are_counted_by_table_row_filter_and_partition(shop: Shop) -> None:
    shop.database.execute("""
        create table tree (k int primary key, n int) partition by range (k);
        create table low partition of tree for values from (0) to (10);
        create table "High" partition of tree for values from (10) to (20);
        create publication r for table tree where (k <> 5) with (publish_via_partition_root);
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
        ("stock", "public.stock"): ["nothing"],
        ("High", 'public."High"'): ["nothing"],
        ("low", "public.low"): ["nothing"],
    }
    assert (
        "UPDATEs: sent as DELETE, INSERT, UPDATE, or not sent, by (id > 1); each run"
        in shop.cli("validate")[1]
    )
    assert shop.cli("run")[0] == 0

    shop.database.execute("""
        update orders set id = 10 where id = 1; update orders set id = 1 where id = 2; update orders set n = 0 where id > 2;
        update orders set n = 0 where id = 1; update orders set id = 0 where id = 1; insert into orders values (-1, 0);
        delete from orders where id = 4;
        insert into tree values (1, 1), (5, 5), (15, 15); update tree set n = 0; update tree set k = 6 where k = 5;
        update stock set n = 0
    """)
    code, output = shop.cli("run", "--json")
    assert code == 0, output
    one, two = json.JSONDecoder().raw_decode(output)[0]["subscriptions"]
    assert [_counted(each) for each in one["transformed"]] == [
        ("orders", "public.orders", "(id > 1)", (1, 7, 1), (1, 3, 1, 2)),
        ("tree", 'public."High"', "(k <> 5)", (1, 1, 0), (0, 1, 0, 0)),
        ("tree", "public.low", "(k <> 5)", (2, 3, 0), (1, 1, 0, 1)),
    ]
    assert [_counted(each) for each in two["transformed"]] == [
        ("High", 'public."High"', None, (1, 1, 0), (0, 0, 0, 1)),
        ("low", "public.low", None, (2, 3, 0), (0, 0, 0, 3)),
    ], "its publication of leaves sends no UPDATE, and the UPDATEs of stock are not captured"

    tree, together = _metadata(shop, "one", "public", "tree"), _metadata(shop, "one", "table_changes")
    names = [
        f"UPDATEs {became}" for became in ("sent as INSERT", "sent as UPDATE", "sent as DELETE", "not sent")
    ]
    assert [tree[name] for name in (*names, "relations")] == [1, 2, 0, 1, 2]
    assert [together[name] for name in (*names, "relations")] == [2, 5, 1, 3, 3]
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
