"""Gives keys numbers, and finds rows by their keys.

In: Arrow tables of key columns. Out: numbers of keys and of rows. Two rows have the same key if all values of their key
columns are equal in PostgreSQL (`equality`). Raises Arrow's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.digests import HASH_FACTOR, value_words
from pgsieve.decoding.changes.equality import is_octets, to_comparable
from pgsieve.decoding.changes.net_change import NONE, Mask, Numbers

#: Integer keys are looked up in an array if it has at most so many elements for each key, and so many more.
_DENSE, _FEW = 16, 1 << 20
#: Integers are numbered without a hash table if an array from the least to the greatest has at most so many elements for
#: each integer.
_NUMBERED_DENSE = 4


def key_numbers(keys: pa.Table) -> Numbers:
    """Return the number of each row's key. Numbers begin with 0, and equal keys have the same number.

    NULL counts as a value here, although no table has NULL in a key.
    """
    return reduce(_combine, (_encode(to_comparable(column)) for column in keys.columns))


def key_parts(keys: pa.Table, number: int) -> Numbers:
    """Divide rows into `number` parts by their keys, and return the number of each row's part, from 0 on.

    Equal keys are in the same part, even if they come from different tables.
    """
    mixed = np.zeros(keys.num_rows, np.uint64)
    for column in keys.columns:
        values = to_comparable(column).combine_chunks()
        for words in (value_words(values), *_end_words(values)):
            mixed = mixed * HASH_FACTOR + words
            mixed ^= mixed >> np.uint64(29)
    return ((mixed * HASH_FACTOR >> np.uint64(32)) * np.uint64(number) >> np.uint64(32)).astype(np.int64)


def _end_words(values: pa.Array) -> list[npt.NDArray[np.uint64]]:
    """Return the first and the last eight bytes of each text as numbers; an empty list for types of fixed width."""
    if not is_octets(values.type):
        return []
    values = values.cast(pa.large_binary())
    buffers = values.buffers()
    offsets = np.frombuffer(buffers[1], np.int64)[values.offset :][: len(values) + 1]
    # With padding, eight bytes follow the beginning of the last value, and eight precede the end of the first value.
    padding = np.zeros(8, np.uint8)
    octets = np.concatenate([padding, np.frombuffer(buffers[2] or b"", np.uint8), padding])
    words = np.lib.stride_tricks.sliding_window_view(octets, 8)
    lengths = np.minimum(np.diff(offsets), 8).astype(np.uint64)
    # If a value has less than eight bytes, the word also has bytes of the values next to it. These are shifted out.
    shift = np.minimum(np.uint64(8) * (np.uint64(8) - lengths), np.uint64(63))
    first = np.ascontiguousarray(words[offsets[:-1] + 8]).view("<u8")[:, 0] << shift
    last = np.ascontiguousarray(words[offsets[1:]]).view("<u8")[:, 0] >> shift
    return [np.where(lengths == 0, np.uint64(0), word) for word in (first, last)]


def _combine(left: Numbers, right: Numbers) -> Numbers:
    return _encode(pa.chunked_array([pa.array(left * (int(right.max(initial=0)) + 1) + right)]))


def _encode(column: pa.ChunkedArray) -> Numbers:
    """Return a number for each value; equal values have the same number."""
    if pa.types.is_signed_integer(column.type) and len(column) and not column.null_count:
        values = np.asarray(column).astype(np.int64, copy=False)
        least, greatest = int(values.min()), int(values.max())
        if greatest - least < _NUMBERED_DENSE * len(values):
            return _encode_dense(values - least, greatest - least + 1)
    indices = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)


def _encode_dense(offsets: Numbers, count: int) -> Numbers:
    """Number integers from 0 to `count` - 1 in their own order, which takes a tenth of the time of a hash table."""
    occurs = np.zeros(count, np.bool_)
    occurs[offsets] = True
    return (np.cumsum(occurs, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64) - 1)[
        offsets
    ].astype(np.int64)


def equal_rows(left: pa.Table, right: pa.Table) -> tuple[Numbers, Numbers]:
    """Return the pairs of rows of two tables that are equal in PostgreSQL's sense; NULL equals nothing.

    The result has the indexes of these rows in the left table, and in the same order those in the right table.
    """
    equal = _numbered(left, "left").join(_numbered(right, "right"), left.column_names, join_type="inner")
    return np.asarray(equal["left"]), np.asarray(equal["right"])


def _numbered(rows: pa.Table, label: str) -> pa.Table:
    comparable = pa.table([to_comparable(column) for column in rows.columns], rows.column_names)
    return comparable.append_column(label, pa.array(np.arange(rows.num_rows)))


@dataclass(frozen=True)
class SoughtKeys:
    """Distinct keys that are sought in rows, batch by batch. Spark sends the object to executors.

    A key of one column needs no join; a join takes several times as long. `numbers` has an element for each integer
    from `least` on: the key's number, or -1 if the integer is no key. It is None if keys are no integers, or far apart.
    """

    keys: pa.Table
    least: int = 0
    numbers: Numbers | None = None

    @classmethod
    def of(cls, keys: pa.Table) -> SoughtKeys:
        """Prepare the search for keys; their columns must not be called `left` or `right`."""
        column = keys.column(0)
        is_integer = keys.num_columns == 1 and pa.types.is_signed_integer(column.type)
        if not is_integer or column.null_count or not len(column):
            return cls(keys)
        values = np.asarray(column).astype(np.int64)
        least, greatest = int(values.min()), int(values.max())
        if greatest - least > _DENSE * len(values) + _FEW:
            return cls(keys)
        numbers = np.full(greatest - least + 1, NONE, np.int64)
        numbers[values - least] = np.arange(len(values))
        return cls(keys, least, numbers)

    def within(self, rows: pa.Table) -> tuple[Numbers, Numbers]:
        """Return the indexes of the rows that have one of the keys, and the numbers of their keys."""
        column = rows.column(0)
        if self.numbers is not None and not column.null_count:
            # An integer below `least` has a negative offset, which is a large number without a sign.
            offset = (np.asarray(column).astype(np.int64, copy=False) - self.least).view(np.uint64)
            row = np.flatnonzero(offset < len(self.numbers))
            key = self.numbers[offset if len(row) == len(offset) else offset[row]]
            is_key = key >= 0
            return row[is_key], key[is_key]
        if rows.num_columns > 1 or not has_bounds(column.type):
            return equal_rows(rows, self.keys)
        number = pc.index_in(column, value_set=self.keys.column(0).combine_chunks(), skip_nulls=True)
        is_key = number.is_valid()
        return np.flatnonzero(np.asarray(is_key)), np.asarray(number.filter(is_key)).astype(np.int64)


def has_bounds(kind: pa.DataType) -> bool:
    """Whether Arrow and PostgreSQL agree on which values of a type are equal, and Arrow orders them."""
    return bool(
        pa.types.is_integer(kind) or is_text(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


@dataclass(frozen=True)
class PresentKeys:
    """The rows of a replica that have some of a batch's keys: the numbers of the keys, and the keys as these rows have them.

    Equal keys may have different values: 0.0 equals -0.0. `lives` is false for rows that have ended and are kept.
    """

    numbers: Numbers
    keys: pa.Table
    lives: Mask

    @classmethod
    def empty(cls, keys: pa.Table) -> PresentKeys:
        """Return an object without rows."""
        return cls(np.empty(0, np.int64), keys.slice(0, 0), np.empty(0, np.bool_))

    @property
    def living(self) -> Numbers:
        """The numbers of the keys that have a living row: one that has not ended."""
        return self.numbers[self.lives]

    def stored_keys(self, keys: pa.Table) -> pa.Table:
        """Return the keys with the values that the replica's rows have; keys without a row keep their values."""
        rows = np.arange(keys.num_rows)
        rows[self.numbers] = keys.num_rows + np.arange(len(self.numbers))
        return pa.concat_tables([keys, self.keys]).take(pa.array(rows))
