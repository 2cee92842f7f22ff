"""Ended rows: rows that a replica with `deletes: soft` keeps and marks as deleted, and the metadata of these rows.

A row ends by a DELETE, by a TRUNCATE, or by an UPDATE that moves the row out of the row filter. In: the net change of a
batch, and the replica's rows of the batch's keys. Out: the replica's rows that end, by file, which are written again
with new metadata; and the metadata of new rows that the same batch ends. Raises Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.completion import Completion
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.derived_rows import read_rows
from pgsieve.resources.lake.stores.store import Store, join_path


@dataclass(frozen=True)
class EndedRows:
    """The rows of the replica's file `name` that end: their ascending numbers in the file, and their new metadata.

    The row with the number `rows[i]` gets the metadata in row `metadata_rows[i]` of `metadata`.
    """

    name: str
    rows: Numbers
    metadata_rows: Numbers
    metadata: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return self.rows.nbytes + self.metadata_rows.nbytes + int(self.metadata.nbytes)

    def batches(self, store: Store, path: str, schema: pa.Schema, stamp: Stamp) -> Iterator[pa.RecordBatch]:
        """Read the rows, and yield them with their new metadata; `path` is the replica, `schema` its columns."""
        fields = pa.schema([schema.field(name) for name in self.metadata.column_names])
        new_metadata = conform(self.metadata, fields)
        for numbers, rows in read_rows(store, join_path(path, self.name), schema, self.rows):
            values, batch = new_metadata.take(pa.array(self.metadata_rows[numbers])), rows
            for name in fields.names:
                index = schema.get_field_index(name)
                batch = batch.set_column(index, schema.field(index), _single_array(values[name]))
            yield stamp.apply(batch)


@dataclass(frozen=True)
class Endings:
    """The rows that a batch ends but the replica keeps.

    `remains` is the mask of the keys of the net change that have a row after the batch; this row may be an ended one.
    `truncated_rows` are the rows of the replica that a TRUNCATE ends; empty without a TRUNCATE.
    """

    keyed: KeyedChanges
    net: NetChange
    remains: Mask
    truncated_rows: Sequence[FileMatches]

    @property
    def _metadata(self) -> pa.Table:
        """The metadata of ended rows: a row per change; and at the end, if there is a TRUNCATE, a row for the first one."""
        assert self.keyed.end_metadata is not None
        return pa.concat_tables(
            [table for table in (self.keyed.end_metadata, self.keyed.truncated_metadata) if table is not None]
        )

    def split_rows(self, leaving: Sequence[FileMatches]) -> tuple[list[FileMatches], list[EndedRows]]:
        """Return the rows to remove from their files, and those among them to write again as ended rows.

        `leaving` are the replica's rows for which the batch writes another row of the same key.
        """
        net, metadata, other_key = self.net, self._metadata, self.keyed.keys.num_rows
        is_ended = self.remains & (net.last == NONE)
        metadata_by_key = np.full(other_key + 1, NONE)
        metadata_by_key[net.keys[is_ended]] = net.ended[is_ended]
        metadata_by_key[other_key] = metadata.num_rows - 1
        matches, ended_rows = _merge_matches(leaving, self.truncated_rows, other_key), list[EndedRows]()
        for match in matches:
            end_rows = metadata_by_key[match.key_indices]
            is_kept = end_rows != NONE
            if is_kept.any():
                metadata_numbers, metadata_rows = np.unique(end_rows[is_kept], return_inverse=True)
                ended_rows.append(
                    EndedRows(
                        match.name,
                        match.row_numbers[is_kept],
                        metadata_rows,
                        metadata.take(pa.array(metadata_numbers)),
                    )
                )
        return matches, ended_rows

    def completions(self, schema: pa.Schema) -> list[Completion]:
        """The metadata of the rows that the batch both writes and ends; `schema` has the replica's columns."""
        net = self.net
        changed = np.flatnonzero(self.remains & (net.last != NONE) & (net.ended != NONE))
        changed = changed[np.argsort(net.last[changed])]
        metadata = self._metadata.take(pa.array(net.ended[changed]))
        metadata = conform(metadata, pa.schema([schema.field(name) for name in metadata.column_names]))
        places = self.keyed.places[net.last[changed]]
        return [Completion(name, places, _single_array(metadata[name])) for name in metadata.column_names]


def _merge_matches(
    leaving: Sequence[FileMatches], truncated_rows: Sequence[FileMatches], key: int
) -> list[FileMatches]:
    """The union of both sets of rows, by file. A row that is only in `truncated_rows` gets the key number `key`."""
    truncated = {
        match.name: replace(match, key_indices=np.full(len(match.row_numbers), key))
        for match in truncated_rows
    }
    merged = list[FileMatches]()
    for match in leaving:
        rows, keys = match.row_numbers, match.key_indices
        if (truncated_match := truncated.pop(match.name, None)) is not None:
            truncated_only = np.setdiff1d(truncated_match.row_numbers, rows)
            rows, keys = (
                np.concatenate([rows, truncated_only]),
                np.concatenate([keys, np.full(len(truncated_only), key)]),
            )
            order = np.argsort(rows)
            rows, keys = rows[order], keys[order]
        merged.append(replace(match, row_numbers=rows, key_indices=keys))
    return [*merged, *truncated.values()]


def _single_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
