"""Compares a replica with the publisher's table at one LSN: finds which segments differ, and after that which rows.

A segment consists of the rows with hashes that end with the same bits. For each segment, the server adds up the hashes
of the published rows in a snapshot, and pgsieve adds up the hashes of the replica's rows. If the two sums differ, the
rows of the segment are read and compared value by value. Small tables are compared row by row without hashes, and
so are all tables of a server that computes other hashes than pgsieve, for example a big-endian one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame

from pgsieve.assets.steps.checks.difference import (
    SideCounts,
    count_few_rows_by_side,
    count_rows_by_side,
    find_differing_rows,
    find_few_differing_rows,
)
from pgsieve.assets.steps.checks.segments import compute_checksums, open_living_rows
from pgsieve.assets.steps.initial_sync.rows import (
    ReplicaColumn,
    SelectedRows,
    make_replica_schema,
    read_query_batches,
    read_rows_by_spark,
)
from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.changes.metadata_columns import Metadata, find_metadata_column, keep_living_rows
from pgsieve.decoding.checksums.segments import (
    SEGMENT_COUNT,
    Checksums,
    RowHash,
    SegmentSelection,
    add_query_result,
    checksums_query,
    hash_expression,
    hash_values,
)
from pgsieve.decoding.values.replica_output import list_texts
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource, SparkRows
from pgsieve.resources.lake.spark_writes import number_columns
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.snapshot import Chunks, Snapshot, read_chunk

#: A sample has at most this many of the rows that differ.
SAMPLE_ROWS = 10
#: This process reads at most about this many bytes of differing segments at a time. It reads all of both sides for each time.
_SELECTION_BYTES = 64 * 1024 * 1024
#: The server computes checksums in this many sessions at the same time.
CHECKSUM_SESSIONS = 4


@dataclass(frozen=True)
class Difference:
    """The result of a comparison.

    - `publisher_rows`, `replica_rows`: how many rows the two sides have
    - `counts`: how many rows differ
    - `sample`: some of these rows. Each has the columns c0, c1 and so on, and `count`: how many more of this row the
      publisher has than the replica.
    """

    publisher_rows: int
    replica_rows: int
    counts: SideCounts = SideCounts()  # noqa: RUF009 - it is immutable
    sample: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class TableSides:
    """The publisher's rows of a table in a snapshot, and the rows of one version of its replica.

    - `make_chunks`: makes queries that together select the given expressions from all published rows of the table
    - `select_list`: the expressions that a copy selects, named c0, c1 and so on
    - `row_hash`: hashes rows; None if the server computes other hashes than pgsieve, or if the table has no columns
    - `soft_delete_columns`: the metadata columns of a replica that keeps deleted rows. Deleted rows and these columns
      are not compared.
    """

    lake: Lake
    path: str
    version: int
    columns: Sequence[ReplicaColumn]
    conninfo: Conninfo
    snapshot: Snapshot
    make_chunks: Callable[[Sequence[str]], Chunks]
    select_list: Sequence[str]
    row_hash: RowHash | None
    soft_delete_columns: Metadata = ()

    def compare(self) -> Difference:
        """Compare the two sides."""
        part = self._find_part_to_compare()
        if part.row_counts is not None and not part.selections:
            return Difference(*part.row_counts)
        difference = self._compare_by_spark(part) if part.is_for_spark else self._compare_in_process(part)
        return (
            difference
            if part.row_counts is None
            else Difference(*part.row_counts, difference.counts, difference.sample)
        )

    def find_differing_rows(self) -> pa.Table | DataFrame:
        """Find the rows that one side has more often than the other, with c0, c1 and so on, and `count`.

        `count` is how many more of the row the publisher has. Unlike in `compare`, -0.0 differs from 0.0. The rows are a
        DataFrame if Spark compares them, otherwise they are in memory.
        """
        part = self._find_part_to_compare()
        if not part.is_for_spark:
            return self._find_differing_rows_in_process(part, unify_zeros=False)[0]
        columns = [column.name for column in self.columns]
        return find_differing_rows(*self.read_frames(part.only_selection), columns, unify_zeros=False)

    def _find_part_to_compare(self) -> "_ComparedPart":
        """Find the rows that may differ, and whether Spark compares them."""
        if self.row_hash is None:
            return _ComparedPart(is_for_spark=self._is_for_spark(None))
        size_bytes = max(self.make_chunks(self.select_list).bytes, self.lake.records.size_bytes(self.path))
        if self.lake.policy.is_small(size_bytes) and not self._is_for_spark(size_bytes):
            return _ComparedPart(is_for_spark=False)
        publisher_checksums, replica_checksums = self._compute_checksums(self.row_hash)
        row_counts, differing_segments = (
            (int(publisher_checksums.row_counts.sum()), int(replica_checksums.row_counts.sum())),
            np.flatnonzero(publisher_checksums.differing_segments(replica_checksums)),
        )
        if not len(differing_segments):
            return _ComparedPart(False, (), row_counts)
        segment_share = max(
            int(side.row_counts[differing_segments].sum())
            for side in (publisher_checksums, replica_checksums)
        ) / max(row_counts)
        differing_bytes = int(size_bytes * segment_share)
        is_for_spark = self._is_for_spark(differing_bytes)
        selection_count = 1 if is_for_spark else -(-differing_bytes // _SELECTION_BYTES)
        selections = [
            SegmentSelection(self.row_hash, np.isin(np.arange(SEGMENT_COUNT), segments))
            for segments in np.array_split(differing_segments, min(selection_count, len(differing_segments)))
        ]
        return _ComparedPart(is_for_spark, selections, row_counts)

    def _compute_checksums(self, row_hash: RowHash) -> tuple[Checksums, Checksums]:
        """Compute the checksums of the publisher and of the replica at the same time."""
        queries = [
            checksums_query(query) for query in self.make_chunks([_make_hash_expression(row_hash)]).queries
        ]
        publisher_checksums = Checksums()
        with ThreadPoolExecutor(CHECKSUM_SESSIONS) as pool:
            futures = [pool.submit(self._read_chunk, query) for query in queries]
            with self.lake.access.translate_errors(self.path):
                replica_checksums = compute_checksums(self._open_replica(), row_hash)
            for future in futures:
                for batch in future.result():
                    add_query_result(publisher_checksums, batch)
        return publisher_checksums, replica_checksums

    def read_frames(self, segments: SegmentSelection | None) -> tuple[DataFrame, DataFrame]:
        """Read the publisher's and the replica's rows as Spark DataFrames.

        They are the rows in the chosen segments, or all rows if `segments` is None.
        """
        selected_rows = SelectedRows(
            self.conninfo, self.snapshot.name, self._make_queries(segments), self.columns
        )
        return read_rows_by_spark(self.lake.spark, selected_rows), self._read_replica_frame(segments)

    @property
    def key_columns(self) -> list[str]:
        """The columns of the key, as c0, c1 and so on."""
        return [f"c{index}" for index, column in enumerate(self.columns) if column.is_key]

    @property
    def _deleted_column(self) -> str | None:
        """The column that marks deleted rows; None if the replica does not keep them."""
        return find_metadata_column(self.soft_delete_columns, DELETED)

    def _read_replica_frame(self, segments: SegmentSelection | None) -> DataFrame:
        """Let Spark read the replica's rows that are not deleted, in the chosen segments."""
        names, deleted_column = [column.name for column in self.columns], self._deleted_column
        table = self.lake.read_version(self.path, self.version)
        rows = table.select(*map(quote_name, names))
        if segments is None and deleted_column is None:
            return rows
        keep_rows = partial(
            keep_living_rows, schema=make_replica_schema(self.columns), deleted_column=deleted_column
        )
        numbered_schema = number_columns(rows).schema

        def select_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                selected_rows = batch if segments is None else segments.select(batch)
                yield selected_rows.rename_columns(numbered_schema.names)

        read_names = names if deleted_column is None else [*names, deleted_column]
        living_rows = SparkRows(table.select(*map(quote_name, read_names)), partial(map, keep_rows))
        return living_rows.map_batches(select_rows, numbered_schema).toDF(*names)

    def _is_for_spark(self, size_bytes: int | None) -> bool:
        """Whether Spark compares so many bytes of rows; None stands for many.

        This process compares few rows, and any number of rows if threads do Spark's work. If only Spark can read the
        replica, Spark compares the rows.
        """
        policy = self.lake.policy
        return not (policy.is_small(size_bytes) or policy.uses_threads) or policy.is_read_by_spark(self.path)

    def _read_chunk(self, query: str) -> list[pa.RecordBatch]:
        return list(read_chunk(self.conninfo, self.snapshot.name, query))

    def _open_replica(self) -> RowSource[pa.RecordBatch]:
        """Open the replica's rows that are not deleted."""
        schema = make_replica_schema(self.columns)
        return open_living_rows(self.lake, self.path, self.version, schema, self._deleted_column)

    def _make_queries(self, segments: SegmentSelection | None) -> list[str]:
        if segments is None:
            return self.make_chunks(self.select_list).queries
        names = [f"c{number}" for number in range(len(self.columns))]
        queries = self.make_chunks([*self.select_list, _make_hash_expression(segments.row_hash)]).queries
        return [segments.query(query, names) for query in queries]

    def _compare_by_spark(self, part: "_ComparedPart") -> Difference:
        """Compare the rows by Spark."""
        publisher_rows, replica_rows = self.read_frames(part.only_selection)
        differences = find_differing_rows(publisher_rows, replica_rows, [c.name for c in self.columns])
        counts = count_rows_by_side(differences, self.key_columns)
        sample = _format_rows(differences.limit(SAMPLE_ROWS).toArrow()) if counts.total else []
        replica_row_count = replica_rows.count()
        # This gives the publisher's number of rows, so that the publisher's rows are read only once.
        publisher_row_count = replica_row_count + counts.only_publisher - counts.only_replica
        return Difference(publisher_row_count, replica_row_count, counts, sample)

    def _compare_in_process(self, part: "_ComparedPart") -> Difference:
        """Compare the rows in this process."""
        differences, row_counts = self._find_differing_rows_in_process(part, unify_zeros=True)
        counts = count_few_rows_by_side(differences, self.key_columns)
        return Difference(*row_counts, counts, _format_rows(differences.slice(0, SAMPLE_ROWS)))

    def _find_differing_rows_in_process(
        self, part: "_ComparedPart", *, unify_zeros: bool
    ) -> tuple[pa.Table, tuple[int, int]]:
        """Find the rows that differ, and count the rows of the publisher and of the replica that were read."""
        schema = make_replica_schema(self.columns)
        differences = [
            find_few_differing_rows(schema.empty_table(), schema.empty_table(), unify_zeros=unify_zeros)
        ]
        row_counts = np.zeros(2, np.int64)
        for selection in part.selections:
            publisher_rows, replica_rows = self._read_tables(selection)
            differences.append(find_few_differing_rows(publisher_rows, replica_rows, unify_zeros=unify_zeros))
            row_counts += (publisher_rows.num_rows, replica_rows.num_rows)
        return pa.concat_tables(differences), (int(row_counts[0]), int(row_counts[1]))

    def _read_tables(self, segments: SegmentSelection | None) -> tuple[pa.Table, pa.Table]:
        """Read rows of the publisher and of the replica into memory."""
        schema = make_replica_schema(self.columns)
        publisher_batches = [
            batch
            for query in self._make_queries(segments)
            for batch in read_query_batches(self.conninfo, self.snapshot.name, query, self.columns)
        ]
        with self.lake.access.translate_errors(self.path):
            replica_batches = self._open_replica().read()
            if segments is not None:
                replica_batches = map(segments.select, replica_batches)
            replica_rows = pa.Table.from_batches(replica_batches, schema)
        return pa.Table.from_batches(publisher_batches, schema), replica_rows


