"""Decides how the messages of a relation version are decoded and transformed for a subscription.

A relation version is a Relation message of a slice, and the changes that it describes.

In: the Relation message, and the definition of the replica, which may be newer
Out: the `Transformation` to the columns of the replica

Raises SchemaChangedError if the columns of the Relation message fit neither the present nor the former definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.subscription import Definition, Subscription, metadata_arrow_types
from pgsieve.assets.steps.update_transformation.messages import MessageFilter, Messages
from pgsieve.assets.steps.update_transformation.slice_contents import PublishedVersion
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.decode import AddedColumn, FilterColumns
from pgsieve.decoding.changes.metadata_columns import MetadataColumns
from pgsieve.decoding.changes.sent_as import BY_PUBLISHER, Origin
from pgsieve.decoding.changes.transform import Transformation
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.catalog import PublishedRelation
from pgsieve.decoding.publications.evolution import SchemaChangedError, find_missing_value, find_present_names
from pgsieve.decoding.publications.filters import parse_published_filter
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.types import convert_text


@dataclass(frozen=True)
class Reading:
    """The messages of one relation version, and how they are transformed for the subscription."""

    messages: Messages
    transformation: Transformation


def readings_of(
    subscription: Subscription,
    messages: Messages,
    parts: Sequence[PublishedVersion],
    since: OrderKey,
    definition: Definition,
) -> list[Reading]:
    """A reading for each relation version of a table that has changes after `since`."""
    return [
        _reading(subscription, messages, part, since, definition)
        for part in parts
        if part.is_after(since) and _is_of_replica(subscription, part, since, definition)
    ]


def _is_of_replica(
    subscription: Subscription, part: PublishedVersion, since: OrderKey, definition: Definition
) -> bool:
    """True if a relation version belongs to the replica.

    If the publisher filters, it may belong to another table, which had the same name before the copy. After the copy,
    any table of this name belongs to the replica, because a PostgreSQL subscriber finds its table by name
    (logicalrep_rel_open() in src/backend/replication/logical/relation.c).
    """
    relation_id = part.version.relation.relation_id
    return (
        not subscription.slot_stream.filtered
        or relation_id == definition.layout.oid
        or part.version.begin > since
    )


def _reading(
    subscription: Subscription,
    messages: Messages,
    part: PublishedVersion,
    since: OrderKey,
    definition: Definition,
) -> Reading:
    """Make the reading of a relation version's changes after `since`, for a replica with this definition."""
    relation, published = part.version.relation, part.sent
    columns, added = arriving_columns(subscription, part, definition)
    _refuse_unfound(subscription, part, since, definition)
    filters = {
        operation: None if texts is None else [parse_published_filter(published, text) for text in texts]
        for operation, texts in published.filters.items()
    }
    filter_columns = None
    if any(each is not None for each in filters.values()):
        names_in_filters = frozenset(
            name for each in filters.values() for row_filter in each or () for name in row_filter.columns
        )
        if not {*map(subscription.replica_name, names_in_filters)} <= {
            *columns.names,
            *(column.name for column in added),
        }:
            raise _copy_needed(part, "columns of its row filter changed")
        filter_columns = _filter_columns(subscription, part, definition, names_in_filters)
    source = quote_qualified(relation.namespace or "pg_catalog", relation.name)
    # If a partition tree is published as its root, the messages do not say to which leaf partition a row belongs.
    is_root = part.root_key is not None and relation.relation_id == definition.layout.oid
    transformation = Transformation(
        columns,
        changes_schema(_types(columns, added, definition)),
        definition.key,
        frozenset(published.operations),
        filters,
        [column for column in added if column.name in definition.names],
        filter_columns,
        Origin(source, _filter_texts(subscription, published)),
        MetadataColumns(dict(definition.metadata), None if is_root else source),
    )
    begin = max(part.version.begin, since)
    choice = MessageFilter(begin, part.version.end, relations=frozenset({relation.relation_id}))
    return Reading(messages.apply_filter(choice), transformation)


def _filter_texts(subscription: Subscription, published: PublishedRelation) -> dict[str, str | None]:
    """Maps each operation to its row filter as text, in the form in which users see it."""
    if subscription.slot_stream.filtered:
        return dict.fromkeys(published.filters, BY_PUBLISHER)
    return {
        operation: None if texts is None else " OR ".join(texts)
        for operation, texts in published.filters.items()
    }


def _filter_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition, names: frozenset[str]
) -> FilterColumns:
    """The columns that row filters read, in the default types instead of the types that the user has chosen.

    `names` are the publisher's names of these columns.
    """
    columns, added = _typed_columns(replace(subscription, types={}), part, definition)
    published_names = subscription.published_names(part.sent.publish_as)
    relation_columns = RelationColumns(
        tuple(published_names.get(name, name) for name in columns.names), columns.types
    )
    added = [replace(column, name=published_names.get(column.name, column.name)) for column in added]
    key = tuple(published_names.get(name, name) for name in definition.key)
    return FilterColumns(names, relation_columns, [column for column in added if column.name in names], key)


