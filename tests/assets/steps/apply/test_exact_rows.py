"""Tables without a key: each change touches one of several equal rows, or none where none is left."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest

from pgsieve.assets.steps.apply.exact_rows import RowChanges, kept_but, replayed, row_values

#: The rows of a replica, by number: A twice, B once, C not at all.
A, B, C = range(3)
BEFORE = [2, 1, 0]


@pytest.mark.parametrize(
    ("changes", "counts", "missing"),
    [
        pytest.param([(None, A)], [3, 1, 0], 0, id="an INSERT adds one of the equal rows"),
        pytest.param([(A, None)], [1, 1, 0], 0, id="a DELETE takes one of them"),
        pytest.param([(A, C)], [1, 1, 1], 0, id="an UPDATE replaces one of them"),
        pytest.param([(C, None)], [2, 1, 0], 1, id="a DELETE of a missing row does nothing"),
        pytest.param([(C, B)], [2, 1, 0], 1, id="so does an UPDATE"),
        pytest.param([(B, None), (B, A), (None, B)], [2, 1, 0], 1, id="the order of changes counts"),
    ],
)
def test_changes_are_replayed_one_after_the_other(
    changes: list[tuple[int | None, int | None]], counts: list[int], missing: int
) -> None:
    assert replayed(changes, BEFORE) == (counts, missing)
    assert BEFORE == [2, 1, 0]


NAN = float("nan")
#: By type: values that are all different from each other.
DIFFERENT = {
    "int": ([1, 2, None], pa.int32()),
    "double": ([0.0, -0.0, NAN, 1e300, None], pa.float64()),
    "real": ([0.0, -0.0, NAN, 0.1, None], pa.float32()),
    "numeric": ([Decimal("1.50"), Decimal("-1.50"), None], pa.decimal128(10, 2)),
    "text": (["", "a", "A", None], pa.string()),
    "bytes": ([b"", b"a", None], pa.binary()),
    "boolean": ([True, False, None], pa.bool_()),
    "infinite times": ([2**63 - 1, -(2**63) + 1, 0, None], pa.timestamp("us", "UTC")),
    "infinite dates": ([2**31 - 1, -(2**31) + 1, 0, None], pa.date32()),
    "doubles": ([[0.0], [-0.0], [NAN], [None], [], None], pa.list_(pa.float64())),
    "times": ([[2**63 - 1], [-(2**63) + 1], None], pa.list_(pa.timestamp("us", "UTC"))),
    "dates": ([[2**31 - 1], [dt.date(1, 1, 1).toordinal()], None], pa.list_(pa.date32())),
}


def _column(values: list[object], kind: pa.DataType) -> pa.Array:
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if not pa.types.is_temporal(inner):
        return pa.array(values, kind)
    number = pa.int32() if pa.types.is_date32(inner) else pa.int64()
    return pa.array(values, pa.list_(number) if pa.types.is_list(kind) else number).cast(kind)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_rows_are_equal_where_all_values_are_the_same(kind: str) -> None:
    column = _column(*DIFFERENT[kind])
    twice = pa.concat_arrays([column, column])
    values = list(row_values(pa.table({"v": twice})))
    count = len(column)
    assert values[:count] == values[count:]
    assert len(set(values)) == count

    changes = RowChanges.of(pa.table({"v": column}), pa.table({"v": column}), [True] * count, [True] * count)
    assert list(changes.changes) == [(number, number) for number in range(count)]
    batch = pa.RecordBatch.from_arrays([twice], ["v"])
    assert changes.numbered(batch) == [(place, place % count) for place in range(2 * count)]


def test_of_equal_rows_as_many_go_as_are_to_go() -> None:
    rows = pa.table({"v": ["a", "b", "c"]})
    changes = RowChanges.of(rows, rows, [True, True, False], [False, False, True])
    assert list(changes.changes) == [(0, None), (1, None), (None, 2)]
    staying = kept_but(changes, [2, 1, -1])
    batches = [pa.record_batch({"v": values}) for values in (["a", "c", "b"], ["a", "a", "b"], ["b"])]
    masks = [mask and mask.to_pylist() for mask in map(staying, batches)]
    assert masks == [[False, True, False], [False, True, True], None]
    assert changes.repeated([0, -1, 2]).to_pydict() == {"v": ["c", "c"]}
