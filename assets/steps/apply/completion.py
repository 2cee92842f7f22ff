"""Completes rows that lack values. The value comes from the last change that sent it, or from the replica's row.

An UPDATE does not send a TOASTed value that it leaves unchanged (PostgreSQL documentation, 54.9 Logical Replication
Message Formats, TupleData). In: the places of the changes that made the new rows. For each missing value, this is the
place of the change that sent it, or the key under which the replica has it. Out: the missing values, in parts that fit
in memory. Raises Arrow's errors.

    change       columns sent             completed row of place 9
    place 3      id, note, body           id, note: of place 9
    place 7      id, note                 body: of place 3; of the replica's row if no change sent it
    place 9      id, note
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.extent import compute_places
from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path

#: The most bytes of missing values in memory. If there are more, the rows are completed in parts, and the changes are
#: read again for each part.
MEMORY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class NetRows:
    """New rows of the replica, by the ascending places of the changes that made them.

    `sent_places` has an entry for each column that some change did not send. For each row, the entry has the place of the
    change that sent the row's value of the column, or `NONE` if no change of the batch sent it. For each row, `base_keys`
    has the number of the key under which the replica has the row with the values that no change sent. If this number is
    `NONE`, these values are NULL.
    """

    places: Numbers
    sent_places: Mapping[str, Numbers]
    base_keys: Numbers

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return sum(array.nbytes for array in (self.places, self.base_keys, *self.sent_places.values()))

    def take_range(self, begin: int, end: int) -> "NetRows":
        """Take the rows from number `begin` up to, but not including, `end`."""
        row_range = slice(begin, end)
        sent_places = {name: places[row_range] for name, places in self.sent_places.items()}
        return NetRows(self.places[row_range], sent_places, self.base_keys[row_range])


def find_net_rows(places: Numbers, net: NetChange, has_row: Mask) -> NetRows:
    """Find the new rows of the keys in the mask `has_row`; `places` has the place of each effective change."""
    keys = np.flatnonzero(has_row)
    keys = keys[np.argsort(net.last_changes[keys])]
    sent_places = {
        name: np.where(changes[keys] == NONE, NONE, places[changes[keys]])
        for name, changes in net.changes_by_column.items()
    }
    return NetRows(
        places[net.last_changes[keys]], sent_places, np.where(net.is_updated[keys], net.base_keys[keys], NONE)
    )


@dataclass(frozen=True)
class Completion:
    """Values of one column: `values[i]` is for the row of the change at `places[i]`. The places ascend."""

    column: str
    places: Numbers
    values: pa.Array

    def fill(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Set these values in `rows` and return the rows; `places` has the place of each row's change."""
        if not len(self.places):
            return rows
        indexes = np.minimum(np.searchsorted(self.places, places), len(self.places) - 1)
        has_value = self.places[indexes] == places
        if not has_value.any():
            return rows
        column = rows.schema.get_field_index(self.column)
        values = pa.concat_arrays([rows.column(column), self.values])
        taken = np.where(has_value, rows.num_rows + indexes, np.arange(rows.num_rows))
        return rows.set_column(column, rows.schema.field(column), values.take(pa.array(taken)))


class _BudgetExceededError(Exception):
    """The missing values do not fit in the memory budget."""


@dataclass
class _Budget:
    """The number of bytes that may still be added to memory."""

    bytes: int

    def charge(self, values: pa.Array) -> pa.Array:
        self.bytes -= values.nbytes
        if self.bytes < 0:
            raise _BudgetExceededError
        return values


def read_completions(
    store: Store,
    path: str,
    groups: Sequence[RowGroup],
    slice_ends: Sequence[int],
    matches: Sequence[FileMatches],
    rows: NetRows,
    schema: pa.Schema,
) -> Iterator[tuple[Numbers, Sequence[Completion]]]:
    """Yield parts of the rows: the places of the part, and the values that its rows lack.

    `groups` are the row groups of the change history that have the changes, `slice_ends` the ends of their slices.
    `matches` tells where the replica at `path` has rows with the keys. `schema` has the replica's columns.
    """
    missing_values = _MissingValues(store, path, groups, slice_ends, matches, schema)
    ranges = [(0, len(rows))]
    while ranges:
        begin, end = ranges.pop()
        part, budget = rows.take_range(begin, end), _Budget(MEMORY_BYTES)
        try:
            part_completions = [
                missing_values.read_completion(name, part, budget) for name in rows.sent_places
            ]
        except _BudgetExceededError:
            if end - begin == 1:
                budget = _Budget(2**63)
                part_completions = [
                    missing_values.read_completion(name, part, budget) for name in rows.sent_places
                ]
            else:
                middle = (begin + end) // 2
                ranges += [(middle, end), (begin, middle)]
                continue
        yield part.places, part_completions


