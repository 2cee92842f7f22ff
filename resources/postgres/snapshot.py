"""An exported snapshot at a known LSN, and the queries that copy tables at it in parallel.

In: a `Source`, and the tables to copy. Out: a snapshot's name and LSN within a block (`exported_snapshot`),
one query per chunk (`chunk_queries`), and a chunk's rows as Arrow batches (`read_chunk`, for executors). Only
CREATE_REPLICATION_SLOT ... (SNAPSHOT 'export') gives a snapshot that is exact at an LSN (section 54.4): the
snapshot has everything that committed before the LSN, and nothing after.
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
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable, Table
from pgsieve.resources.parts import number_of_parts
from pgsieve.resources.postgres.awaited import BRIEF_SECONDS, LOCKED, awaiting
from pgsieve.resources.postgres.errors import (
    LOCKED_OUT,
    LockedTableError,
    PassingFaultError,
    SourceError,
    is_passing,
    message_without_values,
    without_values,
)
from pgsieve.resources.postgres.sessions import Conninfo, execute
from pgsieve.resources.postgres.slot import warn_of_waiting
from pgsieve.resources.postgres.source import Source, fetched, literal, quote

#: A chunk of a table has at most about this many bytes.
CHUNK_BYTES = 128 * 1024 * 1024


#: The server's time, as a text that does not depend on the session's settings.
_CLOCK = b"select to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00'"


class SnapshotLostError(PassingFaultError):
    """The session that exported the snapshot has ended; the table can be copied at a new snapshot."""


class AlteredTableError(SnapshotLostError):
    """The table was altered, renamed or dropped since its definition was read: queries use the present catalog."""


#: How long a session waits for a lock on a table that it reads.
_BRIEFLY = f"set lock_timeout = '{BRIEF_SECONDS:g}s'"
#: SQLSTATEs of a query whose column, table or schema is gone since the catalog was read (appendix A).
_ALTERED = ("42703", "42P01", "3F000")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot, and the LSN from which changes follow it.

    `time` is the server's time just before (ISO 8601).
    """

    name: str
    lsn: int
    time: str


@dataclass(frozen=True, slots=True)
class Chunks:
    """The queries that copy a table, and its bytes on disk, TOAST included."""

    queries: list[str]
    bytes: int


@contextmanager
def exported_snapshot(source: Source, seconds: float | None = None) -> Iterator[Snapshot]:
    """Export a snapshot for the block, by a temporary slot, which ends with the block.

    Raises SnapshotAwaitedError if it waits for open transactions longer than `seconds`; None is no limit.
    """
    slot = f"pgsieve_snapshot_{uuid.uuid4().hex[:16]}"
    with source.connect(replication="database") as connection:
        warn_of_waiting(connection, source.name)
        export = "(SNAPSHOT 'export')" if connection.info.server_version >= 150000 else "EXPORT_SNAPSHOT"
        command = f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput {export}'
        with awaiting(source, connection, seconds):
            clock = connection.pgconn.exec_(_CLOCK)
            result = connection.pgconn.exec_(command.encode())
            if result.status != ExecStatus.TUPLES_OK:
                state = result.error_field(psycopg.pq.DiagnosticField.SQLSTATE)
                refused = psycopg.errors.error_from_result(result)
                raise (PassingFaultError if connection.broken or is_passing(refused) else SourceError)(
                    f'source "{source.name}": no snapshot for the initial copy ({result.get_error_message().strip()})',
                    hint="the role needs REPLICATION, and max_replication_slots one free slot",
                    sqlstate=state.decode() if state else None,
                )
        lsn, name, time = result.get_value(0, 1), result.get_value(0, 2), clock.get_value(0, 0)
        assert lsn is not None
        assert name is not None
        assert time is not None
        yield Snapshot(name.decode(), parse_lsn(lsn.decode()), time.decode())
        # Sessions that imported the snapshot keep it, so this session may end.
        connection.close()


#: pg_table_size() locks a table, so a table that another session has locked exclusively counts as empty.
_BYTES = f"""
with recursive tree(schema, name, oid, relkind) as (
  select w.schema, w.name, c.oid, relkind from unnest(%s::text[], %s::text[]) w(schema, name)
    join pg_namespace n on n.nspname = w.schema join pg_class c on relnamespace = n.oid and relname = w.name
  union all
  select schema, name, c.oid, c.relkind from tree t join pg_inherits on inhparent = t.oid join pg_class c on c.oid = inhrelid
   where t.relkind = 'p'
)
select schema, name, coalesce(sum(case when oid <> all(array({LOCKED})) then pg_table_size(oid) end), 0)::bigint
  from tree group by 1, 2
"""


