"""Finds rows of a Delta table that has no key.

Without a key, a row is identified by a digest of all its values (`pgsieve.decoding.changes.digests`). So a runner
(Spark or threads) must read all files of the table, and compute the digests of their rows.

In: a table, and digests.
Out: the rows with these digests, file by file.

Raises errors of delta-rs and Arrow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.resources.lake.delta.deletion_vectors import find_deleted_rows
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.parts import Guard

#: The result of a search: the number of a file, the number of a row in it, and the index of the digest that the
#: row has.
_MATCH_SCHEMA = pa.schema([("file", pa.int64()), ("row", pa.int64()), ("digest", pa.int64())])


def find_row_matches(
    table: DeltaTable, path: str, store: Store, digests: WantedDigests, schema: pa.Schema, runner: Runner
) -> list[FileMatches]:
    """The rows that have one of these digests. The `key_indices` of the result are indices into the digests."""
    files = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    file_names = [unquote(file["path"]) for file in files]
    results = runner.run(
        _FileSearch(store, path, schema, file_names, digests), len(file_names), schema=_MATCH_SCHEMA
    )
    file_numbers, row_numbers, key_indices = (np.asarray(results[name]) for name in _MATCH_SCHEMA.names)
    deleted_rows, no_rows = find_deleted_rows(table), np.empty(0, np.int64)
    matches = []
    for file_number in np.unique(file_numbers).tolist():
        is_match, name = file_numbers == file_number, file_names[file_number]
        # Rows that a deletion vector marks as deleted are still in the file. They do not belong to the table.
        deleted_row_numbers = deleted_rows.get(name, no_rows)
        is_match[is_match] = np.isin(row_numbers[is_match], deleted_row_numbers, invert=True)
        matches.append(
            FileMatches(
                name,
                files[file_number]["path"],
                files[file_number]["size_bytes"],
                row_numbers[is_match],
                key_indices[is_match],
                deleted_row_numbers,
            )
        )
    return [match for match in matches if len(match.row_numbers)]


@dataclass(frozen=True)
class _FileSearch:
    """Searches the files of a table for rows with some digests. The runner calls it once for each file."""

    store: Store
    path: str
    schema: pa.Schema
    file_names: Sequence[str]
    digests: WantedDigests

    def __call__(self, file_number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        first_row = 0
        for batch in guard(
            self.store.read_batches(join_path(self.path, self.file_names[file_number]), self.schema)
        ):
            row_numbers, digest_indices = self.digests.find_rows(batch)
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(np.full(len(row_numbers), file_number)),
                    pa.array(first_row + row_numbers),
                    pa.array(digest_indices),
                ],
                schema=_MATCH_SCHEMA,
            )
            first_row += batch.num_rows
