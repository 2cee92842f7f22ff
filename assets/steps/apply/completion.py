"""Completes rows that lack values. The value comes from the last change that sent it, or from the replica's row.

A batch is the changes that are applied to a replica in one commit.

An UPDATE does not send a TOASTed value that it leaves unchanged (PostgreSQL documentation, 54.9 Logical Replication
Message Formats, TupleData). The place of a change is a number that orders the changes of a batch.

In:  - the places of the changes that made the new rows
     - for each missing value the place of the change that sent it, or the key under which the replica has it
Out: the missing values, in portions that fit in memory. The process that writes the rows reads the values.

Raises Arrow's errors.

    change       columns sent
    place 3      id, note, body
    place 7      id, note
    place 9      id, note                 the new row has id and note of place 9, and body of place 3

If no change had sent body, the new row would have the body of the replica's row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.extent import compute_places
from pgsieve.decoding.changes.net_change import LeftRows, NetChange
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.derived_rows import read_rows
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path

#: The most bytes of missing values in the memory of a task. If there are more, the rows are completed in portions, and the
#: task reads its changes again for each portion.
MEMORY_BYTES = 64 * 1024 * 1024
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class NetRows:
    """New rows of the replica, in the order of the changes that made them. `places` has the places of these changes.

    - `sent_places` has an array for each column that some change did not send. For each row, the array has the place of
      the change that sent the row's value, or `NONE` if no change of the batch sent it.
    - `base_keys` has for each row the number of a key: the replica's row with this key has the values that no change
      sent. If it is `NONE`, these values are NULL.
    - `begin_places` has for each row the place of the INSERT with which it began, or `NONE` if the replica had it. An
      UPDATE of the key counts as an INSERT with the new key.
    """

    places: Numbers
    sent_places: Mapping[str, Numbers]
    base_keys: Numbers
    begin_places: Numbers

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return sum(
            array.nbytes
            for array in (self.places, self.base_keys, self.begin_places, *self.sent_places.values())
        )

    def take(self, numbers: Numbers) -> "NetRows":
        """Take the rows with these numbers, which ascend."""
        sent_places = {name: places[numbers] for name, places in self.sent_places.items()}
        return NetRows(self.places[numbers], sent_places, self.base_keys[numbers], self.begin_places[numbers])


def find_net_rows(places: Numbers, net: NetChange, has_row: Mask) -> NetRows:
    """Find the new rows, those of the keys for which `has_row` is True.

    `places` has the place of each change after the last TRUNCATE. `net` is what these changes do together. It refers to a
    change by its index in `places`.
    """
    indices = np.flatnonzero(has_row)
    indices = indices[np.argsort(net.last_changes[indices])]
    sent_places = {
        name: find_places(places, changes[indices]) for name, changes in net.changes_by_column.items()
    }
    base_keys = np.where(net.is_updated[indices], net.base_keys[indices], NONE)
    begin_places = find_places(places, net.begin_changes[indices])
    return NetRows(places[net.last_changes[indices]], sent_places, base_keys, begin_places)


def describe_left_rows(places: Numbers, left_rows: LeftRows) -> NetRows:
    """Describe the rows whose key an UPDATE changes, as they are before it. The result has the places of these UPDATEs.

    The argument `places` has the place of each change.
    """
    sent_places = {
        name: find_places(places, changes) for name, changes in left_rows.changes_by_column.items()
    }
    begin_places = find_places(places, left_rows.begin_changes)
    return NetRows(places[left_rows.leaves], sent_places, left_rows.base_keys, begin_places)


def find_places(places: Numbers, changes: Numbers) -> Numbers:
    """Find the places of changes, which are given by their indices in `places`; `NONE` stays `NONE`."""
    return np.where(changes == NONE, NONE, places[changes]) if len(places) else changes


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
        value_indices = np.where(has_value, rows.num_rows + indexes, np.arange(rows.num_rows))
        return rows.set_column(column, rows.schema.field(column), values.take(pa.array(value_indices)))


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


@dataclass(frozen=True)
class MissingValues:
    """Finds the values that new rows lack. It is sent to executors.

    - `groups`: the row groups with the changes, in the table's change history (the Delta table with all its changes)
    - `slice_ends`: the LSNs at which the slices of these changes end; a slice is the changes between two positions of
      the slot
    - `matches`: where the replica at `path` has rows with the keys
    - `schema`: the replica's columns
    - `rows`: the new rows
    """

    store: Store
    path: str
    groups: Sequence[RowGroup]
    slice_ends: Sequence[int]
    matches: Sequence[FileMatches]
    schema: pa.Schema
    rows: NetRows

    def reduce(self) -> "MissingValues":
        """Leave out the rows of the replica from which no new row takes a value."""
        lacks_value = np.zeros(len(self.rows), np.bool_)
        for places in self.rows.sent_places.values():
            lacks_value |= places == NONE
        base_keys = np.where(lacks_value, self.rows.base_keys, NONE)
        greatest_keys = (int(match.key_indices.max(initial=NONE)) for match in self.matches)
        is_base = np.zeros(max(greatest_keys, default=NONE) + 1, np.bool_)
        is_base[base_keys[base_keys != NONE]] = True
        base_matches = (match.select_keys(is_base) for match in self.matches)
        matches = [replace(m, deleted_row_numbers=_NO_ROWS) for m in base_matches if len(m.row_numbers)]
        return replace(self, matches=matches, rows=replace(self.rows, base_keys=base_keys))

    def read_portions(self, places: Numbers) -> Iterator[tuple[Numbers, Sequence[Completion]]]:
        """Divide the rows whose changes are at `places` into portions; yields their places and the values that they lack.

        A portion has rows that are near each other in the replica, so that few portions read the same row group.
        """
        rows = self.rows.take(np.flatnonzero(np.isin(self.rows.places, places)))
        order = np.argsort(self._find_locations(rows.base_keys), kind="stable")
        ranges = [(0, len(rows))] if len(rows) else []
        while ranges:
            begin, end = ranges.pop()
            portion = rows.take(np.sort(order[begin:end]))
            # A single row is completed even if its values are large.
            budget = _Budget(MEMORY_BYTES if end - begin > 1 else 2**63)
            try:
                completions = [self.read_completion(name, portion, budget) for name in rows.sent_places]
            except _BudgetExceededError:
                middle = (begin + end) // 2
                ranges += [(middle, end), (begin, middle)]
                continue
            yield portion.places, completions

    def _find_locations(self, key_numbers: Numbers) -> Numbers:
        """For each key, find the location of its row in the replica.

        A location is a number that orders rows by file and row. It is NONE without a row.
        """
        location_by_key = np.full(int(key_numbers.max(initial=NONE)) + 2, NONE)
        for number, match in enumerate(self.matches):
            is_sought = match.key_indices < len(location_by_key) - 1
            location_by_key[match.key_indices[is_sought]] = (number << 32) + match.row_numbers[is_sought]
        return location_by_key[key_numbers]

    def read_completion(self, name: str, rows: NetRows, budget: _Budget) -> Completion:
        """Read the values of the column `name` for the rows whose last change did not send it.

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
        """Yield numbers of rows, and the values that earlier changes sent for these rows.

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
            repetitions = np.where(file_places[order] < 0, 0, end - begin)
            if repetitions.any():
                change_numbers = np.repeat(order, repetitions)
                rows = pa.table(
                    {name: struct_field(read([f"new.{name}"])["new"], name).take(pa.array(change_numbers))}
                )
                numbers = rows_to_complete[_join_ranges(begin, repetitions)]
                yield numbers, budget.charge(_cast_column(rows, column_schema))

    def _read_from_replica(
        self, column_schema: pa.Schema, base_keys: Numbers, rows_to_complete: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """Yield numbers of rows, and their values from the replica's rows with the keys `base_keys`.

        Several rows may take their value from one row: with `history: scd2`, each version that a row has during the batch
        counts as a row. All versions before the first change that sends the value take it from the replica.
        """
        if not len(rows_to_complete):
            return
        rows_to_complete = rows_to_complete[np.argsort(base_keys[rows_to_complete], kind="stable")]
        keys = base_keys[rows_to_complete]
        for match in self.matches:
            begin, end = (np.searchsorted(keys, match.key_indices, side) for side in ("left", "right"))
            repetitions = end - begin
            if repetitions.any():
                rows = np.repeat(match.row_numbers, repetitions)
                yield (
                    rows_to_complete[_join_ranges(begin, repetitions)],
                    self._read_file_values(match, rows, column_schema, budget),
                )

    def _read_file_values(
        self, match: FileMatches, row_numbers: Numbers, column_schema: pa.Schema, budget: _Budget
    ) -> pa.Array:
        values = [_cast_column(column_schema.empty_table(), column_schema)]
        for _, batch in read_rows(self.store, join_path(self.path, match.name), column_schema, row_numbers):
            values.append(budget.charge(_cast_column(pa.Table.from_batches([batch]), column_schema)))
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
