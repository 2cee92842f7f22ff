"""Ends versions of rows without reading the rows again: the apply of the replica has them in memory.

Only the columns that say when a version began are read from the files of versions. In: the rows that the apply has
removed from the replica, by key, and the places of the versions of the same keys, file by file. Out: ended versions.
Raises OSError and Arrow's errors.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.history.shared_rows import NumberedRows
from pgsieve.decoding.changes.net_change import NONE, Mask, Numbers
from pgsieve.decoding.changes.versions import VALID_FROM, VALID_FROM_LSN, Commits, end_versions
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.derived_rows import read_rows
from pgsieve.resources.lake.stores.store import Store, join_path


def mask_keys(rows: Sequence[NumberedRows], matches: Sequence[FileMatches]) -> Mask:
    """The mask of the keys that have a row in memory (`rows`); it has an element for each key in `matches` too."""
    highest = max((int(keys.max(initial=0)) for keys in (m.keys for m in matches)), default=0)
    highest = max(highest, *(int(keys.max(initial=0)) for keys, _ in rows), 0)
    has_row = np.zeros(highest + 1, np.bool_)
    for keys, _ in rows:
        has_row[keys] = True
    return has_row


@dataclass(frozen=True)
class EndsInMemory:
    """Versions that end, with their rows in memory (`rows`).

    `begun` has the begin of each version. For each key number, `begin_of` has the row of `begun` for the key's version,
    and `until` the number in `commits` of the commit that ends it; both have `NONE` if no version of the key ends.
    """

    schema: pa.Schema
    rows: Sequence[NumberedRows]
    begun: pa.RecordBatch
    begin_of: Numbers
    until: Numbers
    commits: Commits

    @classmethod
    def of(
        cls,
        store: Store,
        folder: str,
        schema: pa.Schema,
        rows: Sequence[NumberedRows],
        ended: Sequence[tuple[FileMatches, Numbers]],
        of_one_commit: Collection[str],
        commits: Commits,
    ) -> "EndsInMemory":
        """End the versions `ended`: for each file, the versions in it and the number of the commit that ends each.

        `of_one_commit` are the names of the files in which all versions began with the same commit. Of such a file only
        the begin of the first version is read.
        """
        begin = pa.schema([schema.field(name) for name in (VALID_FROM, VALID_FROM_LSN)])
        count = len(mask_keys(rows, [match for match, _ in ended]))
        begin_of, until_of = np.full(count, NONE, np.int64), np.full(count, NONE, np.int64)
        parts, number = [begin.empty_table().combine_chunks()], 0
        for match, until in ended:
            is_one = match.name in of_one_commit
            at = match.rows[:1] if is_one else match.rows
            batches = [batch for _, batch in read_rows(store, join_path(folder, match.name), begin, at)]
            parts.append(pa.Table.from_batches(batches, begin))
            begin_of[match.keys] = number + (0 if is_one else np.arange(len(at)))
            until_of[match.keys] = until
            number += len(at)
        (begun,) = pa.concat_tables(parts).combine_chunks().to_batches()
        return cls(schema, rows, begun, begin_of, until_of, commits)

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Yield the ended versions."""
        for removed, rows in self.rows:
            is_ended = self.until[removed] != NONE
            if is_ended.any():
                keys = removed[is_ended]
                ended = rows if is_ended.all() else rows.filter(pa.array(is_ended))
                begun = self.begun.take(pa.array(self.begin_of[keys]))
                yield end_versions(self._complete(ended, begun), self.until[keys], self.commits)

    def _complete(self, rows: pa.RecordBatch, begun: pa.RecordBatch) -> pa.RecordBatch:
        """Put together present versions from their rows (`rows`) and their begin (`begun`); other columns are NULL."""
        columns = [
            rows[field.name]
            if field.name in rows.schema.names
            else begun[field.name]
            if field.name in begun.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
