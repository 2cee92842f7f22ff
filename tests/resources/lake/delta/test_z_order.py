"""Z-order: close numbers are close in every column, whatever the columns' types are. No JVM."""

from __future__ import annotations

import datetime as dt
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.resources.lake.delta.z_order import sort_by_z_order


def test_two_columns_of_four_values_are_in_the_order_of_the_drawing() -> None:
    cells = pa.table({"a": [i // 4 for i in range(16)], "b": [i % 4 for i in range(16)]})
    shuffled = cells.take(np.random.default_rng(7).permutation(16))
    drawn = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    order = sort_by_z_order(shuffled, ["a", "b"])
    assert [drawn[a][b] for a, b in zip(*order.to_pydict().values(), strict=True)] == list(range(16))


def test_one_column_is_sorted_with_nulls_last() -> None:
    assert sort_by_z_order(pa.table({"a": [3, None, 1, 2]}), ["a"])["a"].to_pylist() == [1, 2, 3, None]


@pytest.mark.parametrize(
    "values",
    [
        [True, False, None],
        [b"b", b"", None],
        ["é", "", None],
        [1.5, float("nan"), None],
        [decimal.Decimal("1.50"), decimal.Decimal(-9), None],
        [dt.date(2020, 1, 1), dt.date(1, 1, 1), None],
        [dt.datetime(2020, 1, 1, tzinfo=dt.UTC), None, None],
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_every_type_can_be_ordered(values: list[object]) -> None:
    rows = pa.table({"n": range(6), "v": pa.array(values * 2)})
    assert sorted(sort_by_z_order(rows, ["v", "n"])["n"].to_pylist()) == list(range(6))


@given(
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.none()] * 3), max_size=50), st.integers(1, 3)
)
def test_no_row_is_lost_whatever_the_columns_are(rows: list[tuple[int | None, ...]], columns: int) -> None:
    names = ["a", "b", "c"]
    table = pa.table({n: pa.array([row[i] for row in rows], pa.int64()) for i, n in enumerate(names)})
    ordered = sort_by_z_order(table, names[:columns])
    assert sorted(map(str, ordered.to_pylist())) == sorted(map(str, table.to_pylist()))


def test_more_columns_than_digits_are_no_error() -> None:
    rows = pa.table({str(i): [2, 1] for i in range(70)})
    assert sort_by_z_order(rows, rows.column_names)["0"].to_pylist() == [1, 2]