def _types(
    columns: RelationColumns, added: Sequence[AddedColumn], definition: Definition
) -> list[tuple[str, pa.DataType]]:
    """The columns of the replica, each with the Arrow type in which its values arrive."""
    types_by_name = {name: kind.arrow_type for name, kind in zip(columns.names, columns.types, strict=True)}
    types_by_name |= {column.name: column.value.type for column in added}
    types = [(name, types_by_name[name]) for name, _ in definition.table_columns]
    return [*types, *metadata_arrow_types(definition)]


def arriving_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    """The columns of a relation version under their present names, and the columns of the replica that it does not have.

    Raises SchemaChangedError if the version fits neither the present nor the former definition.
    """
    columns, added = _typed_columns(subscription, part, definition)
    types_by_name = {name: kind.spark_type for name, kind in zip(columns.names, columns.types, strict=True)}
    types_by_name |= {column.name: column.spark for column in added}
    if any(types_by_name.get(name) != spark for name, spark in definition.table_columns):
        raise _copy_needed(part, "its columns changed")
    if {"update", "delete"} & part.sent.operations:
        _refuse_another_identity(part, columns.names, definition)
    return columns, added


def _typed_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    """Find the columns of a relation version, and the columns that it does not have, with their types."""
    names, added = _present_columns(subscription, part, definition)
    types = tuple(
        subscription.column_type(
            part.sent.publish_as, name, column.type_oid, column.type_modifier, part.defined
        )
        for name, column in zip(names, part.version.relation.columns, strict=True)
    )
    return RelationColumns(names, types), added


def _present_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[tuple[str, ...], Sequence[AddedColumn]]:
    """Find the present names of a relation version's columns, and the columns of the replica that it does not have.

    These columns were added to the table after the relation version. Their values come from ADD COLUMN.
    """
    relation, former, layout = part.version.relation, definition.former, definition.layout
    names = tuple(subscription.replica_name(column.name) for column in relation.columns)
    if former is None or part.version.begin >= (former.until, 0):
        return names, ()
    table = part.sent.publish_as
    try:
        names = find_present_names(
            [(name, column.type_oid) for name, column in zip(names, relation.columns, strict=True)],
            relation.relation_id,
            former.layout,
            layout,
        )
        columns_since = [
            column for column in layout.list_added_columns(former.layout) if column.name in definition.names
        ]
        missing_columns = [column for column in columns_since if column.name not in names]
        values_by_column = [
            (column, find_missing_value(column, former.layout, layout)) for column in missing_columns
        ]
    except SchemaChangedError as error:
        raise _copy_needed(part, error.message) from None
    added_columns = []
    for column, value in values_by_column:
        kind = subscription.column_type(
            table, column.name, column.type_oid, column.type_modifier, part.defined
        )
        array = convert_text(pa.array([value], pa.string()), kind, column.name)
        added_columns.append(AddedColumn(column.name, kind.spark_type, array))
    return names, added_columns


def _refuse_another_identity(part: PublishedVersion, names: Sequence[str], definition: Definition) -> None:
    """Raise SchemaChangedError if old tuples do not have the columns that identify the rows of the replica.

    These are the columns of its key, or all columns if it has no key. Leaf partitions have replica identities of their
    own, for which there is `_refuse_unfound`.
    """
    relation, former = part.version.relation, definition.former
    if relation.relation_id != part.sent.publish_as.oid or _is_found_by_leaves(part, definition):
        return
    identity = {name for name, column in zip(names, relation.columns, strict=True) if column.is_key}
    lost_key = (
        not definition.key
        and former is not None
        and former.key
        and part.version.begin < (former.until, 0)
        and relation.replica_identity != "f"
    )
    if lost_key or not set(definition.key) <= identity:
        raise _copy_needed(part, "its replica identity changed")


def _is_found_by_leaves(part: PublishedVersion, definition: Definition) -> bool:
    """True if the rows of a partition tree are found by a key that its leaf partitions share.

    False if they are found by the key of the root.
    """
    return part.root_key is not None and not (definition.key and set(definition.key) == part.root_key)


def _refuse_unfound(
    subscription: Subscription, part: PublishedVersion, since: OrderKey, definition: Definition
) -> None:
    """Raise SchemaChangedError if a leaf partition was altered or detached, and its old tuples no longer identify rows.

    The definition has the present replica identities of the leaf partitions. If a leaf was described before the copy
    and not after it, it was altered before the copy.
    """
    for leaf in part.leaves if _is_found_by_leaves(part, definition) else ():
        is_over = leaf.end is not None and leaf.end <= since
        if is_over or (leaf.begin < since and definition.former is None):
            continue
        names, _ = _present_columns(subscription, replace(part, version=leaf), definition)
        identity = {name for name, column in zip(names, leaf.relation.columns, strict=True) if column.is_key}
        is_full = leaf.relation.replica_identity == "f"
        if identity and not (set(definition.key) <= identity if definition.key else is_full):
            raise _copy_needed(part, "the replica identity of a partition changed")


def _copy_needed(part: PublishedVersion, what: str) -> SchemaChangedError:
    """The error that the table has to be copied again; `what` says why."""
    return SchemaChangedError(
        f'table "{part.sent.publish_as.qualified_name}": {what}; it is copied again by the next run'
    )
