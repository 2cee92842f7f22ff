"""An error of one subscription is told with its name, and the others go on; without a JVM, but for the one that follows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from assets.steps.subscription_state import disable
from pipelines.config import load_config
from pipelines.definitions import definitions
from pipelines.follow import follow
from pipelines.results import RunSummary
from pipelines.run import instance
from pipelines.status import status
from tests.fixtures.shop import Quiet, Shop


def _folder(shop: Shop, subscription: str) -> Path:
    return Path(load_config(shop.path).lake) / subscription


def _break(shop: Shop, subscription: str) -> None:
    """Let nothing be written for the subscription."""
    folder = _folder(shop, subscription)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(folder.with_name("aside"))
    folder.write_text("in the way")


def _mend(shop: Shop, subscription: str) -> None:
    folder = _folder(shop, subscription)
    folder.unlink()
    if (aside := folder.with_name("aside")).exists():
        aside.rename(folder)


def test_a_subscription_that_fails_is_named_and_the_others_of_its_slot_go_on(shop: Shop) -> None:
    _break(shop, "one")
    code, output = shop.cli("run")
    assert code != 0
    assert output.count("error: ") == output.count("error: one: ") == 1
    assert shop.ids("two", "stock") == [1, 2, 3, 4]
    _mend(shop, "one")
    assert shop.cli("run")[0] == 0
    assert shop.ids("one", "orders") == [2, 3, 4]
    assert shop.ids("two", "stock") == [1, 2, 3, 4]


def test_an_error_of_a_source_concerns_its_subscriptions_and_no_others(shop: Shop) -> None:
    source = shop.written["sources"]["shop"]
    gone = {"conninfo": "host=127.0.0.1 port=1 dbname=x"}
    one, two = shop.written["subscriptions"].values()
    elsewhere = {"source": "gone", "publications": ["p"]}
    shop.configure(
        sources={"gone": gone, "shop": source},
        subscriptions={"first": elsewhere, "one": one, "other": elsewhere, "two": two},
    )
    for command in ("run", "check"):
        code, output = shop.cli(command)
        assert code == 2, output
        assert (
            output.count("error: ") == output.count('error: first, other: source "gone": no connection') == 1
        )
        assert shop.ids("one", "orders") == [2, 3, 4]
        assert shop.ids("two", "stock") == [1, 2, 3, 4]
    dg.Definitions.validate_loadable(definitions(load_config(shop.path)))


def test_an_error_of_a_slot_is_told_once_for_all_that_read_it(shop: Shop) -> None:
    own: dict[str, Any] = {"source": "shop", "publications": ["q"], "row_filter": "publisher"}
    shop.configure(subscriptions={**shop.written["subscriptions"], "three": own})
    shop.copy()
    shop.database.execute("select pg_drop_replication_slot(%s)", [shop.written["sources"]["shop"]["slot"]])
    shop.database.execute("create table later (id int primary key); alter publication q add table later")
    code, output = shop.cli("run")
    assert code == 2
    assert output.count("error: ") == output.count("error: one, two: ") == 1, output
    assert shop.ids("three", "later") == []


def test_a_publication_that_is_missing_does_not_hide_the_other_subscriptions_from_dagster(shop: Shop) -> None:
    shop.copy()
    shop.database.execute("drop publication q")
    graph = definitions(load_config(shop.path)).resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    assert {"one/public/orders", "one/public/notes", "two/public/stock"} <= keys


def test_in_dagsters_job_the_subscriptions_that_do_not_fail_are_materialised(shop: Shop) -> None:
    shop.copy()
    disable(shop.lake, "one", "an error")
    defs, config = definitions(load_config(shop.path)), load_config(shop.path)
    with instance(config) as dagster:
        job = defs.resolve_job_def("shop_increments")
        result = job.execute_in_process(instance=dagster, raise_on_error=False)
    assert not result.success
    materialised = {e.asset_key.to_user_string() for e in result.get_asset_materialization_events()}
    assert materialised == {"shop/change_log", "two/table_changes", "two/public/stock"}


@pytest.mark.spark
def test_a_followed_subscription_that_fails_is_left_out_and_the_others_are_followed(shop: Shop) -> None:
    shop.copy()
    _break(shop, "one")
    config, told = load_config(shop.path), []

    def tell(summary: RunSummary) -> None:
        told.append(summary)
        if summary.failures:
            shop.database.execute("insert into stock values (5, 5)")
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    (failure,) = follow(config, config.selected([]), Quiet(), tell)
    assert failure.subscriptions == ("one",)
    assert [summary.failures for summary in told] == [(failure,), ()]
    assert [(each.name, each.tables[0].inserted) for each in told[1].subscriptions] == [("two", 1)]
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5]


def test_of_a_source_that_cannot_be_asked_the_status_shows_what_the_lake_has(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shop.copy()
    away = {"conninfo": "host=127.0.0.1 port=1 dbname=away"}
    far = {"source": "away", "publications": ["p"]}
    both, subscriptions = shop.written["sources"], shop.written["subscriptions"]
    shop.configure(sources={"away": away, **both}, subscriptions={"far": far, **subscriptions})
    ends, printed = shop.cli("status")
    assert ends == 2
    assert 'away: source "away"' in printed
    assert printed.count("ready") == 3, "of the source that answers"

    shop.configure(sources={"shop": {**both["shop"], **away}}, subscriptions=subscriptions)
    one, two = status(load_config(shop.path)).subscriptions
    assert [(t.name, t.state, t.rows) for t in one.tables] == [("notes", "ready", 4), ("orders", "ready", 3)]
    assert [(t.name, t.state, t.rows) for t in two.tables] == [("stock", "ready", 4)]
    shop.configure(sources=both)
