"""Estimates how many bytes a slot will deliver, before the slot is read.

In: a session, a slot and the published tables.
Out: a number of bytes.

The estimate only decides whether work is prepared early, for example whether Spark is started. So a wrong estimate
does no harm, and it is not worth a wait: the queries read only statistics and sizes, which need no lock that another
session could hold for long (PostgreSQL documentation, Statistics Collection Configuration, and Database Object
Management Functions).
"""

from collections.abc import Collection
from typing import Any

import psycopg

from pgsieve.resources.postgres.slot import read_slot_state
from pgsieve.resources.postgres.snapshot import read_table_bytes

#: The bytes of WAL for each byte of a table's changes. WAL also contains changes of indexes, whole pages, and
#: headers.
_WAL_RATIO = 8

_PUBLISHED_TABLES_QUERY = "select schemaname, tablename from pg_publication_tables where pubname = any(%s)"
#: Finds the table to which most rows were written since the statistics of the database began. The result is the number
#: of rows written to it, divided by the number written to all tables. Rows of partitions count as rows of their root.
_LARGEST_SHARE_QUERY = """
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


def estimate_bytes(
    connection: psycopg.Connection[Any],
    slot: str,
    publications: Collection[str],
    tables: Collection[tuple[str, str]] = (),
    sufficient_bytes: int = 0,
) -> int:
    """Estimate how many bytes of rows or changes the slot will deliver for the table that gets the most.

    The tables are those of `publications` and those of `tables`. If the slot does not exist, the tables will be
    copied, so the estimate is the size of the largest table. If the slot exists, its unconfirmed WAL is converted to
    bytes of changes (`_WAL_RATIO`). If these are at most `sufficient_bytes`, as in most runs, they are the estimate.
    Otherwise the estimate is the share of the table with the most written rows. It takes further queries. The caller sets
    `sufficient_bytes` to the size below which the exact estimate does not matter to it.
    """
    state = read_slot_state(connection, slot)
    if state is not None and (waiting_bytes := state.lag_bytes // _WAL_RATIO) <= sufficient_bytes:
        return waiting_bytes
    names = {*tables, *connection.execute(_PUBLISHED_TABLES_QUERY, [list(publications)]).fetchall()}
    if not names:
        return 0
    if state is None:
        return max(read_table_bytes(connection, names).values())
    row = connection.execute(
        _LARGEST_SHARE_QUERY, [[schema for schema, _ in names], [name for _, name in names]]
    ).fetchone()
    assert row is not None
    return int(state.lag_bytes * row[0] / _WAL_RATIO)
