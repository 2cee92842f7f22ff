"""Warnings: facts that stop nothing, and that a user should know in advance.

In: a subscription or a feed, and the publisher's catalog. Out: warnings as errors that are not raised: of rows
that are not found, as with a PostgreSQL subscriber; of partitions whose changes are not sent; of statements that the
publisher refuses once its tables are captured.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, PublicationError, Table
from pgsieve.decoding.publications.replica_identity import leaves_without_root_key
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.resources.lake.spark_writes import column_mapping

_MAX_NAMES = 5


def warnings_of_subscription(subscription: Subscription, catalog: Catalog) -> Iterator[PgsieveError]:
    """Warnings of leaves whose old rows lack the key of their root, and of leaves whose changes are not in the WAL."""
    with suppress(PublicationError):
        publications = subscription.feed.publications(catalog, subscription.name)
        for replicated in subscription.tables(catalog).values():
            leaves = leaves_without_root_key(replicated, publications, catalog)
            if leaves:
                key = ", ".join(map(quote_identifier, replicated.key))
                yield PgsieveError(
                    f'table "{replicated.table.qualified}": rows of {_listed(leaves)} are not found if the old row that is'
                    f" sent lacks the key of the root ({key}): as in a PostgreSQL subscriber, they stay as they were",
                    hint="give these partitions the replica identity of the root, or REPLICA IDENTITY FULL",
                )
    yield from unsent_leaves(subscription, catalog)


def unsent_leaves(subscription: Subscription, catalog: Catalog) -> Iterator[PgsieveError]:
    """Warnings of unlogged and foreign leaves, whose changes are not in the WAL.

    The replica has their rows as of its copy if they are published by their root. Otherwise they are not replicated.
    """
    with suppress(PublicationError):
        publications = subscription.feed.publications(catalog, subscription.name)
        names = set[str]()
        for replicated in subscription.tables(catalog).values():
            if unsent := replicated.table.unsent_leaves:
                names |= {*unsent}
                yield PgsieveError(
                    f'table "{replicated.table.qualified}": changes of {", ".join(unsent)} are not in the WAL, as these'
                    " partitions are unlogged or foreign: the replica has their rows as of its copy",
                    hint="make unlogged ones logged (ALTER TABLE ... SET LOGGED); `pgsieve check --repair` brings their rows up to date",
                )
        listing = [p for p in publications if not p.all_tables]
        for root in sorted(catalog.tables.values(), key=lambda table: len(table.ancestors)):
            left_out = [leaf for leaf in root.unsent_leaves if leaf not in names]
            if left_out and any(p.contains(root) for p in listing):
                names |= {*left_out}
                yield PgsieveError(
                    f'table "{root.qualified}": {", ".join(left_out)} are not replicated, as these partitions are unlogged or'
                    " foreign, and published as themselves",
                    hint="make unlogged ones logged (ALTER TABLE ... SET LOGGED), or publish the root (publish_via_partition_root)",
                )


def warnings_of_names(
    subscription: Subscription, catalog: Catalog, is_mapped: Callable[[Name], bool]
) -> Iterator[PgsieveError]:
    """Warnings of column names that Parquet in Spark forbids; `is_mapped` says whether Delta maps those of a replica."""
    with suppress(PublicationError):
        for table, replicated in subscription.tables(catalog).items():
            named = map(subscription.replica_name, replicated.columns)
            if names := [name for name in named if column_mapping([name])]:
                readers = (
                    "are mapped by Delta: Spark, Trino and Delta Kernel read them, Polars and delta-rs refuse the table"
                    if is_mapped(table)
                    else "stay as they are in the Delta table: Spark, Polars, delta-rs and DuckDB over it read them, and Spark refuses"
                    " ALTER TABLE and RESTORE of the replica"
                )
                column_text = ", ".join(map(quote_identifier, names))
                yield PgsieveError(
                    f'table "{replicated.table.qualified}": the names {column_text} {readers}',
                    hint="nothing needs to be done; for other readers set `layout: {names: snake}`, or rename the columns",
                )


def warnings_of_feed(feed: Feed, catalog: Catalog) -> Iterator[PgsieveError]:
    """A warning of tables that cannot be made unlogged once they are captured, and could before."""
    with suppress(PublicationError):
        captured: Mapping[int, Table] = {t.oid: t for p in feed.planned_capture(catalog) for t in p.tables}
        other_publications = [
            p for name, p in catalog.publications.items() if p.owner and not name.startswith(feed.capture)
        ]
        listed_oids = {entry.oid for publication in other_publications for entry in publication.tables}
        tables = [t for oid, t in captured.items() if oid not in listed_oids and t.kind == "r"]
        if tables:
            yield PgsieveError(
                f"once the capture publication lists {_listed(tables)}, the publisher refuses ALTER TABLE ... SET UNLOGGED"
                " of it",
                hint="take the table out of the subscribed publications before, and run pgsieve once",
                sqlstate="55000",
            )


def warning_of_switched_decoding(feed: Feed) -> PgsieveError:
    """A warning for `wal_level = replica`: dropping the last logical slot ends logical decoding."""
    return PgsieveError(
        f'source "{feed.source.name}": wal_level is replica: logical decoding is on while a logical replication slot exists,'
        f' and the last one that is dropped switches it off; slot "{feed.slot}" keeps it on',
        hint="nothing needs to be done; set wal_level = logical if decoding has to be on without a slot, as for standbys",
    )


def _listed(tables: list[Table]) -> str:
    names = [quote_qualified(t.schema, t.name) for t in tables]
    rest_text = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest_text} more" if rest_text > 0 else "")
