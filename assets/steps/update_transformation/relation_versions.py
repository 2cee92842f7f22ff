"""Decides how the messages of a relation version are decoded and transformed for a subscription.

To transform changes is to filter them, and to give them the columns of the replica. A relation version is a Relation
message of a slice, and the changes that it describes. (A slice is the changes from one position of the slot to
another.)

In: the Relation message, and the definition of the replica (its columns and key), which may be newer
Out: the `Transformation` to the columns of the replica

Raises SchemaChangedError if the columns of the Relation message fit neither the present nor the former definition, or if
old tuples no longer have the columns that identify the replica's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.subscription import Definition, Subscription, metadata_arrow_types
from pgsieve.assets.steps.update_transformation.messages import MessageFilter
from pgsieve.assets.steps.update_transformation.slice_contents import PublishedVersion
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.decode import AddedColumn, FilterColumns
from pgsieve.decoding.changes.metadata_columns import MetadataColumns
from pgsieve.decoding.changes.sent_as import EVALUATED_BY_PUBLISHER, Origin
from pgsieve.decoding.changes.transform import Transformation
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.evolution import SchemaChangedError, find_missing_value, find_present_names
from pgsieve.decoding.publications.filters import parse_published_filter
from pgsieve.decoding.publications.published_tables import PublishedRelation
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.types import convert_text


@dataclass(frozen=True)
class Reading:
    """Selects the messages of one relation version, and says how they are transformed for the subscription."""

    message_filter: MessageFilter
    transformation: Transformation


def make_readings(
    subscription: Subscription,
    versions: Sequence[PublishedVersion],
    since_order: OrderKey,
    definition: Definition,
) -> list[Reading]:
    """Make a reading for each relation version that has changes of the table after its copy.

    `since_order` is the order key of the copy: its LSN, with an ordinal before that of any change.
    """
    return [
        _make_reading(subscription, published_version, since_order, definition)
        for published_version in versions
        if published_version.is_after(since_order)
        and _is_of_replica(subscription, published_version, since_order, definition)
    ]


def _is_of_replica(
    subscription: Subscription,
    published_version: PublishedVersion,
    since_order: OrderKey,
    definition: Definition,
) -> bool:
    """Whether a relation version belongs to the replica.

    If the publisher filters, it may belong to another table, which had the same name before the copy. After the copy,
    any table of this name belongs to the replica, because a PostgreSQL subscriber finds its table by name
    (logicalrep_rel_open() in src/backend/replication/logical/relation.c).
    """
    relation_id = published_version.version.relation.relation_id
    return (
        not subscription.slot_stream.filtered
        or relation_id == definition.layout.oid
        or published_version.version.begin > since_order
    )


def _make_reading(
    subscription: Subscription,
    published_version: PublishedVersion,
    since_order: OrderKey,
    definition: Definition,
) -> Reading:
    """Make the reading of a relation version's changes after `since_order`, for a replica with this definition."""
    relation, published_relation = published_version.version.relation, published_version.published_relation
    columns, added_columns = find_version_columns(subscription, published_version, definition)
    _refuse_altered_leaves(subscription, published_version, since_order, definition)
    filters_by_operation = {
        operation: None
        if texts is None
        else [parse_published_filter(published_relation, text) for text in texts]
        for operation, texts in published_relation.filters.items()
    }
    filter_columns = None
    if any(row_filters is not None for row_filters in filters_by_operation.values()):
        names_in_filters = frozenset(
            name
            for row_filters in filters_by_operation.values()
            for row_filter in row_filters or ()
            for name in row_filter.columns
        )
        if not {*map(subscription.replica_name, names_in_filters)} <= {
            *columns.names,
            *(column.name for column in added_columns),
        }:
            raise _make_copy_error(published_version, "columns of its row filter changed")
        filter_columns = _find_filter_columns(subscription, published_version, definition, names_in_filters)
    source_table = quote_qualified(relation.namespace or "pg_catalog", relation.name)
    # If a partition tree is published as its root, the messages do not say to which leaf partition a row belongs.
    is_root = published_version.root_key is not None and relation.relation_id == definition.layout.oid
    transformation = Transformation(
        columns,
        changes_schema(_find_decoded_types(columns, added_columns, definition)),
        definition.key,
        frozenset(published_relation.operations),
        filters_by_operation,
        [column for column in added_columns if column.name in definition.names],
        filter_columns,
        Origin(source_table, _describe_filters(subscription, published_relation)),
        MetadataColumns(dict(definition.metadata), None if is_root else source_table),
    )
    begin_order = max(published_version.version.begin, since_order)
    message_filter = MessageFilter(
        begin_order, published_version.version.end, relations=frozenset({relation.relation_id})
    )
    return Reading(message_filter, transformation)


