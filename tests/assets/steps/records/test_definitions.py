"""The definition of a replica in its table state, and the choice of the change history for its columns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pgsieve.assets.steps.subscription import Definition, FormerLayout, History, planned_sources
from pgsieve.decoding.publications.evolution import Layout, LayoutColumn

MOOD = (("c", "16390", "1 16384"), ("e", "16384", "sad", "ok"))
LAYOUT = Layout(
    7, (LayoutColumn(1, "a", 23, -1, 9), LayoutColumn(3, "ß", 25, -1, 8, ("x", None), MOOD)), 3, ((7, 70),)
)
MADE = Definition(
    columns=(("a", "int"), ("ß", "string")),
    key=("a",),
    layout=LAYOUT,
    former=FormerLayout(LAYOUT, frozenset({1, 3}), 5),
    history=History(1, (("a", "int"),)),
)


def test_a_definition_is_read_back_from_its_text() -> None:
    read = Definition.from_json(MADE.to_json())
    assert (read, read.former, read.history) == (MADE, MADE.former, MADE.history)


def test_an_old_definition_without_types_has_none() -> None:
    written = json.loads(MADE.to_json())
    for column in written["layout"]["columns"]:
        del column["made"]
    read = Definition.from_json(json.dumps(written))
    assert [column.type_parts for column in read.layout.columns] == [(), ()]
    # The next run adds the present types, and copies nothing.
    assert [source.former_column for source in planned_sources(read, MADE)] == ["a", "ß"]


def test_a_former_name_and_a_history_make_no_other_definition() -> None:
    assert replace(MADE, former=None, history=History()) == MADE
    assert replace(MADE, layout=replace(LAYOUT, files=((7, 71),))) != MADE


@pytest.mark.parametrize(
    ("columns", "generation"),
    [
        ([("a", "int"), ("b", "date")], 0),
        ([("c", "string")], 0),
        ([("a", "bigint")], 1),
        ([("A", "int")], 1),
        ([("a", "int"), ("x y", "int")], 1),
    ],
)
def test_a_new_history_begins_for_another_type_or_another_spelling(
    columns: list[tuple[str, str]], generation: int
) -> None:
    history = History(0, (("a", "int"), ("b", "date")))
    followed = history.with_columns(columns)
    assert followed.generation == generation
    assert set(columns) <= set(followed.columns)
    if not generation:
        assert set(history.columns) <= set(followed.columns)
