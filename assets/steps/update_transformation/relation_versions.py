"""How the messages of one relation version in a slice are decoded and transformed for a subscription.

In: a Relation message of the slice, and the replica's definition, which may be newer. Out: the `Transformation` to the
replica's columns. Raises SchemaChangedError if the columns of the Relation message fit neither the present nor the
former definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.subscription import Definition, Subscription, metadata_arrow_types
from pgsieve.assets.steps.update_transformation.messages import Choice, Messages
from pgsieve.assets.steps.update_transformation.slice_contents import PublishedVersion
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.decode import AddedColumn, FilterColumns
from pgsieve.decoding.changes.metadata_columns import MetadataColumns
from pgsieve.decoding.changes.sent_as import BY_PUBLISHER, Origin
from pgsieve.decoding.changes.transform import Transformation
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.catalog import PublishedRelation
from pgsieve.decoding.publications.evolution import SchemaChangedError, missing_value, present_names
from pgsieve.decoding.publications.filters import parse_published_filter
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.types import from_text


@dataclass(frozen=True)
class Reading:
    """The messages of one relation version, and their transformation for the subscription."""

    messages: Messages
    transformation: Transformation


def readings_of(
    subscription: Subscription,
    messages: Messages,
    parts: Sequence[PublishedVersion],
    since: Order,
    definition: Definition,
) -> list[Reading]:
    """The readings of a table's changes after `since`, one per relation version."""
    return [
        _reading(subscription, messages, part, since, definition)
        for part in parts
        if part.is_after(since) and _is_of_replica(subscription, part, since, definition)
    ]


def _is_of_replica(
    subscription: Subscription, part: PublishedVersion, since: Order, definition: Definition
) -> bool:
    """Whether a relation version belongs to the replica.

    If the publisher filters, it may be of another table that had the same name before the copy. After the copy any
    table with the name belongs to the replica, as a PostgreSQL subscriber finds its table by name
    (logicalrep_rel_open() in src/backend/replication/logical/relation.c).
    """
    relation_id = part.version.relation.relation_id
    return (
        not subscription.feed.filtered or relation_id == definition.layout.oid or part.version.begin > since
    )


def _reading(
    subscription: Subscription,
    messages: Messages,
    part: PublishedVersion,
    since: Order,
    definition: Definition,
) -> Reading:
    """The reading of a relation version's changes after `since`, for a replica with this definition."""
    relation, sent = part.version.relation, part.sent
    columns, added = arriving_columns(subscription, part, definition)
    _refuse_unfound(subscription, part, since, definition)
    filters = {
        operation: None if texts is None else [parse_published_filter(sent, text) for text in texts]
        for operation, texts in sent.filters.items()
    }
    read = None
    if any(each is not None for each in filters.values()):
        used = frozenset(name for each in filters.values() for one in each or () for name in one.columns)
        if not {*map(subscription.replica_name, used)} <= {*columns.names, *(a.name for a in added)}:
            raise _copy_needed(part, "columns of its row filter changed")
        read = _filter_columns(subscription, part, definition, used)
    source = quote_qualified(relation.namespace or "pg_catalog", relation.name)
    # If a partition tree is published as its root, messages of the root do not name the leaf.
    is_root = part.root_key is not None and relation.relation_id == definition.layout.oid
    transformation = Transformation(
        columns,
        changes_schema(_types(columns, added, definition)),
        definition.key,
        frozenset(sent.operations),
        filters,
        [a for a in added if a.name in definition.names],
        read,
        Origin(source, _filter_texts(subscription, sent)),
        MetadataColumns(dict(definition.metadata), None if is_root else source),
    )
    begin = max(part.version.begin, since)
    chosen = Choice(begin, part.version.end, relations=frozenset({relation.relation_id}))
    return Reading(messages.chosen(chosen), transformation)


def _filter_texts(subscription: Subscription, sent: PublishedRelation) -> dict[str, str | None]:
    """The row filters by operation as users read them."""
    if subscription.feed.filtered:
        return dict.fromkeys(sent.filters, BY_PUBLISHER)
    return {o: None if texts is None else " OR ".join(texts) for o, texts in sent.filters.items()}


def _filter_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition, used: frozenset[str]
) -> FilterColumns:
    """The columns that row filters read, in the default types instead of those that the user chose."""
    columns, added = _typed_columns(replace(subscription, types={}), part, definition)
    own = subscription.published_names(part.sent.publish_as)
    named = RelationColumns(tuple(own.get(name, name) for name in columns.names), columns.types)
    added = [replace(a, name=own.get(a.name, a.name)) for a in added]
    key = tuple(own.get(name, name) for name in definition.key)
    return FilterColumns(used, named, [a for a in added if a.name in used], key)


