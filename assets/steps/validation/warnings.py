"""Warnings: facts that do not stop replication, but that a user should know in advance.

In: a subscription or a slot stream (a slot with its subscriptions), and the publisher's catalog
Out: warnings, as errors that are not raised
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, PublicationError, Table
from pgsieve.decoding.publications.replica_identity import find_leaves_without_root_key
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.resources.lake.spark_writes import find_column_mapping_property

#: A warning lists at most this many names.
_MAX_NAMES = 5


def find_subscription_warnings(subscription: Subscription, catalog: Catalog) -> Iterator[PgsieveError]:
    """Yields warnings about partitions of a subscription.

    There are two kinds. The old rows of a partition may lack the key of its root. Or the changes of a partition are not
    in the WAL.
    """
    with suppress(PublicationError):
        publications = subscription.slot_stream.publications(catalog, subscription.name)
        for replicated_table in subscription.tables(catalog).values():
            leaves = find_leaves_without_root_key(replicated_table, publications, catalog)
            if leaves:
                key = ", ".join(map(quote_identifier, replicated_table.key))
                yield PgsieveError(
                    f'table "{replicated_table.table.qualified_name}": an UPDATE or DELETE of rows of {_list_names(leaves)} changes nothing in the replica if the old row that is sent lacks the key of the root ({key}), as in a PostgreSQL subscriber',
                    hint="give these partitions the replica identity of the root, or REPLICA IDENTITY FULL",
                )
    yield from find_unsent_leaves(subscription, catalog)


def find_unsent_leaves(subscription: Subscription, catalog: Catalog) -> Iterator[PgsieveError]:
    """Yields warnings about unlogged and foreign partitions, since their changes are not in the WAL.

    If such partitions are published as their root, the replica keeps the rows that they had at the copy. Otherwise they
    are not replicated.
    """
    with suppress(PublicationError):
        publications = subscription.slot_stream.publications(catalog, subscription.name)
        reported_names = set[str]()
        for replicated_table in subscription.tables(catalog).values():
            if leaf_names := replicated_table.table.unsent_leaves:
                reported_names |= {*leaf_names}
                yield PgsieveError(
                    f'table "{replicated_table.table.qualified_name}": changes of {", ".join(leaf_names)} are not in the WAL, as these partitions are unlogged or foreign: the replica has their rows as of its copy',
                    hint="make unlogged ones logged (ALTER TABLE ... SET LOGGED); `pgsieve check --repair` brings their rows up to date",
                )
        explicit_publications = [p for p in publications if not p.all_tables]
        for root in sorted(catalog.tables.values(), key=lambda table: len(table.ancestors)):
            unreported_names = [leaf for leaf in root.unsent_leaves if leaf not in reported_names]
            if unreported_names and any(p.contains(root) for p in explicit_publications):
                reported_names |= {*unreported_names}
                yield PgsieveError(
                    f'table "{root.qualified_name}": {", ".join(unreported_names)} are not replicated, as these partitions are unlogged or foreign, and not published as their root',
                    hint="make unlogged ones logged (ALTER TABLE ... SET LOGGED), or publish the root (publish_via_partition_root)",
                )


def find_name_warnings(
    subscription: Subscription, catalog: Catalog, is_mapped: Callable[[Name], bool]
) -> Iterator[PgsieveError]:
    """Yields warnings about names of columns that Spark forbids in Parquet files.

    `is_mapped` is true for a replica if Delta maps its names of columns to other names in the files.
    """
    with suppress(PublicationError):
        for table, replicated_table in subscription.tables(catalog).items():
            names_in_replica = map(subscription.replica_name, replicated_table.columns)
            if names := [name for name in names_in_replica if find_column_mapping_property([name])]:
                readers = (
                    "are mapped by Delta: Spark, Trino, Delta Kernel and the QueryBuilder of delta-rs read them; Polars refuses the table, and the Arrow reader of delta-rs refuses it or reads NULL"
                    if is_mapped(table)
                    else "stay as they are in the Delta table: Spark, Polars, delta-rs, and DuckDB through delta-rs read them, and Spark refuses ALTER TABLE and RESTORE of the replica"
                )
                column_names = ", ".join(map(quote_identifier, names))
                yield PgsieveError(
                    f'table "{replicated_table.table.qualified_name}": the names {column_names} {readers}',
                    hint="nothing needs to be done; for other readers set `layout: {names: snake}`, or rename the columns",
                )


def find_slot_stream_warnings(slot_stream: SlotStream, catalog: Catalog) -> Iterator[PgsieveError]:
    """Yields a warning if tables can be made unlogged only until pgsieve captures them.

    To capture tables, pgsieve publishes them with publications of its own.
    """
    with suppress(PublicationError):
        captured_tables: Mapping[int, Table] = {
            t.oid: t for p in slot_stream.planned_capture(catalog) for t in p.tables
        }
        other_publications = [
            p
            for name, p in catalog.publications.items()
            if p.owner and not name.startswith(slot_stream.capture)
        ]
        listed_oids = {entry.oid for publication in other_publications for entry in publication.tables}
        tables = [t for oid, t in captured_tables.items() if oid not in listed_oids and t.kind == "r"]
        if tables:
            yield PgsieveError(
                f"once the capture publication lists {_list_names(tables)}, the publisher refuses ALTER TABLE ... SET UNLOGGED of it",
                hint="before that statement, take the table out of the subscribed publications, and run pgsieve once",
                sqlstate="55000",
            )


def make_decoding_warning(slot_stream: SlotStream) -> PgsieveError:
    """The warning for a server with `wal_level = replica`: dropping the last logical slot switches logical decoding off."""
    return PgsieveError(
        f'source "{slot_stream.source.name}": wal_level is replica: logical decoding is on while a logical replication slot exists, and the last one that is dropped switches it off; slot "{slot_stream.slot}" keeps it on',
        hint="nothing needs to be done; set wal_level = logical if decoding has to be on without a slot, as for standbys",
    )


def _list_names(tables: list[Table]) -> str:
    """List the names of tables, but not more than `_MAX_NAMES`."""
    names = [quote_qualified(t.schema, t.name) for t in tables]
    further_count = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {further_count} more" if further_count > 0 else "")
