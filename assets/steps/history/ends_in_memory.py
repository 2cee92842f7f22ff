"""Ends versions of rows (`history: scd2`) without reading the whole rows again.

The table of versions has each row that the replica has had, with the times from when to when it was valid. If a batch of
changes removes a row from the replica, the present version of this row ends. It is written again, with its end. The row
itself is still in memory, as it was just removed from the replica (`shared_rows`). So only the columns that say when
the version began are read from the files of the table of versions.

In: - the rows that were removed from the replica, by the numbers that the batch gives to their keys
    - for each file of the table of versions, the row numbers of the versions with the same keys
Out: the ended versions

Raises OSError and Arrow's errors.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.history.shared_rows import NumberedRows
from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.versions import VALID_FROM, VALID_FROM_LSN, Commits, end_versions
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.stores.store import Store, join_path


def _count_key_numbers(rows: Sequence[NumberedRows], matches: Sequence[FileMatches]) -> int:
    """Return the length of an array that has an element for each key number in `rows` and `matches`."""
    number_arrays = [*(match.key_indices for match in matches), *(key_numbers for key_numbers, _ in rows)]
    return max((int(key_numbers.max(initial=0)) for key_numbers in number_arrays), default=0) + 1


def mask_keys_in_memory(rows: Sequence[NumberedRows], matches: Sequence[FileMatches]) -> Mask:
    """Return a mask that has True for the number of each key with a row in `rows`.

    It is long enough to have an element for each key in `matches`, too.
    """
    has_row = np.zeros(_count_key_numbers(rows, matches), np.bool_)
    for key_numbers, _ in rows:
        has_row[key_numbers] = True
    return has_row


@dataclass(frozen=True)
class EndsInMemory:
    """Versions that end, and whose rows are in memory. A call yields them.

    - `rows` are the rows, with the numbers of their keys.
    - `beginnings` has rows with the time and the LSN at which versions began. Versions that began with the same commit
      may share a row.
    - `beginning_indices` has an element for each key number: the index in `beginnings` of the key's version, or `NONE` if
      no version of the key ends.
    - `ending_commits` has an element for each key number: the number in `commits` of the commit that ends the version, or
      `NONE`.
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
        ended_versions: Sequence[tuple[FileMatches, Numbers]],
        single_commit_files: Collection[str],
        commits: Commits,
    ) -> "EndsInMemory":
        """Read the beginnings of the versions that end now, from the files of the table of versions in `folder`.

        `ended_versions` has a pair for each file: the versions that end, and an array with a number for each of them, the
        number of the commit that ends it. `single_commit_files` are the names of the files in which all versions began
        with the same commit. For such a file it suffices to read its first version.
        """
        beginning_schema = pa.schema([schema.field(name) for name in (VALID_FROM, VALID_FROM_LSN)])
        key_count = _count_key_numbers(rows, [match for match, _ in ended_versions])
        beginning_indices, ending_commits = (
            np.full(key_count, NONE, np.int64),
            np.full(key_count, NONE, np.int64),
        )
        parts, beginning_count = [beginning_schema.empty_table().combine_chunks()], 0
        for match, file_ending_commits in ended_versions:
            file = join_path(folder, match.name)
            if match.name in single_commit_files:
                parts.append(store.read_first_row(file, beginning_schema))
                beginning_indices[match.key_indices] = beginning_count
            else:
                batches = [batch for _, batch in read_rows(store, file, beginning_schema, match.row_numbers)]
                parts.append(pa.Table.from_batches(batches, beginning_schema))
                beginning_indices[match.key_indices] = beginning_count + np.arange(len(match.row_numbers))
            ending_commits[match.key_indices] = file_ending_commits
            beginning_count += parts[-1].num_rows
        (beginnings,) = pa.concat_tables(parts).combine_chunks().to_batches()
        return cls(schema, rows, beginnings, beginning_indices, ending_commits, commits)

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Yield the ended versions."""
        for removed_key_numbers, rows in self.rows:
            is_ended = self.ending_commits[removed_key_numbers] != NONE
            if is_ended.any():
                ended_key_numbers = removed_key_numbers[is_ended]
                ended_rows = rows if is_ended.all() else rows.filter(pa.array(is_ended))
                beginnings = self.beginnings.take(pa.array(self.beginning_indices[ended_key_numbers]))
                yield end_versions(
                    self._make_present_versions(ended_rows, beginnings),
                    self.ending_commits[ended_key_numbers],
                    self.commits,
                )

    def _make_present_versions(self, rows: pa.RecordBatch, beginnings: pa.RecordBatch) -> pa.RecordBatch:
        """Make present versions of rows: their columns, and those of their beginnings. All other columns are NULL."""
        columns = [
            rows[field.name]
            if field.name in rows.schema.names
            else beginnings[field.name]
            if field.name in beginnings.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
