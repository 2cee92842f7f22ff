"""Decides which relations a slot captures, and to which replica a captured change belongs.

In: the publisher's catalog, and the publications of each subscription of a slot
(`pgsieve.decoding.publications.catalog`). Out:

- `plan_capture`: the capture publications. pgsieve creates these publications and reads the slot with them.
  Together they send exactly the subscribed tables and operations, without row filters.
- `find_routes`: maps each relation id in messages to what one subscription receives of this relation's changes. For
  example, with publish_via_partition_root the changes of a partition belong to the replica of its root.
- `find_truncated_tables`: the replicated tables that a TRUNCATE empties.
- `find_uncaptured_tables`: the replicated tables whose changes the present capture publications do not send as planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from pgsieve.decoding.publications.catalog import (
    OPERATIONS,
    Catalog,
    Publication,
    PublicationError,
    PublicationTable,
    Table,
)
from pgsieve.decoding.publications.published_tables import (
    PublishedRelation,
    find_published_relation,
    find_replicated_tables,
)

PublicationsBySubscription = Mapping[str, Sequence[Publication]]


@dataclass(frozen=True, slots=True)
class CapturePublication:
    """A publication without row filters that a slot reads.

    All of its tables are captured with the same operations, and with the same publish_via_partition_root
    (`via_root`). `suffix` follows the configured name in the publication's name.
    """

    suffix: str
    operations: tuple[str, ...]
    via_root: bool
    tables: tuple[Table, ...]


def list_relations_with_rows(catalog: Catalog) -> list[Table]:
    """Return the relations that contain rows: plain tables and leaf partitions."""
    return [t for t in catalog.tables.values() if t.kind == "r"]


def _has_uniform_leaves(root: Table, relations: Mapping[int, PublishedRelation], catalog: Catalog) -> bool:
    """Whether all leaves of `root` are published as `root`, with the same operations, filters and columns.

    `relations` has the published relations of one subscription by oid.
    """
    leaves = [relations.get(leaf) for leaf in root.leaves if leaf in catalog.tables]
    if not leaves:
        return False
    first_relation = leaves[0]
    return all(
        relation is not None
        and first_relation is not None
        and relation.publish_as.oid == root.oid
        and (relation.operations, relation.filters, relation.columns)
        == (first_relation.operations, first_relation.filters, first_relation.columns)
        for relation in leaves
    )


def plan_capture(
    catalog: Catalog, subscriptions: PublicationsBySubscription
) -> tuple[CapturePublication, ...]:
    """Return the capture publications for the subscriptions of one slot.

    A partition tree can be captured in two ways:

    - As its root: if each subscription to the tree receives it as this root, and all of its leaves in the same way. The
      publisher sends each change as a change of the root that the leaf had at that time. It also distinguishes a
      TRUNCATE of a leaf from a TRUNCATE of the root.
    - As its leaves: in all other cases in which a subscription receives the tree as its root. `find_routes` routes the
      changes of the leaves to the root. The capture publication then lists the root, but without
      publish_via_partition_root. So the publisher also sends the changes of leaves that are created later.

    A table is captured only with the operations that a subscription receives. A publication of updates makes
    UPDATE fail on a table without a replica identity (PostgreSQL documentation, CREATE PUBLICATION, notes).
    """
    relations_by_subscription = [
        _find_published_relations(catalog, publications) for publications in subscriptions.values()
    ]
    roots = _find_captured_roots(catalog, subscriptions, relations_by_subscription)
    operations_by_table: dict[int, tuple[Table, set[str]]] = {
        oid: (catalog.tables[oid], set(operations)) for oid, (_, operations) in roots.items()
    }
    for relations in relations_by_subscription:
        for relation in relations.values():
            captured_roots = [oid for oid in relation.relation.ancestors if oid in roots]
            oid = captured_roots[-1] if captured_roots else relation.relation.oid
            operations_by_table.setdefault(oid, (relation.relation, set()))[1].update(relation.operations)
    tables_by_group: dict[tuple[tuple[str, ...], bool], list[Table]] = {}
    for table, operations in operations_by_table.values():
        if not table.legible:
            continue  # No statement can contain its illegible name; `Subscription.definition` reports it.
        sorted_operations = tuple(operation for operation in OPERATIONS if operation in operations)
        via_root = table.oid in roots and roots[table.oid][0]
        tables_by_group.setdefault((sorted_operations, via_root), []).append(table)
    return tuple(
        CapturePublication(
            suffix=_make_suffix(operations, via_root=via_root),
            operations=operations,
            via_root=via_root,
            tables=tuple(sorted(tables, key=lambda t: (t.schema, t.name))),
        )
        for (operations, via_root), tables in sorted(tables_by_group.items())
    )


def _find_captured_roots(
    catalog: Catalog,
    subscriptions: PublicationsBySubscription,
    relations_by_subscription: Sequence[Mapping[int, PublishedRelation]],
) -> dict[int, tuple[bool, frozenset[str]]]:
    """Find the partitioned tables that a capture publication must list.

    Maps the oid of each such table to two facts: whether its tree is captured as its root, and the operations to
    capture.
    """
    replicated_roots: dict[int, frozenset[str]] = {}
    for publications in subscriptions.values():
        for replicated_table in find_replicated_tables(publications, catalog).values():
            if replicated_table.table.kind == "p":
                oid = replicated_table.table.oid
                replicated_roots[oid] = replicated_roots.get(oid, frozenset()) | replicated_table.operations
    facts_by_root = {}
    for oid, operations in replicated_roots.items():
        root = catalog.tables[oid]
        if any(ancestor in replicated_roots for ancestor in root.ancestors):
            continue
        subscribed_relations = [
            relations
            for relations in relations_by_subscription
            if any(leaf in relations for leaf in root.leaves)
        ]
        is_root_captured = all(
            _has_uniform_leaves(root, relations, catalog) for relations in subscribed_relations
        )
        facts_by_root[oid] = (is_root_captured, operations)
    return facts_by_root


def find_leaf_captured_trees(
    catalog: Catalog, subscriptions: PublicationsBySubscription
) -> tuple[frozenset[int], ...]:
    """Find the partition trees for which messages do not tell a TRUNCATE of the root from a TRUNCATE of all leaves.

    Such a tree is published as its root, including TRUNCATE, but captured as its leaves. Only the publisher's WAL
    shows which of the two statements a user ran. Each set in the result has the oids of the leaves of one tree.
    """
    relations = [
        relation
        for publications in subscriptions.values()
        for relation in find_routes(catalog, publications).values()
    ]
    trees = {
        relation.publish_as.oid: relation.publish_as
        for relation in relations
        if relation.publish_as.oid != relation.relation.oid and "truncate" in relation.operations
    }
    captured_roots = {
        table.oid
        for publication in plan_capture(catalog, subscriptions)
        if publication.via_root
        for table in publication.tables
    }
    return tuple(frozenset(root.leaves) for oid, root in sorted(trees.items()) if oid not in captured_roots)


def list_capture_suffixes() -> tuple[str, ...]:
    """All suffixes that can follow the configured name in the names of capture publications."""
    groups = [group for size in range(1, len(OPERATIONS) + 1) for group in combinations(OPERATIONS, size)]
    return tuple(_make_suffix(group, via_root=via_root) for group in groups for via_root in (False, True))


def _make_suffix(operations: tuple[str, ...], *, via_root: bool) -> str:
    letters = "" if operations == OPERATIONS else "_" + "".join(operation[0] for operation in operations)
    return letters + ("_root" if via_root else "")


def find_routes(catalog: Catalog, publications: Sequence[Publication]) -> dict[int, PublishedRelation]:
    """Map each relation id in captured messages to what one subscription receives of this relation's changes.

    A root is in the result only if all of its leaves are published in the same way. Other trees are captured as their
    leaves, so no message has the id of their root.
    """
    relations = _find_published_relations(catalog, publications)
    published_roots = {relation.publish_as.oid: relation for relation in relations.values()}
    roots = {
        oid: relation
        for oid, relation in published_roots.items()
        if _has_uniform_leaves(relation.publish_as, relations, catalog)
    }
    return roots | relations


def _find_published_relations(
    catalog: Catalog, publications: Sequence[Publication]
) -> dict[int, PublishedRelation]:
    """The relations with rows that these publications publish, by oid."""
    return {
        table.oid: relation
        for table in list_relations_with_rows(catalog)
        if (relation := find_published_relation(table, publications, catalog))
    }


def find_truncated_tables(
    relation_ids: Iterable[int], catalog: Catalog, publications: Sequence[Publication]
) -> list[Table]:
    """The replicated tables that a captured TRUNCATE empties (pgoutput_truncate()).

    If a partition tree is published as its root, a TRUNCATE of a partition does not empty the replica of the root.
    If the leaves of a root are captured, a TRUNCATE of all leaves counts as a TRUNCATE of the root. That is wrong
    if a user truncated the leaves by name. `find_leaf_captured_trees` lists the trees for which this can happen.
    """
    truncated_oids = set(relation_ids)
    emptied_tables: dict[int, Table] = {}
    relation_by_oid = find_routes(catalog, publications)
    for oid in truncated_oids:
        relation = relation_by_oid.get(oid)
        if relation is None or "truncate" not in relation.operations:
            continue
        root = relation.publish_as
        if root.oid == oid:
            emptied_tables[oid] = root
        elif root.leaves and set(root.leaves) <= truncated_oids:
            emptied_tables[root.oid] = root
    return list(emptied_tables.values())


def find_uncaptured_tables(
    catalog: Catalog,
    publications: Sequence[Publication],
    capture_publications: Sequence[Publication],
    planned_publications: Sequence[CapturePublication],
    oids: Collection[int],
) -> list[Table]:
    """The replicated tables whose changes do not all arrive by the capture publications.

    - `oids`: only these tables, and their partition trees, are examined
    - `publications`: the publications of one subscription, which replicate the tables
    - `capture_publications`: the capture publications as they are at the publisher now
    - `planned_publications`: the capture publications as they should be

    The changes of a tree that is captured as its root arrive if `find_routes` has the root. A tree that is captured as its
    leaves, but planned as its root, is in the result: its messages do not tell a TRUNCATE of the root from a TRUNCATE of
    all leaves.
    """
    tree_oids = {_find_topmost_oid(catalog.tables[oid]) for oid in oids if oid in catalog.tables}
    tables = {oid: t for oid, t in catalog.tables.items() if _find_topmost_oid(t) in tree_oids}
    catalog = replace(catalog, tables=tables)
    routes = find_routes(catalog, publications)
    plan = [
        Publication(
            p.suffix,
            frozenset(p.operations),
            tables=tuple(map(_publish_whole, p.tables)),
            via_root=p.via_root,
        )
        for p in planned_publications
    ]
    uncaptured_tables: dict[int, Table] = {}
    for relation in _find_published_relations(catalog, publications).values():
        captured = _find_captured_relation(relation.relation, capture_publications, catalog)
        planned = find_published_relation(relation.relation, plan, catalog)
        is_as_planned = captured is not None and (
            captured.publish_as.oid != relation.relation.oid
            or (planned is not None and planned.publish_as.oid == captured.publish_as.oid)
        )
        if (
            captured is None
            or not is_as_planned
            or captured.publish_as.oid not in routes
            or not relation.operations <= captured.operations
        ):
            uncaptured_tables[relation.publish_as.oid] = relation.publish_as
    for replicated_table in find_replicated_tables(publications, catalog).values():
        root = replicated_table.table
        # Only a publication that lists a root, or an ancestor of it, sends the changes of leaves that are created later.
        lineage = [root, *(catalog.tables[oid] for oid in root.ancestors if oid in catalog.tables)]
        if root.kind == "p" and not any(p.contains(each) for p in capture_publications for each in lineage):
            uncaptured_tables[root.oid] = root
    return [table for table in uncaptured_tables.values() if table.legible]


def _find_topmost_oid(table: Table) -> int:
    return table.ancestors[-1] if table.ancestors else table.oid


def _publish_whole(table: Table) -> PublicationTable:
    return PublicationTable(table.oid)


def _find_captured_relation(
    table: Table, capture_publications: Sequence[Publication], catalog: Catalog
) -> PublishedRelation | None:
    """The changes of a table that the capture publications send. None if they leave out rows or columns, or send nothing."""
    try:
        relation = find_published_relation(table, capture_publications, catalog)
    except PublicationError:
        return None
    if relation is None or any(filters is not None for filters in relation.filters.values()):
        return None
    has_column_list = any(
        p.has_column_list(relation.publish_as)
        for p in capture_publications
        if p.name in relation.publications
    )
    return None if has_column_list else relation
