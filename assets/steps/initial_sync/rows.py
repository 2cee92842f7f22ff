"""Reads the rows of a copy: executors execute the queries for chunks of a table at the exported snapshot.

A chunk is a part of a table. For each chunk there is one query. The Arrow batches of its result are passed on one by
one, to a file or to the JVM. So a chunk never has to fit in memory.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from pgsieve.assets.steps.records.columns import write_ddl
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.values.replica_output import list_texts
from pgsieve.decoding.values.types import ColumnType, convert_copy
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.executors import Executors, OnProgress
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.parts import Guard
from pgsieve.resources.postgres.errors import LockedTableError, TransientError
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import SnapshotLostError, read_chunk

#: If a transient fault interrupts the reading of a chunk, it is read again, but not more often than this. The first
#: pause between two attempts has this many seconds, and each further pause is twice as long.
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
        return replica_schema(self.columns)

    def batches(self, number: int) -> Generator[pa.RecordBatch, None, None]:
        """Yields the rows of the query with this number."""
        return copied_batches(self.conninfo, self.snapshot, self.queries[number], self.columns)


def copied_rows(spark: SparkSession, selected: SelectedRows) -> DataFrame:
    """The selected rows as a DataFrame, which has a partition for each query."""
    schema, queries = (
        write_ddl((column.name, column.type.spark_type) for column in selected.columns),
        len(selected.queries),
    )
    if not queries:
        return spark.createDataFrame([], schema)

    def copy(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from selected.batches(number)

    return spark.range(0, queries, 1, queries).mapInArrow(copy, schema)


def copied_files(
    executors: Executors,
    selected: SelectedRows,
    folder: str,
    store: Store,
    size: int,
    on_progress: OnProgress | None = None,
) -> pa.Table:
    """Let the executors write the selected rows into files of about `size` bytes.

    Returns a row (`FILE_SCHEMA`) for each file. `on_progress` is called with the number of queries that have finished.
    """
    schema = selected.schema

    def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        with closing(selected.batches(number)) as batches:
            yield from write_files(folder, schema, guard(batches), store=store, size=size)

    def copy(number: int, guard: Guard) -> list[pa.RecordBatch]:
        # A second attempt cannot duplicate rows, because the files of the first one are in no commit.
        return read_with_retries(partial(write, number, guard))

    return executors.run(copy, len(selected.queries), on_progress)


def read_with_retries(chunk: Callable[[], Iterable[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """Read all rows of a chunk. After a transient fault, read them again.

    If the snapshot is lost, or the table is locked, the error is raised at once.
    """
    for attempt in range(_MAX_ATTEMPTS - 1):
        try:
            return list(chunk())
        except (SnapshotLostError, LockedTableError):
            raise
        except TransientError:
            time.sleep(_PAUSE_SECONDS * 2**attempt)
    return list(chunk())


def replica_schema(columns: Sequence[ReplicaColumn]) -> pa.Schema:
    """The columns of a replica as an Arrow schema."""
    return pa.schema([(column.name, column.type.arrow_type) for column in columns])


def copied_batches(
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
            raise error.with_key(_key(rows.slice(error.value_index, 1), columns)) from None
        yield pa.RecordBatch.from_arrays(arrays, names=names)
    reach(Failpoint.CHUNK_COPIED)


def _key(row: pa.RecordBatch, columns: Sequence[ReplicaColumn]) -> dict[str, str]:
    """The key of a row as text. Empty if a value of the key itself cannot be converted."""
    key = {column.name: (row.column(index), column) for index, column in enumerate(columns) if column.is_key}
    with suppress(ValueNotRepresentableError):
        return {
            name: list_texts(convert_copy(value, column.type, name))[0]
            for name, (value, column) in key.items()
        }
    return {}
