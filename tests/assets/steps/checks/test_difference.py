"""The comparison of few rows equals a count of them. `tests/replication/` tests Spark's comparison."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.assets.steps.checks.difference import find_few_differing_rows

_SCHEMA = pa.schema(
    {"id": pa.int64(), "x": pa.float64(), "text": pa.string(), "listed": pa.list_(pa.float64())}
)
_NUMBERS = st.none() | st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")])
_ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(0, 2),
        _NUMBERS,
        st.none() | st.sampled_from(["", "a"]),
        st.none() | st.lists(_NUMBERS, max_size=2),
    ),
    max_size=8,
)
_Row = tuple[int | None, float | None, str | None, list[float | None] | None]
_Key = tuple[int | None, str, str | None, tuple[str, ...] | None]


def _table(rows: list[_Row]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[]] * 4, schema=_SCHEMA)


def _number(value: float | None) -> str:
    """A number in a form that is equal if PostgreSQL's values are: NaN equals NaN, and -0.0 equals 0.0."""
    return "NULL" if value is None else repr(value + 0.0)


def _counter(rows: list[_Row]) -> Counter[_Key]:
    return Counter(
        (i, _number(x), text, None if numbers is None else tuple(map(_number, numbers)))
        for i, x, text, numbers in rows
    )


@given(_ROWS, _ROWS)
def test_few_rows_are_compared_as_multisets(expected: list[_Row], replica: list[_Row]) -> None:
    differing = find_few_differing_rows(_table(expected), _table(replica)).to_pylist()
    counted = Counter[_Key]()
    for row in differing:
        counted.update(dict.fromkeys(_counter([(row["c0"], row["c1"], row["c2"], row["c3"])]), row["count"]))
    difference = _counter(expected)
    difference.subtract(_counter(replica))
    assert {k: n for k, n in counted.items() if n} == {k: n for k, n in difference.items() if n}
    assert len(differing) == len(counted)
