"""Rows of a table without a key by their values: few changes -> what is to be done with each row. Knows no Spark.

Rows are equal when all their values are the same, NULL and NaN included, as `equal_rows` has them: floating-point numbers are
compared by their text, so that 0.0 and -0.0 are two values.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.resources.lake.delta.key_lookup import key_values

Row = tuple[Hashable, ...]


def row_values(rows: pa.Table) -> Iterator[Row]:
    """Each row as a tuple that is equal where the rows are."""
    return zip(*(_values(column) for column in rows.columns), strict=True)


def _values(column: pa.ChunkedArray) -> Iterator[Hashable]:
    kind = column.type
    if pa.types.is_list(kind):
        # Python cannot hold every time; its numbers and texts are as exact.
        if pa.types.is_temporal(kind.value_type):
            number = pa.int32() if pa.types.is_date32(kind.value_type) else pa.int64()
            column = column.cast(pa.list_(number))
        return map(repr, column.to_pylist())
    if pa.types.is_floating(kind):
        return map(repr, column.to_pylist())
    return (value for (value,) in key_values([column]))


@dataclass(frozen=True)
class RowChanges:
    """Changes as pairs (old, new) of numbers of rows, None for no row; `rows` has one row of each number."""

    rows: pa.Table
    numbers: Mapping[Row, int]
    changes: Sequence[tuple[int | None, int | None]]

    @classmethod
    def of(
        cls, old: pa.Table, new: pa.Table, has_old: Sequence[bool], has_new: Sequence[bool]
    ) -> "RowChanges":
        """The changes whose old and new rows these are, where they have them."""
        numbers: dict[Row, int] = {}
        first: list[int] = []
        sides: list[list[int | None]] = []
        for begin, rows, is_there in ((0, old, has_old), (old.num_rows, new, has_new)):
            side: list[int | None] = []
            for place, (row, there) in enumerate(zip(row_values(rows), is_there, strict=True), begin):
                if there and row not in numbers:
                    numbers[row] = len(numbers)
                    first.append(place)
                side.append(numbers[row] if there else None)
            sides.append(side)
        rows = pa.concat_tables([old, new]).take(pa.array(first, pa.int64()))
        return cls(rows, numbers, list(zip(*sides, strict=True)))

    def numbered(self, batch: pa.RecordBatch) -> list[tuple[int, int]]:
        """The rows of a batch that are of some number: place and number."""
        maybe = np.ones(batch.num_rows, np.bool_)
        for name in self.rows.column_names:
            column = batch.column(name)
            if not (pa.types.is_list(column.type) or pa.types.is_floating(column.type)):
                maybe &= np.asarray(pc.is_in(column, self.rows[name].combine_chunks()))
        places = np.flatnonzero(maybe)
        candidates = pa.Table.from_batches([batch]).select(self.rows.column_names).take(pa.array(places))
        found = zip(places.tolist(), row_values(candidates), strict=True)
        return [(place, self.numbers[row]) for place, row in found if row in self.numbers]

    def repeated(self, counts: Sequence[int]) -> pa.Table:
        """Each row as often as the counts say; less than once is not at all."""
        times = np.maximum(np.asarray(counts, np.int64), 0)
        return self.rows.take(pa.array(np.repeat(np.arange(len(times)), times)))


def replayed(
    changes: Sequence[tuple[int | None, int | None]], copies: Sequence[int]
) -> tuple[list[int], int]:
    """What each row's count becomes by changes (old, new) one after the other, and how many found no row.

    A change whose old row is not there has no effect (section 29.8, update_missing and delete_missing).
    """
    counts, missing = list(copies), 0
    for old, new in changes:
        if old is not None:
            if not counts[old]:
                missing += 1
                continue
            counts[old] -= 1
        if new is not None:
            counts[new] += 1
    return counts, missing


def kept_but(changes: RowChanges, going: Sequence[int]) -> Callable[[pa.RecordBatch], pa.Array | None]:
    """What tells which rows of a batch stay, where of each number so many go; None: all stay. Batches come one by one."""
    remaining = list(going)

    def staying(batch: pa.RecordBatch) -> pa.Array | None:
        mask = np.ones(batch.num_rows, np.bool_)
        for place, number in changes.numbered(batch):
            if remaining[number] > 0:
                remaining[number] -= 1
                mask[place] = False
        return None if mask.all() else pa.array(mask)

    return staying
