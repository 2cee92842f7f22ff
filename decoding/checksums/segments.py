"""Divides the rows of a table into segments by their hashes, counts the rows of each segment, and sums up the hashes.

In: the columns of a table, and a seed. Out: SQL with which a publisher computes the hash of each row, and the checksums
of each segment (its count and its sum). For the rows of a replica, which are Arrow columns, the module computes the same.

The order of rows does not matter. If a row occurs several times, it counts several times. The low bits of a row's hash
are the number of its segment. If a row differs between publisher and replica, its two versions are usually in different
segments, and the checksums of both segments differ.

The probability that two different tables have the same checksums is 2⁻⁶⁴. If that happens, the checksums under another
seed almost certainly differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import Mask, Positions, UnsignedIntegers
from pgsieve.decoding.checksums.hash_bytes import hash_bytes_extended
from pgsieve.decoding.checksums.record_send import SentColumn, record_send, row_expression

#: The number of segments. With this number of groups, the server's hash table fits into the default work_mem.
SEGMENT_COUNT = 2**14
_SEGMENT_MASK = SEGMENT_COUNT - 1

#: If a row has more bytes, its SHA-256 is hashed instead. In this process, numpy hashes the rows together, block by
#: block. So a long row would take many steps.
_MAX_HASHED_BYTES = 1000
#: The greatest numbers of rows and of bytes that are hashed together. So few rows mostly stay in the processor's cache.
_MAX_ROWS = 8192
_MAX_BYTES = 64 * 1024 * 1024

Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowHash:
    """Hashes the rows of a table, in SQL at the publisher or in this process."""

    columns: tuple[SentColumn, ...]
    seed: int

    @property
    def expression(self) -> str:
        """The SQL expression for the hash of a row; its type is bigint."""
        short_value = "CASE WHEN pg_catalog.length(sent) <= {0} THEN sent ELSE pg_catalog.sha256(sent) END"
        # Without OFFSET 0 the planner repeats the row's expression at each use of `sent`.
        return (
            f"(SELECT {hash_expression(short_value.format(_MAX_HASHED_BYTES), self.seed)}"
            f" FROM (SELECT {row_expression(self.columns)} AS sent OFFSET 0) AS one_row)"
        )

    def compute_hashes(self, batch: pa.RecordBatch) -> UnsignedIntegers:
        """Return the hashes of the rows of a batch; the batch has the columns of the table, in the same order."""
        arrays = [
            array if array.type == column.arrow_type else array.cast(column.arrow_type)
            for array, column in zip(batch.columns, self.columns, strict=True)
        ]
        return np.concatenate([self._compute_part_hashes(part) for part in _split_rows(arrays)])

    def _compute_part_hashes(self, arrays: Sequence[pa.Array]) -> UnsignedIntegers:
        rows = record_send(arrays, self.columns)
        is_long = pc.greater(pc.binary_length(rows), _MAX_HASHED_BYTES)
        if is_long.true_count:
            digests = [hashlib.sha256(row.as_buffer()).digest() for row in rows.filter(is_long)]
            rows = pc.replace_with_mask(rows, is_long, pa.array(digests, pa.binary()))
        return hash_values(rows, self.seed)


def hash_expression(value: str, seed: int) -> str:
    """Return the SQL expression for the hash of a bytea.

    The bytea is put into an array, because servers before 18 have a hash function for arrays but none for bytea.
    """
    signed = seed - 2**64 if seed >= 2**63 else seed
    return f"pg_catalog.hash_array_extended(ARRAY[{value}], {signed})"


def hash_values(values: pa.Array, seed: int) -> UnsignedIntegers:
    """Return what `hash_expression` computes for binary values, as unsigned numbers.

    Source: hash_array_extended() in src/backend/utils/adt/arrayfuncs.c.
    """
    return hash_bytes_extended(values, seed) + np.uint64(31)


def _split_rows(arrays: Sequence[pa.Array]) -> Iterator[Sequence[pa.Array]]:
    row_count = len(arrays[0])
    total_bytes = sum(a.nbytes for a in arrays)
    step = max(1, min(_MAX_ROWS, _MAX_BYTES * row_count // max(total_bytes, 1)))
    for first in range(0, max(row_count, 1), step):
        yield [a.slice(first, step) for a in arrays]


def find_segment_numbers(hashes: UnsignedIntegers) -> Numbers:
    """Return the segment number of each row, given the hashes of the rows."""
    return (hashes & np.uint64(_SEGMENT_MASK)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of all segments of a table, by segment number.

    `row_counts` has the number of rows, and `hash_sums` has the sum of their hashes modulo 2⁶⁴.
    """

    row_counts: Numbers = field(default_factory=lambda: np.zeros(SEGMENT_COUNT, np.int64))
    hash_sums: UnsignedIntegers = field(default_factory=lambda: np.zeros(SEGMENT_COUNT, np.uint64))

    def add(self, hashes: UnsignedIntegers) -> None:
        """Add rows, given their hashes."""
        segments = find_segment_numbers(hashes)
        self.row_counts[:] += np.bincount(segments, minlength=SEGMENT_COUNT)
        np.add.at(self.hash_sums, segments, hashes)

    def add_sums(self, segments: Positions, row_counts: Numbers, hash_sums: UnsignedIntegers) -> None:
        """Add numbers of rows and sums of hashes to segments. The same segment may be in `segments` several times."""
        np.add.at(self.row_counts, segments, row_counts)
        np.add.at(self.hash_sums, segments, hash_sums)

    def differing_segments(self, other: Checksums) -> Mask:
        """Return the mask of the segments whose checksums differ."""
        is_different: Mask = (self.row_counts != other.row_counts) | (self.hash_sums != other.hash_sums)
        return is_different


def checksums_query(rows_query: str) -> str:
    """Return SQL for the checksums of all segments; `rows_query` is a query with a column `hash`."""
    return (
        f"SELECT hash & {_SEGMENT_MASK} AS segment, pg_catalog.count(*) AS rows, pg_catalog.sum(hash)::text AS sum"
        f" FROM ({rows_query} OFFSET 0) AS hashed GROUP BY 1"
    )


def add_query_result(checksums: Checksums, batch: pa.RecordBatch) -> None:
    """Add a result of `checksums_query` to checksums."""
    hash_sums = [int(text) % 2**64 for text in batch.column("sum").to_pylist()]
    checksums.add_sums(
        np.asarray(batch.column("segment")), np.asarray(batch.column("rows")), np.array(hash_sums, np.uint64)
    )


@dataclass(frozen=True, slots=True)
class SegmentSelection:
    """Some segments of a table; `is_selected` is their mask."""

    row_hash: RowHash
    is_selected: Mask

    def query(self, rows_query: str, columns: Sequence[str]) -> str:
        """Return SQL for `columns` of the rows in these segments.

        `rows_query` is a query with these columns and a column `hash`.
        """
        numbers = ",".join(map(str, np.flatnonzero(self.is_selected)))
        return (
            f"SELECT {', '.join(columns)} FROM ({rows_query}) AS hashed"
            f" WHERE hash & {_SEGMENT_MASK} IN (SELECT pg_catalog.unnest('{{{numbers}}}'::bigint[]))"
        )

    def select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch that are in these segments."""
        return batch.filter(
            pa.array(self.is_selected[find_segment_numbers(self.row_hash.compute_hashes(batch))])
        )
