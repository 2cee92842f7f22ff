"""The publisher: connections, its catalog, and the SQL identifiers composed for it.

In: a libpq conninfo. Out: connections, and the `Catalog` of tables and publications at one moment.
Raises `SourceError` subclasses for what a user can correct: unreachable server, wrong settings, missing rights.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import sql

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import (
    Attribute,
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)
from pgsieve.decoding.publications.filter_rules import Expression, column_names
from pgsieve.decoding.publications.node_tree import parse_expression
from pgsieve.decoding.values.builtin_types import MadeOf
from pgsieve.resources.passwords import concealed
from pgsieve.resources.postgres.kept_sessions import kept_sessions
from pgsieve.resources.postgres.pooler import is_pooled, pooler_at, shares_processes, some_pooler
from pgsieve.resources.postgres.sessions import Conninfo, PasswordCommandError, UnreadableConninfoError
from pgsieve.resources.postgres.turns import Turn

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor


class SourceError(PgsieveError):
    """The publisher cannot be used as it is."""


class SourceUnreachableError(SourceError):
    """No connection: wrong conninfo, server down, or authentication refused."""


class SourcePermissionError(SourceError):
    """The role lacks a right."""


class PassingFaultError(SourceError):
    """A fault that passes by itself: the connection was cut, the server shuts down, or has too little of something.

    The same may succeed a moment later, and no table is to blame.
    """


class LockHeldError(SourceError):
    """Another process does what only one may do, and goes on with it."""


class SourceSettingError(SourceError):
    """A server setting stands in the way of logical replication."""


#: SQLSTATEs, by how they begin, of what goes by: connection lost, resources exhausted, operator intervention and
#: statement_timeout, a session's other timeouts, serialization failure, deadlock, lock_timeout (appendix A).
_PASSING = ("08", "53", "57", "25P03", "25P04", "40001", "40P01", "55P03")


def is_passing(error: BaseException) -> bool:
    """Whether what a driver raised passes by itself; without a SQLSTATE it is the connection that failed."""
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_PASSING)
    if isinstance(error, adbc_driver_manager.Error):
        return error.status_code == adbc_driver_manager.AdbcStatusCode.IO
    return isinstance(error, psycopg.OperationalError)


def quote(*parts: str) -> str:
    """A qualified, quoted SQL identifier: never compose one in another way."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def literal(value: str) -> str:
    """A quoted SQL string literal."""
    return sql.Literal(value).as_string(None)


#: Python's own logging, which a terminal shows; an orchestrator's log of a step is not shown there.
_LOGGER = logging.getLogger(__name__)

#: The locks that this thread of work holds.
_HELD: ContextVar[Mapping[tuple["Source", str], Turn]] = ContextVar("locks", default=MappingProxyType({}))


