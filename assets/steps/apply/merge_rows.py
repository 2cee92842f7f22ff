"""The rows of a net change, for a replica that is changed by a MERGE.

A batch is the changes that are applied to a replica in one commit. Its net change is what they do together to each key. The
place of a change is a number that orders the changes of a batch.

In: the net change, and the keys as the replica has them. Out: what the source of the MERGE has for each key: the new row,
or that the row is deleted. The new rows are functions of Arrow batches, so delta-rs and Spark get the same. Raises Arrow's
errors.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.ended_rows import RowEndings
from pgsieve.assets.steps.apply.keyed_changes import ChangesOutcome, KeyedChanges
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_rows import NetRows, find_net_rows
from pgsieve.decoding.changes.value_sources import Completion, NumberedValues
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit

#: Rows in the form of an engine: a table of Arrow, or a DataFrame of Spark.
Rows = TypeVar("Rows")


@dataclass(frozen=True)
class MergeRows:
    """What the source of a MERGE has, in the columns of `merge`. The object is sent to executors.

    - `new_rows`: the rows that the MERGE inserts, or puts in the place of the rows with their keys
    - `new_keys`: the keys of these rows, as the replica has them
    - `ended_metadata`: the metadata of those new rows that the batch also ends; the replica keeps them as deleted rows
    - `other_rows`: the keys whose rows are deleted, or end; with new metadata if they end
    - `key_numbers`: the numbers of the keys of all these rows
    """

    merge: Merge
    new_rows: NetRows
    new_keys: pa.Table
    ended_metadata: Sequence[Completion]
    other_rows: pa.Table
    key_numbers: Numbers

    @classmethod
    def make(
        cls,
        merge: Merge,
        keyed_changes: KeyedChanges,
        present_keys: PresentKeys,
        outcome: ChangesOutcome,
        row_schema: pa.Schema,
        stamp: Stamp,
    ) -> "MergeRows":
        """Make the rows from the outcome of a batch; `row_schema` has the replica's columns."""
        net, has_row, retain_ended = outcome.net, outcome.has_row, keyed_changes.end_metadata is not None
        has_values = net.last_changes != NONE
        new_rows = find_net_rows(keyed_changes.effective_places, net, has_row & has_values)
        new_keys = keyed_changes.find_new_keys(new_rows.places)
        others = np.flatnonzero(
            has_row & ~has_values if retain_ended else ~has_row & outcome.had_row[net.keys]
        )
        stored_keys = present_keys.take_stored_keys(keyed_changes.keys).rename_columns(
            list(merge.key_source_by_column.values())
        )
        ended_metadata = list[Completion]()
        other_rows = stored_keys.take(pa.array(net.keys[others]))
        if retain_ended:
            ended_metadata = RowEndings(keyed_changes, net, has_row, ()).make_completions(row_schema)
            metadata = keyed_changes.make_ended_metadata(net.end_changes[others], stamp)
            for name in metadata.column_names:
                other_rows = other_rows.append_column(merge.value_source_by_column[name], metadata[name])
        actions = pa.array(["end" if retain_ended else "delete"] * len(others), pa.string())
        return cls(
            merge,
            new_rows,
            stored_keys.take(pa.array(new_keys)),
            ended_metadata,
            other_rows.append_column("action", actions),
            np.concatenate([new_keys, net.keys[others]]),
        )

    def complete(
        self,
        rows: pa.RecordBatch,
        places: Numbers,
        sent_values: Mapping[str, NumberedValues],
        base_values: Mapping[str, NumberedValues],
    ) -> pa.RecordBatch:
        """Set the values that the changes of some new rows did not send; `places` has the place of each row's change.

        `sent_values` has for each column the values of other changes, and `base_values` those of the replica's rows
        (`NetRows.complete`).
        """
        new_rows = self.new_rows.take(np.sort(self._find_rows(places)))
        for name in new_rows.sent_places:
            rows = new_rows.complete(name, sent_values[name], base_values[name]).fill(rows, places)
        return rows

    def make_source(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Turn new rows into rows of the source; `places` has the place of each row's change."""
        keys = self.new_keys.take(pa.array(self._find_rows(places))).combine_chunks()
        columns = {name: _join_chunks(keys[name]) for name in keys.column_names}
        columns |= {v: rows.column(name) for name, v in self.merge.value_source_by_column.items()}
        columns["action"] = pa.array(["upsert"] * rows.num_rows, pa.string())
        return pa.RecordBatch.from_arrays([*columns.values()], [*columns])

    def _find_rows(self, places: Numbers) -> Numbers:
        return np.searchsorted(self.new_rows.places, places)


class ChangesToMerge(ABC, Generic[Rows]):
    """The changes of a batch, and the replica into which an engine merges them."""

    @property
    @abstractmethod
    def row_schema(self) -> pa.Schema:
        """The replica's columns."""

    @abstractmethod
    def read_keyed_changes(self) -> KeyedChanges:
        """Read the changes by key."""

    @abstractmethod
    def find_present_keys(self, keyed_changes: KeyedChanges) -> PresentKeys:
        """Find the rows of the replica that have one of the keys to look up (`KeyedChanges.sought_keys`)."""

    @abstractmethod
    def read_inserts(self) -> Rows:
        """Read the new rows of the INSERTs after the last TRUNCATE."""

    @abstractmethod
    def count(self, rows: Rows) -> int:
        """Count rows."""

    @abstractmethod
    def read_new_rows(self, merge_rows: MergeRows, keyed_changes: KeyedChanges) -> Rows:
        """Read the new rows of a net change, in the columns of the replica."""

    @abstractmethod
    def append(self, rows: Rows, commit: Commit) -> None:
        """Append rows to the replica, or overwrite the replica with them."""

    @abstractmethod
    def merge(self, merge_rows: MergeRows, keyed_changes: KeyedChanges, commit: Commit) -> bool:
        """Merge a net change into the replica. Returns False if the replica has the position of the commit already."""


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
