"""Finds layouts that are impossible.

Two replicas cannot share a folder. A table needs the columns by which it is clustered. A table with a column that a change
data feed reserves cannot have such a feed.

A layout is what `layout` in pgsieve.yaml says about the folders and files of replicas, the copies of tables.

In: a subscription and its tables
Out: - a problem for each such table
     - the columns by which a table is clustered. Raises ClusteringError if the table does not have one of them, or if one
       is an array.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.resources.lake.delta.feed_property import (
    FEED_PROPERTY,
    find_reserved_columns,
    is_feed_impossible,
)
from pgsieve.resources.lake.delta.layout import DEFAULT_FOLDER_TEMPLATE, TableLayout
from pgsieve.resources.lake.paths import format_replica_folder


class SharedFolderError(PgsieveError):
    """Two replicas would have the same folder."""


class ClusteringError(PgsieveError):
    """The rows of a replica cannot be clustered by the columns that its layout names."""


def find_clustering_columns(
    subscription: Subscription, name: Name, columns: Iterable[tuple[str, str]]
) -> tuple[str, ...]:
    """Find the columns by which a table is clustered. Empty if its layout has none.

    `columns` are the columns of the table, with their Spark types. A `cluster_by` for all tables of a subscription
    applies only to those that have all of its columns.
    """
    cluster_columns = tuple(
        map(subscription.replica_name, subscription.layout.find_table_layout(name).cluster_by or ())
    )
    types = dict(columns)
    unfit_columns = [column for column in cluster_columns if types.get(column, "array<").startswith("array<")]
    if not unfit_columns:
        return cluster_columns
    table_layout = subscription.layout.layout_by_table.get(name)
    if table_layout is None or table_layout.cluster_by is None:
        return ()
    column_names = ", ".join(map(quote_identifier, unfit_columns))
    raise ClusteringError(
        f'subscription "{subscription.name}": table {quote_qualified(*name)} cannot be clustered by {column_names}:'
        " its replica has no such column, or it is an array",
        hint="name other columns in `cluster_by` of the table's layout in pgsieve.yaml, or leave it out",
        sqlstate="42703",
    )


def find_feed_problem(subscription: Subscription, replicated_table: ReplicatedTable) -> PgsieveError | None:
    """The problem of a table whose own layout demands a change data feed that is impossible with its columns.

    A feed for all tables of a subscription applies only to those that can have one.
    """
    table = replicated_table.table
    table_layout = subscription.layout.layout_by_table.get((table.schema, table.name), TableLayout())
    columns = subscription.replica_types(replicated_table)
    if not is_feed_impossible(table_layout.properties, columns):
        return None
    column_names = ", ".join(map(quote_identifier, find_reserved_columns(columns)))
    return PgsieveError(
        f'subscription "{subscription.name}": the replica of table {table.quoted_name} cannot have a change data feed:'
        f" Delta reserves the name of its column {column_names} for the feed",
        hint=f"take {FEED_PROPERTY} out of the table's layout in pgsieve.yaml, or rename the column",
        sqlstate="42939",
    )


def find_shared_folders(subscription: Subscription, names: Collection[Name]) -> dict[Name, PgsieveError]:
    """Map each table that would share its folder with another table to an error."""
    template = subscription.layout.folder_template
    if template == DEFAULT_FOLDER_TEMPLATE:
        return {}
    names_by_folder: dict[str, list[Name]] = {}
    for name in sorted(names):
        names_by_folder.setdefault(format_replica_folder(template, *name), []).append(name)
    return {
        name: SharedFolderError(
            f"tables {' and '.join(quote_qualified(*table) for table in names)} would have the same folder, {folder}",
            hint=f"rename one of them, or take it out of the publications; or change `folders` in pgsieve.yaml after"
            f" `pgsieve drop {subscription.name}`",
            sqlstate="42P07",
        )
        for folder, names in names_by_folder.items()
        if len(names) > 1
        for name in names
    }


def find_layout_problems(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable], existing_names: Collection[Name]
) -> Iterator[PgsieveError]:
    """Yields the problems of a subscription's layout, each once.

    It is also a problem if the layout names a table that is neither replicated nor among `existing_names` (the tables of
    the publisher, and those with a state in the lake).
    """
    yield from {str(error): error for error in find_shared_folders(subscription, tables).values()}.values()
    for name, replicated_table in tables.items():
        try:
            subscription.refuse_shared_names(replicated_table.table)
        except PgsieveError as error:
            yield error
        if (feed_problem := find_feed_problem(subscription, replicated_table)) is not None:
            yield feed_problem
        if subscription.layout.find_table_layout(name).cluster_by:
            types = (
                (column, column_type.spark_type)
                for column, column_type in subscription.replica_types(replicated_table).items()
            )
            try:
                find_clustering_columns(subscription, name, types)  # Raises the problem of the columns.
            except ClusteringError as error:
                yield error
    for name in _find_unreplicated_names(subscription, tables):
        if name not in existing_names:
            yield _make_unreplicated_error(
                subscription,
                name,
                "correct the name in `tables` of the layout in pgsieve.yaml, or leave it out",
            )


def find_unused_layouts(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable], existing_names: Collection[Name]
) -> Iterator[PgsieveError]:
    """Yields a warning for each table of the layout that is not replicated, but is among `existing_names`.

    Such a table has left the publications, or has not been added yet.
    """
    for name in _find_unreplicated_names(subscription, tables):
        if name in existing_names:
            yield _make_unreplicated_error(
                subscription,
                name,
                "add it to a publication, or take it out of `tables` of the layout in pgsieve.yaml",
            )


def _find_unreplicated_names(
    subscription: Subscription, tables: Mapping[Name, ReplicatedTable]
) -> list[Name]:
    return [name for name in subscription.layout.layout_by_table if name not in tables]


def _make_unreplicated_error(subscription: Subscription, name: Name, hint: str) -> PgsieveError:
    return PgsieveError(
        f'subscription "{subscription.name}" does not replicate table {quote_qualified(*name)}, which its layout names',
        hint=hint,
        sqlstate="42P01",
    )