def _describe_filters(
    subscription: Subscription, published_relation: PublishedRelation
) -> dict[str, str | None]:
    """Map each operation to its row filter as text, in the form in which users see it."""
    if subscription.slot_stream.filtered:
        return dict.fromkeys(published_relation.filters, EVALUATED_BY_PUBLISHER)
    return {
        operation: None if texts is None else " OR ".join(texts)
        for operation, texts in published_relation.filters.items()
    }


def _find_filter_columns(
    subscription: Subscription,
    published_version: PublishedVersion,
    definition: Definition,
    names: frozenset[str],
) -> FilterColumns:
    """Find the columns that row filters read. `names` are the publisher's names of these columns.

    They get their default types, because the types that pgsieve.yaml chooses must not change what a filter decides.
    """
    columns, added_columns = _find_columns_with_types(
        replace(subscription, types={}), published_version, definition
    )
    publisher_name_by_column = subscription.published_names(published_version.published_relation.publish_as)
    relation_columns = RelationColumns(
        tuple(publisher_name_by_column.get(name, name) for name in columns.names), columns.types
    )
    added_columns = [
        replace(column, name=publisher_name_by_column.get(column.name, column.name))
        for column in added_columns
    ]
    key = tuple(publisher_name_by_column.get(name, name) for name in definition.key)
    return FilterColumns(
        names, relation_columns, [column for column in added_columns if column.name in names], key
    )


def _find_decoded_types(
    columns: RelationColumns, added_columns: Sequence[AddedColumn], definition: Definition
) -> list[tuple[str, pa.DataType]]:
    """Find the Arrow type that the values of each column of the replica have when they are decoded."""
    type_by_name = {
        name: column_type.arrow_type for name, column_type in zip(columns.names, columns.types, strict=True)
    }
    type_by_name |= {column.name: column.value.type for column in added_columns}
    types = [(name, type_by_name[name]) for name, _ in definition.table_columns]
    return [*types, *metadata_arrow_types(definition)]


