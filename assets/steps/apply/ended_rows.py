"""Ended rows: rows that a replica with `deletes: soft` keeps and marks as deleted, in columns of metadata.

A row ends by a DELETE, by a TRUNCATE, or by an UPDATE that moves the row out of the row filter. A batch is the changes
that are applied to a replica in one commit. The place of a change is a number that orders the changes of a batch.

In:  the net change of a batch (what its changes do together to each key), and the replica's rows with these keys
Out: - the replica's rows that end, by file; they are written again with new metadata
     - the metadata of new rows that the same batch ends

Raises Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_change import NetChange
from pgsieve.decoding.changes.value_sources import Completion, NumberedValues
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.stores.store import Store, join_path


@dataclass(frozen=True)
class EndedRows:
    """The rows of one file of the replica that end: their numbers in the file, in order, and their new metadata.

    The row with the number `row_numbers[i]` gets the metadata in row `metadata_rows[i]` of `metadata`.
    """

    file_name: str
    row_numbers: Numbers
    metadata_rows: Numbers
    metadata: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return self.row_numbers.nbytes + self.metadata_rows.nbytes + int(self.metadata.nbytes)

    def read_batches(
        self, store: Store, path: str, schema: pa.Schema, stamp: Stamp
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows, and yield them with their new metadata; `path` is the replica, `schema` its columns."""
        metadata_columns = pa.schema([schema.field(name) for name in self.metadata.column_names])
        new_metadata = conform(self.metadata, metadata_columns)
        for part, rows in read_rows(store, join_path(path, self.file_name), schema, self.row_numbers):
            part_metadata, batch = new_metadata.take(pa.array(self.metadata_rows[part])), rows
            for name in metadata_columns.names:
                index = schema.get_field_index(name)
                batch = batch.set_column(index, schema.field(index), _join_chunks(part_metadata[name]))
            yield stamp.set_time(batch)


@dataclass(frozen=True)
class RowEndings:
    """Finds the rows that a batch ends but the replica keeps.

    `has_row` is the mask of the net change's keys that have a row after the batch, even if only an ended row.
    `truncated_rows` are the rows of the replica that a TRUNCATE ends; empty without a TRUNCATE.
    """

    keyed_changes: KeyedChanges
    net_change: NetChange
    has_row: Mask
    truncated_rows: Sequence[FileMatches]

    @property
    def metadata(self) -> pa.Table:
        """For each change, the metadata of a row that it ends. The last row is for the first TRUNCATE, if there is one."""
        assert self.keyed_changes.end_metadata is not None
        return pa.concat_tables(
            [
                table
                for table in (self.keyed_changes.end_metadata, self.keyed_changes.truncated_metadata)
                if table is not None
            ]
        )

    @property
    def truncated_key(self) -> int:
        """The number that stands for all keys that no change of the batch has: the number after that of the last key.

        Only a TRUNCATE ends rows with these keys.
        """
        return int(self.keyed_changes.keys.num_rows)

    def split_rows(self, removed_rows: Sequence[FileMatches]) -> tuple[list[FileMatches], list[EndedRows]]:
        """Return the rows to remove from their files, and those of these rows that are written again as ended rows.

        `removed_rows` are the replica's rows that the batch replaces: by another row of the same key or, if the row ends,
        by the same row with new metadata.
        """
        metadata, metadata_by_key = self.metadata, self.find_metadata_rows()
        matches, ended_rows = (
            _merge_matches(removed_rows, self.truncated_rows, self.truncated_key),
            list[EndedRows](),
        )
        for match in matches:
            metadata_rows = metadata_by_key[match.key_indices]
            is_kept = metadata_rows != NONE
            if is_kept.any():
                metadata_numbers, metadata_indices = np.unique(metadata_rows[is_kept], return_inverse=True)
                ended_rows.append(
                    EndedRows(
                        match.name,
                        match.row_numbers[is_kept],
                        metadata_indices,
                        metadata.take(pa.array(metadata_numbers)),
                    )
                )
        return matches, ended_rows

    def find_metadata_rows(self) -> Numbers:
        """For each key, find the row of `metadata` for the replica's row that ends; `NONE` if none ends.

        The last element is for rows with other keys, which a TRUNCATE ends.
        """
        net, key_count = self.net_change, self.keyed_changes.keys.num_rows
        is_ended = self.has_row & (net.last_changes == NONE)
        metadata_rows = np.full(key_count + 1, NONE)
        metadata_rows[net.keys[is_ended]] = net.end_changes[is_ended]
        metadata_rows[key_count] = self.metadata.num_rows - 1
        return metadata_rows

    def make_completions(self, schema: pa.Schema) -> list[Completion]:
        """Make the metadata of the rows that the batch both writes and ends; `schema` has the replica's columns."""
        return make_completions(*self.find_ended_new_rows(), schema)

    def find_ended_new_rows(self) -> tuple[Numbers, pa.Table]:
        """Find the rows that the batch both writes and ends: the ascending places of their changes, and their metadata."""
        net = self.net_change
        keys = np.flatnonzero(self.has_row & (net.last_changes != NONE) & (net.end_changes != NONE))
        keys = keys[np.argsort(net.last_changes[keys])]
        return self.keyed_changes.places[net.last_changes[keys]], self.metadata.take(
            pa.array(net.end_changes[keys])
        )


def make_completions(places: Numbers, metadata: pa.Table, schema: pa.Schema) -> list[Completion]:
    """Make the values of metadata columns for the new rows at `places`; `schema` has the replica's columns."""
    metadata = conform(metadata, pa.schema([schema.field(name) for name in metadata.column_names]))
    return [
        Completion(name, NumberedValues(places, _join_chunks(metadata[name])))
        for name in metadata.column_names
    ]


def _merge_matches(
    removed_rows: Sequence[FileMatches], truncated_rows: Sequence[FileMatches], other_key: int
) -> list[FileMatches]:
    """Join both sets of rows, by file. A row that is only in `truncated_rows` gets the key number `other_key`."""
    truncated_match_by_file = {
        match.name: replace(match, key_indices=np.full(len(match.row_numbers), other_key))
        for match in truncated_rows
    }
    merged_matches = list[FileMatches]()
    for match in removed_rows:
        rows, keys = match.row_numbers, match.key_indices
        if (truncated_match := truncated_match_by_file.pop(match.name, None)) is not None:
            only_truncated = np.setdiff1d(truncated_match.row_numbers, rows)
            rows, keys = (
                np.concatenate([rows, only_truncated]),
                np.concatenate([keys, np.full(len(only_truncated), other_key)]),
            )
            order = np.argsort(rows)
            rows, keys = rows[order], keys[order]
        merged_matches.append(replace(match, row_numbers=rows, key_indices=keys))
    return [*merged_matches, *truncated_match_by_file.values()]


def _join_chunks(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