def _types(
    columns: RelationColumns, added: Sequence[AddedColumn], definition: Definition
) -> list[tuple[str, pa.DataType]]:
    """The replica's columns, each with the Arrow type in which its values arrive."""
    arriving = {name: t.arrow for name, t in zip(columns.names, columns.types, strict=True)}
    arriving |= {a.name: a.value.type for a in added}
    types = [(name, arriving[name]) for name, _ in definition.table_columns]
    return [*types, *metadata_arrow_types(definition)]


def arriving_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    """The columns of a relation version under their present names, and the replica's columns that it lacks.

    Raises SchemaChangedError if the version fits neither the present nor the former definition.
    """
    columns, added = _typed_columns(subscription, part, definition)
    arriving = {name: t.spark for name, t in zip(columns.names, columns.types, strict=True)}
    arriving |= {a.name: a.spark for a in added}
    if any(arriving.get(name) != spark for name, spark in definition.table_columns):
        raise _copy_needed(part, "its columns changed")
    if {"update", "delete"} & part.sent.operations:
        _refuse_another_identity(part, columns.names, definition)
    return columns, added


def _typed_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[RelationColumns, Sequence[AddedColumn]]:
    names, added = _present_columns(subscription, part, definition)
    types = tuple(
        subscription.column_type(part.sent.publish_as, name, c.type_oid, c.type_modifier, part.defined)
        for name, c in zip(names, part.version.relation.columns, strict=True)
    )
    return RelationColumns(names, types), added


def _present_columns(
    subscription: Subscription, part: PublishedVersion, definition: Definition
) -> tuple[tuple[str, ...], Sequence[AddedColumn]]:
    relation, former, layout = part.version.relation, definition.former, definition.layout
    names = tuple(subscription.replica_name(c.name) for c in relation.columns)
    if former is None or part.version.begin >= (former.until, 0):
        return names, ()
    table = part.sent.publish_as
    try:
        names = present_names(
            [(name, c.type_oid) for name, c in zip(names, relation.columns, strict=True)],
            relation.relation_id,
            former.layout,
            layout,
        )
        since = [c for c in layout.columns_added_since(former.layout) if c.name in definition.names]
        lacking = [c for c in since if c.name not in names]
        added = [(c, missing_value(c, former.layout, layout)) for c in lacking]
    except SchemaChangedError as error:
        raise _copy_needed(part, error.message) from None
    columns = []
    for c, value in added:
        kind = subscription.column_type(table, c.name, c.type_oid, c.type_modifier, part.defined)
        array = from_text(pa.array([value], pa.string()), kind, c.name)
        columns.append(AddedColumn(c.name, kind.spark, array))
    return names, columns


def _refuse_another_identity(part: PublishedVersion, names: Sequence[str], definition: Definition) -> None:
    """Raise SchemaChangedError if old tuples lack the columns that identify the replica's rows: its key, or all columns.

    Leaves have identities of their own: see `_refuse_unfound`.
    """
    relation, former = part.version.relation, definition.former
    if relation.relation_id != part.sent.publish_as.oid or _is_found_by_leaves(part, definition):
        return
    identity = {name for name, c in zip(names, relation.columns, strict=True) if c.is_key}
    keyless = (
        not definition.key
        and former is not None
        and former.key
        and part.version.begin < (former.until, 0)
        and relation.replica_identity != "f"
    )
    if keyless or not set(definition.key) <= identity:
        raise _copy_needed(part, "its replica identity changed")


def _is_found_by_leaves(part: PublishedVersion, definition: Definition) -> bool:
    """Whether the rows of a partition tree are found by a key that its leaves share, and not by the root's key."""
    return part.root_key is not None and not (definition.key and set(definition.key) == part.root_key)


def _refuse_unfound(
    subscription: Subscription, part: PublishedVersion, since: Order, definition: Definition
) -> None:
    """Raise SchemaChangedError if a leaf was altered or detached, and its old tuples do not identify the replica's rows.

    The definition has the present identities of the leaves. A leaf that was described before the copy, and not since,
    was altered before the copy.
    """
    for leaf in part.leaves if _is_found_by_leaves(part, definition) else ():
        over = leaf.end is not None and leaf.end <= since
        if over or (leaf.begin < since and definition.former is None):
            continue
        names, _ = _present_columns(subscription, replace(part, version=leaf), definition)
        identity = {name for name, c in zip(names, leaf.relation.columns, strict=True) if c.is_key}
        full = leaf.relation.replica_identity == "f"
        if identity and not (set(definition.key) <= identity if definition.key else full):
            raise _copy_needed(part, "the replica identity of a partition changed")


def _copy_needed(part: PublishedVersion, what: str) -> SchemaChangedError:
    return SchemaChangedError(
        f'table "{part.sent.publish_as.qualified}": {what}; it is copied again by the next run'
    )