@dataclass(frozen=True)
class Source:
    """One PostgreSQL database, by libpq conninfo; the conninfo stays out of repr and messages."""

    name: str
    _conninfo: str
    _password: str | None = None
    _password_command: tuple[str, ...] = ()
    #: Whether the server may be a standby.
    standby: bool = False

    def __repr__(self) -> str:
        return f"Source({self.name!r})"

    @property
    def _sessions(self) -> Conninfo:
        return Conninfo(self._conninfo, self._password, self._password_command)

    @contextmanager
    def connect(self, **options: Any) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """An autocommit session (`pgsieve.resources.postgres.sessions`); errors become SourceErrors.

        Without `options` it may be one that was used before, as new (`pgsieve.resources.postgres.kept_sessions`).
        """
        kept, conninfo = None if options else kept_sessions(), self._sessions
        connection = kept.take(conninfo) if kept else None
        try:
            connection = connection or conninfo.connect(**options)
        except (UnreadableConninfoError, PasswordCommandError) as error:
            raise SourceUnreachableError(f'source "{self.name}": {error.message}', hint=error.hint) from None
        except psycopg.Error as error:
            pooler = pooler_at(self._sessions.host, str(error))
            through = f" through {pooler.name}" if pooler else ""
            raise SourceUnreachableError(
                f'source "{self.name}": no connection{through} ({_one_line(error)})',
                hint=pooler.hint
                if pooler
                else "check host, port, dbname, user and password in conninfo, and that the server is running",
                sqlstate=error.sqlstate,
            ) from None
        try:
            with kept.lending(conninfo, connection) if kept else connection:
                yield connection
        except psycopg.Error as error:
            if connection.broken:
                raise SourceUnreachableError(
                    f'source "{self.name}": the connection was lost ({_one_line(error)})',
                    hint="run again once the server answers: nothing is lost",
                    sqlstate=error.sqlstate,
                ) from None
            passing = is_passing(error)
            raise (PassingFaultError if passing else SourceError)(
                f'source "{self.name}": {_without_values(error)}',
                hint="run again: nothing is lost" if passing else None,
                sqlstate=error.sqlstate,
            ) from _cause(error)

    @contextmanager
    def exclusively(self, what: str, seconds: float | None = None) -> Iterator[Turn]:
        """Hold the database's advisory lock of a name (section 13.3.5) in the block; again inside of it at no cost.

        Waits for other processes, and after a second logs a warning that names them; raises LockHeldError after so many
        `seconds`. What is done in the block must be right without the lock: the lock ends silently with its session.
        """
        key = (self, what)
        if (turn := _HELD.get().get(key)) is not None:
            yield turn
            return
        with self.connect() as connection:
            turn = Turn(connection, f"pgsieve {what}")
            try:
                turn.take(1.0 if seconds is None else seconds)
            except psycopg.errors.LockNotAvailable:
                holders = turn.holders()
                if seconds is not None:
                    raise LockHeldError(
                        f'source "{self.name}": another process is {what}: {holders}',
                        hint="stop it first",
                        sqlstate="55006",
                    ) from None
                _LOGGER.warning('waiting for "%s" of source "%s": %s', what, self.name, holders)
                turn.take(0.0)
            _HELD.set({**_HELD.get(), key: turn})
            try:
                yield turn
            finally:
                _HELD.set({k: held for k, held in _HELD.get().items() if k != key})
                turn.give()

    def executor_conninfo(self) -> Conninfo:
        """How executors open sessions, where the environment (PGPASSWORD, service files) is another."""
        with self.connect() as connection:
            return self._sessions.for_executors(connection)

    def check_ready(self) -> int:
        """The server's version number; raises SourceSettingError where it cannot decode, or is a standby and should not be."""
        with self.connect() as connection:
            version = connection.info.server_version
            if version < 130000:
                raise SourceSettingError(
                    f'source "{self.name}": PostgreSQL {version // 10000} is too old', hint="use 13 or newer"
                )
            row = connection.execute(
                "select current_setting('wal_level'), pg_is_in_recovery(), pg_last_wal_receive_lsn() is not null"
            ).fetchone()
            assert row is not None
            if row[1]:
                self._refuse_standby(version, streams=row[2])
            if row[0] != "logical":
                raise SourceSettingError(
                    f'source "{self.name}": logical decoding requires "wal_level" >= "logical", it is "{row[0]}"',
                    hint="set wal_level = logical in postgresql.conf and restart the server",
                    sqlstate="55000",
                )
            if is_pooled(connection):
                self._refuse_pooler(connection)
        return version

    def _refuse_standby(self, version: int, *, streams: bool) -> None:
        """Raise SourceSettingError where a standby is not what was meant, or cannot decode."""
        message = f'source "{self.name}": the server is a standby, recovery is in progress'
        if not self.standby:
            raise SourceSettingError(
                message,
                hint="name its primary; with all hosts in conninfo, target_session_attrs=read-write finds it; or read from"
                " the standby with `standby: true`",
                sqlstate="55000",
            )
        if version < 160000:
            raise SourceSettingError(
                f"{message}; standbys decode from PostgreSQL 16 on", hint="name its primary", sqlstate="0A000"
            )
        if not streams:
            raise SourceSettingError(
                f"{message}, and it has received nothing by streaming replication",
                hint="set primary_conninfo there: a standby that restores archived WAL only cannot be read",
                sqlstate="55000",
            )

    def _refuse_pooler(self, connection: psycopg.Connection[Any]) -> None:
        """Raise SourceSettingError where a pooler shares server processes, or does not let replication through."""
        pooler, reason = some_pooler(self._sessions.host), None
        if shares_processes(connection, self.connect):
            reason = "a session's locks and settings do not last there"
        else:
            try:
                with self.connect(replication="database", cursor_factory=psycopg.ClientCursor) as walsender:
                    walsender.execute("IDENTIFY_SYSTEM")
            except SourceError as error:
                reason = f"it does not let replication through ({error.message})"
        if reason is not None:
            raise SourceSettingError(
                f'source "{self.name}": the connection goes through {pooler.name}: {reason}',
                hint=pooler.hint,
                sqlstate="0A000",
            )


