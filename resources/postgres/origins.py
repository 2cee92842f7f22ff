"""Finds published tables whose rows the source may itself have received by replication.

With `origin: none` a subscription gets only changes that were made at the source. The slot leaves out changes
that a subscription of the source has applied. But the table has the rows that such a subscription wrote before, and a
copy cannot leave them out (PostgreSQL documentation, CREATE SUBSCRIPTION, `origin`; check_publications_origin() in
src/backend/commands/subscriptioncmds.c).

In: published tables.
Out: the names of those tables that subscriptions of the source write to.
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Table

#: The published tables to which a subscription writes. It may write to the table itself, to one of its partitions or to
#: one of its ancestors. The query avoids pg_partition_tree(), which would lock each partition.
_SUBSCRIBED_TABLES_QUERY = """
with recursive tree(published, relid) as (
  select oid, oid from unnest(%s::oid[]) as published(oid)
  union all
  select published, inhrelid from tree join pg_class c on c.oid = relid and relkind = 'p' join pg_inherits on inhparent = relid
)
select distinct n.nspname::text, c.relname::text
from tree
join pg_class c on c.oid = published
join pg_namespace n on n.oid = c.relnamespace
join pg_subscription_rel s on s.srrelid = tree.relid
  or s.srrelid in (select relid from pg_partition_ancestors(published))
order by 1, 2
"""


def find_subscribed_tables(
    connection: psycopg.Connection[Any], tables: Sequence[Table]
) -> list[tuple[str, str]]:
    """The schema and name of each table that a subscription of this server writes to.

    The subscription may also write to the table's partitions, or to a root that has the table as a partition.
    """
    return connection.execute(_SUBSCRIBED_TABLES_QUERY, [[table.oid for table in tables]]).fetchall()
