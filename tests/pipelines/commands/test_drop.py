"""`pgsieve drop`: what it drops, deletes and leaves, on the server and in the lake. Copies are small and need no JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.slot import SlotInUseError
from tests.fixtures.shop import Shop


def test_drop_leaves_only_objects_that_others_created_or_need(shop: Shop) -> None:
    capture = shop.written["sources"]["shop"]["capture"]
    shop.copy()
    assert shop.on_server() == ([capture], ["p", "q", capture, f"{capture}_i"])
    report = shop.drop("one")
    assert (report.slot, report.publications, report.kept_for) == (None, (capture,), ("two",))
    assert shop.on_server() == ([capture], ["p", "q", f"{capture}_i"])
    report = shop.drop("two")
    assert (report.slot, report.publications) == (capture, (f"{capture}_i",))
    assert shop.on_server() == ([], ["p", "q"])
    assert shop.ids("one", "orders") == [2, 3, 4], "the replicas stay"
    for name in ("one", "two"):
        assert shop.drop(name).slot is None, "there is nothing left to do"


def test_a_kept_slot_captures_only_the_tables_of_other_subscriptions(shop: Shop) -> None:
    shop.database.execute("alter publication q set (publish = 'insert, update, delete, truncate')")
    capture = shop.written["sources"]["shop"]["capture"]
    shop.copy()
    assert shop.drop("one").altered == (capture,)
    tables = shop.database.execute(
        "select tablename from pg_publication_tables where pubname = %s", [capture]
    )
    assert tables.fetchall() == [("stock",)]


def test_drop_works_although_another_subscriptions_publication_is_missing(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("drop publication q")
    report = shop.drop("one")
    assert report.kept_for == ("two",)
    assert report.altered == report.publications == (), "what the other one needs is unknown"
    shop.database.execute("create publication q for table stock with (publish = 'insert')")
    shop.copy()
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_drop_keeps_a_capture_publication_that_pgsieve_did_not_create(shop: Shop) -> None:
    capture = shop.written["sources"]["shop"]["capture"]
    shop.database.execute(f"create publication {capture} for table orders, notes")
    shop.copy()
    shop.drop("one")
    report = shop.drop("two")
    assert report.publications == (f"{capture}_i",)
    assert f"publication {capture}, which pgsieve did not create" in (report.left or "")
    assert shop.on_server()[1] == ["p", "q", capture]


def test_a_dropped_subscription_begins_from_scratch(shop: Shop) -> None:
    for _ in range(2):
        shop.copy()
        for name in ("one", "two"):
            shop.drop(name)
        assert shop.state("one", "orders") == "not replicated any more"
        shop.database.execute("insert into orders select max(id) + 1, 0 from orders")
    shop.copy()
    assert shop.ids("one", "orders") == [2, 3, 4, 5, 6]


def test_drop_deletes_the_tables_on_request(shop: Shop) -> None:
    shop.copy()
    folder = Path(shop.lake.uri)
    assert shop.drop("one", delete_tables=True).folders == (str(folder / "one"),)
    assert not (folder / "one").exists()
    assert (folder / "two").exists()
    assert shop.drop("two", delete_tables=True).folders == (
        str(folder / "two"),
        str(folder / "_pgsieve" / "shop"),
    )
    assert shop.drop("two", delete_tables=True).folders == ()
    shop.copy()
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_without_the_server_drop_needs_leave_slot(shop: Shop) -> None:
    shop.copy()
    before = shop.written["sources"]
    shop.configure(sources={"shop": {**before["shop"], "conninfo": "host=127.0.0.1 port=1 dbname=x"}})
    with pytest.raises(SourceUnreachableError) as raised:
        shop.drop("one")
    assert "--leave-slot" in str(raised.value.hint)
    report = shop.drop("one", leave_slot=True)
    assert (report.slot, report.kept_for) == (None, ("two",))
    slot = before["shop"]["slot"]
    assert shop.drop("two", leave_slot=True).left == f"replication slot {slot} and the publications {slot}*"
    shop.configure(sources=before)
    shop.copy()
    assert shop.ids("one", "orders") == [2, 3, 4]


@pytest.mark.drawn
def test_a_slot_in_use_is_not_dropped(shop: Shop) -> None:
    shop.copy()
    shop.drop("two")
    slot = shop.written["sources"]["shop"]["slot"]
    with shop.slot_reader(), pytest.raises(SlotInUseError):
        shop.drop("one")
    assert shop.state("one", "orders") == "ready"
    assert shop.drop("one").slot == slot


def test_a_drop_needs_the_subscription_in_the_file(shop: Shop) -> None:
    shop.copy()
    code, output = shop.cli("drop", "three")
    assert (code, "allowed here: one, two" in output) == (2, True)
    shop.configure(subscriptions={"two": shop.written["subscriptions"]["two"]})
    code, output = shop.cli("drop", "one")
    assert code == 2
    assert "put it back" in output


def test_a_subscriptions_own_slot_is_dropped_with_it(shop: Shop) -> None:
    own = {**shop.written["subscriptions"]["one"], "row_filter": "publisher"}
    shop.configure(subscriptions={"one": own})
    shop.copy()
    assert shop.on_server() == (["pgsieve_shop_one"], ["p", "q"])
    assert shop.drop("one").slot == "pgsieve_shop_one"
    assert shop.on_server() == ([], ["p", "q"])


def test_drop_deletes_the_disabled_state_and_the_lsn_to_skip(shop: Shop) -> None:
    shop.copy()
    shop.skip("one", "7F/0")
    SubscriptionRecord(shop.lake, "one").disable("a value")
    shop.drop("one")
    state = SubscriptionRecord(shop.lake, "one").read_state()
    assert (state.enabled, state.skip_lsn) == (True, None)
    SubscriptionRecord(shop.lake, "one").write_state(state)
    assert SubscriptionRecord(shop.lake, "one").read_state() == state
