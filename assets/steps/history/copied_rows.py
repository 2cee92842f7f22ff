"""Begins the change history of a table with the rows of its copy.

The change history is a Delta table with all changes of one of the publisher's tables, one row per change.

In: a replica that has just been copied, so it has exactly the transactions that committed before the copy's LSN
Out: one commit to the change history. It has the replica's rows as INSERTs, and the copy's LSN as its position (the LSN up
     to which the table has all changes).

Raises LakeError.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial

import pyarrow as pa

from pgsieve.assets.steps.records.columns import format_changes_ddl
from pgsieve.assets.steps.records.table_states import TableState
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.copied_rows import CopiedRows
from pgsieve.resources.lake.added_columns import add_missing_columns
from pgsieve.resources.lake.delta.layout import DEFAULT_FILE_BYTES
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.derived_rows import BatchSource, RowWriter, list_file_rows
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import number_columns

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
    replica_path, rows = lake.paths.replica(subscription, *state.name), CopiedRows(state.lsn, time, schema)
    replica_bytes = lake.records.size_bytes(replica_path)
    add_missing_columns(lake, history_path, schema)
    committer, reader = (
        lake.policy.choose_file_committer(history_path, schema),
        lake.policy.find_reader(replica_path),
    )
    if committer is None or reader is None:
        _begin_by_spark(lake, replica_path, history_path, rows, definition, position)
        return
    with lake.access.translate_errors(replica_path):
        file_rows = list_file_rows(
            reader, replica_path, pa.schema(list(schema.field("new").type)), rows.to_changes
        )
    batches: list[BatchSource] = [partial(_yield_batch, rows.make_snapshot_change()), *file_rows]
    row_writer = RowWriter(
        lake.store, history_path, schema, DEFAULT_FILE_BYTES, [[batch] for batch in batches]
    )
    committer.commit(
        lambda: row_writer.write_on(lake.policy.choose_runner(replica_bytes)),
        history_path,
        schema,
        Commit(state.lsn, expected_position=position, properties=CHANGES_PROPERTIES),
    )


def _yield_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    yield batch


def _begin_by_spark(
    lake: Lake,
    replica_path: str,
    history_path: str,
    copied_rows: CopiedRows,
    definition: Definition,
    position: int,
) -> None:
    ddl, column_names = format_changes_ddl(definition.columns), list(lake.columns(replica_path))
    first_change = lake.spark.createDataFrame(
        pa.Table.from_batches([copied_rows.make_snapshot_change()]).to_pylist(), ddl
    )
    copied_changes = number_columns(lake.read_table(replica_path)).mapInArrow(
        _make_change_function(copied_rows, column_names), ddl
    )
    commit = Commit(copied_rows.lsn, expected_position=position, properties=CHANGES_PROPERTIES)
    lake.write(first_change.unionByName(copied_changes), history_path, commit)


def _make_change_function(
    copied_rows: CopiedRows, column_names: list[str]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a function that turns batches of the replica's rows into changes; `column_names` are the replica's columns."""

    def make_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (copied_rows.to_changes(batch.rename_columns(column_names)) for batch in batches)

    return make_changes
