"""Decides which relations a slot captures, and to which replica a captured change belongs.

In: a catalog, and the publications of each subscription of a slot (`pgsieve.decoding.publications.catalog`). Out:

- `plan_capture`: the capture publications, which the slot reads. Together they send exactly the subscribed tables
  and operations, without filters.
- `routes`: maps each relation id in messages to what one subscription receives of the relation's changes. With
  publish_via_partition_root a partition's changes belong to its root.
- `truncated_tables`: the replicated tables that a TRUNCATE empties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pgsieve.decoding.publications.catalog import (
    OPERATIONS,
    Catalog,
    Publication,
    PublishedRelation,
    Table,
    published_relation,
    replicated_tables,
)

Subscriptions = Mapping[str, Sequence[Publication]]


@dataclass(frozen=True, slots=True)
class CapturePublication:
    """A publication without filters that a slot reads: tables with the same operations and `via_root`."""

    suffix: str
    operations: tuple[str, ...]
    via_root: bool
    tables: tuple[Table, ...]


def changed_relations(catalog: Catalog) -> list[Table]:
    """The relations that contain rows: plain tables and leaf partitions."""
    return [t for t in catalog.tables.values() if t.kind == "r"]


def _has_uniform_leaves(root: Table, sent: Mapping[int, PublishedRelation], catalog: Catalog) -> bool:
    """Whether all leaves of `root` are published as `root`, with the same operations, filters and columns."""
    leaves = [sent.get(leaf) for leaf in root.leaves if leaf in catalog.tables]
    if not leaves:
        return False
    first = leaves[0]
    return all(
        s is not None
        and first is not None
        and s.publish_as.oid == root.oid
        and (s.operations, s.filters, s.columns) == (first.operations, first.filters, first.columns)
        for s in leaves
    )


def plan_capture(catalog: Catalog, subscriptions: Subscriptions) -> tuple[CapturePublication, ...]:
    """Return the capture publications for the subscriptions of one slot.

    A partition tree is captured as its root if all subscriptions publish it as this root, in the same way for
    all leaves. In that case the publisher routes each change by the catalog as of the change, and distinguishes a
    TRUNCATE of a leaf from a TRUNCATE of the root. If a subscription publishes any other tree as its root, the
    leaves are captured, and `routes` routes their changes to the root. The capture publication lists the root
    without publish_via_partition_root, so that new leaves are captured too.

    A table is captured only with the operations that a subscription publishes, because a publication of
    updates makes UPDATE fail on a table without a replica identity (PostgreSQL documentation, CREATE
    PUBLICATION, notes).
    """
    sent_by_subscription = [
        {t.oid: sent for t in changed_relations(catalog) if (sent := published_relation(t, ps, catalog))}
        for ps in subscriptions.values()
    ]
    as_root = _captured_roots(catalog, subscriptions, sent_by_subscription)
    captured: dict[int, tuple[Table, set[str]]] = {
        oid: (catalog.tables[oid], set(operations)) for oid, (_, operations) in as_root.items()
    }
    for relations in sent_by_subscription:
        for relation in relations.values():
            captured_roots = [a for a in relation.relation.ancestors if a in as_root]
            oid = captured_roots[-1] if captured_roots else relation.relation.oid
            captured.setdefault(oid, (relation.relation, set()))[1].update(relation.operations)
    groups: dict[tuple[tuple[str, ...], bool], list[Table]] = {}
    for table, operations in captured.values():
        if not table.legible:
            continue  # A statement cannot name this table; `Subscription.definition` reports it.
        ordered = tuple(o for o in OPERATIONS if o in operations)
        via_root = table.oid in as_root and as_root[table.oid][0]
        groups.setdefault((ordered, via_root), []).append(table)
    return tuple(
        CapturePublication(
            suffix=_suffix(operations, via_root=via_root),
            operations=operations,
            via_root=via_root,
            tables=tuple(sorted(tables, key=lambda t: (t.schema, t.name))),
        )
        for (operations, via_root), tables in sorted(groups.items())
    )


def _captured_roots(
    catalog: Catalog,
    subscriptions: Subscriptions,
    sent_by_subscription: Sequence[Mapping[int, PublishedRelation]],
) -> dict[int, tuple[bool, frozenset[str]]]:
    """Maps the oid of each partitioned table to list to whether it is captured as its root, and to its operations."""
    replicated_roots: dict[int, frozenset[str]] = {}
    for publications in subscriptions.values():
        for replicated in replicated_tables(publications, catalog).values():
            if replicated.table.kind == "p":
                oid = replicated.table.oid
                replicated_roots[oid] = replicated_roots.get(oid, frozenset()) | replicated.operations
    result = {}
    for oid, operations in replicated_roots.items():
        root = catalog.tables[oid]
        if any(a in replicated_roots for a in root.ancestors):
            continue
        sending = [oids for oids in sent_by_subscription if any(leaf in oids for leaf in root.leaves)]
        result[oid] = (all(_has_uniform_leaves(root, oids, catalog) for oids in sending), operations)
    return result


def leaf_captured_trees(catalog: Catalog, subscriptions: Subscriptions) -> tuple[frozenset[int], ...]:
    """For each root that is captured as its leaves although its TRUNCATE is published, the set of these leaves.

    A captured TRUNCATE of all leaves of a root may have been a TRUNCATE of the root. Only the publisher's WAL
    shows whether it was.
    """
    sent = [s for publications in subscriptions.values() for s in routes(catalog, publications).values()]
    trees = {
        s.publish_as.oid: s.publish_as
        for s in sent
        if s.publish_as.oid != s.relation.oid and "truncate" in s.operations
    }
    as_root = {table.oid for c in plan_capture(catalog, subscriptions) if c.via_root for table in c.tables}
    return tuple(frozenset(root.leaves) for oid, root in sorted(trees.items()) if oid not in as_root)


def capture_suffixes() -> tuple[str, ...]:
    """All suffixes that follow the configured name in names of capture publications."""
    groups = [g for n in range(1, len(OPERATIONS) + 1) for g in combinations(OPERATIONS, n)]
    return tuple(_suffix(group, via_root=via_root) for group in groups for via_root in (False, True))


def _suffix(operations: tuple[str, ...], *, via_root: bool) -> str:
    letters = "" if operations == OPERATIONS else "_" + "".join(o[0] for o in operations)
    return letters + ("_root" if via_root else "")


def routes(catalog: Catalog, publications: Sequence[Publication]) -> dict[int, PublishedRelation]:
    """Maps a relation id in captured messages to the part of the relation's changes that one subscription receives.

    The result has the id of a root only if all leaves of the root are published in the same way, because only
    such a tree is captured as its root.
    """
    sent = {
        t.oid: s for t in changed_relations(catalog) if (s := published_relation(t, publications, catalog))
    }
    roots = {s.publish_as.oid: s for s in sent.values() if _has_uniform_leaves(s.publish_as, sent, catalog)}
    return roots | sent


def truncated_tables(
    relation_ids: Iterable[int], catalog: Catalog, publications: Sequence[Publication]
) -> list[Table]:
    """The replicated tables that a captured TRUNCATE empties (pgoutput_truncate()).

    If a partition tree is published as its root, a TRUNCATE of a partition does not empty the replica of the root.
    If the leaves of a root are captured, a TRUNCATE of all leaves counts as a TRUNCATE of the root.
    `leaf_captured_trees` lists the trees for which this can be wrong.
    """
    truncated = set(relation_ids)
    emptied: dict[int, Table] = {}
    by_id = routes(catalog, publications)
    for oid in truncated:
        relation = by_id.get(oid)
        if relation is None or "truncate" not in relation.operations:
            continue
        root = relation.publish_as
        if root.oid == oid:
            emptied[oid] = root
        elif root.leaves and set(root.leaves) <= truncated:
            emptied[root.oid] = root
    return list(emptied.values())
