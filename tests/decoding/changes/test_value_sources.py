"""The values of rows come from where a plain model of changes one by one finds them."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.decoding.changes.arrays import NONE, is_in
from pgsieve.decoding.changes.value_sources import (
    ColumnSources,
    Completion,
    NumberedValues,
    ValueSources,
    mask_unsent,
)


def _numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _named(numbers: np.ndarray, name: str, value_type: pa.DataType) -> NumberedValues:
    values = [f"{name} {number}" for number in numbers.tolist()]
    return NumberedValues(numbers, pa.array(values, pa.string()).cast(value_type))


@pytest.mark.parametrize("value_type", [pa.string(), pa.binary()])
def test_a_value_is_that_of_the_change_that_sent_it_or_of_the_replica_or_null(
    value_type: pa.DataType,
) -> None:
    drawn = random.Random(34)
    for _ in range(200):
        count = drawn.randrange(6)
        changes = np.array([drawn.choice([NONE, drawn.randrange(9)]) for _ in range(count)], np.int64)
        base_rows = np.array([drawn.choice([NONE, drawn.randrange(9)]) for _ in range(count)], np.int64)
        sources = ColumnSources(changes, base_rows)
        values = sources.take_values(
            _named(sources.needed_changes, "change", value_type),
            _named(sources.needed_base_rows, "row", value_type),
        )
        expected = [
            f"change {change}" if change != NONE else None if base_row == NONE else f"row {base_row}"
            for change, base_row in zip(changes.tolist(), base_rows.tolist(), strict=True)
        ]
        assert values.cast(pa.string()).to_pylist() == expected
        needed = {text.split()[1] for text in expected if text and text.startswith("row")}
        assert set(map(str, sources.needed_base_rows.tolist())) == needed


def test_a_row_that_the_replica_lacks_has_null() -> None:
    values = ColumnSources(_numbers(NONE, NONE), _numbers(4, 5)).take_values(
        NumberedValues.collect(pa.string(), ()), NumberedValues(_numbers(5), pa.array(["five"]))
    )
    assert values.to_pylist() == [None, "five"]


def test_values_are_collected_in_the_order_of_their_numbers() -> None:
    parts = [
        (_numbers(7, NONE, 3), pa.array(["seven", "none", "three"])),
        (_numbers(5), pa.chunked_array([["five"]])),
        (_numbers(), pa.chunked_array([], pa.string())),
    ]
    collected = NumberedValues.collect(pa.string(), parts)
    assert collected.numbers.tolist() == [3, 5, 7]
    assert collected.values.to_pylist() == ["three", "five", "seven"]
    assert collected.find(_numbers(7, 4, 3, NONE)).tolist() == [2, NONE, 0, NONE]


def test_a_completion_fills_only_the_rows_that_it_has_values_for() -> None:
    completion = Completion("v", NumberedValues(_numbers(2, 9), pa.array(["two", "nine"])))
    rows = pa.RecordBatch.from_pydict({"k": [1, 2, 3], "v": [None, None, "own"]})
    assert completion.fill(rows, _numbers(9, 1, 4))["v"].to_pylist() == ["nine", None, "own"]
    assert completion.fill(rows, _numbers(0, 1, 4)) is rows
    assert Completion("v", NumberedValues.collect(pa.string(), ())).fill(rows, _numbers(2, 3, 4)) is rows


def test_a_moved_row_inherits_what_its_own_changes_did_not_send_and_where_it_comes_from() -> None:
    sources = ValueSources(
        {"a": _numbers(4, NONE, NONE), "b": _numbers(NONE, 6, NONE)},
        {"base": _numbers(NONE, NONE, 8), "link": _numbers(3, 5, NONE)},
    )
    former = ValueSources(
        {"a": _numbers(1, 2), "b": _numbers(NONE, 2)}, {"base": _numbers(7, NONE), "link": _numbers(NONE, 9)}
    )
    inherited = sources.inherit(_numbers(0, 1), former)
    assert {name: numbers.tolist() for name, numbers in inherited.changes_by_column.items()} == {
        "a": [4, 2, NONE],
        "b": [NONE, 6, NONE],
    }
    assert {name: numbers.tolist() for name, numbers in inherited.origins.items()} == {
        "base": [7, NONE, 8],
        "link": [NONE, 9, NONE],
    }
    assert mask_unsent(inherited.changes_by_column, 3).tolist() == [True, False, True]
    assert sources.changes_by_column["a"].tolist() == [4, NONE, NONE]
    assert sources.take(_numbers(2, 0)).origins["base"].tolist() == [8, NONE]


def test_numbers_are_found_among_sorted_ones() -> None:
    assert is_in(_numbers(3, 1, 9), _numbers(1, 2, 3)).tolist() == [True, True, False]
    assert is_in(_numbers(3), _numbers()).tolist() == [False]
