"""Caches the publisher's catalog, and reads it again only if a row of it has changed.

In: a connection.
Out: the same `Catalog` that `read_catalog` would read now.

Each step of a run needs the catalog, and a continuous run needs it several times per slice (the changes between
two positions of the slot). Reading the catalog takes several large queries. To find out whether a cached catalog
is still right, one small query suffices: its checksum covers the xmin of each row that `read_catalog` reads, and a
row that has changed has another xmin.
"""

import threading
from collections import OrderedDict
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.printed_names import PRINTED_NAMES

#: The number of cached catalogs. It is enough for a few publishers, each with its catalog before and after an
#: alteration.
_MAX_CATALOGS = 8

#: The server (its start time, address and port), the database, and the checksum of the rows that `read_catalog` reads.
#: A row that has changed has another xmin. The text of an expression contains names of functions, operators, types
#: and collations, so the checksum covers the rows of these, too.
_STAMP_QUERY = f"""
with {PRINTED_NAMES}, relations as (
  select oid, xmin from pg_class where relkind in ('r', 'p') and relpersistence = 'p' and oid >= 16384
), written as (
  select concat_ws(' ', 'class', oid, xmin) from relations
  union all select concat_ws(' ', 'attribute', attrelid, attnum, a.xmin)
    from pg_attribute a join relations r on r.oid = attrelid where attnum > 0
  union all select concat_ws(' ', 'default', d.oid, d.xmin) from pg_attrdef d join relations r on r.oid = adrelid
  union all select concat_ws(' ', 'index', indexrelid, i.xmin) from pg_index i join relations r on r.oid = indrelid
    where indisprimary or indisreplident
  union all select concat_ws(' ', 'parent', inhrelid, inhparent, xmin) from pg_inherits
  union all select concat_ws(' ', 'schema', oid, xmin) from pg_namespace where nspname !~ '^pg_'
  union all select concat_ws(' ', 'publication', oid, xmin, pg_get_userbyid(pubowner)) from pg_publication
  union all select concat_ws(' ', 'table', oid, xmin) from pg_publication_rel
  {{schemas}}
  union all select concat_ws(' ', 'names', kind, digest) from printed_names
  union all select concat_ws(' ', 'type', t.oid, t.xmin) from pg_type t join pg_namespace n on n.oid = typnamespace
    where t.oid >= 16384 and nspname !~ '^pg_'
  union all select concat_ws(' ', 'range', rngtypid, xmin) from pg_range where rngtypid >= 16384
  union all select concat_ws(' ', 'label', oid, xmin) from pg_enum
  union all select concat_ws(' ', 'field', attrelid, attnum, a.xmin)
    from pg_attribute a join pg_class c on c.oid = attrelid where c.oid >= 16384 and c.relkind in ('c', 'v', 'm', 'f')
  union all select concat_ws(' ', 'collation', oid, xmin) from pg_collation where oid >= 16384
  union all select concat_ws(' ', 'function', oid, xmin) from pg_proc where oid >= 16384
  union all select concat_ws(' ', 'operator', oid, xmin) from pg_operator where oid >= 16384
)
select concat_ws(' ', pg_postmaster_start_time(), inet_server_addr(), inet_server_port(), pg_is_in_recovery(),
       (select oid from pg_database where datname = current_database()), count(*), sum(hashtextextended(entry, 0)))
  from written w(entry)
"""
_SCHEMAS_SELECT = "union all select concat_ws(' ', 'schema', oid, xmin) from pg_publication_namespace"

_catalog_by_stamp: OrderedDict[str, Catalog] = OrderedDict()
_lock = threading.Lock()


def read_present_catalog(connection: psycopg.Connection[Any]) -> Catalog:
    """All user tables, publications and types of the database, as `read_catalog` returns them.

    A catalog is cached only if no row changed while it was read.
    """
    stamp = _read_stamp(connection)
    while True:
        with _lock:
            if (cached_catalog := _catalog_by_stamp.get(stamp)) is not None:
                _catalog_by_stamp.move_to_end(stamp)
                return cached_catalog
        catalog = read_catalog(connection)
        former_stamp, stamp = stamp, _read_stamp(connection)
        if (
            catalog.locked
        ):  # Some expressions are missing now, but may be readable in a moment, so this is not cached.
            return catalog
        if stamp == former_stamp:
            with _lock:
                _catalog_by_stamp[stamp] = catalog
                while len(_catalog_by_stamp) > _MAX_CATALOGS:
                    _catalog_by_stamp.popitem(last=False)
            return catalog


def _read_stamp(connection: psycopg.Connection[Any]) -> str:
    """A text that differs between servers, and changes whenever a row that `read_catalog` reads has changed."""
    schemas = _SCHEMAS_SELECT if connection.info.server_version >= 150000 else ""
    row = connection.execute(_STAMP_QUERY.format(schemas=schemas)).fetchone()
    assert row is not None
    return str(row[0])
