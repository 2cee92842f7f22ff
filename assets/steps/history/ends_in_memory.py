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
    highest_key = max((int(keys.max(initial=0)) for keys in (m.key_indices for m in matches)), default=0)
    highest_key = max(highest_key, *(int(keys.max(initial=0)) for keys, _ in rows), 0)
    has_row = np.zeros(highest_key + 1, np.bool_)
    for keys, _ in rows:
        has_row[keys] = True
    return has_row


@dataclass(frozen=True)
class EndsInMemory:
    """Versions that end, with their rows in memory (`rows`).

    `beginnings` has the begin of each version. For each key number, `beginning_indices` has the row of `beginnings` for
    the key's version, and `ending_commits` the number in `commits` of the commit that ends it; both have `NONE` if no
    version of the key ends.
    """

    schema: pa.Schema
    rows: Sequence[NumberedRows]
    beginnings: pa.RecordBatch
    beginning_indices: Numbers
    ending_commits: Numbers
    commits: Commits

    @classmethod
    def from_matches(
        cls,
        store: Store,
        folder: str,
        schema: pa.Schema,
        rows: Sequence[NumberedRows],
        ended: Sequence[tuple[FileMatches, Numbers]],
        single_commit_files: Collection[str],
        commits: Commits,
    ) -> "EndsInMemory":
        """End the versions `ended`: for each file, the versions in it and the number of the commit that ends each.

        `single_commit_files` are the names of the files in which all versions began with the same commit. Of such a
        file only the begin of the first version is read.
        """
        beginning_schema = pa.schema([schema.field(name) for name in (VALID_FROM, VALID_FROM_LSN)])
        count = len(mask_keys(rows, [match for match, _ in ended]))
        beginning_indices, ending_commits = np.full(count, NONE, np.int64), np.full(count, NONE, np.int64)
        parts, beginning_count = [beginning_schema.empty_table().combine_chunks()], 0
        for match, file_ending_commits in ended:
            has_one_commit = match.name in single_commit_files
            row_numbers = match.row_numbers[:1] if has_one_commit else match.row_numbers
            batches = [
                batch
                for _, batch in read_rows(store, join_path(folder, match.name), beginning_schema, row_numbers)
            ]
            parts.append(pa.Table.from_batches(batches, beginning_schema))
            beginning_indices[match.key_indices] = beginning_count + (
                0 if has_one_commit else np.arange(len(row_numbers))
            )
            ending_commits[match.key_indices] = file_ending_commits
            beginning_count += len(row_numbers)
        (beginnings,) = pa.concat_tables(parts).combine_chunks().to_batches()
        return cls(schema, rows, beginnings, beginning_indices, ending_commits, commits)

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Yield the ended versions."""
        for removed_keys, rows in self.rows:
            is_ended = self.ending_commits[removed_keys] != NONE
            if is_ended.any():
                ended_keys = removed_keys[is_ended]
                ended_rows = rows if is_ended.all() else rows.filter(pa.array(is_ended))
                beginnings = self.beginnings.take(pa.array(self.beginning_indices[ended_keys]))
                yield end_versions(
                    self._complete(ended_rows, beginnings), self.ending_commits[ended_keys], self.commits
                )

    def _complete(self, rows: pa.RecordBatch, beginnings: pa.RecordBatch) -> pa.RecordBatch:
        """Put together present versions from their rows (`rows`) and their begin (`beginnings`); other columns are NULL."""
        columns = [
            rows[field.name]
            if field.name in rows.schema.names
            else beginnings[field.name]
            if field.name in beginnings.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
