"""Finds the values that the changes of a row did not send.

An UPDATE does not send a TOASTed value that it leaves unchanged (PostgreSQL documentation, 54.9 Logical Replication
Message Formats, TupleData). Such a value is in an earlier change of the row, or in the replica's row.

    change        columns sent
    number 3      id, note, body
    number 7      id, note
    number 9      id, note                the new row has id and note of change 9, and body of change 3

If no change had sent body, the new row would have the body of the replica's row. If the replica has no such row either, the
body is NULL.

In: for each row the numbers of the changes and of the replica's row that have its values; and these values, as Arrow
arrays. Out: the numbers after a move (an UPDATE that changes the key of a row), or the values of a column. Raises
Arrow's errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers, fill_none


def mask_unsent(changes_by_column: Mapping[str, Numbers], count: int) -> Mask:
    """Return the mask of the rows with a value that no change sent.

    `changes_by_column` is that of `ValueSources`, and `count` is the number of rows.
    """
    is_unsent = np.zeros(count, np.bool_)
    for changes in changes_by_column.values():
        is_unsent |= changes == NONE
    return is_unsent


@dataclass(frozen=True)
class ValueSources:
    """Where the values of rows are. Each array has one element per row.

    - `changes_by_column` has the columns that some change did not send. It maps such a column to the change that sent the
      row's value, or to `NONE` if no change sent it.
    - `origins` says where the row comes from, in numbers that the caller chooses, for example the row's key in the
      replica. The values that no change sent are there.
    """

    changes_by_column: Mapping[str, Numbers]
    origins: Mapping[str, Numbers]

    def take(self, rows: Numbers) -> ValueSources:
        """Return the sources of the rows with these indexes."""
        return ValueSources(
            {name: changes[rows] for name, changes in self.changes_by_column.items()},
            {name: origins[rows] for name, origins in self.origins.items()},
        )

    def inherit(self, rows: Numbers, former_rows: ValueSources) -> ValueSources:
        """Return the sources after the rows with the indexes `rows` have inherited from `former_rows`.

        `former_rows` has for each of them the same row as it was before, for example under the key that a move took it from.
        A row keeps the values that its own changes sent. It inherits the other values, and where it comes from.
        """
        changes_by_column, origins = dict(self.changes_by_column), dict(self.origins)
        for name, changes in self.changes_by_column.items():
            own_changes, changes_by_column[name] = changes[rows], changes.copy()
            changes_by_column[name][rows] = np.where(
                own_changes == NONE, former_rows.changes_by_column[name], own_changes
            )
        for name, numbers in self.origins.items():
            origins[name] = numbers.copy()
            origins[name][rows] = former_rows.origins[name]
        return ValueSources(changes_by_column, origins)


@dataclass(frozen=True)
class NumberedValues:
    """Values of one column. `numbers` are the ascending numbers of the changes or rows that have them."""

    numbers: Numbers
    values: pa.Array

    @classmethod
    def collect(
        cls, value_type: pa.DataType, parts: Iterable[tuple[Numbers, pa.Array | pa.ChunkedArray]]
    ) -> NumberedValues:
        """Collect parts, whose numbers are in any order. A value with the number `NONE` is left out."""
        numbers, chunks = [fill_none(0)], [pa.nulls(0, value_type)]
        for part_numbers, values in parts:
            numbers.append(part_numbers)
            chunks += values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        all_numbers, all_values = np.concatenate(numbers), pa.concat_arrays(chunks)
        if len(all_numbers) and (all_numbers[0] == NONE or (np.diff(all_numbers) < 0).any()):
            order = np.argsort(all_numbers, kind="stable")
            order = order[all_numbers[order] != NONE]
            all_numbers, all_values = all_numbers[order], all_values.take(pa.array(order))
        return cls(all_numbers, all_values)

    def find(self, numbers: Numbers) -> Numbers:
        """Return the indexes of the values with these numbers; `NONE` for a number without a value."""
        if not len(self.numbers):
            return fill_none(len(numbers))
        indexes = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return np.where(self.numbers[indexes] == numbers, indexes, NONE)

    def replace_in(self, rows: pa.RecordBatch, column: str, numbers: Numbers) -> pa.RecordBatch:
        """Replace the values of a column in the rows whose numbers have a value here; `numbers` has each row's number."""
        indexes = self.find(numbers)
        if not (indexes != NONE).any():
            return rows
        column_index = rows.schema.get_field_index(column)
        values = pa.concat_arrays([rows.column(column_index), self.values])
        value_indexes = np.where(indexes == NONE, np.arange(rows.num_rows), rows.num_rows + indexes)
        return rows.set_column(
            column_index, rows.schema.field(column_index), values.take(pa.array(value_indexes))
        )


@dataclass(frozen=True)
class ColumnSources:
    """Where the values of one column are. Each array has one element per row.

    `changes` has the change that sent the value, or `NONE` if no change sent it. Then the value is in the replica's row
    with the number in `base_rows`; without such a row (`NONE`) it is NULL.
    """

    changes: Numbers
    base_rows: Numbers

    @property
    def needed_changes(self) -> Numbers:
        """The changes that have values, in ascending order."""
        return np.unique(self.changes[self.changes != NONE])

    @property
    def needed_base_rows(self) -> Numbers:
        """The numbers of the replica's rows that have values, in ascending order."""
        return np.unique(self.base_rows[(self.changes == NONE) & (self.base_rows != NONE)])

    def take_values(self, sent_values: NumberedValues, base_values: NumberedValues) -> pa.Array:
        """Return the value of each row. `sent_values` are those of the changes, `base_values` those of the replica's rows."""
        sent_count, base_indexes = len(sent_values.numbers), base_values.find(self.base_rows)
        indexes = np.where(
            self.changes == NONE,
            np.where(base_indexes == NONE, NONE, sent_count + base_indexes),
            sent_values.find(self.changes),
        )
        values = pa.concat_arrays([sent_values.values, base_values.values])
        return values.take(pa.array(indexes, mask=indexes == NONE))


@dataclass(frozen=True)
class Completion:
    """Values of a column for rows that are identified by the places of their changes (`compute_places`)."""

    column: str
    values: NumberedValues

    def fill(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Set these values in `rows` and return the rows; `places` has the place of each row's change."""
        return self.values.replace_in(rows, self.column, places)
