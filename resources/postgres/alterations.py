"""Detects whether catalog rows that decide what publications send were altered between two moments.

In: - a connection to the publisher
    - the names of publications, and of capture publications (pgsieve's own publications, without row filters)
Out: - a `CatalogFingerprint`: if it is the same at two moments, nothing was altered between them
     - with `read_catalog_and_fingerprint` also the catalog that the fingerprint covers

A fingerprint takes two queries, which are fast enough to run once per slice (the changes between two positions of the
slot). If rows of the catalogs may have been deleted, further queries follow. A fingerprint covers the publications,
their tables, the partition trees of these tables, and all columns, names and replica identities. It also covers the
database's encoding, and the library that changes the case of letters in row filters. A fingerprint contains digests
(hashes of rows). The encoding is part of a digest unless it is UTF8: earlier versions of pgsieve left it out, so in
UTF8 databases their digests can still be compared with new ones.

For each change, the output plugin pgoutput decides what to send by the catalog as it was at that change
(get_rel_sync_entry() in src/backend/replication/pgoutput/pgoutput.c). If the fingerprints before and after a slice
are equal, one catalog is right for all changes of the slice.

The slot is read with the capture publications. If they lacked a table for a while, its changes from that time are
missing, even if the user's publications had the table. So an alteration of a capture publication changes the fingerprint,
too.

An alteration that was undone changes the fingerprint, too. Either a row of the catalog was written again, and has
another xmin. Or a row was inserted and deleted, and the server still stores its index entry
(`pgsieve.resources.postgres.removed_rows`).

For a table, the digest has columns of pg_class instead of the xmin of the table's row in pg_class. TRUNCATE and
VACUUM FULL write this row again, although they alter nothing that publications depend on. ATTACH and DETACH
PARTITION write this row, too, and add or remove a row of pg_inherits. The digest has the rows of pg_inherits that exist.
So the xmin of the rows of pg_class is compared only if a row of pg_inherits was removed. Tables that are in no publication
are not covered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.postgres.case_mappings import add_case_mappings
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.removed_rows import check_for_removed_rows, find_removed_oids
from pgsieve.resources.postgres.source import quote_literal

#: Common table expressions: the publications, the tables that they list, and in `tree` the partition trees of these
#: tables and of the tables of the capture publications.
_TREE_EXPRESSIONS = """
with recursive published as (
  select oid, xmin, pubname, puballtables, p::text as definition from pg_publication p where pubname = any(%s)
), listed as (
  select r.oid, r.xmin, r.prrelid from pg_publication_rel r join published p on p.oid = r.prpubid
), capturing as (
  select oid, xmin, pubviaroot from pg_publication where pubname = any(%s)
), captured as (
  select r.oid, r.xmin, r.prrelid from pg_publication_rel r join capturing c on c.oid = r.prpubid
), {schemas}, tree(relid) as (
  select prrelid from listed union select prrelid from captured
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

_DIGEST_QUERY = """, entries as (
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
       (select count(*) || ' ' || sum(hashtextextended(concat_ws(' ', kind, oid, xmin), 0)) from (
          select 'publication', oid, xmin from capturing
          union all select 'table', oid, xmin from captured
          {captured_schemas}) entries(kind, oid, xmin)),
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint %% 4294967296,
       array(select oid::bigint from published union select oid::bigint from capturing where pubviaroot)
"""

_SCHEMAS_EXPRESSION = """schemas as (
  select s.oid, s.xmin, s.pnnspid as nspid from pg_publication_namespace s join published p on p.oid = s.pnpubid
)"""
#: The versions of the server and of the library that changes the case of letters. They count only if a row filter,
#: or the default or generation expression of a column, depends on the case of letters. The numbers are the oids of lower,
#: upper, initcap, and of the functions of the operators ~*, !~*, ~~* and !~~* (pg_proc.dat).
_CASE_ENTRIES = r"""union all
  select concat_ws(' ', 'letters', current_setting('server_version_num'), pg_database_collation_actual_version(d.oid),
                   (select max(pg_collation_actual_version(oid)) from pg_collation where collprovider = 'c'))
    from pg_database d
   where datname = current_database()
     and (exists (select from listed join pg_publication_rel r using (oid) where r.prqual::text ~ {case})
          or exists (select from tree join pg_attrdef on adrelid = relid where adbin::text ~ {case}))
""".format(case=r"'funcid (870|871|872|1238|1239|1633|1634|1656|1657|1660|1661)\M'")
_CAPTURED_SCHEMAS = """union all
          select 'schema', s.oid, s.xmin from pg_publication_namespace s join capturing c on c.oid = s.pnpubid"""
_EMPTY_SCHEMAS_EXPRESSION = (
    "schemas as (select null::oid as oid, null::xid as xmin, null::oid as nspid where false)"
)


@dataclass(frozen=True)
class CatalogFingerprint:
    """The state of the catalog rows that decide what publications send, at one moment.

    - `digest`: a hash of the rows that exist
    - `relations_digest`: a hash of the oid and xmin of each table's row in pg_class
    - `capture_digest`: a hash of the rows of the capture publications
    - `removed_rows`: rows that were perhaps deleted from the catalogs of publications, and that the server still
      stores. Each row is a number (`_list_removed_rows`). None if there are too many to list.
    - `has_removed_parents`: whether a row of pg_inherits was perhaps deleted
    - `oldest_xid`: all transactions with an earlier xid had ended
    """

    digest: str
    relations_digest: str
    removed_rows: frozenset[int] | None = frozenset()
    has_removed_parents: bool = False
    oldest_xid: int = 0
    capture_digest: str = ""

    def matches(self, digest: str, relations_digest: str, capture_digest: str) -> bool:
        """True if the rows are the same as when an earlier fingerprint with these digests was taken.

        The rows that were inserted and deleted in between are not compared here; `removed_rows` identifies them.
        """
        return (
            self.digest == digest
            and self.capture_digest == capture_digest
            and (not self.has_removed_parents or self.relations_digest == relations_digest)
        )


def fingerprint_catalog(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture_publications: Sequence[str] = ()
) -> CatalogFingerprint:
    """The fingerprint of what `publications` send. It also covers `capture_publications` and their tables."""
    parameters = [list(publications), list(capture_publications)]
    has_filters_and_schemas = connection.info.server_version >= 150000
    tree = _TREE_EXPRESSIONS.format(
        schemas=_SCHEMAS_EXPRESSION if has_filters_and_schemas else _EMPTY_SCHEMAS_EXPRESSION
    )
    query = tree + _DIGEST_QUERY.format(
        letters=_CASE_ENTRIES if has_filters_and_schemas else "",
        captured_schemas=_CAPTURED_SCHEMAS if has_filters_and_schemas else "",
    )
    row = connection.execute(query, parameters).fetchone()
    assert row is not None
    digest, relations_digest, capture_digest, oldest_xid, oids = row
    oid_array = quote_literal(f"{{{','.join(map(str, oids))}}}")
    selections = [f"pg_publication_rel where prpubid = any({oid_array}::oid[])"]
    if has_filters_and_schemas:
        selections.append(f"pg_publication_namespace where pnpubid = any({oid_array}::oid[])")
    publication_list = ", ".join(map(quote_literal, publications))
    selections += [f"pg_publication where pubname in ({publication_list})"] if publications else []
    *have_removed_rows, has_removed_parents = check_for_removed_rows(
        connection, [*selections, "pg_inherits where inhrelid > '0'::oid"]
    )
    if has_removed_parents:
        # The removed rows may be of any partition tree. Check again, only for the trees that the fingerprint covers.
        rows = connection.execute(f"{tree} select relid::bigint from tree", parameters).fetchall()
        oid_array = quote_literal(f"{{{','.join(str(oid) for (oid,) in rows)}}}")
        (has_removed_parents,) = check_for_removed_rows(
            connection, [f"pg_inherits where inhrelid = any({oid_array}::oid[])"]
        )
    removed_rows = (
        _list_removed_rows(connection, [selection.split()[0] for selection in selections])
        if any(have_removed_rows)
        else frozenset[int]()
    )
    return CatalogFingerprint(
        str(digest), str(relations_digest), removed_rows, has_removed_parents, oldest_xid, str(capture_digest)
    )


def find_altered_tables(
    connection: psycopg.Connection[Any], capture_publications: Sequence[str], since_xid: int
) -> frozenset[int]:
    """The oids of the tables that a transaction from `since_xid` on may have put into a capture publication.

    If such a transaction has altered the publication itself, these are all tables that the publication has.
    """
    schemas = (
        """union all
        select c.oid::bigint, p.xmin::text::bigint, s.xmin::text::bigint
          from capturing p join pg_publication_namespace s on s.pnpubid = p.oid join pg_class c on c.relnamespace = s.pnnspid"""
        if connection.info.server_version >= 150000
        else ""
    )
    query = f"""
        with capturing as (select oid, xmin, puballtables from pg_publication where pubname = any(%s))
        select r.prrelid::bigint, p.xmin::text::bigint, r.xmin::text::bigint
          from capturing p join pg_publication_rel r on r.prpubid = p.oid
        {schemas}
        union all
        select c.oid::bigint, p.xmin::text::bigint, p.xmin::text::bigint from capturing p, pg_class c where puballtables
    """
    rows = connection.execute(query, [list(capture_publications)]).fetchall()
    return frozenset(oid for oid, *xids in rows if any(is_same_or_later_xid(xid, since_xid) for xid in xids))


def is_same_or_later_xid(xid: int, reference: int) -> bool:
    """True if a transaction identifier (xid) is equal to `reference` or later.

    The numbers have 32 bits and wrap around, so a smaller number may be later (PostgreSQL documentation, 66.1
    Transactions and Identifiers).
    """
    return (xid - reference) % 2**32 < 2**31


def _list_removed_rows(connection: psycopg.Connection[Any], catalogs: Sequence[str]) -> frozenset[int] | None:
    """The rows of these catalogs that were perhaps deleted and are still stored; None if they are too many to list.

    The number of a row is the position of its catalog in `catalogs`, times 2**32, plus the row's oid.
    """
    numbers: set[int] = set()
    for number, catalog in enumerate(catalogs):
        oids = find_removed_oids(connection, catalog)
        if oids is None:
            return None
        numbers.update(number * 2**32 + oid for oid in oids)
    return frozenset(numbers)


def read_catalog_and_fingerprint(
    connection: psycopg.Connection[Any], publications: Sequence[str], capture_publications: Sequence[str] = ()
) -> tuple[CatalogFingerprint, Catalog]:
    """Read the catalog, and the fingerprint of exactly this catalog.

    The catalog is read again until the fingerprints before and after the read are equal.
    """
    fingerprint = fingerprint_catalog(connection, publications, capture_publications)
    while True:
        catalog = add_case_mappings(connection, read_present_catalog(connection), publications)
        later_fingerprint = fingerprint_catalog(connection, publications, capture_publications)
        if replace(later_fingerprint, oldest_xid=fingerprint.oldest_xid) == fingerprint:
            return later_fingerprint, catalog
        fingerprint = later_fingerprint
