"""Picks rows from changes: the rows as they are after a change, or as they were before it.

A batch is the changes that one commit applies. The place of a change is a number that orders the changes of a batch
(`pgsieve.decoding.changes.extent`).

In: columns of a change history (the Delta table with all changes of a table), from a row group of a file or from Spark.
Out: the rows of the changes at chosen places. If a change does not send an unchanged TOAST value, the row gets this
value from an earlier change or from the replica. Raises Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.completion import MissingValues
from pgsieve.decoding.changes.arrays import Mask, Numbers, is_in
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent, compute_places
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.value_sources import Completion
from pgsieve.decoding.changes.versions import VALIDITY_SCHEMA, Commits, add_validity
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.stores.store import Reader, RowGroup, Store


class AddedColumns(Protocol):
    """Columns that rows get when they are read from changes."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that are added."""

    def add_to(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Add the columns; `places` has the place of each row's change."""


@dataclass(frozen=True)
class Validity:
    """The commits that begin and end versions of rows (`history: scd2`).

    - `places`: the ascending places of the changes that begin the versions
    - `begin_commits`, `end_commits`: for each version, the numbers of the commits that begin and end it
    - `commits`: the commits by their numbers
    """

    places: Numbers
    begin_commits: Numbers
    end_commits: Numbers
    commits: Commits

    @property
    def schema(self) -> pa.Schema:
        """The columns that are added."""
        return VALIDITY_SCHEMA

    def add_to(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Add the columns that say from when to when each row is valid; `places` has the place of each row's change."""
        begin = int(np.searchsorted(self.places, places[0])) if len(places) else 0
        versions: slice | Numbers = slice(begin, begin + len(places))
        # Mostly the rows are consecutive versions, and the first one's place is enough to find them.
        if not np.array_equal(self.places[versions], places):
            versions = np.searchsorted(self.places, places)
        return add_validity(rows, self.begin_commits[versions], self.end_commits[versions], self.commits)


@dataclass(frozen=True)
class RowSelection:
    """Chooses rows from the changes of a batch. It is sent to executors.

    - `extent`: tells which changes of the history belong to the batch
    - `stamp`: sets the column `applied_at` of the rows, if there is one
    - `places`: the ascending places of the chosen changes; if it is None, all INSERTs are chosen except those that a later
      TRUNCATE removes
    - `completions`: values that are in memory already, and are put into columns of the chosen rows
    - `missing_values`: finds the values that the chosen changes did not send, and that are not in memory yet. `divide` reads
      them, and makes them `completions`. None if there are none.
    - `added_columns`: if it is given, the rows get its columns. With a `Validity` they become versions of rows (`scd2`).
    - `side`: `new` for the rows after the changes, `old` for the rows before them
    """

    extent: Extent
    stamp: Stamp
    places: Numbers | None = None
    completions: Sequence[Completion] = ()
    missing_values: MissingValues | None = None
    added_columns: AddedColumns | None = None
    side: str = "new"

    def make_file_schema(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns of the files: those of the rows, and the `added_columns`."""
        return rows if self.added_columns is None else pa.schema([*rows, *self.added_columns.schema])

    def divide(self, store: Store, groups: Sequence[RowGroup]) -> Iterator["RowSelection"]:
        """Divide the selection into portions whose missing values fit in memory, and read these values.

        `groups` are the row groups that have the chosen changes.
        """
        if self.missing_values is None:
            yield self
            return
        all_places = [
            compute_places(read(["slice", "number"]), self.extent.slices)
            for _, read in store.iterate_group_readers(groups)
        ]
        for places, completions in self.missing_values.read_portions(np.concatenate(all_places)):
            all_completions = [*completions, *self.completions]
            yield replace(self, places=places, completions=all_completions, missing_values=None)

    def read_placed_rows(self, read: Reader, row_type: pa.DataType) -> tuple[Numbers, pa.RecordBatch] | None:
        """Read the chosen rows of the changes, with the places of their changes; None if there are none.

        `read` reads columns of the changes.
        """
        changes = read(PLACE_COLUMNS)
        places = compute_places(changes, self.extent.slices)
        is_chosen = self._mask_inserts(changes) if self.places is None else is_in(places, self.places)
        if not is_chosen.any():
            return None
        rows, places = read([self.side]), places[is_chosen]
        rows = rows if is_chosen.all() else rows.filter(pa.array(is_chosen))
        batch = pa.RecordBatch.from_struct_array(
            conform(rows, pa.schema([(self.side, row_type)]))[self.side].combine_chunks()
        )
        for completion in self.completions:
            batch = completion.fill(batch, places)
        batch = self.stamp.set_time(batch)
        return places, batch if self.added_columns is None else self.added_columns.add_to(batch, places)

    def _mask_inserts(self, changes: pa.Table) -> Mask:
        is_insert: Mask = self.extent.mask_effective_changes(changes) & np.asarray(
            pc.equal(changes["operation"], "insert")
        )
        return is_insert


def make_reader(changes: pa.Table) -> Reader:
    """Return a function that returns columns of these changes, for `RowSelection`."""
    return lambda names: changes.select(list(names))
