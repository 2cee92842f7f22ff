"""`history` of a subscription: which histories are kept of all tables, and of single ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.pipelines.config.file import ConfigError
from pgsieve.pipelines.config.model import parse_config


def read(history: object) -> HistoryChoices:
    subscription = {"source": "s", "publications": ["p"], "history": history}
    written = {"lake": "./lake", "sources": {"s": {"conninfo": ""}}, "subscriptions": {"a": subscription}}
    config = parse_config(yaml.safe_dump(written), Path("pgsieve.yaml"), {})
    return config.subscriptions["a"].history.to_history_choices()


def test_one_word_keeps_versions_of_all_tables() -> None:
    assert read("scd2") == HistoryChoices(HistoryChoice(scd2=True))
    assert read({}) == HistoryChoices()
    assert read("off") == HistoryChoices(HistoryChoice(initial=False, scd2=False))


def test_a_table_overrides_the_default() -> None:
    kept = read({"initial": True, "tables": {"public.a": "scd2", '"S".b': "off", "c.d": {"initial": False}}})
    assert kept.find_choice(("public", "a")) == HistoryChoice(initial=True, scd2=True)
    assert kept.find_choice(("S", "b")) == HistoryChoice(initial=False, scd2=False)
    assert kept.find_choice(("c", "d")) == HistoryChoice(initial=False)
    assert kept.find_choice(("public", "other")) == HistoryChoice(initial=True)


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ({"whole": True}, "unknown key"),
        ({"initial": "perhaps"}, "should be true or false"),
        ("scd3", "should be a mapping"),
        ({"tables": {"orders": "scd2"}}, "has 1 name where 2 are needed"),
        ({"tables": {"public.a": "scd2", 'public."a"': "scd2"}}, "names a table twice"),
    ],
)
def test_invalid_histories_are_refused(history: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(history)