def _one_line(error: Exception) -> str:
    """What libpq says, on one line, without a piece of a password."""
    return concealed(" ".join(str(error).split()))


def _without_values(error: Exception) -> str:
    """The server's message about a query, without the cells that it shows.

    Only the first line: DETAIL and CONTEXT show rows. In it, data exceptions (SQLSTATE class 22) show the value at the
    end, quoted or a number, or as `value "..."`.
    """
    text = str(error)
    if isinstance(error, adbc_driver_manager.Error):
        # The driver quotes its own queries, which have several lines.
        text = re.sub(r"\[libpq\] Failed to execute query '.*?': \w+: +", "", text, flags=re.DOTALL)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, adbc_driver_manager.Error):
        line = line.removeprefix(f"{error.status_code.name}: ")
        line = re.sub(r"^\[libpq\] Execution error \[\w+\]: \w+: +", "", line)
    return concealed(re.sub(r'(: |\bvalue |\bcharacter )(".*"|-?[\d.]+$)', r"\1...", " ".join(line.split())))


def _cause(error: Exception) -> Exception | None:
    """The error that ours is raised from, without values: a traceback shows both."""
    shown = _without_values(error)
    if isinstance(error, psycopg.Error):
        return type(error)(shown, info=error.pgresult)
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, shown)
    return None


def fetched(cursor: "Cursor") -> Iterator[pa.RecordBatch]:
    """What an ADBC cursor has executed, as Arrow batches; its errors keep their SQLSTATE, those of `fetch_record_batch` do not."""
    assert cursor._results is not None  # noqa: SLF001 (the only reader that asks the driver what failed)
    yield from cursor._results.reader  # noqa: SLF001


@contextmanager
def without_values() -> Iterator[None]:
    """Have an error of what reads rows show none of their values: an executor's ends up in Spark's log as it is."""
    try:
        yield
    except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        kind = PassingFaultError if is_passing(error) else SourceError
        raise kind(_without_values(error), sqlstate=getattr(error, "sqlstate", None)) from None


