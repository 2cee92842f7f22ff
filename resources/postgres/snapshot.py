"""Exports a snapshot at a known LSN, and copies tables at this snapshot in parallel.

In: a `Source`, and the tables to copy.
Out: - `export_snapshot`: the name and LSN of a snapshot, for the length of a block
     - `build_chunk_queries`: the queries that copy a table. Each of them reads a chunk: a range of the table's pages, or
       several small partitions.
     - `read_chunk`: the rows of a chunk as Arrow batches; executors call it

A copy and the changes after it must fit together without a gap. So the snapshot must contain everything that
committed before an LSN, and nothing else. Only CREATE_REPLICATION_SLOT ... (SNAPSHOT 'export') makes such a
snapshot (PostgreSQL documentation, Streaming Replication Protocol).
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg.pq import ExecStatus

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.publications.catalog import Catalog, Table
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.resources.parts import count_parts
from pgsieve.resources.postgres.errors import (
    LOCK_TIMEOUT_SQLSTATE,
    LockedTableError,
    SourceError,
    TransientError,
    is_transient,
    remove_values,
    remove_values_from_message,
)
from pgsieve.resources.postgres.sessions import Conninfo, execute
from pgsieve.resources.postgres.slot import warn_of_standby_wait
from pgsieve.resources.postgres.source import Source, fetch_batches, quote, quote_literal
from pgsieve.resources.postgres.waits import BRIEF_SECONDS, LOCKED_RELATIONS_QUERY, limit_wait

#: A chunk has at most about this many bytes.
CHUNK_BYTES = 128 * 1024 * 1024
#: A query reads at most this many leaves of a partition tree. It locks each of them, and the server counts on 64 locked
#: relations for each transaction (the default of max_locks_per_transaction).
_MAX_LEAVES = 64


#: A query for the server's time, as a text that does not depend on the session's settings.
_CLOCK_QUERY = (
    b"select to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00'"
)


class SnapshotLostError(TransientError):
    """The session that exported the snapshot has ended, so the table must be copied at a new snapshot."""


class AlteredTableError(SnapshotLostError):
    """The table was altered, renamed or dropped after the catalog was read.

    A query at a snapshot reads the rows of the snapshot, but it uses the present columns and names.
    """


#: Limits how long a session waits for a lock on a table that it wants to read.
_SET_LOCK_TIMEOUT = f"set lock_timeout = '{BRIEF_SECONDS:g}s'"
#: The SQLSTATEs of a query with a column, table or schema that does not exist.
_ALTERED_SQLSTATES = ("42703", "42P01", "3F000")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot. A subscription that copied at this snapshot needs the changes from `lsn` on.

    `time` is the server's time just before the export (ISO 8601, UTC).
    """

    name: str
    lsn: int
    time: str


@dataclass(frozen=True, slots=True)
class Chunks:
    """The queries that copy a table, one per chunk, and the table's bytes on disk, including TOAST."""

    queries: list[str]
    bytes: int


@contextmanager
def export_snapshot(source: Source, max_wait_seconds: float | None = None) -> Iterator[Snapshot]:
    """Export a snapshot for the block. This takes a temporary slot, which ends with the block.

    Raises OpenTransactionsError if the export waits for open transactions longer than `max_wait_seconds`. None means no
    limit.
    """
    slot = f"pgsieve_snapshot_{uuid.uuid4().hex[:16]}"
    with source.connect(replication="database") as connection:
        warn_of_standby_wait(connection, source.name)
        export_clause = (
            "(SNAPSHOT 'export')" if connection.info.server_version >= 150000 else "EXPORT_SNAPSHOT"
        )
        command = f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput {export_clause}'
        with limit_wait(source, connection, max_wait_seconds):
            clock_result = connection.pgconn.exec_(_CLOCK_QUERY)
            result = connection.pgconn.exec_(command.encode())
            if result.status != ExecStatus.TUPLES_OK:
                sqlstate = result.error_field(psycopg.pq.DiagnosticField.SQLSTATE)
                error = psycopg.errors.error_from_result(result)
                raise (TransientError if connection.broken or is_transient(error) else SourceError)(
                    f'source "{source.name}": no snapshot for the initial copy ({result.get_error_message().strip()})',
                    hint="the role needs REPLICATION, and max_replication_slots must leave a slot free",
                    sqlstate=sqlstate.decode() if sqlstate else None,
                )
        lsn, name, time = result.get_value(0, 1), result.get_value(0, 2), clock_result.get_value(0, 0)
        assert lsn is not None
        assert name is not None
        assert time is not None
        yield Snapshot(name.decode(), parse_lsn(lsn.decode()), time.decode())
        # This session may end now: sessions that have imported the snapshot keep it.
        connection.close()


