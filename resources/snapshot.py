"""An exported snapshot whose LSN is known, and the queries that copy tables at it in parallel.

In: a `Source`, the tables to copy. Out: a snapshot's name and LSN while it is held (`exported_snapshot`),
one query a chunk (`chunk_queries`), and a chunk's rows as Arrow batches (`read_chunk`, for executors).
CREATE_REPLICATION_SLOT ... (SNAPSHOT 'export') is the only way to a snapshot that is exact at an LSN (section
54.4): it holds all that committed before the LSN, and nothing after.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.pq import ExecStatus

from decoding.lsn import parse_lsn
from decoding.publication import Catalog, ReplicatedTable
from resources.postgres import Source, SourceError, literal, quote, without_values

#: A chunk of a table is about so many bytes of its main fork.
CHUNK_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot and the LSN from which changes follow it."""

    name: str
    lsn: int


@dataclass(frozen=True, slots=True)
class Chunks:
    """The queries that copy a table, and the bytes that it has on disk, TOAST included."""

    queries: list[str]
    bytes: int


@contextmanager
def exported_snapshot(source: Source) -> Iterator[Snapshot]:
    """Export a snapshot by way of a temporary slot, and hold it; nothing of it outlives the block."""
    slot = f"pgsieve_snapshot_{uuid.uuid4().hex[:16]}"
    with source.connect(replication="database") as connection:
        export = "(SNAPSHOT 'export')" if connection.info.server_version >= 150000 else "EXPORT_SNAPSHOT"
        result = connection.pgconn.exec_(
            f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput {export}'.encode()
        )
        if result.status != ExecStatus.TUPLES_OK:
            state = result.error_field(psycopg.pq.DiagnosticField.SQLSTATE)
            raise SourceError(
                f'source "{source.name}": no snapshot for the initial copy ({result.get_error_message().strip()})',
                hint="the role needs REPLICATION, and max_replication_slots one free slot",
                sqlstate=state.decode() if state else None,
            )
        lsn, name = result.get_value(0, 1), result.get_value(0, 2)
        assert lsn is not None
        assert name is not None
        yield Snapshot(name=name.decode(), lsn=parse_lsn(lsn.decode()))


def chunk_queries(
    connection: psycopg.Connection[Any],
    replicated: ReplicatedTable,
    expressions: Sequence[str],
    catalog: Catalog,
) -> "Chunks":
    """The queries that together select a table's published rows, one a ctid range of each of its leaves.

    `expressions` are the select list. Row filters are ORed and run on the server (section 29.4.5).
    """
    table = replicated.table
    parts = (
        [catalog.tables[leaf] for leaf in table.leaves if leaf in catalog.tables]
        if table.kind == "p"
        else [table]
    )
    columns = ", ".join(expressions)
    condition = ""
    if replicated.row_filters is not None:
        condition = "(" + " or ".join(f"({row_filter})" for row_filter in replicated.row_filters) + ") and "
    ranges_work = connection.info.server_version >= 140000
    queries, total = [], 0
    for part in parts:
        row = connection.execute(
            "select pg_relation_size(%(oid)s::oid)::bigint, pg_table_size(%(oid)s::oid)::bigint,"
            " current_setting('block_size')::bigint",
            {"oid": part.oid},
        ).fetchone()
        assert row is not None
        size, whole, block = row
        total += whole
        chunks = max(1, round(size / CHUNK_BYTES)) if ranges_work else 1
        pages = -(-size // block)
        bounds = [pages * i // chunks for i in range(chunks)]
        for number, low in enumerate(bounds):
            within = f"ctid >= '({low},0)'::tid"
            if number + 1 < len(bounds):
                within += f" and ctid < '({bounds[number + 1]},0)'::tid"
            queries.append(
                f"select {columns} from only {quote(part.schema, part.name)} where {condition}{within}"
            )
    return Chunks(queries, total)


def read_chunk(conninfo: str, snapshot: str, query: str) -> Iterator[pa.RecordBatch]:
    """Run one chunk's query at the exported snapshot and yield its Arrow batches (COPY BINARY below)."""
    from adbc_driver_postgresql import dbapi

    with without_values(), dbapi.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.execute("set transaction isolation level repeatable read, read only")
        cursor.execute(f"set transaction snapshot {literal(snapshot)}")
        cursor.execute(query)
        yield from cursor.fetch_record_batch()