@contextmanager
def refusing(source: str, what: str) -> Iterator[None]:
    """Turn the server's refusal into a SourceError that names what was tried."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise SourcePermissionError(
            f'source "{source}": cannot {what} ({_without_values(error)})',
            hint="grant the right, or have the object created by its owner; `pgsieve validate` prints the SQL",
            sqlstate=error.sqlstate,
        ) from _cause(error)
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise SourcePermissionError(
            f'source "{source}": cannot {what} ({_without_values(error)})',
            hint="on a standby nothing can be created: run what `pgsieve validate` prints on its primary",
            sqlstate=error.sqlstate,
        ) from _cause(error)
    except (psycopg.Error, adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        passing = is_passing(error)
        raise (PassingFaultError if passing else SourceError)(
            f'source "{source}": cannot {what} ({_without_values(error)})',
            hint="run again: nothing is lost" if passing else None,
            sqlstate=getattr(error, "sqlstate", None),
        ) from _cause(error)


_KINDS: Mapping[str, str] = {
    "v": "views", "m": "materialized views", "f": "foreign tables", "S": "sequences", "i": "indexes",
    "I": "partitioned indexes", "c": "composite types", "t": "TOAST tables",
}  # fmt: skip
_PERSISTENCES: Mapping[str, str] = {"t": "temporary tables", "u": "unlogged tables"}


def why_missing(
    connection: psycopg.Connection[Any], publication: str, schema: str, name: str
) -> PublicationError:
    """Why a publication of pgsieve.yaml cannot have a table that the catalog lacks, as CREATE PUBLICATION says it.

    The kinds of relations are those of check_publication_add_relation() in src/backend/catalog/pg_publication.c.
    """
    row = connection.execute(
        "select c.relkind::text, c.relpersistence::text from pg_namespace n left join pg_class c"
        " on c.relnamespace = n.oid and c.relname = %s where n.nspname = %s",
        [name, schema],
    ).fetchone()
    if row is None or row[0] is None:
        what, sqlstate = (f'relation "{schema}.{name}"', "42P01") if row else (f'schema "{schema}"', "3F000")
        return PublicationError(
            f'publication "{publication}": {what} does not exist',
            hint="correct the table's name in pgsieve.yaml, or create the table",
            sqlstate=sqlstate,
        )
    kind = _KINDS.get(row[0]) or _PERSISTENCES.get(row[1]) or "system tables"
    is_relation = row[0] not in ("i", "I", "c")
    wanted = (
        f'cannot add relation "{name}" to publication' if is_relation else f'cannot open relation "{name}"'
    )
    return PublicationError(
        f'publication "{publication}": {wanted}: This operation is not supported for {kind}.',
        hint="take it out of the publication in pgsieve.yaml",
        sqlstate="22023" if is_relation else "42809",
    )


_TABLES = """
select c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text,
       (select coalesce(json_agg(json_build_array(a.attname, a.atttypid::bigint, a.atttypmod,
                format_type(a.atttypid, a.atttypmod), coalesce(case when l.collnamespace <> 'pg_catalog'::regnamespace
                then l.collnamespace::regnamespace || '.' end || l.collname, l.collname, ''), a.attnotnull, a.attgenerated,
                case when a.attgenerated <> '' then pg_get_expr(d.adbin, d.adrelid) end,
                a.attnum, a.xmin::text::bigint, a.attmissingval::text::text[],
                a.attgenerated = '' or (a.attgenerated = 's' and current_setting('server_version_num')::int >= 180000)
                ) order by a.attnum), '[]')
          from pg_attribute a
          left join pg_collation l on l.oid = a.attcollation
          left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
       (select array_agg(a.attname::text order by k.n) from pg_index i
          cross join unnest(i.indkey::int2[]) with ordinality k(attnum, n)
          join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
         where i.indrelid = c.oid and i.indisprimary and i.indimmediate and k.n <= i.indnkeyatts),
       (select array_agg(a.attname::text order by k.n) from pg_index i
          cross join unnest(i.indkey::int2[]) with ordinality k(attnum, n)
          join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
         where i.indrelid = c.oid and i.indisreplident and k.n <= i.indnkeyatts),
       case when c.relispartition then
         (select array_agg(r.relid::oid::bigint order by r.n) from pg_partition_ancestors(c.oid) with ordinality r(relid, n)
           where r.relid <> c.oid) end,
       case when c.relkind = 'p' then
         (select array_agg(t.relid::oid::bigint) from pg_partition_tree(c.oid) t where t.isleaf and t.relid <> c.oid) end,
       case when c.relkind = 'r' then
         (select array_agg(i.inhrelid::bigint order by i.inhrelid) from pg_inherits i where i.inhparent = c.oid) end,
       c.relnatts, c.relfilenode::bigint
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
   and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
"""

_PUBLICATIONS = """
select p.oid::bigint, p.pubname, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       {generated}, pg_get_userbyid(p.pubowner)
  from pg_publication p
"""

#: What users' types are made of; a type of an extension in C is of its own kind, and not among these.
_TYPES = """
with parts as materialized (
  select atttypid as oid from pg_attribute where attrelid >= 16384 and attnum > 0 and atttypid >= 16384
  union select typbasetype from pg_type where typbasetype >= 16384
  union select rngsubtype from pg_range where rngsubtype >= 16384
)
select t.oid::bigint, case when t.typtype = 'b' then 'a' else t.typtype::text end,
       coalesce(nullif(t.typbasetype, 0), r.rngsubtype, m.rngtypid, t.typelem)::bigint,
       case t.typtype when 'e' then
         (select array_agg(e.enumlabel::text order by e.oid) from pg_enum e where e.enumtypid = t.oid) end,
       case when t.typtype = 'c' and (t.oid in (select oid from parts) or t.typarray in (select oid from parts)) then
         (select json_agg(json_build_array(a.attnum, a.atttypid::bigint) order by a.attnum) from pg_attribute a
           where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) end
  from pg_type t
  left join pg_range r on r.rngtypid = t.oid
  left join pg_range m on {multirange} = t.oid
 where t.oid >= 16384
   and (t.typtype in ('c', 'd', 'e', 'm', 'r') or (t.typtype = 'b' and t.typsend = 'array_send'::regproc))
"""


def read_catalog(connection: psycopg.Connection[Any], snapshot: str | None = None) -> Catalog:
    """All user tables, publications and types of the database, read in one snapshot, which may be an exported one."""
    version = connection.info.server_version
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        if snapshot is not None:
            connection.execute(f"set transaction snapshot {literal(snapshot)}")
        tables = {}
        for row in connection.execute(_TABLES):
            oid, schema, name, kind, identity, attributes, pk, index, ancestors, leaves, *more = row
            children, columns, file = more
            tables[oid] = Table(
                oid=oid,
                schema=schema,
                name=name,
                kind=kind,
                replica_identity=identity,
                attributes=tuple(_attribute(*a) for a in attributes),
                primary_key=tuple(pk or ()),
                identity_index=tuple(index or ()),
                ancestors=tuple(ancestors or ()),
                leaves=tuple(leaves or ()),
                children=tuple(children or ()),
                columns_ever=columns,
                file=file,
            )
        publications = _read_publications(connection, version, tables)
        types_query = _TYPES.format(multirange="m.rngmultitypid" if version >= 140000 else "null")
        types = {
            oid: MadeOf(kind, of, tuple(labels or ()), tuple((n, t) for n, t in fields or ()))
            for oid, kind, of, labels, fields in connection.execute(types_query)
        }
    return Catalog(tables=tables, publications=publications, types=types, server_version=version)


def _attribute(*values: Any) -> Attribute:
    """A column from its JSON array; a missing value is an array of one, which box delimits by semicolons."""
    attribute = Attribute(*values)
    return attribute if attribute.missing is None else replace(attribute, missing=",".join(attribute.missing))


def _read_publications(
    connection: psycopg.Connection[Any], version: int, tables: Mapping[int, Table]
) -> dict[str, Publication]:
    generated = "p.pubgencols::text" if version >= 180000 else "'n'"
    lists = (
        "pg_get_expr(r.prqual, r.prrelid), (select array_agg(a.attname::text) from pg_attribute a"
        " where a.attrelid = r.prrelid and a.attnum = any(r.prattrs)), r.prqual::text"
        if version >= 150000
        else "null, null, null"
    )
    entries: dict[int, list[PublicationTable]] = {}
    for publication, oid, where, columns, tree in connection.execute(
        f"select r.prpubid::bigint, r.prrelid::bigint, {lists} from pg_publication_rel r order by r.prrelid"
    ):
        entries.setdefault(publication, []).append(
            PublicationTable(
                oid,
                where,
                None if columns is None else frozenset(columns),
                None
                if tree is None or oid not in tables
                else column_names(Expression(parse_expression(tree)), tables[oid]),
            )
        )
    schemas: dict[int, set[str]] = {}
    if version >= 150000:
        for publication, schema in connection.execute(
            "select s.pnpubid::bigint, n.nspname from pg_publication_namespace s join pg_namespace n on n.oid = s.pnnspid"
        ):
            schemas.setdefault(publication, set()).add(schema)
    publications = {}
    for (
        oid,
        name,
        all_tables,
        ins,
        upd,
        dele,
        trunc,
        via_root,
        generated_columns,
        owner,
    ) in connection.execute(_PUBLICATIONS.format(generated=generated)):
        switched = {"insert": ins, "update": upd, "delete": dele, "truncate": trunc}
        publications[name] = Publication(
            name=name,
            operations=frozenset(o for o, on in switched.items() if on),
            all_tables=all_tables,
            schemas=frozenset(schemas.get(oid, ())),
            tables=tuple(entries.get(oid, ())),
            via_root=via_root,
            generated_columns=generated_columns,
            owner=owner,
        )
    return publications
