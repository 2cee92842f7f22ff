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

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.equality import to_comparable

#: Integer keys are looked up in an array, which has an element for each integer between the least and the greatest of the
#: keys (or of the rows in which the keys are sought). The array has at most 16 elements per key or row, plus a fixed number
#: of elements. If it would be larger, a hash table is used instead, which takes several times as long.
_ARRAY_ELEMENTS_PER_VALUE, _EXTRA_ARRAY_ELEMENTS = 16, 1 << 20
#: This many integers are looked up at a time, so that arrays of this length stay in a core's cache.
_LOOKUP_LENGTH = 1 << 17
#: Integers are numbered with an array, which has an element for each integer from the least to the greatest. The array may
#: have this number of elements for each value. For larger arrays a hash table is used instead.
_ARRAY_ELEMENTS_PER_INTEGER = 4


def number_keys(keys: pa.Table) -> Numbers:
    """Return the number of each row's key. Numbers begin with 0, and equal keys have the same number.

    NULL counts as a value here. (No table has NULL in a key.)
    """
    return reduce(_number_pairs, (_number_values(to_comparable(column)) for column in keys.columns))


def _number_pairs(left: Numbers, right: Numbers) -> Numbers:
    return _number_values(pa.chunked_array([pa.array(left * (int(right.max(initial=0)) + 1) + right)]))


def _number_values(column: pa.ChunkedArray) -> Numbers:
    """Return a number for each value; equal values have the same number."""
    if pa.types.is_signed_integer(column.type) and len(column) and not column.null_count:
        values = np.asarray(column).astype(np.int64, copy=False)
        least, greatest = int(values.min()), int(values.max())
        if greatest - least < _ARRAY_ELEMENTS_PER_INTEGER * len(values):
            return _number_dense_values(values - least, greatest - least + 1)
    indices = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)


def _number_dense_values(offsets: Numbers, count: int) -> Numbers:
    """Number integers from 0 to `count` - 1 in their own order, which takes a tenth of the time of a hash table."""
    occurs = np.zeros(count, np.bool_)
    occurs[offsets] = True
    return (np.cumsum(occurs, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64) - 1)[
        offsets
    ].astype(np.int64)


def find_equal_rows(left: pa.Table, right: pa.Table) -> tuple[Numbers, Numbers]:
    """Return the pairs of rows of two tables that are equal in PostgreSQL's sense; NULL equals nothing.

    The result has the indexes of these rows in the left table, and in the same order those in the right table.
    """
    index_pairs = _append_row_indexes(left, "left").join(
        _append_row_indexes(right, "right"), left.column_names, join_type="inner"
    )
    return np.asarray(index_pairs["left"]), np.asarray(index_pairs["right"])


def _append_row_indexes(rows: pa.Table, column_name: str) -> pa.Table:
    comparable = pa.table([to_comparable(column) for column in rows.columns], rows.column_names)
    return comparable.append_column(column_name, pa.array(np.arange(rows.num_rows)))


@dataclass(frozen=True)
class _NumberByInteger:
    """Maps integers to numbers.

    `number_by_offset` has an element for each integer from `first_integer` on: its number, or -1 if it has none.
    """

    first_integer: int
    number_by_offset: npt.NDArray[np.int32]

    @classmethod
    def from_integers(
        cls, integers: Numbers, numbers: Numbers, least: int, greatest: int
    ) -> _NumberByInteger:
        """Give integers, which are between `least` and `greatest`, these numbers."""
        number_by_offset = np.full(greatest - least + 1, NONE, np.int32)
        number_by_offset[integers - least] = numbers
        return cls(least, number_by_offset)

    def find(self, column: pa.ChunkedArray) -> tuple[Numbers, Numbers]:
        """Return the indexes of those integers in a column that have a number, and their numbers.

        The column has no NULL. An integer outside of the array gets the number of the array's first or last element. So
        callers make sure that these two elements have no number, or that no integer is outside.
        """
        indexes, numbers, first_index = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
        for chunk in column.chunks:
            for begin in range(0, len(chunk), _LOOKUP_LENGTH):
                integers = np.asarray(chunk[begin : begin + _LOOKUP_LENGTH]).astype(np.int64, copy=False)
                found_numbers = self.number_by_offset.take(integers - self.first_integer, mode="clip")
                found_indexes = np.flatnonzero(found_numbers >= 0)
                indexes.append(found_indexes + first_index)
                numbers.append(found_numbers[found_indexes].astype(np.int64))
                first_index += len(integers)
        return np.concatenate(indexes), np.concatenate(numbers)