def table_bytes(
    connection: psycopg.Connection[Any], names: Collection[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    """The bytes of tables on disk with TOAST and partitions.

    0 for a table that is missing, or cannot be read now.
    """
    rows = connection.execute(_BYTES, [[schema for schema, _ in names], [table for _, table in names]])
    return dict.fromkeys(names, 0) | {(schema, table): size for schema, table, size in rows}


def chunk_queries(
    connection: psycopg.Connection[Any],
    replicated: ReplicatedTable,
    expressions: Sequence[str],
    catalog: Catalog,
    parallelism: Callable[[int], int],
) -> "Chunks":
    """The queries that together select a table's published rows, one per ctid range of each of its leaves.

    `expressions` are the select list; `parallelism` gives the number of parallel queries for a table's bytes.
    Row filters are ORed and run on the server (section 29.4.5). If the role may not read the leaves of a
    partition tree, one query selects from its root, as a built-in subscription does. Raises LockedTableError.
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
    with _waiting_briefly(connection):
        sizes = [_Size.of(connection, part) for part in parts]
    total = sum(size.bytes for size in sizes)
    most = max(1, total // number_of_parts(total, CHUNK_BYTES, parallelism(total)))
    queries = []
    for part, size in zip(parts, sizes, strict=True):
        chunks = max(1, min(round(size.bytes / most), size.pages)) if ranges_work else 1
        bounds = [size.pages * i // chunks for i in range(chunks)]
        for number, low in enumerate(bounds):
            within = f"ctid >= '({low},0)'::tid"
            if number + 1 < len(bounds):
                within += f" and ctid < '({bounds[number + 1]},0)'::tid"
            queries.append(
                f"select {columns} from only {quote(part.schema, part.name)} where {condition}{within}"
            )
    # A built-in subscription copies these leaves, too, although the publisher sends no changes of them.
    queries += [f"select {columns} from only {leaf} where {condition}true" for leaf in table.unsent_leaves]
    if table.kind == "p" and _is_read_by_root(connection, table.oid, [part.oid for part in parts]):
        queries = [f"select {columns} from {quote(table.schema, table.name)} where {condition}true"]
    return Chunks(queries, total)


@contextmanager
def _waiting_briefly(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Raise LockedTableError if another session keeps a table locked."""
    connection.execute(_BRIEFLY)
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise LockedTableError(message_without_values(error), sqlstate=error.sqlstate) from None


@dataclass(frozen=True, slots=True)
class _Size:
    """The pages of a table's main fork, and its bytes with large values, which are stored elsewhere."""

    pages: int
    bytes: int

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], table: Table) -> "_Size":
        """The size of a table without partitions; raises AlteredTableError if it is gone."""
        row = connection.execute(
            "select ceil(pg_relation_size(%(oid)s::oid) / current_setting('block_size')::numeric)::bigint,"
            " pg_table_size(%(oid)s::oid)::bigint",
            {"oid": table.oid},
        ).fetchone()
        if row is None or None in row:
            raise AlteredTableError(
                f'table "{table.qualified}" was dropped before it was copied', sqlstate="42P01"
            )
        return cls(*row)


#: A query of the root uses the root's rights and policies, and ignores those of its partitions (section
#: 5.12.2).
_BY_ROOT = """
select row_security_active(%s::oid) or exists (
    select from pg_class where oid = any(%s::oid[]) and (row_security_active(oid)
    or not has_schema_privilege(relnamespace, 'usage') or not has_table_privilege(oid, 'select')))
"""


def _is_read_by_root(connection: psycopg.Connection[Any], root: int, leaves: Sequence[int]) -> bool:
    """Whether the role reads other rows from a tree's leaves than from its root, or may not read the leaves."""
    return connection.execute(_BY_ROOT, [root, list(leaves)]).fetchone() == (True,)


#: Tables with an active row-level policy, unless a permissive policy lets all rows pass, and no restrictive
#: one hides any.
_HIDDEN = f"""
select oid::bigint from pg_class where oid = any(%s::oid[]) and row_security_active(oid) and oid <> all(array({LOCKED}))
 and not coalesce((
    select bool_or(polpermissive and qual = 'true') and bool_and(polpermissive or qual = 'true')
    from (select polpermissive, coalesce(pg_get_expr(polqual, polrelid), 'true') as qual from pg_policy
        where polrelid = pg_class.oid and polcmd in ('r', '*')
        and (0 = any(polroles) or exists (select from unnest(polroles) role where role <> 0 and pg_has_role(role, 'usage')))) p),
    false)
"""


def partly_hidden(connection: psycopg.Connection[Any], oids: Collection[int]) -> set[int]:
    """The tables in which row-level security may hide rows from the role, although it receives their changes."""
    return {oid for (oid,) in connection.execute(_HIDDEN, [list(oids)])}


def read_chunk(conninfo: Conninfo, snapshot: str, query: str) -> Iterator[pa.RecordBatch]:
    """Run one chunk's query at the exported snapshot and yield its Arrow batches (COPY BINARY below)."""
    with without_values(), conninfo.adbc() as connection, connection.cursor() as cursor:
        cursor.execute("set transaction isolation level repeatable read, read only")
        try:
            cursor.execute(f"set transaction snapshot {literal(snapshot)}")
        except adbc_driver_manager.Error as error:
            if is_passing(error):
                raise
            raise SnapshotLostError("the exported snapshot is gone", sqlstate=error.sqlstate) from None
        cursor.execute(_BRIEFLY)
        try:
            with without_values():
                execute(cursor, query)
        except SourceError as error:
            if error.sqlstate == LOCKED_OUT:
                raise LockedTableError(error.message, sqlstate=error.sqlstate) from None
            if error.sqlstate not in _ALTERED:
                raise
            message = f"the table was altered while it was copied: {error.message}"
            raise AlteredTableError(message, sqlstate=error.sqlstate) from None
        yield from fetched(cursor)
