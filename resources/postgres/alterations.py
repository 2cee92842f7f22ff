"""Detects alterations of the catalog that change what publications send: two queries, fast enough for every slice.

In: a connection to the publisher, and the names of publications. Out: a `CatalogFingerprint`, alone or with the
catalog that it covers (`read_with_fingerprint`). A fingerprint covers the publications, their tables, the
partition trees of these tables, and all columns, names and replica identities. It also covers the library that
changes the case of letters in row filters, and the database's encoding. The encoding UTF8 adds nothing to a
digest, so that digests by earlier versions of pgsieve, which left out the encoding, still compare.

pgoutput decides what to send by the catalog as it was at the change (get_rel_sync_entry() in
src/backend/replication/pgoutput/pgoutput.c). If two fingerprints are equal, the catalog did not change in
between. An alteration that was undone changes the fingerprint, too. In that case the server has written a row
again, with another xmin; or it has inserted and deleted a row, whose index entry it still stores
(`pgsieve.resources.postgres.removed_rows`).

For pg_class the digest has the columns instead of the xmin, because TRUNCATE and VACUUM FULL write a row of
pg_class again without an alteration. ATTACH and DETACH write such a row, too, and remove or add a row of
pg_inherits. So the xmin of pg_class counts if a row of pg_inherits was removed. Tables in no publication do
not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.postgres.case_mappings import with_case_mappings
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.removed_rows import has_removed_rows, removed_oids
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
#: The versions of the server and of the library that map letters, if a row filter, or a generated column that
#: a filter may read, depends on the case of letters. The functions are lower, upper, initcap and those of ~*,
#: !~*, ~~* and !~~* (pg_proc.dat).
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
class CatalogFingerprint:
    """The state of the catalog rows that decide what publications send, as of one moment.

    `digest` covers the present rows, `relations_digest` the tables' rows of pg_class. `removed` identifies
    the rows of the publications' catalogs that were perhaps deleted, and that the server still stores; it is
    None if there are too many. `has_removed_parents` says whether a row of pg_inherits was perhaps deleted.
    All transactions with an xid before `oldest` had ended.
    """

    digest: str
    relations_digest: str
    removed: frozenset[int] | None = frozenset()
    has_removed_parents: bool = False
    oldest: int = 0

    def matches(self, digest: str, relations_digest: str) -> bool:
        """Whether an earlier fingerprint with these digests covers the same rows.

        `removed` has the rows that were inserted and deleted in between.
        """
        return self.digest == digest and (
            not self.has_removed_parents or self.relations_digest == relations_digest
        )


def fingerprint_catalog(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture: Sequence[str] = ()
) -> CatalogFingerprint:
    """The fingerprint of what `publications` send, and of the tables of the publications `capture`."""
    names = [list(publications), list(capture)]
    has_filters = connection.info.server_version >= 150000
    tree = _TREE.format(schemas=_SCHEMAS if has_filters else _NO_SCHEMAS)
    query = tree + _DIGEST.format(letters=_LETTERS if has_filters else "")
    row = connection.execute(query, names).fetchone()
    assert row is not None
    digest, relations_digest, oldest, oids = row
    ids = literal(f"{{{','.join(map(str, oids))}}}")
    selections = [f"pg_publication_rel where prpubid = any({ids}::oid[])"]
    if has_filters:
        selections.append(f"pg_publication_namespace where pnpubid = any({ids}::oid[])")
    publication_list = ", ".join(map(literal, publications))
    selections += [f"pg_publication where pubname in ({publication_list})"] if publications else []
    *selections_with_removed_rows, has_removed_parents = has_removed_rows(
        connection, [*selections, "pg_inherits where inhrelid > '0'::oid"]
    )
    if has_removed_parents:  # These rows may be of any partition. Check again for the partitions of the tree.
        rows = connection.execute(f"{tree} select relid::bigint from tree", names).fetchall()
        ids = literal(f"{{{','.join(str(oid) for (oid,) in rows)}}}")
        (has_removed_parents,) = has_removed_rows(
            connection, [f"pg_inherits where inhrelid = any({ids}::oid[])"]
        )
    removed_rows = (
        _removed_rows(connection, [each.split()[0] for each in selections])
        if any(selections_with_removed_rows)
        else frozenset[int]()
    )
    return CatalogFingerprint(str(digest), str(relations_digest), removed_rows, has_removed_parents, oldest)


def _removed_rows(connection: psycopg.Connection[Any], catalogs: Sequence[str]) -> frozenset[int] | None:
    """The rows of these catalogs that were perhaps deleted and are still stored, as numbers; None if there are too many."""
    numbers: set[int] = set()
    for number, catalog in enumerate(catalogs):
        oids = removed_oids(connection, catalog)
        if oids is None:
            return None
        numbers.update(number * 2**32 + oid for oid in oids)
    return frozenset(numbers)


def read_with_fingerprint(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture: Sequence[str] = ()
) -> tuple[CatalogFingerprint, Catalog]:
    """Read the catalog, and the fingerprint of exactly this catalog."""
    fingerprint = fingerprint_catalog(connection, publications, capture)
    while True:
        catalog = with_case_mappings(connection, present_catalog(connection), publications)
        later_fingerprint = fingerprint_catalog(connection, publications, capture)
        if replace(later_fingerprint, oldest=fingerprint.oldest) == fingerprint:
            return later_fingerprint, catalog
        fingerprint = later_fingerprint
