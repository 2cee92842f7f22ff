"""Reads the values that rows lack, because their changes did not send them. `value_sources` says where these values are.

A batch is the changes that are applied to a replica in one commit. The place of a change is a number that orders the
changes of a batch.

In:  - the places of the changes that made the new rows
     - for each missing value the place of the change that sent it, or the key under which the replica has it
Out: the missing values, in portions that fit in memory. The process that writes the rows reads the values.

Raises Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import NONE, Numbers, is_in
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.extent import compute_places
from pgsieve.decoding.changes.net_rows import NetRows
from pgsieve.decoding.changes.value_sources import Completion, NumberedValues
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path

#: The most bytes of missing values in the memory of a task. If there are more, the rows are completed in portions, and the
#: task reads its changes again for each portion.
MEMORY_BYTES = 64 * 1024 * 1024
_NO_ROWS = np.empty(0, np.int64)


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
        base_keys = np.where(self.rows.is_unsent, self.rows.base_keys, NONE)
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
        column_schema, (_, sources) = pa.schema([self.schema.field(name)]), rows.find_column_sources(name)
        value_type = column_schema.field(name).type
        sent_values = NumberedValues.collect(
            value_type, self._read_from_changes(column_schema, sources.needed_changes, budget)
        )
        base_values = NumberedValues.collect(
            value_type, self._read_from_replica(column_schema, sources.needed_base_rows, budget)
        )
        # With `history: scd2`, each version that a row has during the batch counts as a row. Several of them may have the
        # value of one change, or of one row of the replica.
        completion = rows.complete(name, sent_values, base_values)
        if len(completion.values.numbers) > len(sent_values.numbers) + len(base_values.numbers):
            budget.charge(completion.values.values)
        return completion

    def _read_from_changes(
        self, column_schema: pa.Schema, wanted_places: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """Yield the values that the changes at `wanted_places` sent, with the places of these changes."""
        if not len(wanted_places):
            return
        (name,) = column_schema.names
        for _, read in self.store.iterate_group_readers(self.groups):
            places = compute_places(read(["slice", "number"]), self.slice_ends)
            is_wanted = is_in(places, wanted_places)
            if is_wanted.any():
                values = struct_field(read([f"new.{name}"])["new"], name).filter(pa.array(is_wanted))
                yield (
                    places[is_wanted],
                    budget.charge(_cast_column(pa.table({name: values}), column_schema)),
                )

    def _read_from_replica(
        self, column_schema: pa.Schema, wanted_keys: Numbers, budget: _Budget
    ) -> Iterator[tuple[Numbers, pa.Array]]:
        """Yield the values of the replica's rows with the keys `wanted_keys`, with the numbers of these keys."""
        for match in self.matches if len(wanted_keys) else ():
            is_wanted = is_in(match.key_indices, wanted_keys)
            if is_wanted.any():
                values = self._read_file_values(match, match.row_numbers[is_wanted], column_schema, budget)
                yield match.key_indices[is_wanted], values

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
