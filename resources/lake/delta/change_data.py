"""Writes the files of a Delta table's change data feed, which has the rows that each commit adds, removes and updates.

A table has a feed if its property `delta.enableChangeDataFeed` is true. If a commit removes rows, it needs such files, with
all rows that it adds and removes. Readers find out by themselves what other commits changed.

In: rows with a column `_change_type`. Out: files below the table's folder `_change_data`, a row that describes each of
them (`parquet_files.FILE_SCHEMA`), and their actions in the log. Raises OSError.

https://github.com/delta-io/delta/blob/master/PROTOCOL.md (Add CDC File; Change Data Files)
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from pgsieve.resources.lake.delta.feed_property import CHANGE_TYPE
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.stores.store import Store, join_path

#: The values of the column that says what a commit does to a row.
INSERT, DELETE, UPDATE_PREIMAGE, UPDATE_POSTIMAGE = "insert", "delete", "update_preimage", "update_postimage"
CHANGE_TYPE_SCHEMA = pa.schema([(CHANGE_TYPE, pa.string())])
_FOLDER = "_change_data"


def write_change_files(
    path: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], store: Store, target_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Write rows into files of the feed of the table at `path`; yield one row (`FILE_SCHEMA`) per file.

    `schema` has the columns of the rows, among them `CHANGE_TYPE`. `target_bytes` has the same meaning as in `write_files`.
    """
    for files in write_files(join_path(path, _FOLDER), schema, batches, store, target_bytes):
        rows = [{**row, "path": f"{_FOLDER}/{row['path']}"} for row in files.to_pylist()]
        yield pa.RecordBatch.from_pylist(rows, FILE_SCHEMA)


def is_change_file(file: Mapping[str, Any]) -> bool:
    """True if a file belongs to the feed; `file` is a row that describes it."""
    return str(file["path"]).startswith(f"{_FOLDER}/")


def make_change_action(file: Mapping[str, Any]) -> Action:
    """Make the action that adds a file of the feed to the log."""
    return {"cdc": {"path": file["path"], "partitionValues": {}, "size": file["size"], "dataChange": False}}
