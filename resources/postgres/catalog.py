"""Reads the publisher's catalog at one moment: its tables, publications and types.

It also says why a table that a user has named is not in the catalog, for example because it is a view (PostgreSQL
documentation, System Catalogs).

In: a psycopg session.
Out: a `Catalog`.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import (
    UNREAD_FILTER,
    Attribute,
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)
from pgsieve.decoding.publications.filter_rules import Expression, find_expression_columns
from pgsieve.decoding.publications.node_tree import parse_expression
from pgsieve.decoding.values.builtin_types import DerivedType
from pgsieve.decoding.values.output import PADDED_LSN
from pgsieve.resources.postgres.printed_names import PRINTED_NAMES
from pgsieve.resources.postgres.source import quote_literal
from pgsieve.resources.postgres.texts import Texts, read_any_encoding
from pgsieve.resources.postgres.waits import LOCK_SECONDS, find_exclusively_locked_tables

#: The kinds of relations that cannot be published, by relkind of pg_class, in the words of the server's messages.
_UNPUBLISHABLE_KINDS: Mapping[str, str] = {
    "v": "views", "m": "materialized views", "f": "foreign tables", "S": "sequences", "i": "indexes",
    "I": "partitioned indexes", "c": "composite types", "t": "TOAST tables",
}  # fmt: skip
_UNPUBLISHABLE_PERSISTENCES: Mapping[str, str] = {"t": "temporary tables", "u": "unlogged tables"}


def make_missing_relation_error(
    connection: psycopg.Connection[Any],
    publication: str,
    schema: str,
    name: str,
    *,
    is_excluded: bool = False,
) -> PublicationError:
    """The error if a publication of pgsieve.yaml lists or excludes a table that cannot be published.

    The message has the words of CREATE PUBLICATION. The kinds of relations are those of
    check_publication_add_relation() in src/backend/catalog/pg_publication.c.
    """
    row = connection.execute(
        "select c.relkind::text, c.relpersistence::text from pg_namespace n left join pg_class c"
        " on c.relnamespace = n.oid and c.relname = %s where n.nspname = %s",
        [name, schema],
    ).fetchone()
    if row is None or row[0] is None:
        missing_object, sqlstate = (
            (f'relation "{schema}.{name}"', "42P01") if row else (f'schema "{schema}"', "3F000")
        )
        return PublicationError(
            f'publication "{publication}": {missing_object} does not exist',
            hint="correct the table's name in pgsieve.yaml, or create the table",
            sqlstate=sqlstate,
        )
    kind = _UNPUBLISHABLE_KINDS.get(row[0]) or _UNPUBLISHABLE_PERSISTENCES.get(row[1]) or "system tables"
    is_relation = row[0] not in ("i", "I", "c")
    refusal = f'cannot open relation "{name}"'
    if is_relation and is_excluded:
        refusal = f'cannot specify relation "{schema}.{name}" in the publication EXCEPT clause'
    elif is_relation:
        refusal = f'cannot add relation "{name}" to publication'
    return PublicationError(
        f'publication "{publication}": {refusal}: This operation is not supported for {kind}.',
        hint="take it out of the publication in pgsieve.yaml",
        sqlstate="22023" if is_relation else "42809",
    )


#: The tables, one per row. A partition that is being detached has a row, but is not among the leaves of its tree.
#: pg_partition_tree() would leave it out, too, but it would lock each partition.
_TABLES_QUERY = """
with recursive tree(root, relid) as (
  select oid, oid from pg_class where relkind = 'p' and oid >= 16384
  union all
  select root, inhrelid from tree join pg_inherits on inhparent = relid {attached}
), leaves as (
  select root, array_agg(relid::bigint order by relid) as oids,
         array_agg(format('%I.%I', nspname, relname) order by relid) filter (where relpersistence <> 'p' or relkind = 'f') as unsent
    from tree join pg_class on oid = relid join pg_namespace n on n.oid = relnamespace where relkind <> 'p' group by root
)
select c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text,
       (select coalesce(json_agg(json_build_array(a.attname, a.atttypid::bigint, a.atttypmod,
                format_type(a.atttypid, a.atttypmod), coalesce(case when l.collnamespace <> 'pg_catalog'::regnamespace
                then l.collnamespace::regnamespace || '.' end || l.collname, l.collname, ''), a.attnotnull, a.attgenerated,
                case when a.attgenerated <> '' and a.attrelid <> all({locked}) then pg_get_expr(d.adbin, d.adrelid) end,
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
       leaves.oids,
       case when c.relkind = 'r' then
         (select array_agg(i.inhrelid::bigint order by i.inhrelid) from pg_inherits i where i.inhparent = c.oid) end,
       c.relnatts, c.relfilenode::bigint,
       (select array_agg(coalesce(a.attname::text, '') order by k.n) from pg_partitioned_table p
          cross join unnest(p.partattrs::int2[]) with ordinality k(attnum, n)
          left join pg_attribute a on a.attrelid = c.oid and a.attnum = k.attnum
         where p.partrelid = c.oid),
       leaves.unsent
  from pg_class c join pg_namespace n on n.oid = c.relnamespace left join leaves on root = c.oid
 where c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
   and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
"""

_PUBLICATIONS_QUERY = """
select p.oid::bigint, p.pubname, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete, p.pubtruncate, p.pubviaroot,
       {generated}, pg_get_userbyid(p.pubowner)
  from pg_publication p
"""

#: The types that users created, one per row, each with the oids of the types that it consists of. The fields of a
#: composite type are read only if a column or another type contains it. Base types of C extensions are left out.
_TYPES_QUERY = """
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
           where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped) end,
       case t.typtype when 'e' then
         (select array_agg(e.xmin::text::bigint order by e.oid) from pg_enum e where e.enumtypid = t.oid) end
  from pg_type t
  left join pg_range r on r.rngtypid = t.oid
  left join pg_range m on {multirange} = t.oid
 where t.oid >= 16384
   and (t.typtype in ('c', 'd', 'e', 'm', 'r') or (t.typtype = 'b' and t.typsend = 'array_send'::regproc))
"""


def read_catalog(connection: psycopg.Connection[Any], snapshot: str | None = None) -> Catalog:
    """All user tables, publications and types of the database, read in one snapshot.

    `snapshot` is the name of an exported snapshot to read in; None for the present. The query calls pg_get_expr(),
    which locks the table of the expression (pg_get_expr_worker() in src/backend/utils/adt/ruleutils.c). If another
    session has locked a table with such expressions exclusively, these expressions are left out, and the catalog's
    `locked` has the table.
    """
    lock_holders_by_oid: Mapping[int, str] = {}
    while True:
        try:
            return read_any_encoding(
                connection, partial(_read_catalog, connection, snapshot, lock_holders_by_oid)
            )
        except psycopg.errors.LockNotAvailable:
            lock_holders_by_oid = find_exclusively_locked_tables(connection)


def _read_catalog(
    connection: psycopg.Connection[Any],
    snapshot: str | None,
    lock_holders_by_oid: Mapping[int, str],
    as_bytes: bool,
) -> Catalog:
    """Read the catalog in one transaction, without the expressions of tables in `lock_holders_by_oid`.

    If `as_bytes` is true, the server does not convert texts from the database's encoding.
    """
    version = connection.info.server_version
    encoding = connection.info.parameter_status("server_encoding") or "UTF8"
    with connection.transaction():
        connection.execute("set transaction isolation level repeatable read, read only")
        if snapshot is not None:
            connection.execute(f"set transaction snapshot {quote_literal(snapshot)}")
        connection.execute(f"set local lock_timeout = '{LOCK_SECONDS:g}s'")
        texts = Texts(connection, as_bytes=as_bytes)
        cursor = texts.cursor
        locked_oids = f"'{{{','.join(map(str, lock_holders_by_oid))}}}'::oid[]"
        tables = _read_tables(texts, version, encoding, locked_oids)
        publications = _read_publications(cursor, version, tables, locked_oids)
        types_query = _TYPES_QUERY.format(multirange="m.rngmultitypid" if version >= 140000 else "null")
        types = {
            oid: DerivedType(
                kind, base, tuple(labels or ()), tuple((n, t) for n, t in fields or ()), tuple(xmins or ())
            )
            for oid, kind, base, labels, fields, xmins in cursor.execute(types_query)
        }
        if version >= 190000:
            types |= PADDED_LSN
        name_digests = dict(
            cursor.execute(f"with {PRINTED_NAMES} select kind, digest from printed_names").fetchall()
        )
    oids_with_expressions = {t.oid for t in tables.values() if any(a.generated for a in t.attributes)}
    oids_with_expressions |= {t.oid for p in publications.values() for t in p.tables if t.where is not None}
    lock_holders_by_oid = {
        oid: holders for oid, holders in lock_holders_by_oid.items() if oid in oids_with_expressions
    }
    return Catalog(tables, publications, types, version, name_digests, lock_holders_by_oid)


def _read_tables(texts: Texts, version: int, encoding: str, locked_oids: str) -> dict[int, Table]:
    """Read the tables of the catalog; the result maps each table's oid to the table.

    `version` is the number of the server's version, for example 180001. `encoding` is the server's encoding.
    `locked_oids` is an SQL expression: the array of the oids of the locked tables.
    """
    tables = {}
    attached_condition = "and not inhdetachpending" if version >= 140000 else ""
    for row in texts.cursor.execute(_TABLES_QUERY.format(locked=locked_oids, attached=attached_condition)):
        (
            oid,
            schema,
            name,
            kind,
            identity,
            attributes,
            primary_key,
            identity_index,
            ancestors,
            leaves,
            *details,
        ) = row
        children, column_count, relfilenode, partition_columns, unsent_leaves = details
        tables[oid] = Table(
            oid=oid,
            schema=schema,
            name=name,
            kind=kind,
            replica_identity=identity,
            attributes=tuple(_make_attribute(*a) for a in attributes),
            primary_key=tuple(primary_key or ()),
            identity_index=tuple(identity_index or ()),
            ancestors=tuple(ancestors or ()),
            leaves=tuple(leaves or ()),
            children=tuple(children or ()),
            columns_ever=column_count,
            file=relfilenode,
            encoding=encoding,
            major_version=version // 10000,
            legible=texts.illegible_texts.isdisjoint({schema, name, *(a[0] for a in attributes)}),
            partition_columns=tuple(partition_columns or ()),
            unsent_leaves=tuple(unsent_leaves or ()),
        )
    return tables


def _make_attribute(*values: Any) -> Attribute:
    """A column from its JSON array. In the array, attmissingval is an array of one element.

    The query splits the text of this array at commas that are not quoted. Only a value of type box has such commas, so its
    parts are joined again.
    """
    attribute = Attribute(*values)
    return attribute if attribute.missing is None else replace(attribute, missing=",".join(attribute.missing))


def _read_publications(
    cursor: psycopg.Cursor[Any], version: int, tables: Mapping[int, Table], locked_oids: str
) -> dict[str, Publication]:
    entries, excluded = _read_entries(cursor, version, tables, locked_oids)
    schemas: dict[int, set[str]] = {}
    if version >= 150000:
        for publication, schema in cursor.execute(
            "select s.pnpubid::bigint, n.nspname from pg_publication_namespace s join pg_namespace n on n.oid = s.pnnspid"
        ):
            schemas.setdefault(publication, set()).add(schema)
    generated_column = "p.pubgencols::text" if version >= 180000 else "'n'"
    publications = {}
    for oid, name, all_tables, *operation_flags, via_root, generated_columns, owner in cursor.execute(
        _PUBLICATIONS_QUERY.format(generated=generated_column)
    ):
        operations = zip(("insert", "update", "delete", "truncate"), operation_flags, strict=True)
        publications[name] = Publication(
            name=name,
            operations=frozenset(operation for operation, is_published in operations if is_published),
            all_tables=all_tables,
            schemas=frozenset(schemas.get(oid, ())),
            tables=tuple(entries.get(oid, ())),
            via_root=via_root,
            generated_columns=generated_columns,
            owner=owner,
            excluded=frozenset(excluded.get(oid, ())),
        )
    return publications


def _read_entries(
    cursor: psycopg.Cursor[Any], version: int, tables: Mapping[int, Table], locked_oids: str
) -> tuple[dict[int, list[PublicationTable]], dict[int, set[int]]]:
    """Two mappings by the oid of a publication: the tables that the publication lists, and the tables that it excludes."""
    entry_columns = (
        f"case when r.prrelid <> all({locked_oids}) then pg_get_expr(r.prqual, r.prrelid)"
        f" when r.prqual is not null then {quote_literal(UNREAD_FILTER)} end, (select array_agg(a.attname::text) from pg_attribute a"
        " where a.attrelid = r.prrelid and a.attnum = any(r.prattrs)), r.prqual::text"
        if version >= 150000
        else "null, null, null"
    )
    exclusion = "r.prexcept" if version >= 190000 else "false"
    entries: dict[int, list[PublicationTable]] = {}
    excluded: dict[int, set[int]] = {}
    for publication, oid, is_excluded, row_filter, columns, filter_tree in cursor.execute(
        f"select r.prpubid::bigint, r.prrelid::bigint, {exclusion}, {entry_columns} from pg_publication_rel r order by r.prrelid"
    ):
        if is_excluded:
            excluded.setdefault(publication, set()).add(oid)
            continue
        entries.setdefault(publication, []).append(
            PublicationTable(
                oid,
                row_filter,
                None if columns is None else frozenset(columns),
                None
                if filter_tree is None or oid not in tables
                else find_expression_columns(Expression(parse_expression(filter_tree)), tables[oid]),
            )
        )
    return entries, excluded
