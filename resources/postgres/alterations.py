"""Whether anything was altered that decides what publications send: one query, fast enough for every slice.

In: a connection to the publisher, and the names of publications. Out: a digest that changes with each alteration
of them, of the tables they publish, of the partition trees these are in, of their columns, names and identities, and
of the library by which their row filters know the case of letters; and the catalog as of a digest (`digested_catalog`). An
encoding that is not UTF8 counts, too: catalogs recorded by earlier versions lack it. pgoutput decides by the catalog as of a change
(get_rel_sync_entry() in src/backend/replication/pgoutput/pgoutput.c): between two equal digests that is one catalog.

The xmin of a row also shows an alteration that was undone. Of pg_class only columns are used, not xmin: TRUNCATE and VACUUM
FULL write its rows anew, and alter nothing. Tables that are in no publication do not count.
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.postgres.case_mappings import with_case_mappings
from pgsieve.resources.postgres.present_catalog import present_catalog

_DIGEST = """
with recursive published as (
  select oid, xmin, pubname, puballtables, p::text as definition from pg_publication p where pubname = any(%s)
), listed as (
  select r.oid, r.xmin, r.prrelid from pg_publication_rel r join published p on p.oid = r.prpubid
), {schemas}, tree(relid) as (
  select prrelid from listed
  union
  select c.oid from pg_class c
   where c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
     and (exists (select from published where puballtables) or c.relnamespace in (select nspid from schemas))
  union
  select related.relid from tree t cross join lateral (
    select inhparent from pg_inherits where inhrelid = t.relid
    union all
    select inhrelid from pg_inherits where inhparent = t.relid) related(relid)
), entries as (
  select concat_ws(' ', 'publication', oid, xmin, definition) from published
  union all select concat_ws(' ', 'table', oid, xmin) from listed
  union all select concat_ws(' ', 'schema', oid, xmin) from schemas
  union all
  select concat_ws(' ', 'relation', c.oid, relname, relnamespace, n.xmin, relkind, relreplident, relispartition, t.xmin)
    from tree join pg_class c on c.oid = relid join pg_namespace n on n.oid = relnamespace
    left join pg_type t on t.oid = reltype
  union all
  select concat_ws(' ', 'parent', inhrelid, inhparent, i.xmin) from tree join pg_inherits i on inhrelid = relid
  union all
  select concat_ws(' ', 'column', attrelid, attnum, a.xmin) from tree join pg_attribute a on attrelid = relid
   where attnum > 0
  union all
  select concat_ws(' ', 'default', d.oid) from tree join pg_attrdef d on adrelid = relid
  union all
  select concat_ws(' ', 'index', indexrelid, indkey, indisprimary, indisreplident, indimmediate)
    from tree join pg_index on indrelid = relid where indisprimary or indisreplident
  {letters}
  union all select concat_ws(' ', 'encoding', encoding) from pg_database
   where datname = current_database() and pg_encoding_to_char(encoding) <> 'UTF8'
)
select count(*) || ' ' || sum(hashtextextended(entry, 0)) from entries e(entry)
"""

_SCHEMAS = """schemas as (
  select s.oid, s.xmin, s.pnnspid as nspid from pg_publication_namespace s join published p on p.oid = s.pnpubid
)"""
#: Of row filters that go by the case of letters, and generated columns that they may read: the server and library that
#: know letters. The functions are lower, upper, initcap and those of ~*, !~*, ~~* and !~~* (pg_proc.dat).
_LETTERS = r"""union all
  select concat_ws(' ', 'letters', current_setting('server_version_num'), pg_database_collation_actual_version(d.oid),
                   (select max(pg_collation_actual_version(oid)) from pg_collation where collprovider = 'c'))
    from pg_database d
   where datname = current_database()
     and (exists (select from listed join pg_publication_rel r using (oid) where r.prqual::text ~ {case})
          or exists (select from tree join pg_attrdef on adrelid = relid where adbin::text ~ {case}))
""".format(case=r"'funcid (870|871|872|1238|1239|1633|1634|1656|1657|1660|1661)\M'")
_NO_SCHEMAS = "schemas as (select null::oid as oid, null::xid as xmin, null::oid as nspid where false)"


def catalog_digest(connection: psycopg.Connection[Any], publications: Sequence[str]) -> str:
    """A digest of all that decides what these publications send; as text."""
    has_filters = connection.info.server_version >= 150000
    query = _DIGEST.format(
        schemas=_SCHEMAS if has_filters else _NO_SCHEMAS, letters=_LETTERS if has_filters else ""
    )
    row = connection.execute(query, [list(publications)]).fetchone()
    assert row is not None
    return str(row[0])


def digested_catalog(connection: psycopg.Connection[Any], publications: Sequence[str]) -> tuple[str, Catalog]:
    """The catalog, and the digest of just this catalog."""
    before = catalog_digest(connection, publications)
    while True:
        catalog = with_case_mappings(connection, present_catalog(connection), publications)
        after = catalog_digest(connection, publications)
        if after == before:
            return after, catalog
        before = after
