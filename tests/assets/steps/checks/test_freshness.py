"""How long the oldest commit has been waiting, and how often the server has to decode for the answer."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from pgsieve.assets.steps.checks import freshness
from pgsieve.assets.steps.checks.freshness import check_freshness
from pgsieve.assets.steps.slot_consumption.drain import drain
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import project
from tests.fixtures.shop import Shop


@pytest.mark.drawn
def test_of_what_waits_in_a_slot_one_of_its_subscriptions_asks(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    first_message = freshness.first_message
    monkeypatch.setattr(
        freshness, "first_message", lambda *query: asked.append(query) or first_message(*query)
    )
    shop.run()
    declared = project(load_config(shop.path))
    lake = declared.lake.open()

    def waiting() -> tuple[list[bool], int]:
        """Whether something waits for each of the subscriptions, twice, and how often the server decoded."""
        asked.clear()
        each = [
            check_freshness(s, lake).seconds > 0 for _ in range(2) for s in declared.subscriptions.values()
        ]
        return each, len(asked)

    freshness._FIRST.clear()
    assert waiting() == ([False] * 4, 1)
    assert waiting() == ([False] * 4, 0)
    shop.database.execute("insert into orders values (5, 5)")
    assert waiting() == ([True] * 4, 1)
    shop.database.execute("insert into stock values (5, 5)")
    assert waiting() == ([True] * 4, 0), "the same transaction is still the first"
    shop.run()
    shop.database.execute("create table unpublished as select 1")
    assert waiting() == ([False] * 4, 1)
    shop.database.execute("insert into notes values (5, 5)")
    assert waiting() == ([True] * 4, 1)


@pytest.mark.drawn
def test_who_asks_what_waits_keeps_nobody_from_reading_the_slot(shop: Shop) -> None:
    """As a check of the web interface and a run once met: to look decodes all that a long transaction holds back."""
    shop.run()
    declared = project(load_config(shop.path))
    subscription = declared.subscriptions["one"]
    ended = threading.Event()

    def look() -> None:
        own = project(load_config(shop.path))
        while not ended.is_set():
            freshness._FIRST.clear()
            assert check_freshness(own.subscriptions["one"], own.lake.open()).problem is None

    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"]) as long:
        long.execute("insert into stock values (1000, 0)")
        shop.database.execute("insert into notes select i, i from generate_series(5, 50000) i")
        looking = threading.Thread(target=look)
        looking.start()
        try:
            until, number = time.monotonic() + 4, 100_000
            while time.monotonic() < until:
                shop.database.execute("insert into orders values (%s, 0)", [(number := number + 1)])
                drain(subscription.feed, declared.lake.open(), [subscription], lambda _: None)
        finally:
            ended.set()
            looking.join()


@pytest.mark.drawn
def test_a_look_does_not_wait_for_long_where_another_process_has_its_turn(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "_TURN_SECONDS", 0.2)
    shop.run()
    declared = project(load_config(shop.path))
    subscription = declared.subscriptions["one"]
    freshness._FIRST.clear()
    shop.database.execute("insert into orders values (5, 5)")
    held = "select pg_advisory_lock(hashtextextended(%s, 0))"
    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"], autocommit=True) as other:
        other.execute(held, [f"pgsieve slot {subscription.feed.slot}"])
        # It waits without an end where it waits for its turn.
        assert check_freshness(subscription, declared.lake.open()).seconds > 0
    assert not freshness._FIRST, "the slot was not read"