@dataclass(frozen=True)
class _MissingValues:
    """Reads missing values from the row groups of the changes, and from the replica's files."""

    store: Store
    path: str
    groups: Sequence[RowGroup]
    slice_ends: Sequence[int]
    matches: Sequence[FileMatches]
    schema: pa.Schema

    def read_completion(self, name: str, rows: NetRows, budget: _Budget) -> Completion:
        """Read the values of the column `name` for the rows that need one, as their last change did not send it.

        Raises _BudgetExceededError if the values exceed the budget.
        """
        sent_places, column_schema = rows.sent_places[name], pa.schema([self.schema.field(name)])
        rows_to_complete = np.flatnonzero(sent_places != rows.places)
        sent_rows, unsent_rows = _split(rows_to_complete, sent_places[rows_to_complete] != NONE)
        replica_rows, null_rows = _split(unsent_rows, rows.base_keys[unsent_rows] != NONE)
        parts = [
            *self._read_from_changes(column_schema, sent_places, sent_rows, budget),
            *self._read_from_replica(column_schema, rows.base_keys, replica_rows, budget),
            (null_rows, pa.nulls(len(null_rows), column_schema.field(name).type)),
        ]
        row_numbers = np.concatenate([numbers for numbers, _ in parts])
        order = np.argsort(row_numbers)
        values = pa.concat_arrays([part_values for _, part_values in parts]).take(pa.array(order))
        return Completion(name, rows.places[row_numbers[order]], values)

    def _read_from_changes(
        self, column_schema: pa.Schema, sent_places: Numbers, rows_to_complete: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """Yield numbers of rows, and the rows' values, which earlier changes sent.

        Several rows may take the value of the same change.
        """
        if not len(rows_to_complete):
            return
        rows_to_complete = rows_to_complete[np.argsort(sent_places[rows_to_complete], kind="stable")]
        (name,), places = column_schema.names, sent_places[rows_to_complete]
        for _, read in self.store.iterate_group_readers(self.groups):
            file_places = compute_places(read(["slice", "number"]), self.slice_ends)
            order = np.argsort(file_places, kind="stable")
            begin, end = (np.searchsorted(places, file_places[order], side) for side in ("left", "right"))
            times = np.where(file_places[order] < 0, 0, end - begin)
            if times.any():
                change_numbers = np.repeat(order, times)
                rows = pa.table(
                    {name: struct_field(read([f"new.{name}"])["new"], name).take(pa.array(change_numbers))}
                )
                numbers = rows_to_complete[_join_ranges(begin, times)]
                yield numbers, budget.charge(_cast_column(rows, column_schema))

    def _read_from_replica(
        self, column_schema: pa.Schema, base_keys: Numbers, rows_to_complete: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """Yield numbers of rows, and the rows' values, which the replica has under the keys with the numbers `base_keys`.

        Several rows may take the value of one key: a row that moves to other keys keeps the value under each of them.
        """
        if not len(rows_to_complete):
            return
        rows_to_complete = rows_to_complete[np.argsort(base_keys[rows_to_complete], kind="stable")]
        keys = base_keys[rows_to_complete]
        for match in self.matches:
            begin, end = (np.searchsorted(keys, match.key_indices, side) for side in ("left", "right"))
            times = end - begin
            if times.any():
                rows = np.repeat(match.row_numbers, times)
                yield (
                    rows_to_complete[_join_ranges(begin, times)],
                    self._read_file_values(match, rows, column_schema, budget),
                )

    def _read_file_values(
        self, match: FileMatches, row_numbers: Numbers, column_schema: pa.Schema, budget: _Budget
    ) -> pa.Array:
        values, begin = [_cast_column(column_schema.empty_table(), column_schema)], 0
        for batch in self.store.read_batches(join_path(self.path, match.name), column_schema):
            first, last = np.searchsorted(row_numbers, (begin, begin + batch.num_rows))
            matching = batch.take(pa.array(row_numbers[first:last] - begin))
            values.append(budget.charge(_cast_column(pa.Table.from_batches([matching]), column_schema)))
            begin += batch.num_rows
        return pa.concat_arrays(values)


def _cast_column(rows: pa.Table, column_schema: pa.Schema) -> pa.Array:
    """Return the only column of the rows, cast to the schema's type."""
    column = conform(rows, column_schema).column(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)


def _split(numbers: Numbers, mask: Mask) -> tuple[Numbers, Numbers]:
    return numbers[mask], numbers[~mask]


def _join_ranges(begins: Numbers, counts: Numbers) -> Numbers:
    """Concatenate ranges of numbers. Range i starts at `begins[i]` and has `counts[i]` numbers."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
