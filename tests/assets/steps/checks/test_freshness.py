"""How long the oldest commit has been waiting, and how often the server has to decode for the answer."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.checks import freshness
from pgsieve.assets.steps.checks.freshness import check_freshness
from pgsieve.pipelines.config.model import load_config
from pgsieve.pipelines.project import project
from tests.fixtures.shop import Shop


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
