"""Which relations a source's slot captures, and which replica a captured change belongs to.

In: a catalog, and the publications of each subscription of a source
(`pgsieve.decoding.publications.catalog`). Out: the capture publications that together send exactly the
subscribed tables and operations, unfiltered (`plan_capture`); for each relation id in messages the table as
which it is published, which resolves publish_via_partition_root (`routes`); and the tables that a TRUNCATE
empties (`truncated_tables`).
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
    """One unfiltered publication that a slot reads: tables that share operations and routing."""

    suffix: str
    operations: tuple[str, ...]
    via_root: bool
    tables: tuple[Table, ...]


def changed_relations(catalog: Catalog) -> list[Table]:
    """The relations that contain rows: plain tables and leaf partitions."""
    return [t for t in catalog.tables.values() if t.kind == "r"]


def _same_under(root: Table, sent: Mapping[int, PublishedRelation], catalog: Catalog) -> bool:
    """Whether every leaf under `root` is published as `root`, with the same operations and filters."""
    below = [sent.get(leaf) for leaf in root.leaves if leaf in catalog.tables]
    if not below:
        return False
    first = below[0]
    return all(
        s is not None
        and first is not None
        and s.publish_as.oid == root.oid
        and (s.operations, s.filters, s.columns) == (first.operations, first.filters, first.columns)
        for s in below
    )


def plan_capture(catalog: Catalog, subscriptions: Subscriptions) -> tuple[CapturePublication, ...]:
    """The capture publications for the subscriptions of one source.

    A partition tree is captured as its root if every subscription publishes it as this root, in the same way
    for all leaves. Then the publisher routes changes by its historic catalog, and distinguishes a TRUNCATE of
    a leaf from one of the root. Other trees that a subscription publishes as a root are captured as leaves,
    and `routes` routes their changes; the root is listed without publish_via_partition_root, so that new
    leaves are captured too. A table is captured only with operations that a subscription publishes, because a
    publication of updates makes UPDATE fail on a table without replica identity (CREATE PUBLICATION, notes).
    """
    sent_by = [
        {t.oid: sent for t in changed_relations(catalog) if (sent := published_relation(t, ps, catalog))}
        for ps in subscriptions.values()
    ]
    as_root = _roots(catalog, subscriptions, sent_by)
    captured: dict[int, tuple[Table, set[str]]] = {
        oid: (catalog.tables[oid], set(operations)) for oid, (_, operations) in as_root.items()
    }
    for sent_to_one in sent_by:
        for relation in sent_to_one.values():
            above = [a for a in relation.relation.ancestors if a in as_root]
            oid = above[-1] if above else relation.relation.oid
            captured.setdefault(oid, (relation.relation, set()))[1].update(relation.operations)
    groups: dict[tuple[tuple[str, ...], bool], list[Table]] = {}
    for table, operations in captured.values():
        if not table.legible:
            continue  # No statement can name this table; `Subscription.definition` reports it.
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


def _roots(
    catalog: Catalog, subscriptions: Subscriptions, sent_by: Sequence[Mapping[int, PublishedRelation]]
) -> dict[int, tuple[bool, frozenset[str]]]:
    """The partitioned tables that capture publications list, with their operations.

    The boolean says whether a tree is captured as its root.
    """
    wanted: dict[int, frozenset[str]] = {}
    for publications in subscriptions.values():
        for replicated in replicated_tables(publications, catalog).values():
            if replicated.table.kind == "p":
                oid = replicated.table.oid
                wanted[oid] = wanted.get(oid, frozenset()) | replicated.operations
    result = {}
    for oid, operations in wanted.items():
        root = catalog.tables[oid]
        if any(a in wanted for a in root.ancestors):
            continue
        interested = [sent for sent in sent_by if any(leaf in sent for leaf in root.leaves)]
        result[oid] = (all(_same_under(root, sent, catalog) for sent in interested), operations)
    return result


def leaves_captured(catalog: Catalog, subscriptions: Subscriptions) -> tuple[frozenset[int], ...]:
    """The leaves of each root whose own TRUNCATE is published while only its leaves are captured.

    A captured TRUNCATE of every leaf may have been one of the root; only the publisher knows.
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
    """The suffixes of capture publications' names, after the configured name."""
    groups = [g for n in range(1, len(OPERATIONS) + 1) for g in combinations(OPERATIONS, n)]
    return tuple(_suffix(group, via_root=via_root) for group in groups for via_root in (False, True))


def _suffix(operations: tuple[str, ...], *, via_root: bool) -> str:
    letters = "" if operations == OPERATIONS else "_" + "".join(o[0] for o in operations)
    return letters + ("_root" if via_root else "")


def routes(catalog: Catalog, publications: Sequence[Publication]) -> dict[int, PublishedRelation]:
    """For each relation id that captured messages may have, the part of its changes that a subscription gets.

    A root's id stands for all its leaves if these agree; they do if the tree is captured as its root.
    """
    sent = {
        t.oid: s for t in changed_relations(catalog) if (s := published_relation(t, publications, catalog))
    }
    roots = {s.publish_as.oid: s for s in sent.values() if _same_under(s.publish_as, sent, catalog)}
    return roots | sent


def truncated_tables(
    relation_ids: Iterable[int], catalog: Catalog, publications: Sequence[Publication]
) -> list[Table]:
    """The replica tables that a captured TRUNCATE empties (pgoutput_truncate()).

    A table that is published as its root is emptied by a TRUNCATE of the root, not by one of a partition. If
    leaves are captured, a TRUNCATE that lists all of them counts as the root's; if this may be wrong, the
    publisher decides (`leaves_captured`).
    """
    truncated = set(relation_ids)
    emptied: dict[int, Table] = {}
    by_id = routes(catalog, publications)
    for oid in truncated:
        sent = by_id.get(oid)
        if sent is None or "truncate" not in sent.operations:
            continue
        root = sent.publish_as
        if root.oid == oid:
            emptied[oid] = root
        elif root.leaves and set(root.leaves) <= truncated:
            emptied[root.oid] = root
    return list(emptied.values())
