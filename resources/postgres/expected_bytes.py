"""Estimates how much a slot will deliver, before it is read.

In: a session, a slot and the published tables. Out: bytes. An estimate, for preparations that cost time and
can be in vain; nothing depends on it. It takes no lock that another session could hold for long. Sections
27.2.1, Statistics Collection Configuration, and 9.28.7, Database Object Management Functions.
"""

from collections.abc import Collection
from typing import Any

import psycopg

from pgsieve.resources.postgres.slot import slot_state
from pgsieve.resources.postgres.snapshot import table_bytes

#: WAL also holds changes of indexes, whole pages, and headers: bytes of WAL per byte of a table's changes.
_WAL_BYTES = 8

_PUBLISHED = "select schemaname, tablename from pg_publication_tables where pubname = any(%s)"
#: The part of all written rows of this database, since its statistics began, that were the most written
#: table's. The rows of partitions count as their root's.
_SHARE = """
with recursive tree(root, oid) as (
  select c.oid, c.oid from unnest(%s::text[], %s::text[]) w(schema, name)
    join pg_namespace n on n.nspname = w.schema join pg_class c on relnamespace = n.oid and relname = w.name
  union all
  select root, inhrelid from tree t join pg_class c on c.oid = t.oid and relkind = 'p' join pg_inherits on inhparent = t.oid
), written(oid, rows) as (
  select relid, n_tup_ins + n_tup_upd + n_tup_del from pg_stat_user_tables
)
select coalesce(max(rows) / nullif((select sum(rows) from written), 0), 0)::float8
  from (select sum(rows) rows from tree join written using (oid) group by root) of_tables
"""


def expected_bytes(
    connection: psycopg.Connection[Any],
    slot: str,
    publications: Collection[str],
    tables: Collection[tuple[str, str]] = (),
) -> int:
    """About how many bytes the largest table of some publications and `tables` will get.

    Without the slot that is a table's size, as it will be copied; otherwise a table's share of the WAL that waits.
    """
    state = slot_state(connection, slot)
    names = {*tables, *connection.execute(_PUBLISHED, [list(publications)]).fetchall()}
    if not names:
        return 0
    if state is None:
        return max(table_bytes(connection, names).values())
    if state.lag == 0:
        return 0
    row = connection.execute(
        _SHARE, [[schema for schema, _ in names], [name for _, name in names]]
    ).fetchone()
    assert row is not None
    return int(state.lag * row[0] / _WAL_BYTES)
