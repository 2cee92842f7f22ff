"""Detects alterations of the catalog that change what publications send: two queries, fast enough for every slice.

In: a connection to the publisher, and the names of publications. Out: a `Look`, or a look together with the
catalog that it covers (`examined_catalog`). A look covers the publications, their tables, the partition trees
of these, and their columns, names and identities. It also covers the library that changes the case of letters
in row filters, and an encoding other than UTF8, which catalogs recorded by earlier versions lack.

pgoutput decides what to send by the catalog as it was at the change (get_rel_sync_entry() in
src/backend/replication/pgoutput/pgoutput.c). If the looks before and after are equal, the catalog did not
change in between.

A row that is written again has another xmin, so an alteration that was undone is visible as long as its row
exists. Rows that were inserted and deleted in between are visible in the indexes
(`pgsieve.resources.postgres.removed_rows`). For pg_class the digest has columns instead of xmin, because
TRUNCATE and VACUUM FULL also write its rows again, and alter nothing. ATTACH and DETACH write them, too. So
the xmin of pg_class counts if a row of pg_inherits was removed. Tables that are in no publication do not
count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.postgres.case_mappings import with_case_mappings
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.removed_rows import removed_oids, removed_rows
from pgsieve.resources.postgres.source import literal

#: The publications, the tables that they list, and the partition trees of these and of the captured tables.
_TREE = """
with recursive published as (
  select oid, xmin, pubname, puballtables, p::text as definition from pg_publication p where pubname = any(%s)
), listed as (
  select r.oid, r.xmin, r.prrelid from pg_publication_rel r join published p on p.oid = r.prpubid
), {schemas}, tree(relid) as (
  select prrelid from listed
  union
  select r.prrelid from pg_publication_rel r join pg_publication p on p.oid = r.prpubid where p.pubname = any(%s)
  union
  select c.oid from pg_class c
   where c.relkind in ('r', 'p') and c.relpersistence = 'p' and c.oid >= 16384
     and (exists (select from published where puballtables) or c.relnamespace in (select nspid from schemas))
  union
  select related.relid from tree t cross join lateral (
    select inhparent from pg_inherits where inhrelid = t.relid
    union all
    select inhrelid from pg_inherits where inhparent = t.relid) related(relid)
)"""

_DIGEST = """, entries as (
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
select (select count(*) || ' ' || sum(hashtextextended(entry, 0)) from entries e(entry)),
       (select count(*) || ' ' || sum(hashtextextended(concat_ws(' ', c.oid, c.xmin), 0))
          from tree join pg_class c on c.oid = relid),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint %% 4294967296,
       array(select oid::bigint from published)
"""

_SCHEMAS = """schemas as (
  select s.oid, s.xmin, s.pnnspid as nspid from pg_publication_namespace s join published p on p.oid = s.pnpubid
)"""
#: For row filters that depend on the case of letters, and for generated columns, which filters may read: the
#: versions of the server and of the library that map letters. The functions are lower, upper, initcap and
#: those of ~*, !~*, ~~* and !~~* (pg_proc.dat).
_LETTERS = r"""union all
  select concat_ws(' ', 'letters', current_setting('server_version_num'), pg_database_collation_actual_version(d.oid),
                   (select max(pg_collation_actual_version(oid)) from pg_collation where collprovider = 'c'))
    from pg_database d
   where datname = current_database()
     and (exists (select from listed join pg_publication_rel r using (oid) where r.prqual::text ~ {case})
          or exists (select from tree join pg_attrdef on adrelid = relid where adbin::text ~ {case}))
""".format(case=r"'funcid (870|871|872|1238|1239|1633|1634|1656|1657|1660|1661)\M'")
_NO_SCHEMAS = "schemas as (select null::oid as oid, null::xid as xmin, null::oid as nspid where false)"


@dataclass(frozen=True)
class Look:
    """The catalog rows that decide what publications send, as of one moment.

    `digest` covers the present rows, `relations` the tables' rows of pg_class. `removed` identifies rows of
    the publications' catalogs that are perhaps deleted but that the server still stores; None if there are
    too many to list. `detached` says whether there are such rows of partitions. Transactions before `oldest`
    had ended.
    """

    digest: str
    relations: str
    removed: frozenset[int] | None = frozenset()
    detached: bool = False
    oldest: int = 0

    def is_like(self, digest: str, relations: str) -> bool:
        """Whether an earlier look with this digest and these relations saw the same rows.

        Rows that came and went in between are in `removed`.
        """
        return self.digest == digest and (not self.detached or self.relations == relations)


def look(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture: Sequence[str] = ()
) -> Look:
    """Look at the catalog rows that decide what `publications` send.

    The tables of `capture` are covered, too.
    """
    names = [list(publications), list(capture)]
    has_filters = connection.info.server_version >= 150000
    tree = _TREE.format(schemas=_SCHEMAS if has_filters else _NO_SCHEMAS)
    query = tree + _DIGEST.format(letters=_LETTERS if has_filters else "")
    row = connection.execute(query, names).fetchone()
    assert row is not None
    digest, relations, oldest, oids = row
    ids = literal(f"{{{','.join(map(str, oids))}}}")
    kept = [f"pg_publication_rel where prpubid = any({ids}::oid[])"]
    if has_filters:
        kept.append(f"pg_publication_namespace where pnpubid = any({ids}::oid[])")
    named = ", ".join(map(literal, publications))
    kept += [f"pg_publication where pubname in ({named})"] if publications else []
    *gone, detached = removed_rows(connection, [*kept, "pg_inherits where inhrelid > '0'::oid"])
    if detached:  # These rows may be of any partition; look again for rows of the tree.
        rows = connection.execute(f"{tree} select relid::bigint from tree", names).fetchall()
        ids = literal(f"{{{','.join(str(oid) for (oid,) in rows)}}}")
        (detached,) = removed_rows(connection, [f"pg_inherits where inhrelid = any({ids}::oid[])"])
    removed = _removed(connection, [part.split()[0] for part in kept]) if any(gone) else frozenset[int]()
    return Look(str(digest), str(relations), removed, detached, oldest)


def _removed(connection: psycopg.Connection[Any], catalogs: Sequence[str]) -> frozenset[int] | None:
    """The perhaps deleted rows that these catalogs still store, each as a number.

    None if there are too many.
    """
    numbers: set[int] = set()
    for number, catalog in enumerate(catalogs):
        oids = removed_oids(connection, catalog)
        if oids is None:
            return None
        numbers.update(number * 2**32 + oid for oid in oids)
    return frozenset(numbers)


def examined_catalog(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture: Sequence[str] = ()
) -> tuple[Look, Catalog]:
    """Read the catalog, and a look that covers exactly this catalog."""
    before = look(connection, publications, capture)
    while True:
        catalog = with_case_mappings(connection, present_catalog(connection), publications)
        after = look(connection, publications, capture)
        if replace(after, oldest=before.oldest) == before:
            return after, catalog
        before = after
