"""The contents of a slice of the change log for a subscription, found without reading any row.

In: the slice's Relation and Truncate messages, and its catalog (`slices_to_read`). Out: for each replica table the
relation versions with changes for it (`published_versions`), and the TRUNCATEs of it (`table_truncates`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.observations import notes_of
from pgsieve.assets.steps.records.catalogs import AlteredSlices, Catalogs, as_published, decided_by_server
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.records.slices import Slices, SliceSummary, summary_of
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.protocol.messages import Relation, Truncate, decode
from pgsieve.decoding.publications.catalog import (
    OPERATIONS,
    Catalog,
    Publication,
    PublishedRelation,
    Table,
)
from pgsieve.decoding.publications.replica_identity import sends_updates_or_deletes
from pgsieve.decoding.publications.routing import routes, truncated_tables
from pgsieve.decoding.values.builtin_types import DefinedTypes
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class RelationVersion:
    """A Relation message, and the order keys between which it describes the relation's tuples; `end` None: to the end."""

    relation: Relation
    begin: Order
    end: Order | None


@dataclass(frozen=True)
class SliceContents:
    """The contents of a slice: its end, its bytes, relation versions by oid, changed relations, and TRUNCATEs."""

    end: int
    size: int
    versions: Mapping[int, Sequence[RelationVersion]]
    changed: frozenset[int]
    truncates: Sequence[tuple[Order, Truncate]]


def slices_to_read(
    lake: Lake, subscription: Subscription, present: Catalog, after: int
) -> Iterator[tuple[int, Subscription | None, Catalog]]:
    """The ends of the slices after an LSN, in order, each with the subscription that reads it, and the slice's catalog.

    `present` is the present catalog, for slices without a recorded one. The subscription that reads a slice has the feed
    with the publisher's decisions (`as_published`) if publications were altered in the slice. It is None if the slot was
    not read for the subscription at that time.
    """
    feed, name = subscription.feed, subscription.name
    decided_subscription = replace(subscription, feed=as_published(feed, name))
    with lake.consistent_read():
        # The change log is read before `altered`, since a slice is in `altered` first.
        durable = ChangeLog(lake, feed).position() or 0
        altered = AlteredSlices(lake, feed).ends(name, durable)
        appended_ends = lake.records.slices(ChangeLog(lake, feed).path, after=after)
    for end in sorted({*appended_ends, *(end for end in altered if end > after)}):
        if end in altered:
            yield end, decided_subscription, present
        elif decided_by_server(feed, name) and (recorded_catalog := Catalogs(lake, feed).of_slice(end)):
            catalog, readers = recorded_catalog
            # Values of a recorded type may contain a type that is newer than the record. Oids keep their meaning.
            catalog = replace(catalog, types={**catalog.types, **present.types})
            yield end, subscription if name in readers else None, catalog
        else:
            yield end, subscription, present


def summarized_slice(lake: Lake, feed: Feed, end: int) -> SliceContents:
    """The recorded contents of a slice; if a run died before it recorded them, they are recorded now."""
    slices = Slices(lake, feed)
    row = slices.row(end)
    if row is None:
        row = slices.append(end, _summary(lake, ChangeLog(lake, feed).path, end))
    versions: dict[int, list[RelationVersion]] = {}
    truncates: list[tuple[Order, Truncate]] = []
    for message in sorted(row["messages"], key=lambda m: (m["commit_lsn"], m["ordinal"])):
        decoded = decode(message["data"])
        begin = (message["commit_lsn"], message["ordinal"])
        if isinstance(decoded, Truncate):
            truncates.append((begin, decoded))
        elif isinstance(decoded, Relation):
            described = versions.setdefault(decoded.relation_id, [])
            if described and described[-1].relation == decoded:
                continue
            if described:
                described[-1] = replace(described[-1], end=begin)
            described.append(RelationVersion(decoded, begin, None))
    return SliceContents(end, row["bytes"], versions, frozenset(row["relations"]), truncates)


def _summary(lake: Lake, path: str, end: int) -> Mapping[str, Any]:
    """Compute the summary of a slice of the change log at `path`."""
    # The size of the whole change log, since the slice's own is not recorded.
    size = None if lake.by_spark_alone else lake.records.size(path)
    columns = ["commit_lsn", "ordinal", "xid", "kind", "relation_id", "data"]
    rows = lake.slice_rows(path, [end], size, columns=columns)
    if rows is None:
        return summary_of(notes_of(lake.read_slices(path, [end]).select(*columns), _summarized))
    summary = SliceSummary(lake.policy.prepare_runner)
    for _ in summary.of(rows.to_batches()):
        pass
    return summary.row()


@dataclass(frozen=True)
class PublishedVersion:
    """One relation version of a slice, how it is published (`sent`), and the types that users have defined.

    If a partition tree is published as its root, `root_key` is the root's own key, and `leaves` are the versions of the
    leaves to which UPDATEs and DELETEs may belong. A session describes a leaf before the leaf's first change, and again
    after it was altered (maybe_send_schema() of pgoutput.c). `partitions` are partitions through which changes came,
    except those that the session described in an earlier slice.
    """

    version: RelationVersion
    sent: PublishedRelation
    defined: DefinedTypes
    root_key: frozenset[str] | None = None
    leaves: Sequence[RelationVersion] = ()
    partitions: tuple[str, ...] = ()

    def is_after(self, since: Order) -> bool:
        """Whether the version describes tuples after an order key."""
        return self.version.end is None or self.version.end > since


