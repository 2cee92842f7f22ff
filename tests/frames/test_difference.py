"""The comparison of few rows, against counting them one by one; Spark's is compared in the orchestration tests."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from assets.frames.difference import few_differing_rows

_SCHEMA = pa.schema({"id": pa.int64(), "x": pa.float64(), "text": pa.string()})
_ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(0, 2),
        st.none() | st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
        st.none() | st.sampled_from(["", "a"]),
    ),
    max_size=8,
)
_Row = tuple[int | None, float | None, str | None]


def _table(rows: list[_Row]) -> pa.Table:
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[], [], []], schema=_SCHEMA)


def _counter(rows: list[_Row]) -> Counter[tuple[int | None, str | None, str | None]]:
    """Rows by what PostgreSQL holds to be equal: NaN equals NaN, and -0.0 equals 0.0."""
    return Counter((i, None if x is None else repr(x + 0.0), text) for i, x, text in rows)


@settings(deadline=None)
@given(_ROWS, _ROWS)
def test_few_rows_are_compared_as_multisets(expected: list[_Row], replica: list[_Row]) -> None:
    found = few_differing_rows(_table(expected), _table(replica)).to_pylist()
    counted = Counter[tuple[int | None, str | None, str | None]]()
    for row in found:
        counted.update(dict.fromkeys(_counter([(row["c0"], row["c1"], row["c2"])]), row["count"]))
    difference = _counter(expected)
    difference.subtract(_counter(replica))
    assert {k: n for k, n in counted.items() if n} == {k: n for k, n in difference.items() if n}
    assert len(found) == len(counted)
