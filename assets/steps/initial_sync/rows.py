"""Reads the rows of a copy: executors execute the queries for chunks of a table at the exported snapshot.

A chunk is a part of a table. For each chunk there is one query. An executor passes on the Arrow batches of its result
one by one, to a file or to the JVM. So a chunk need not fit in the executor's memory.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.records.columns import format_ddl
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.values.replica_output import list_texts
from pgsieve.decoding.values.types import ColumnType, convert_copy
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.runners import OnProgress, Runner
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.parts import Guard
from pgsieve.resources.postgres.errors import LockedTableError, TransientError
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import SnapshotLostError, read_chunk

#: If a transient fault (such as a lost connection) interrupts the reading of a chunk, the chunk is read again. It is
#: read at most this many times in all. The pause before the second attempt takes `_PAUSE_SECONDS`, and each further
#: pause twice as long as the one before.
_MAX_ATTEMPTS, _PAUSE_SECONDS = 4, 0.25


class ReplicaColumn(NamedTuple):
    """A column of a replica: its name, its type, and whether it is part of the key."""

    name: str
    type: ColumnType
    is_key: bool = False


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The rows that some queries select at an exported snapshot, in the types of a replica's columns."""

    conninfo: Conninfo
    snapshot: str
    queries: Sequence[str]
    columns: Sequence[ReplicaColumn]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the replica as an Arrow schema."""
        return make_replica_schema(self.columns)

    def read_batches(self, query_index: int) -> Generator[pa.RecordBatch, None, None]:
        """Yields the rows of the query with this index."""
        return read_query_batches(self.conninfo, self.snapshot, self.queries[query_index], self.columns)


def read_rows_by_spark(spark: SparkSession, selected_rows: SelectedRows) -> DataFrame:
    """Make a DataFrame of the selected rows. It has a partition for each query."""
    schema, query_count = (
        format_ddl((column.name, column.type.spark_type) for column in selected_rows.columns),
        len(selected_rows.queries),
    )
    if not query_count:
        return spark.createDataFrame([], schema)

    def run_queries(query_indices: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in query_indices:
            for query_index in batch.column(0).to_pylist():
                yield from selected_rows.read_batches(query_index)

    return spark.range(0, query_count, 1, query_count).mapInArrow(run_queries, schema)


def write_rows_to_files(
    executors: Runner,
    selected_rows: SelectedRows,
    folder: str,
    store: Store,
    file_bytes: int,
    on_progress: OnProgress | None = None,
) -> pa.Table:
    """Let the executors write the selected rows into files of about `file_bytes` bytes.

    Returns a row (`FILE_SCHEMA`) for each file. `on_progress` is called with the number of queries that have finished.
    """
    schema = selected_rows.schema

    def write_once(query_index: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        with closing(selected_rows.read_batches(query_index)) as batches:
            yield from write_files(folder, schema, guard(batches), store=store, target_bytes=file_bytes)

    def write_with_retries(query_index: int, guard: Guard) -> list[pa.RecordBatch]:
        # A second attempt cannot duplicate rows, because the files of the first one are in no commit.
        return read_with_retries(partial(write_once, query_index, guard))

    return executors.run(write_with_retries, len(selected_rows.queries), on_progress)


def read_with_retries(read: Callable[[], Iterable[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """Return all that `read` yields from a chunk. After a transient fault, read again.

    If the snapshot is lost, or the table is locked, the error is raised without another attempt.
    """
    for attempt in range(_MAX_ATTEMPTS - 1):
        try:
            return list(read())
        except (SnapshotLostError, LockedTableError):
            raise
        except TransientError:
            time.sleep(_PAUSE_SECONDS * 2**attempt)
    return list(read())


def make_replica_schema(columns: Sequence[ReplicaColumn]) -> pa.Schema:
    """Make an Arrow schema of the columns of a replica."""
    return pa.schema([(column.name, column.type.arrow_type) for column in columns])


def read_query_batches(
    conninfo: Conninfo, snapshot: str, query: str, columns: Sequence[ReplicaColumn]
) -> Generator[pa.RecordBatch, None, None]:
    """Yields the rows that a query selects at `snapshot`, in the types of the replica."""
    names = [column.name for column in columns]
    for rows in read_chunk(conninfo, snapshot, query):
        try:
            arrays = [
                convert_copy(rows.column(index), column.type, column.name)
                for index, column in enumerate(columns)
            ]
        except ValueNotRepresentableError as error:
            raise error.with_key(_format_key(rows.slice(error.value_index, 1), columns)) from None
        yield pa.RecordBatch.from_arrays(arrays, names=names)
    reach(Failpoint.CHUNK_COPIED)


def _format_key(row: pa.RecordBatch, columns: Sequence[ReplicaColumn]) -> dict[str, str]:
    """Format the key of a row as text. Empty if a value of the key itself cannot be converted."""
    key = {column.name: (row.column(index), column) for index, column in enumerate(columns) if column.is_key}
    with suppress(ValueNotRepresentableError):
        return {
            name: list_texts(convert_copy(value, column.type, name))[0]
            for name, (value, column) in key.items()
        }
    return {}
