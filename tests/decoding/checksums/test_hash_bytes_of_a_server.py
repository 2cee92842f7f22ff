"""Hashes of byte strings and checksums of segments equal the server's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.checksums.hash_bytes import hash_bytes_extended
from pgsieve.decoding.checksums.record_send import SentColumn
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
from pgsieve.decoding.values.types import column_type
from pgsieve.resources.postgres.embedded import EmbeddedServer

_SEEDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])


@pytest.fixture(scope="module")
def connection(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as connection:
        yield connection


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=80), max_size=20), _SEEDS)
def test_values_of_any_lengths_have_the_servers_hashes(
    connection: psycopg.Connection, values: list[bytes], seed: int
) -> None:
    query = f"select {hash_expression('v', seed)} from unnest(%s::bytea[]) with ordinality u(v, n) order by n"
    expected = [number % 2**64 for (number,) in connection.execute(query, [values])]
    # A sliced array does not begin where its buffer does.
    sliced = pa.array([b"before", *values, b"behind"], pa.binary())[1:-1]
    assert hash_values(sliced, seed).tolist() == expected


def test_values_of_every_length_up_to_several_blocks_have_the_servers_hashes(
    connection: psycopg.Connection,
) -> None:
    values = [b"\xff" * size for size in range(100)]
    query = (
        "select hash_array_extended(array[v], 7) from unnest(%s::bytea[]) with ordinality u(v, n) order by n"
    )
    expected = [number % 2**64 for (number,) in connection.execute(query, [values])]
    assert len(set(expected)) == 100
    assert (hash_bytes_extended(pa.array(values, pa.binary()), 7) + np.uint64(31)).tolist() == expected


_ROWS = st.lists(
    st.tuples(st.none() | st.integers(-3, 3), st.none() | st.text("ab😀", max_size=2)), max_size=30
)


def _batch(rows: list[tuple[int | None, str | None]]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else ((), ())
    return pa.RecordBatch.from_arrays(
        [pa.array(list(c), t) for c, t in zip(columns, (pa.int32(), pa.string()), strict=True)], ["a", "b"]
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(_ROWS, _SEEDS, st.randoms())
def test_segments_have_the_servers_checksums_in_any_order_of_rows(
    connection: psycopg.Connection, rows: list[tuple[int | None, str | None]], seed: int, r: object
) -> None:
    row_hash = RowHash(
        tuple(SentColumn.for_column(n, oid, column_type(oid, -1)) for n, oid in (("a", 23), ("b", 25))), seed
    )
    given_rows = "unnest(%s::int[], %s::text[]) as t(a, b)"
    query = checksums_query(f"select {row_hash.expression} as hash from {given_rows}")
    lists = [[row[0] for row in rows], [row[1] for row in rows]]
    segments = connection.execute(query, lists).fetchall()
    publisher, replica = Checksums(), Checksums()
    names = ("segment", "rows", "sum")
    columns = [
        pa.array([row[i] for row in segments], t) for i, t in enumerate((pa.int64(), pa.int64(), pa.string()))
    ]
    add_query_result(publisher, pa.RecordBatch.from_arrays(columns, names))
    shuffled = r.sample(rows, len(rows))
    for part in (shuffled[::2], shuffled[1::2]):
        replica.add(row_hash.compute_hashes(_batch(part)))
    assert not publisher.differing_segments(replica).any()
    assert publisher.row_counts.sum() == len(rows)
    replica.add(row_hash.compute_hashes(_batch([(0, "one more")])))
    differing = publisher.differing_segments(replica)
    assert differing.sum() == 1
    chosen = SegmentSelection(row_hash, differing)
    assert chosen.select(_batch([*rows, (0, "one more")])).num_rows == replica.row_counts[differing].sum()
    inside = chosen.query(f"select a, b, {row_hash.expression} as hash from {given_rows}", ["a", "b"])
    assert len(connection.execute(inside, lists).fetchall()) == publisher.row_counts[differing].sum()
    assert len(differing) == SEGMENT_COUNT


def test_values_swapped_between_two_rows_are_noticed() -> None:
    """The sums of the single values' hashes would be the same."""
    row_hash = RowHash(
        tuple(SentColumn.for_column(n, oid, column_type(oid, -1)) for n, oid in (("a", 23), ("b", 25))), 1
    )
    one, other = Checksums(), Checksums()
    one.add(row_hash.compute_hashes(_batch([(1, "x"), (2, "y")])))
    other.add(row_hash.compute_hashes(_batch([(1, "y"), (2, "x")])))
    assert one.differing_segments(other).any()