#: The bytes of tables on disk. pg_table_size() locks a table, so tables that another session has locked
#: exclusively count as empty.
_TABLE_BYTES_QUERY = f"""
with recursive tree(schema, name, oid, relkind) as (
  select w.schema, w.name, c.oid, relkind from unnest(%s::text[], %s::text[]) w(schema, name)
    join pg_namespace n on n.nspname = w.schema join pg_class c on relnamespace = n.oid and relname = w.name
  union all
  select schema, name, c.oid, c.relkind from tree t join pg_inherits on inhparent = t.oid join pg_class c on c.oid = inhrelid
   where t.relkind = 'p'
)
select schema, name, coalesce(sum(case when oid <> all(array({LOCKED_RELATIONS_QUERY})) then pg_table_size(oid) end), 0)::bigint
  from tree group by 1, 2
"""


def read_table_bytes(
    connection: psycopg.Connection[Any], names: Collection[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    """Maps each table to its bytes on disk, including TOAST and partitions.

    The number is 0 for a table that is missing, or that another session has locked exclusively.
    """
    rows = connection.execute(
        _TABLE_BYTES_QUERY, [[schema for schema, _ in names], [table for _, table in names]]
    )
    return dict.fromkeys(names, 0) | {(schema, table): size for schema, table, size in rows}


def build_chunk_queries(
    connection: psycopg.Connection[Any],
    replicated_table: ReplicatedTable,
    expressions: Sequence[str],
    catalog: Catalog,
    choose_parallelism: Callable[[int], int],
) -> "Chunks":
    """The queries that together select the published rows of a table.

    Each query reads a range of ctids of one leaf of the table, or several small leaves. The only leaf of a table that is
    not partitioned is the table itself.

    - `expressions`: the select list
    - `choose_parallelism`: maps the bytes of a table to the number of queries that run at the same time

    The server evaluates the row filters, combined by OR (PostgreSQL documentation, Row Filters, Initial Data
    Synchronization). If the role may not read the leaves of a partition tree, or row-level security is active for the role,
    a single query selects from the root, as a built-in subscription does. Raises LockedTableError if a leaf
    is locked, and AlteredTableError if one was dropped.
    """
    table = replicated_table.table
    leaves = (
        [catalog.tables[leaf] for leaf in table.leaves if leaf in catalog.tables]
        if table.kind == "p"
        else [table]
    )
    columns = ", ".join(expressions)
    condition = ""
    if replicated_table.row_filters is not None:
        condition = (
            "(" + " or ".join(f"({row_filter})" for row_filter in replicated_table.row_filters) + ") and "
        )
    has_ctid_ranges = connection.info.server_version >= 140000
    with _limit_lock_wait(connection):
        sizes = [_TableSize.read_size(connection, leaf) for leaf in leaves]
    table_bytes_on_disk = sum(size.bytes for size in sizes)
    chunk_bytes = max(
        1,
        table_bytes_on_disk
        // count_parts(table_bytes_on_disk, CHUNK_BYTES, choose_parallelism(table_bytes_on_disk)),
    )
    ranges = list[_Range]()
    for leaf, size in zip(leaves, sizes, strict=True):
        chunk_count = max(1, min(round(size.bytes / chunk_bytes), size.pages)) if has_ctid_ranges else 1
        first_pages = [size.pages * i // chunk_count for i in range(chunk_count)]
        for number, first_page in enumerate(first_pages):
            ctid_condition = f"ctid >= '({first_page},0)'::tid"
            if number + 1 < len(first_pages):
                ctid_condition += f" and ctid < '({first_pages[number + 1]},0)'::tid"
            query = f"select {columns} from only {quote(leaf.schema, leaf.name)} where {condition}{ctid_condition}"
            ranges.append(_Range(query, size.bytes // chunk_count))
    queries = _join_small_ranges(ranges, chunk_bytes)
    # Also read foreign and unlogged leaves. The publisher sends no changes of them, but a built-in subscription copies
    # their rows.
    queries += [f"select {columns} from only {name} where {condition}true" for name in table.unsent_leaves]
    if table.kind == "p" and _must_read_root(connection, table.oid, [leaf.oid for leaf in leaves]):
        queries = [f"select {columns} from {quote(table.schema, table.name)} where {condition}true"]
    return Chunks(queries, table_bytes_on_disk)


@dataclass(frozen=True, slots=True)
class _Range:
    """The query for a range of a leaf's pages, and about how many bytes these pages have, including TOAST."""

    query: str
    bytes: int


def _join_small_ranges(ranges: Sequence[_Range], chunk_bytes: int) -> list[str]:
    """Make the queries for some ranges. One query reads successive ranges that have at most `chunk_bytes` together.

    Each query becomes a task, a session and a file of the replica, which take much longer than reading a small leaf.
    """
    groups, group_bytes = list[list[str]](), 0
    for page_range in ranges:
        group_bytes += page_range.bytes
        if not groups or group_bytes > chunk_bytes or len(groups[-1]) == _MAX_LEAVES:
            groups.append([])
            group_bytes = page_range.bytes
        groups[-1].append(page_range.query)
    return [" union all ".join(group) for group in groups]


@contextmanager
def _limit_lock_wait(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Raise LockedTableError if a statement of the block waits for a lock longer than `BRIEF_SECONDS`."""
    connection.execute(_SET_LOCK_TIMEOUT)
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise LockedTableError(remove_values_from_message(error), sqlstate=error.sqlstate) from None


@dataclass(frozen=True, slots=True)
class _TableSize:
    """The number of pages of a table's main fork, and the table's bytes including TOAST."""

    pages: int
    bytes: int

    @classmethod
    def read_size(cls, connection: psycopg.Connection[Any], table: Table) -> "_TableSize":
        """The size of a table that is not partitioned. Raises AlteredTableError if the table was dropped."""
        row = connection.execute(
            "select ceil(pg_relation_size(%(oid)s::oid) / current_setting('block_size')::numeric)::bigint,"
            " pg_table_size(%(oid)s::oid)::bigint",
            {"oid": table.oid},
        ).fetchone()
        if row is None or None in row:
            raise AlteredTableError(
                f'table "{table.qualified_name}" was dropped before it was copied', sqlstate="42P01"
            )
        return cls(*row)


#: A query of the root needs only privileges on the root, and obeys only the policies of the root, not those of the
#: partitions.
_MUST_READ_ROOT_QUERY = """
select row_security_active(%s::oid) or exists (
    select from pg_class where oid = any(%s::oid[]) and (row_security_active(oid)
    or not has_schema_privilege(relnamespace, 'usage') or not has_table_privilege(oid, 'select')))
"""


def _must_read_root(connection: psycopg.Connection[Any], root: int, leaves: Sequence[int]) -> bool:
    """True if the leaves of a tree cannot be read instead of the root.

    This is so if the role may not read the leaves, or if row-level security may make the leaves show other rows than
    the root.
    """
    return connection.execute(_MUST_READ_ROOT_QUERY, [root, list(leaves)]).fetchone() == (True,)


#: The tables with active row-level security. A table is left out if a permissive policy lets all rows pass, and no
#: restrictive policy hides any. A table that another session has locked exclusively is left out, too.
_HIDDEN_ROWS_QUERY = f"""
select oid::bigint from pg_class where oid = any(%s::oid[]) and row_security_active(oid) and oid <> all(array({LOCKED_RELATIONS_QUERY}))
 and not coalesce((
    select bool_or(polpermissive and qual = 'true') and bool_and(polpermissive or qual = 'true')
    from (select polpermissive, coalesce(pg_get_expr(polqual, polrelid), 'true') as qual from pg_policy
        where polrelid = pg_class.oid and polcmd in ('r', '*')
        and (0 = any(polroles) or exists (select from unnest(polroles) role where role <> 0 and pg_has_role(role, 'usage')))) p),
    false)
"""


def find_tables_with_hidden_rows(connection: psycopg.Connection[Any], oids: Collection[int]) -> set[int]:
    """The oids of the tables in which row-level security may hide rows from the role.

    The slot delivers the changes of hidden rows, too. They would not fit a copy without these rows.
    """
    return {oid for (oid,) in connection.execute(_HIDDEN_ROWS_QUERY, [list(oids)])}


def read_chunk(conninfo: Conninfo, snapshot: str, query: str) -> Iterator[pa.RecordBatch]:
    """Run the query of one chunk at the exported snapshot, and yield its Arrow batches."""
    with remove_values(), conninfo.connect_adbc() as connection, connection.cursor() as cursor:
        cursor.execute("set transaction isolation level repeatable read, read only")
        try:
            cursor.execute(f"set transaction snapshot {quote_literal(snapshot)}")
        except adbc_driver_manager.Error as error:
            if is_transient(error):
                raise
            raise SnapshotLostError("the exported snapshot is gone", sqlstate=error.sqlstate) from None
        cursor.execute(_SET_LOCK_TIMEOUT)
        try:
            with remove_values():
                execute(cursor, query)
        except SourceError as error:
            if error.sqlstate == LOCK_TIMEOUT_SQLSTATE:
                raise LockedTableError(error.message, sqlstate=error.sqlstate) from None
            if error.sqlstate not in _ALTERED_SQLSTATES:
                raise
            message = f"the table was altered while it was copied: {error.message}"
            raise AlteredTableError(message, sqlstate=error.sqlstate) from None
        yield from fetch_batches(cursor)