def published_versions(
    subscription: Subscription, contents: SliceContents, catalog: Catalog
) -> dict[Name, list[PublishedVersion]]:
    """The relation versions with changes for each replica table."""
    feed, publications = subscription.feed, _publications(subscription, catalog)
    by_id = {} if feed.filtered else routes(catalog, publications)
    parts: dict[Name, list[PublishedVersion]] = {}
    for relation_id, versions in contents.versions.items():
        if relation_id not in contents.changed:
            continue
        for version in versions:
            sent = _as_published(version.relation) if feed.filtered else by_id.get(relation_id)
            if sent is not None:
                name = (sent.publish_as.schema, sent.publish_as.name)
                part = PublishedVersion(version, sent, catalog.types)
                root = catalog.tables.get(sent.publish_as.oid)
                if root is not None and root.kind == "p":
                    leaves = _leaves(root, version, contents, catalog, publications)
                    partitions = _partitions(root, version, contents)
                    part = replace(
                        part,
                        root_key=frozenset(map(subscription.replica_name, root.key)),
                        leaves=leaves,
                        partitions=partitions,
                    )
                parts.setdefault(name, []).append(part)
    return parts


def _publications(subscription: Subscription, catalog: Catalog) -> Sequence[Publication]:
    """The publications of a subscription; if the publisher filters, without those that no longer exist."""
    feed = subscription.feed
    if not feed.filtered:
        return feed.publications(catalog, subscription.name)
    names = feed.subscriptions[subscription.name]
    return [catalog.publications[name] for name in names if name in catalog.publications]


def _leaves(
    root: Table,
    version: RelationVersion,
    contents: SliceContents,
    catalog: Catalog,
    publications: Sequence[Publication],
) -> list[RelationVersion]:
    """The versions of the leaves, and of possible former leaves, to which changes of a version may belong."""
    if version.relation.relation_id != root.oid:
        described = {version.relation.relation_id: [version]}
    else:
        truncated_oids = {oid for _, truncate in contents.truncates for oid in truncate.relation_ids}
        other_leaves = contents.versions.keys() - contents.changed - truncated_oids
        described = {oid: list(contents.versions[oid]) for oid in sorted(other_leaves)}
    changing = []
    for oid, versions in described.items():
        leaf = catalog.tables.get(oid)
        if (
            sends_updates_or_deletes(leaf, root, publications, catalog)
            if leaf is not None and leaf.ancestors
            else any({"update", "delete"} & p.operations for p in publications)
        ):
            changing += versions
    return changing


def _partitions(root: Table, version: RelationVersion, contents: SliceContents) -> tuple[str, ...]:
    """The partitions through which changes of a version came."""
    oid = version.relation.relation_id
    described = (contents.versions.keys() & {*root.leaves}) if oid == root.oid else {oid}
    relations = [contents.versions[each][-1].relation for each in described]
    return tuple(quote_qualified(each.namespace or "pg_catalog", each.name) for each in relations)


def _as_published(relation: Relation) -> PublishedRelation:
    """A relation of a publisher that filters: all its changes are sent, under the relation's own name."""
    table = Table(
        oid=relation.relation_id,
        schema=relation.namespace or "pg_catalog",
        name=relation.name,
        kind="r",
        replica_identity=relation.replica_identity,
        attributes=(),
    )
    return PublishedRelation(
        relation=table,
        publish_as=table,
        operations=frozenset(OPERATIONS),
        filters=dict.fromkeys(("insert", "update", "delete"), None),
        columns=tuple(c.name for c in relation.columns),
        publications=(),
    )


def table_truncates(
    subscription: Subscription, contents: SliceContents, catalog: Catalog
) -> dict[Name, list[Order]]:
    """The order keys of the TRUNCATEs of each replica table."""
    truncates_by_table: dict[Name, list[Order]] = {}
    for order, truncate in contents.truncates:
        if subscription.feed.filtered:
            # The publisher describes every relation of a TRUNCATE before the TRUNCATE (pgoutput_truncate()).
            tables = [_described(contents.versions[oid], order) for oid in truncate.relation_ids]
        else:
            publications = subscription.feed.publications(catalog, subscription.name)
            tables = truncated_tables(truncate.relation_ids, catalog, publications)
        for table in tables:
            truncates_by_table.setdefault((table.schema, table.name), []).append(order)
    return truncates_by_table


def _described(versions: Sequence[RelationVersion], order: Order) -> Table:
    """The relation as it was described at an order key."""
    return _as_published(next(v for v in reversed(versions) if v.begin < order).relation).publish_as


def _summarized(batches: Iterable[pa.RecordBatch]) -> str:
    summary = SliceSummary()
    for _ in summary.of(batches):
        pass
    return summary.text()
