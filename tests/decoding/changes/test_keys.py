"""The parts of keys: equal keys of different tables are in the same part, and the parts are of about the same size."""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.decoding.changes.hashes import assign_key_parts
from pgsieve.decoding.changes.keys import number_keys

_MANY = 1000
_KEYS = {
    "integers": pa.array([1, -1, 2**62, None]),
    "texts": pa.array(["", "a", "ab", "longer than eight", "longer than 8", None]),
    "bytes": pa.array([b"", b"\0", b"\0\0", None]),
    "numeric": pa.array([Decimal("1.00"), Decimal("-1.00"), None], pa.decimal128(38, 2)),
    "dates": pa.array([dt.date(2000, 1, 1), dt.date(2000, 1, 2), None]),
    "flags": pa.array([True, False, None]),
    "lists": pa.array([[], [1], [1, 2], [2, 1], [None], None], pa.list_(pa.int64())),
}


@pytest.mark.parametrize("name", _KEYS)
def test_a_key_is_in_the_same_part_whatever_keys_are_beside_it(name: str) -> None:
    keys = pa.table({"k": _KEYS[name], "n": pa.array(range(len(_KEYS[name])))})
    parts = assign_key_parts(keys, _MANY)
    alone = [int(assign_key_parts(keys.slice(row, 1), _MANY)[0]) for row in range(keys.num_rows)]
    assert parts.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert assign_key_parts(keys.slice(0, 0), _MANY).tolist() == []


def test_equal_floats_are_in_the_same_part() -> None:
    pairs = [0.0, -0.0], [np.nan, -np.nan], [[0.0, np.nan], [-0.0, -np.nan]]
    zero, nan, listed = (assign_key_parts(pa.table({"k": pa.array(both)}), _MANY) for both in pairs)
    assert len(set(zero)) == len(set(nan)) == len(set(listed)) == 1


@pytest.mark.parametrize(
    "keys",
    [range(20_000), range(0, 20_000 * 64, 64), [str(uuid.UUID(int=n * 2**64 + n)) for n in range(20_000)]],
    ids=["serial", "in steps", "uuid"],
)
def test_parts_have_about_the_same_size(keys: list[object]) -> None:
    sizes = np.bincount(assign_key_parts(pa.table({"k": pa.array(keys)}), 16), minlength=16)
    assert len(sizes) == 16
    assert sizes.min() > 900
    assert sizes.max() < 1_700


@pytest.mark.parametrize(
    "columns",
    [
        [[5, 3, 5, -2, 4, 3]],
        [[2**62, 3, 2**62, -(2**62)]],
        [[-(2**63), 2**63 - 1, -(2**63)]],
        [[5, None, 5, None]],
        [[]],
        [[1, 1, 2, 2, 1], [7, 8, 7, 7, 8]],
    ],
    ids=["dense", "sparse", "the whole range", "NULL", "none", "two columns"],
)
def test_equal_keys_have_the_same_number(columns: list[list[int | None]]) -> None:
    keys = pa.table({f"k{number}": pa.array(values, pa.int64()) for number, values in enumerate(columns)})
    numbers, rows = number_keys(keys).tolist(), list(zip(*columns, strict=True))
    assert {*numbers} == {*range(len({*rows}))}
    assert len({*zip(numbers, rows, strict=True)}) == len({*rows})