@dataclass(frozen=True)
class SoughtKeys:
    """Distinct keys that are sought in rows, batch by batch. Spark sends the object to executors.

    If the key has one column, the rows are found without a join. A join would take several times as long.

    - `is_integer`: whether the keys are single integers
    - `number_by_key`: maps the keys to their numbers; None if the keys are not single integers, or if the
      array would be too large. The first and the last element of the array are not keys.
    """

    keys: pa.Table
    is_integer: bool = False
    number_by_key: _NumberByInteger | None = None

    @classmethod
    def from_keys(cls, keys: pa.Table) -> SoughtKeys:
        """Prepare the search for keys; their columns must not be called `left` or `right`."""
        column = keys.column(0)
        is_integer = keys.num_columns == 1 and pa.types.is_signed_integer(column.type)
        if not is_integer or column.null_count or not 0 < len(column) <= np.iinfo(np.int32).max:
            return cls(keys)
        integers = np.asarray(column).astype(np.int64, copy=False)
        least, greatest = int(integers.min()) - 1, int(integers.max()) + 1
        if _is_too_long(least, greatest, len(integers)) or least < np.iinfo(np.int64).min:
            return cls(keys, is_integer=True)
        numbers = np.arange(len(integers))
        return cls(keys, True, _NumberByInteger.from_integers(integers, numbers, least, greatest))

    def find_rows(self, rows: pa.Table) -> tuple[Numbers, Numbers]:
        """Return the indexes of the rows that have one of the keys, and the numbers of their keys."""
        column = rows.column(0)
        if self.is_integer and len(column) and not column.null_count:
            number_by_key = self.number_by_key or self._number_keys_between(column)
            if number_by_key is not None:
                return number_by_key.find(column)
        if rows.num_columns > 1:
            return find_equal_rows(rows, self.keys)
        sought_values = to_comparable(self.keys.column(0)).combine_chunks()
        numbers = pc.index_in(to_comparable(column), value_set=sought_values, skip_nulls=True)
        is_key = numbers.is_valid()
        return np.flatnonzero(np.asarray(is_key)), np.asarray(numbers.filter(is_key)).astype(np.int64)

    def _number_keys_between(self, column: pa.ChunkedArray) -> _NumberByInteger | None:
        """Number the keys between the least and the greatest integer of a column; None if the array would be too large.

        Often a file has consecutive keys, of which only few are sought.
        """
        least, greatest = pc.min_max(column).as_py().values()
        if _is_too_long(least, greatest, len(column)):
            return None
        integers = np.asarray(self.keys.column(0)).astype(np.int64, copy=False)
        numbers = np.flatnonzero((integers >= least) & (integers <= greatest))
        return _NumberByInteger.from_integers(integers[numbers], numbers, least, greatest)


def _is_too_long(least: int, greatest: int, count: int) -> bool:
    """Whether an array from the least to the greatest of `count` integers would be too large."""
    return greatest - least >= _ARRAY_ELEMENTS_PER_VALUE * count + _EXTRA_ARRAY_ELEMENTS


def is_orderable(data_type: pa.DataType) -> bool:
    """Whether Arrow can order the values of a type, and agrees with PostgreSQL on which values are equal."""
    return bool(
        pa.types.is_integer(data_type)
        or is_text(data_type)
        or pa.types.is_date(data_type)
        or pa.types.is_timestamp(data_type)
    )


def is_text(data_type: pa.DataType) -> bool:
    """Whether a type is one of Arrow's texts."""
    return bool(
        pa.types.is_string(data_type)
        or pa.types.is_large_string(data_type)
        or pa.types.is_string_view(data_type)
    )


@dataclass(frozen=True)
class PresentKeys:
    """The rows of a replica whose keys occur in the changes of a batch (the changes that are applied together).

    - `numbers` has the number of each row's key.
    - `keys` has the keys as these rows store them. A change may have another value for an equal key: 0.0 equals -0.0.
    - `is_living` is false for rows that have ended (they were deleted), and that the replica retains.
    """

    numbers: Numbers
    keys: pa.Table
    is_living: Mask

    @classmethod
    def empty(cls, keys: pa.Table) -> PresentKeys:
        """Return an object without rows."""
        return cls(np.empty(0, np.int64), keys.slice(0, 0), np.empty(0, np.bool_))

    @property
    def living_numbers(self) -> Numbers:
        """The numbers of the keys that have a living row: one that has not ended."""
        return self.numbers[self.is_living]

    def take_stored_keys(self, keys: pa.Table) -> pa.Table:
        """Return the keys with the values that the replica's rows have; keys without a row keep their values."""
        rows = np.arange(keys.num_rows)
        rows[self.numbers] = keys.num_rows + np.arange(len(self.numbers))
        return pa.concat_tables([keys, self.keys]).take(pa.array(rows))