@dataclass(frozen=True)
class _ComparedPart:
    """The rows of the two sides that may differ.

    - `is_for_spark`: whether Spark compares the rows, and not this process
    - `selections`: the segments with these rows, divided so that this process can read those of one selection into
      memory. None selects all rows. Spark compares all rows at once, so there is one selection for it.
    - `row_counts`: how many rows the publisher and the replica have in all; None if they were not counted
    """

    is_for_spark: bool
    selections: Sequence[SegmentSelection | None] = (None,)
    row_counts: tuple[int, int] | None = None

    @property
    def only_selection(self) -> SegmentSelection | None:
        """The selection for Spark."""
        (selection,) = self.selections
        return selection


def _format_rows(differences: pa.Table) -> list[dict[str, Any]]:
    """Format the values of rows as text, as PostgreSQL prints them. Python could not represent some dates."""
    counts = differences["count"].to_pylist()
    names = [name for name in differences.column_names if name != "count"]
    texts = zip(*(list_texts(differences[name]) for name in names), strict=True)
    return [
        {**dict(zip(names, row, strict=True)), "count": count}
        for row, count in zip(texts, counts, strict=True)
    ]


def _make_hash_expression(row_hash: RowHash) -> str:
    return f"{row_hash.expression} AS hash"


def has_same_hashes(connection: psycopg.Connection[Any], seed: int) -> bool:
    """True if the server computes the same hashes as `pgsieve.decoding.checksums.hash_bytes`.

    A big-endian server does not.
    """
    sample = bytes(range(47))
    row = connection.execute(f"SELECT {hash_expression('%s::bytea', seed)}", [sample]).fetchone()
    assert row is not None
    return bool(row[0] % 2**64 == int(hash_values(pa.array([sample], pa.binary()), seed)[0]))
