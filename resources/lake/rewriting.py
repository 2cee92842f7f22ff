"""Replaces the rows of a table by rows that a function makes of them.

In: the lake, the path of a table, and a function of batches.
Out: one commit to the table, or to another table.

Raises LakeError, and the errors of the function.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.resources.lake.committers import FileCommitter, InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.commits import make_writable
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.table_rows import open_rows
from pgsieve.resources.work import DRIVER, add_costs


@dataclass(frozen=True)
class RowChange:
    """A change of all rows of a table.

    - `columns`: the columns to read
    - `change_batch`: the function that changes each batch
    - `schema`: the schema of the result
    - `ddl`: the same schema in Spark's types
    """

    columns: Sequence[str]
    change_batch: Callable[[pa.RecordBatch], pa.RecordBatch]
    schema: pa.Schema
    ddl: str


def rewrite(
    lake: Lake,
    path: str,
    change: RowChange,
    expected_version: int | None,
    *,
    target_path: str | None = None,
    position: int | None = None,
) -> None:
    """Replace the rows of a table by the results of `change`, in one commit that keeps the position.

    With `target_path`, the results and `position` go to the table at that path instead. For `expected_version` see
    `Commit`.
    """
    target, schema, store = target_path or path, change.schema, lake.store
    byte_count = None if lake.is_reached_by_spark_only else lake.records.size_bytes(path)
    commit = Commit(position, overwrite=True, expected_version=expected_version)
    stored_schema = lake.schema(path)
    read_schema = pa.schema([stored_schema.field(name) for name in change.columns])
    rows = open_rows(lake, path, read_schema, change.change_batch)
    committer = lake.policy.choose_committer(target, schema.names, byte_count, lambda: schema, overwrite=True)
    match committer:
        case InProcessCommitter():
            with lake.access.translate_errors(path):
                new_rows = make_writable(pa.Table.from_batches(rows.read(), schema))
            add_costs(DRIVER, 1, new_rows.nbytes)
            committer.write(target, new_rows, commit)
        case FileCommitter():
            file_bytes = committer.find_target_file_bytes(target, {})

            def write_part(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
                return write_files(target, schema, batches, store, file_bytes)

            committer.commit(lambda: rows.compute(write_part, FILE_SCHEMA), target, schema, commit)
        case SparkCommitter():
            lake.write(rows.make_frame(lake.spark, iter, change.ddl), target, commit)