def find_version_columns(
    subscription: Subscription, published_version: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    """Find the columns of a relation version under their present names, and those of the replica that it lacks.

    Raises SchemaChangedError if the version fits neither the present nor the former definition, or if the replica identity
    has changed.
    """
    columns, added_columns = _find_columns_with_types(subscription, published_version, definition)
    spark_type_by_name = {
        name: column_type.spark_type for name, column_type in zip(columns.names, columns.types, strict=True)
    }
    spark_type_by_name |= {column.name: column.spark_type for column in added_columns}
    if any(spark_type_by_name.get(name) != spark_type for name, spark_type in definition.table_columns):
        raise _make_copy_error(published_version, "its columns changed")
    if {"update", "delete"} & published_version.published_relation.operations:
        _refuse_another_identity(published_version, columns.names, definition)
    return columns, added_columns


def _find_columns_with_types(
    subscription: Subscription, published_version: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    """Find the columns of a relation version, and those that it lacks, with their types."""
    names, added_columns = _find_present_columns(subscription, published_version, definition)
    types = tuple(
        subscription.column_type(
            published_version.published_relation.publish_as,
            name,
            column.type_oid,
            column.type_modifier,
            published_version.user_types,
        )
        for name, column in zip(names, published_version.version.relation.columns, strict=True)
    )
    return RelationColumns(names, types), added_columns


def _find_present_columns(
    subscription: Subscription, published_version: PublishedVersion, definition: Definition
) -> tuple[tuple[str, ...], Sequence[AddedColumn]]:
    """Find the present names of a relation version's columns, and the columns of the replica that it lacks.

    The missing columns were added to the table after the relation version. Their values are those that ADD COLUMN gave
    to the existing rows.
    """
    relation, former, layout = (
        published_version.version.relation,
        definition.former,
        definition.layout,
    )
    names = tuple(subscription.replica_name(column.name) for column in relation.columns)
    if former is None or published_version.version.begin >= (former.until, 0):
        return names, ()
    table = published_version.published_relation.publish_as
    try:
        names = find_present_names(
            [(name, column.type_oid) for name, column in zip(names, relation.columns, strict=True)],
            relation.relation_id,
            former.layout,
            layout,
        )
        newer_columns = [
            column for column in layout.list_added_columns(former.layout) if column.name in definition.names
        ]
        missing_columns = [column for column in newer_columns if column.name not in names]
        columns_and_values = [
            (column, find_missing_value(column, former.layout, layout)) for column in missing_columns
        ]
    except SchemaChangedError as error:
        raise _make_copy_error(published_version, error.message) from None
    added_columns = []
    for column, value in columns_and_values:
        column_type = subscription.column_type(
            table, column.name, column.type_oid, column.type_modifier, published_version.user_types
        )
        array = convert_text(pa.array([value], pa.string()), column_type, column.name)
        added_columns.append(AddedColumn(column.name, column_type.spark_type, array))
    return names, added_columns


def _refuse_another_identity(
    published_version: PublishedVersion, names: Sequence[str], definition: Definition
) -> None:
    """Raise SchemaChangedError if old tuples do not have the columns that identify the rows of the replica.

    These are the columns of its key, or all columns if it has no key. Leaf partitions have replica identities of their
    own, for which there is `_refuse_altered_leaves`.
    """
    relation, former = published_version.version.relation, definition.former
    if relation.relation_id != published_version.published_relation.publish_as.oid or _has_key_of_leaves(
        published_version, definition
    ):
        return
    identity_columns = {name for name, column in zip(names, relation.columns, strict=True) if column.is_key}
    has_lost_key = (
        not definition.key
        and former is not None
        and former.key
        and published_version.version.begin < (former.until, 0)
        and relation.replica_identity != "f"
    )
    if has_lost_key or not set(definition.key) <= identity_columns:
        raise _make_copy_error(published_version, "its replica identity changed")


def _has_key_of_leaves(published_version: PublishedVersion, definition: Definition) -> bool:
    """Whether a partition tree is published as its root, but its replica does not have the root's key.

    In that case the replica has the key that the leaf partitions share, or no key.
    """
    return published_version.root_key is not None and not (
        definition.key and set(definition.key) == published_version.root_key
    )


def _refuse_altered_leaves(
    subscription: Subscription,
    published_version: PublishedVersion,
    since_order: OrderKey,
    definition: Definition,
) -> None:
    """Raise SchemaChangedError if a leaf partition was altered or detached, and its old tuples no longer identify rows.

    The present replica identities of the leaf partitions are part of the definition. `published_version.leaves` has
    Relation messages of leaves, some of them from before the copy. Such a message counts only if no later message
    replaced it before the copy, and if the table was altered since the copy.
    """
    for leaf in published_version.leaves if _has_key_of_leaves(published_version, definition) else ():
        is_over = leaf.end is not None and leaf.end <= since_order
        if is_over or (leaf.begin < since_order and definition.former is None):
            continue
        names, _ = _find_present_columns(subscription, replace(published_version, version=leaf), definition)
        identity_columns = {
            name for name, column in zip(names, leaf.relation.columns, strict=True) if column.is_key
        }
        is_full = leaf.relation.replica_identity == "f"
        if identity_columns and not (set(definition.key) <= identity_columns if definition.key else is_full):
            raise _make_copy_error(published_version, "the replica identity of a partition changed")


def _make_copy_error(published_version: PublishedVersion, reason: str) -> SchemaChangedError:
    """Make the error for a table that has to be copied again for this reason."""
    return SchemaChangedError(
        f'table "{published_version.published_relation.publish_as.qualified_name}": {reason}; it is copied again by the next run'
    )
