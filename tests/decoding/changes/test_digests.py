"""Digests of rows: equal if all values are spelled alike, whatever else is in the batch."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.digests import DIGEST_SCHEMA, WantedDigests, compute_row_digests, digest_sides
from pgsieve.resources.lake.session import send_code_in_plans

NAN = float("nan")
#: By type: values that all differ.
DIFFERENT = {
    "int": ([1, 2, -1, None], pa.int32()),
    "bigint": ([2**40, 2**40 + 1, 0, None], pa.int64()),
    "double": ([0.0, -0.0, NAN, 1e300, None], pa.float64()),
    "real": ([0.0, -0.0, NAN, 0.1, None], pa.float32()),
    "numeric": (
        [Decimal("1.50"), Decimal("-1.50"), Decimal("18446744073709551617.50"), None],
        pa.decimal128(30, 2),
    ),
    "numeric as text": (["1.0", "1.00", "NaN", None], pa.string()),
    "jsonb": (['{"a": 1}', '{"a": 1.0}', "null", None], pa.string()),
    "text": (["", "a", "A", "a\0", "é", None], pa.string()),
    "bytes": ([b"", b"a", b"\0", b"\0\0", None], pa.binary()),
    "boolean": ([True, False, None], pa.bool_()),
    "infinite times": ([2**63 - 1, -(2**63) + 1, 0, None], pa.timestamp("us", "UTC")),
    "infinite dates": ([2**31 - 1, -(2**31) + 1, 0, None], pa.date32()),
    "doubles": ([[0.0], [-0.0], [NAN], [None], [], [0.0, 0.0], None], pa.list_(pa.float64())),
    "texts": ([["a", "b"], ["ab"], ["ab", ""], ["", "ab"], [None, "ab"], [], None], pa.list_(pa.string())),
    "times": ([[2**63 - 1], [-(2**63) + 1], None], pa.list_(pa.timestamp("us", "UTC"))),
    "dates": ([[2**31 - 1], [dt.date(1, 1, 1).toordinal()], None], pa.list_(pa.date32())),
}


def _column(values: list[object], kind: pa.DataType) -> pa.Array:
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if not pa.types.is_temporal(inner):
        return pa.array(values, kind)
    number = pa.int32() if pa.types.is_date32(inner) else pa.int64()
    return pa.array(values, pa.list_(number) if pa.types.is_list(kind) else number).cast(kind)


def _digests(*columns: pa.Array) -> list[tuple[int, ...]]:
    digests = compute_row_digests(
        pa.RecordBatch.from_arrays(list(columns), [str(n) for n in range(len(columns))])
    )
    assert digests.schema == DIGEST_SCHEMA
    return list(zip(*(column.to_pylist() for column in digests.columns), strict=True))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_rows_have_the_same_digest_if_all_values_are_the_same(kind: str) -> None:
    column = _column(*DIFFERENT[kind])
    twice, count = pa.concat_arrays([column, column]), len(column)
    digests = _digests(twice)
    assert digests[:count] == digests[count:]
    assert len(set(digests)) == count
    # A part of the batch has the same digests. With a second column each pair of values has its own.
    assert _digests(twice.slice(1)) == digests[1:]
    assert (
        len(
            set(
                _digests(
                    pa.concat_arrays([column] * count),
                    column.take(pa.array([i // count for i in range(count**2)])),
                )
            )
        )
        == count**2
    )

    places, of = WantedDigests(compute_row_digests(pa.record_batch({"0": column.slice(1)}))).find_rows(
        pa.record_batch({"0": twice})
    )
    assert places.tolist() == [place for place in range(2 * count) if place % count]
    assert (of + 1).tolist() == [place % count for place in places]


def test_a_search_can_be_sent_to_executors_without_pgsieve() -> None:
    """It is sent by value, with its class. Before Python 3.12 a cached_property has a lock, which cannot be pickled."""
    send_code_in_plans()
    rows = pa.record_batch({"0": pa.array(["a", "b", "c"])})
    sought = WantedDigests(compute_row_digests(rows.slice(1)))
    executor = (
        "import pickle, sys\n"
        "sent, rows = pickle.load(sys.stdin.buffer)\n"
        "print([part.tolist() for part in sent.find_rows(rows)], 'pgsieve' in sys.modules)\n"
    )
    for _ in range(2):  # also after a search
        found = subprocess.check_output(
            [sys.executable, "-c", executor], input=cloudpickle.dumps((sought, rows))
        )
        assert found == b"[[1, 2], [0, 1]] False\n"
        assert [part.tolist() for part in sought.find_rows(rows)] == [[1, 2], [0, 1]]


def test_values_of_one_column_are_not_mistaken_for_those_of_another() -> None:
    left, right = pa.array(["ab", "a", "", None, "ab"]), pa.array(["", "b", "ab", "ab", None])
    assert len(set(_digests(left, right))) == 5


def test_changes_keep_their_other_columns() -> None:
    row = pa.struct([("a", pa.int64()), ("b", pa.string())])
    rows = {"a": 1, "b": "x"}
    changes = pa.record_batch(
        {
            "operation": pa.array(["insert", "update", "delete"]),
            "old": pa.array([None, rows, rows], row),
            "new": pa.array([rows, {"a": 1, "b": "y"}, None], row),
        }
    )
    same = digest_sides(changes, ["a", "b"])
    assert same.column("operation").equals(changes.column("operation"))
    old, new = (same.column(side).to_pylist() for side in SIDES)
    assert [old[0], new[2]] == [None, None]
    assert old[1] == old[2] == new[0] != new[1]
    # A file may have the columns in another order.
    assert digest_sides(changes, ["b", "a"]).column("old")[1].as_py() != old[1]
