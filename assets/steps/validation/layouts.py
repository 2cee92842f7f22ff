"""Finds layouts that are impossible: two replicas in one folder, or a table without the columns by which to cluster it.

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
from pgsieve.decoding.publications.catalog import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.resources.lake.delta.layout import DEFAULT_FOLDER_TEMPLATE
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
