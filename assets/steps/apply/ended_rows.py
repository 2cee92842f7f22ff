"""Ended rows, which a replica with `deletes: soft` keeps and marks as deleted, and their metadata.

A row ends by a DELETE, by a TRUNCATE, or by an UPDATE that moves it out of the row filter. In: the net change of a
batch, and the replica's rows of its keys. Out: by file, the replica's rows that end, to be written again with new
metadata; and the metadata of new rows that the same batch ends. Raises Arrow's errors.
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
from pgsieve.resources.lake.derived_rows import rows_at
from pgsieve.resources.lake.stores.store import Store, join_path


@dataclass(frozen=True)
class EndedRows:
    """The rows of the file `name` that end: their ascending numbers in the file, and their metadata.

    The row `rows[i]` of the file gets the metadata in row `which[i]` of `ended`.
    """

    name: str
    rows: Numbers
    which: Numbers
    ended: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        return self.rows.nbytes + self.which.nbytes + int(self.ended.nbytes)

    def batches(self, store: Store, path: str, schema: pa.Schema, stamp: Stamp) -> Iterator[pa.RecordBatch]:
        """The rows with their new metadata; `path` is the replica, `schema` its columns."""
        fields = pa.schema([schema.field(name) for name in self.ended.column_names])
        ended = conform(self.ended, fields)
        for which, rows in rows_at(store, join_path(path, self.name), schema, self.rows):
            metadata, batch = ended.take(pa.array(self.which[which])), rows
            for name in fields.names:
                place = schema.get_field_index(name)
                batch = batch.set_column(place, schema.field(place), _single_array(metadata[name]))
            yield stamp.apply(batch)


@dataclass(frozen=True)
class Endings:
    """The rows that a batch ends but the replica keeps.

    `remains` marks the keys of the net change that have a row after the batch, even an ended one. `emptied` are all
    rows of the replica that a TRUNCATE ends.
    """

    keyed: KeyedChanges
    net: NetChange
    remains: Mask
    emptied: Sequence[FileMatches]

    @property
    def _metadata(self) -> pa.Table:
        """The metadata of ended rows: a row for each change, then one for the first TRUNCATE, if any."""
        assert self.keyed.ended is not None
        return pa.concat_tables([each for each in (self.keyed.ended, self.keyed.emptied) if each is not None])

    def split_rows(self, leaving: Sequence[FileMatches]) -> tuple[list[FileMatches], list[EndedRows]]:
        """The rows to remove from their files, and which of them to write again as ended.

        `leaving` are the rows whose keys the batch replaces.
        """
        net, metadata, other_key = self.net, self._metadata, self.keyed.keys.num_rows
        is_ended = self.remains & (net.last == NONE)
        ended_by = np.full(other_key + 1, NONE)
        ended_by[net.keys[is_ended]] = net.ended[is_ended]
        ended_by[other_key] = metadata.num_rows - 1
        removed, ended = _merge_matches(leaving, self.emptied, other_key), list[EndedRows]()
        for match in removed:
            by = ended_by[match.keys]
            stays = by != NONE
            if stays.any():
                changes, which = np.unique(by[stays], return_inverse=True)
                ended.append(
                    EndedRows(match.name, match.rows[stays], which, metadata.take(pa.array(changes)))
                )
        return removed, ended

    def completions(self, schema: pa.Schema) -> list[Completion]:
        """The metadata of new rows that end within the batch; `schema` has the replica's columns."""
        net = self.net
        at = np.flatnonzero(self.remains & (net.last != NONE) & (net.ended != NONE))
        at = at[np.argsort(net.last[at])]
        metadata = self._metadata.take(pa.array(net.ended[at]))
        metadata = conform(metadata, pa.schema([schema.field(name) for name in metadata.column_names]))
        places = self.keyed.places[net.last[at]]
        return [Completion(name, places, _single_array(metadata[name])) for name in metadata.column_names]


def _merge_matches(
    leaving: Sequence[FileMatches], emptied: Sequence[FileMatches], key: int
) -> list[FileMatches]:
    """The union of both, by file. A row that is only in `emptied` gets the key number `key`."""
    others = {match.name: replace(match, keys=np.full(len(match.rows), key)) for match in emptied}
    gone = list[FileMatches]()
    for match in leaving:
        rows, keys = match.rows, match.keys
        if (more := others.pop(match.name, None)) is not None:
            only = np.setdiff1d(more.rows, rows)
            rows, keys = np.concatenate([rows, only]), np.concatenate([keys, np.full(len(only), key)])
            order = np.argsort(rows)
            rows, keys = rows[order], keys[order]
        gone.append(replace(match, rows=rows, keys=keys))
    return [*gone, *others.values()]


def _single_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
