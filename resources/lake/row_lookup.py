"""Finds rows of a Delta table without a key: a runner reads all files.

In: a table, and digests of rows (`pgsieve.decoding.changes.digests`). Out: the rows with these digests, file
by file. Raises errors of delta-rs and Arrow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.resources.lake.delta.deletion_vectors import deleted_rows
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.parts import Guard

_MATCHED = pa.schema([("file", pa.int64()), ("row", pa.int64()), ("sought", pa.int64())])


def row_matches(
    table: DeltaTable, path: str, store: Store, digests: WantedDigests, schema: pa.Schema, runner: Executors
) -> list[FileMatches]:
    """The rows with one of these digests. The `keys` of a match are indices into the digests."""
    files = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    names = [unquote(file["path"]) for file in files]
    results = runner.run(_FileSearch(store, path, schema, names, digests), len(names), schema=_MATCHED)
    places, rows, keys = (np.asarray(results[name]) for name in _MATCHED.names)
    deleted, no_rows = deleted_rows(table), np.empty(0, np.int64)
    matches = []
    for number in np.unique(places).tolist():
        is_of_file, name = places == number, names[number]
        marked = deleted.get(name, no_rows)
        is_of_file[is_of_file] = np.isin(rows[is_of_file], marked, invert=True)
        matches.append(
            FileMatches(
                name,
                files[number]["path"],
                files[number]["size_bytes"],
                rows[is_of_file],
                keys[is_of_file],
                marked,
            )
        )
    return [match for match in matches if len(match.rows)]


@dataclass(frozen=True)
class _FileSearch:
    """Searches the files of a table on executors, one file per part."""

    store: Store
    path: str
    schema: pa.Schema
    names: Sequence[str]
    sought: WantedDigests

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        begin = 0
        for batch in guard(self.store.batches(join_path(self.path, self.names[number]), self.schema)):
            rows, keys = self.sought.within(batch)
            yield pa.RecordBatch.from_arrays(
                [pa.array(np.full(len(rows), number)), pa.array(begin + rows), pa.array(keys)],
                schema=_MATCHED,
            )
            begin += batch.num_rows
