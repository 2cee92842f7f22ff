"""Finds published tables whose rows may have reached the source by replication.

In: published tables. Out: the tables that subscriptions of the source write to. With `origin: none` the stream
leaves out changes that such a subscription applied, but a copy cannot leave out the rows it wrote. PostgreSQL
documentation, CREATE SUBSCRIPTION, `origin`; check_publications_origin() in
src/backend/commands/subscriptioncmds.c.
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsieve.decoding.publications.catalog import Table

#: The query avoids pg_partition_tree(), which would lock each partition.
_SUBSCRIBED = """
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


def subscribed_tables(connection: psycopg.Connection[Any], tables: Sequence[Table]) -> list[tuple[str, str]]:
    """The names of the tables that a subscription of this server writes to, directly or through partitions or roots."""
    return connection.execute(_SUBSCRIBED, [[table.oid for table in tables]]).fetchall()
