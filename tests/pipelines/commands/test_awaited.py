"""A copy that waits for transactions of others holds back no changes, and says for whom it waits."""

from __future__ import annotations

import json
import os
import signal
import threading

import psycopg
import pytest

from pgsieve.pipelines.commands.results import RunSummary
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.following.follow import follow
from tests.fixtures.shop import Quiet, Shop


def _one_more_table(shop: Shop) -> None:
    shop.database.execute("create table more (id int primary key); insert into more values (1)")
    shop.database.execute("alter publication p add table more")
    shop.database.execute("insert into orders values (5, 5); insert into stock values (5, 5)")


@pytest.mark.drawn
def test_changes_go_on_while_a_copy_waits_for_an_open_transaction(shop: Shop) -> None:
    """A copy waits for the transaction in vain, in each of two modes."""
    source = shop.written["sources"]["shop"]
    own = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={**shop.written["subscriptions"], "three": own})
    shop.copy()
    elsewhere = psycopg.conninfo.make_conninfo(
        source["conninfo"], dbname="postgres", application_name="batch"
    )
    with psycopg.connect(elsewhere) as session:
        session.execute("create temporary table f (i int)")
        _one_more_table(shop)
        code, output = shop.cli("run")
        assert code == 1, output
        assert [shop.ids("one", "orders"), shop.ids("two", "stock")] == [[2, 3, 4, 5], [1, 2, 3, 4, 5]], (
            output
        )
        assert shop.ids("three", "stock") == [1, 2, 3, 4, 5], output
        awaited = f'server process {session.info.backend_pid} ("batch" in database "postgres", since '
        for text in (output, shop.cli("status")[1]):
            assert awaited in " ".join(text.split()), text
        shown = json.loads(shop.cli("status", "--json")[1])
        problems = [t["problem"] for s in shown["subscriptions"] for t in s["tables"] if t["name"] == "more"]
        assert awaited in problems[0]
    assert (ran := shop.cli("run"))[0] == 0, ran
    assert shop.ids("one", "more") == [1]


@pytest.mark.long
def test_a_follower_copies_once_the_transaction_has_ended(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("begin; create table held (i int); prepare transaction 'forgotten'")
    _one_more_table(shop)
    config, gids = load_config(shop.path), ["forgotten"]
    told: list[str] = []

    def tell(summary: RunSummary) -> None:
        told.extend(problem for each in summary.subscriptions for problem in each.problems)
        copied = {t.name for each in summary.subscriptions for t in each.copied}
        if gids and shop.ids("one", "orders")[-1] == 5 and shop.ids("two", "stock")[-1] == 5:
            shop.database.execute(f"rollback prepared '{gids.pop()}'")
        elif "more" in copied:
            os.kill(os.getpid(), signal.SIGTERM)

    late = threading.Timer(100, os.kill, [os.getpid(), signal.SIGTERM])
    late.start()
    try:
        assert follow(config, config.selected([]), Quiet(), tell) == ()
    finally:
        late.cancel()
        for gid in gids:
            shop.database.execute(f"rollback prepared '{gid}'")
    assert any('prepared transaction "forgotten" of database' in problem for problem in told)
    assert shop.ids("one", "more") == [1]
