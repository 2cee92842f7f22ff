"""Begins the change history of a table with the rows of its copy.

The change history is a Delta table with all changes of one of the publisher's tables, one row per change.

In: a replica that has just been copied, so it has exactly the transactions that committed before the copy's LSN
Out: one commit to the change history. It has the replica's rows as INSERTs, and the copy's LSN as its position (the LSN up
     to which the table has all changes).

Raises LakeError.
"""

from collections.abc import Iterable
from datetime import datetime

import pyarrow as pa

from pgsieve.assets.steps.records.columns import format_changes_ddl
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.decoding.changes.copied_rows import CopiedRows
from pgsieve.resources.lake.added_columns import add_missing_columns
from pgsieve.resources.lake.committers import FileCommitter, SparkCommitter
from pgsieve.resources.lake.delta.layout import DEFAULT_FILE_BYTES
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.table_rows import open_rows

#: Engines collect statistics only of the first columns, up to `commit_time`. Statistics of all columns would take as long
#: as writing the rows.
CHANGES_PROPERTIES = {"delta.dataSkippingNumIndexedCols": "5"}


def begin_history(
    lake: Lake, subscription: str, state: TableState, schema: pa.Schema, time: datetime | None
) -> None:
    """Begin the change history of a table with the replica's rows, unless the change history has them already.

    `state` has the LSN of the copy. `schema` is the schema of the changes, and `time` the time of the copy.
    """
    definition = state.definition
    assert definition is not None
    history_path = lake.paths.change_history(subscription, *state.name, definition.history.generation)
    position = lake.records.position(history_path) or 0
    if position >= state.lsn:
        return
    replica_path, copied_rows = (
        lake.paths.replica(subscription, *state.name),
        CopiedRows(state.lsn, time, schema),
    )
    add_missing_columns(lake, history_path, schema)
    first_change = copied_rows.make_snapshot_change()
    rows = open_rows(lake, replica_path, pa.schema(list(schema.field("new").type)), copied_rows.to_changes)
    commit = Commit(state.lsn, expected_position=position, properties=CHANGES_PROPERTIES)
    store = lake.store

    def write_part(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        return write_files(history_path, schema, batches, store, DEFAULT_FILE_BYTES)

    def write_changes() -> pa.Table:
        first_file = pa.Table.from_batches(write_part([first_change]), FILE_SCHEMA)
        return pa.concat_tables([first_file, rows.compute(write_part, FILE_SCHEMA)])

    match lake.policy.choose_large_committer(history_path, schema):
        case FileCommitter() as committer:
            committer.commit(write_changes, history_path, schema, commit)
        case SparkCommitter():
            ddl = format_changes_ddl(definition.columns)
            first_row = lake.spark.createDataFrame(pa.Table.from_batches([first_change]).to_pylist(), ddl)
            changes = rows.make_frame(lake.spark, iter, ddl)
            lake.write(first_row.unionByName(changes), history_path, commit)
