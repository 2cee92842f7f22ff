"""How long the oldest commit has been waiting, and how often the server decodes to answer that."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from pgsieve.assets.steps.checks import freshness
from pgsieve.assets.steps.checks.freshness import check_freshness
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import build_project
from pgsieve.resources.postgres.slot import read_slot_state
from tests.fixtures.shop import Shop


@pytest.mark.drawn
def test_one_decoding_answers_for_all_subscriptions_of_a_slot(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    first_message = freshness.fetch_first_message
    monkeypatch.setattr(
        freshness, "fetch_first_message", lambda *query: asked.append(query) or first_message(*query)
    )
    shop.run()
    project = build_project(load_config(shop.path))
    lake = project.lake.open()

    def waiting() -> tuple[list[bool], int]:
        """For each subscription, asked twice, whether changes wait; and how often the server decoded."""
        asked.clear()
        each = [
            check_freshness(s, lake).seconds > 0 for _ in range(2) for s in project.subscriptions.values()
        ]
        return each, len(asked)

    freshness._PEEK_RESULT_BY_SLOT.clear()
    shop.database.execute("create table first_unpublished as select 1")
    assert waiting() == ([False] * 4, 1)
    assert waiting() == ([False] * 4, 0)
    shop.database.execute("insert into orders values (5, 5)")
    assert waiting() == ([True] * 4, 1)
    shop.database.execute("insert into stock values (5, 5)")
    assert waiting() == ([True] * 4, 0), (
        "the slot is decoded again although its first transaction is the same"
    )
    shop.run()
    shop.database.execute("create table unpublished as select 1")
    assert waiting() == ([False] * 4, 1)
    shop.database.execute("insert into notes values (5, 5)")
    assert waiting() == ([True] * 4, 1)


@pytest.mark.drawn
def test_nothing_is_decoded_if_the_slot_is_confirmed_up_to_the_end_of_the_wal(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoding begins at the slot's restart_lsn, and so reads again all that a run has just read."""
    shop.run()
    project = build_project(load_config(shop.path))
    subscription, lake = project.subscriptions["one"], project.lake.open()
    state = read_slot_state(shop.database, subscription.slot_stream.slot)
    assert state is not None
    ends = iter([state.confirmed_lsn, state.confirmed_lsn + 1])
    monkeypatch.setattr(freshness, "read_flushed_lsn", lambda _: next(ends))
    asked = []
    monkeypatch.setattr(freshness, "fetch_first_message", lambda *query: asked.append(query))
    freshness._PEEK_RESULT_BY_SLOT.clear()
    assert (check_freshness(subscription, lake).seconds, asked) == (0, [])
    check_freshness(subscription, lake)
    assert asked, "WAL that is not confirmed is decoded"


@pytest.mark.drawn
def test_a_freshness_check_keeps_no_process_from_reading_the_slot(shop: Shop) -> None:
    """A check of the web interface once blocked a run: a look decodes everything that a long transaction holds back."""
    shop.run()
    project = build_project(load_config(shop.path))
    subscription = project.subscriptions["one"]
    ended = threading.Event()

    def look() -> None:
        own = build_project(load_config(shop.path))
        while not ended.is_set():
            freshness._PEEK_RESULT_BY_SLOT.clear()
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
                drain_slot(subscription.slot_stream, project.lake.open(), [subscription], lambda _: None)
        finally:
            ended.set()
            looking.join()


@pytest.mark.drawn
def test_a_freshness_check_does_not_wait_for_another_processs_turn(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freshness, "_LOCK_SECONDS", 0.2)
    shop.run()
    project = build_project(load_config(shop.path))
    subscription = project.subscriptions["one"]
    freshness._PEEK_RESULT_BY_SLOT.clear()
    shop.database.execute("insert into orders values (5, 5)")
    lock_statement = "select pg_advisory_lock(hashtextextended(%s, 0))"
    with psycopg.connect(shop.written["sources"]["shop"]["conninfo"], autocommit=True) as other:
        other.execute(lock_statement, [f"pgsieve slot {subscription.slot_stream.slot}"])
        # If it waited for its turn, it would wait forever.
        assert check_freshness(subscription, project.lake.open()).seconds > 0
    assert not freshness._PEEK_RESULT_BY_SLOT, "the slot was read"
