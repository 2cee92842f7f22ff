"""Finds what a slice of the change log contains for a subscription, from the slice's summary in the table `slices`.

A slice is the changes from one position of the slot to another. A relation version is a Relation message, and the
changes that it describes. A stream is a slot with its change log and its subscriptions.

In: the Relation and Truncate messages of the slice, and its catalog (`find_slices`)
Out: - for each replica, the relation versions that have changes for it (`find_published_versions`)
     - for each replica, its TRUNCATEs (`find_table_truncates`)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.observations import collect_notes
from pgsieve.assets.steps.records.catalogs import (
    AlteredSlices,
    Catalogs,
    can_publisher_decide,
    make_publisher_slot_stream,
)
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.records.slices import Slices, SliceSummary, join_summaries
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.protocol.messages import Relation, Truncate, decode
from pgsieve.decoding.publications.catalog import OPERATIONS, Catalog, Publication, Table
from pgsieve.decoding.publications.published_tables import PublishedRelation
from pgsieve.decoding.publications.replica_identity import can_send_updates_or_deletes
from pgsieve.decoding.publications.routing import find_routes, find_truncated_tables
from pgsieve.decoding.values.builtin_types import DerivedTypesByOid
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.table_rows import open_slices


@dataclass(frozen=True)
class RelationVersion:
    """A Relation message. It describes the relation's tuples from the order key `begin` to the order key `end`.

    An order key is a commit LSN and an ordinal. If `end` is None, the message describes all tuples up to the end of the
    slice.
    """

    relation: Relation
    begin: OrderKey
    end: OrderKey | None


@dataclass(frozen=True)
class SliceContents:
    """What a slice contains.

    - `end`: the LSN at which it ends
    - `size`: its bytes
    - `versions`: maps the oid of a relation to its relation versions
    - `changed_oids`: the oids of the relations that have changes
    - `truncates`: the TRUNCATEs, with their order keys
    - `bytes_by_relation`: maps these oids to the bytes of the changes; None if an earlier version of pgsieve, which did
      not count them, has summarised the slice
    """

    end: int
    size: int
    versions: Mapping[int, Sequence[RelationVersion]]
    changed_oids: frozenset[int]
    truncates: Sequence[tuple[OrderKey, Truncate]]
    bytes_by_relation: Mapping[int, int] | None = None


def find_slices(
    lake: Lake, subscription: Subscription, present_catalog: Catalog, since_lsn: int
) -> Iterator[tuple[int, Subscription | None, Catalog]]:
    """Yields the slices that end after `since_lsn`, in order: the end, a subscription, and the slice's catalog.

    The present catalog is used for slices that the publisher has filtered, or for which no catalog was recorded.

    Mostly the yielded subscription is the one that was passed. If publications were altered within a slice, the
    publisher filters the slice, and the result is in a change log of its own. For such a slice a copy of the
    subscription is yielded, with the stream of that change log (`make_publisher_slot_stream`). If the slot was not read
    for the subscription at the time of the slice, None is yielded instead of a subscription.
    """
    slot_stream, name = subscription.slot_stream, subscription.name
    subscription_as_published = replace(
        subscription, slot_stream=make_publisher_slot_stream(slot_stream, name)
    )
    with lake.consistent_read():
        # A slice is listed in the table `altered` before it is in the change log. So the position of the change log is read
        # first, and slices beyond it, which another process appends meanwhile, are left to the next call.
        change_log_lsn = ChangeLog(lake, slot_stream).read_position() or 0
        altered_ends = AlteredSlices(lake, slot_stream).read_ends(name, change_log_lsn)
        appended_ends = {
            end
            for end in lake.records.slices(ChangeLog(lake, slot_stream).path, after_lsn=since_lsn)
            if end <= change_log_lsn
        }
    for end in sorted(appended_ends | {end for end in altered_ends if end > since_lsn}):
        if end in altered_ends:
            yield end, subscription_as_published, present_catalog
        elif can_publisher_decide(slot_stream, name) and (
            recorded_catalog := Catalogs(lake, slot_stream).read_for_slice(end)
        ):
            catalog, readers = recorded_catalog
            # The recorded catalog lacks types that were created later, and values of the slice may contain such types. So
            # the present types are added. An oid always means the same type.
            catalog = replace(catalog, types={**catalog.types, **present_catalog.types})
            yield end, subscription if name in readers else None, catalog
        else:
            yield end, subscription, present_catalog


def read_slice_contents(lake: Lake, slot_stream: SlotStream, end: int) -> SliceContents:
    """Read what a slice contains from its recorded summary.

    If a run died before it recorded the summary, the summary is made and recorded now.
    """
    slices = Slices(lake, slot_stream)
    row = slices.read_row(end)
    if row is None:
        row = slices.append(end, _summarize_slice(lake, ChangeLog(lake, slot_stream).path, end))
    versions: dict[int, list[RelationVersion]] = {}
    truncates: list[tuple[OrderKey, Truncate]] = []
    for message in sorted(row["messages"], key=lambda message: (message["commit_lsn"], message["ordinal"])):
        decoded_message = decode(message["data"])
        begin = (message["commit_lsn"], message["ordinal"])
        if isinstance(decoded_message, Truncate):
            truncates.append((begin, decoded_message))
        elif isinstance(decoded_message, Relation):
            relation_versions = versions.setdefault(decoded_message.relation_id, [])
            if relation_versions and relation_versions[-1].relation == decoded_message:
                continue
            if relation_versions:
                relation_versions[-1] = replace(relation_versions[-1], end=begin)
            relation_versions.append(RelationVersion(decoded_message, begin, None))
    relations, byte_counts = row["relations"], row.get("relation_bytes")
    return SliceContents(
        end,
        row["bytes"],
        versions,
        frozenset(relations),
        truncates,
        None if byte_counts is None else dict(zip(relations, byte_counts, strict=True)),
    )


def _summarize_slice(lake: Lake, path: str, end: int) -> Mapping[str, Any]:
    """Make the summary of a slice of the change log at `path`."""
    columns = ["commit_lsn", "ordinal", "xid", "kind", "relation_id", "data"]
    with lake.access.translate_errors(path):
        return join_summaries(collect_notes(open_slices(lake, path, [end], columns), _summarize_batches))


@dataclass(frozen=True)
class PublishedVersion:
    """A relation version of a slice, and how it is published.

    - `published_relation`: the table under whose name the changes are published, its filters and operations
    - `user_types`: the types that users of the publisher have defined
    - `root_key`: the key of the root, if a partition tree is published as its root
    - `leaves`: if a tree is published as its root, the relation versions of those leaf partitions in which its UPDATEs
      and DELETEs may have changed rows. The publisher describes a leaf before its first change in a session, and again
      after it was altered (maybe_send_schema() in pgoutput.c).
    - `partitions`: the partitions through which changes came, if this slice has their Relation messages
    """

    version: RelationVersion
    published_relation: PublishedRelation
    user_types: DerivedTypesByOid
    root_key: frozenset[str] | None = None
    leaves: Sequence[RelationVersion] = ()
    partitions: tuple[str, ...] = ()

    def is_after(self, since: OrderKey) -> bool:
        """True if the version describes tuples after an order key."""
        return self.version.end is None or self.version.end > since


def find_published_versions(
    subscription: Subscription, contents: SliceContents, catalog: Catalog
) -> dict[Name, list[PublishedVersion]]:
    """Maps each replica to the relation versions that have changes for it."""
    slot_stream, publications = subscription.slot_stream, _find_publications(subscription, catalog)
    relations_by_oid = {} if slot_stream.filtered else find_routes(catalog, publications)
    versions_by_table: dict[Name, list[PublishedVersion]] = {}
    for relation_id, versions in contents.versions.items():
        if relation_id not in contents.changed_oids:
            continue
        for version in versions:
            published_relation = (
                _make_published_relation(version.relation)
                if slot_stream.filtered
                else relations_by_oid.get(relation_id)
            )
            if published_relation is not None:
                name = (published_relation.publish_as.schema, published_relation.publish_as.name)
                published_version = PublishedVersion(version, published_relation, catalog.types)
                root = catalog.tables.get(published_relation.publish_as.oid)
                if root is not None and root.kind == "p":
                    leaves = _find_leaf_versions(root, version, contents, catalog, publications)
                    partitions = _name_partitions(root, version, contents)
                    published_version = replace(
                        published_version,
                        root_key=frozenset(map(subscription.replica_name, root.key)),
                        leaves=leaves,
                        partitions=partitions,
                    )
                versions_by_table.setdefault(name, []).append(published_version)
    return versions_by_table


def _find_publications(subscription: Subscription, catalog: Catalog) -> Sequence[Publication]:
    """Find the publications of a subscription. If the publisher filters, those that no longer exist are left out."""
    slot_stream = subscription.slot_stream
    if not slot_stream.filtered:
        return slot_stream.publications(catalog, subscription.name)
    names = slot_stream.subscriptions[subscription.name]
    return [catalog.publications[name] for name in names if name in catalog.publications]


def _find_leaf_versions(
    root: Table,
    version: RelationVersion,
    contents: SliceContents,
    catalog: Catalog,
    publications: Sequence[Publication],
) -> list[RelationVersion]:
    """Find the relation versions of the leaf partitions to which UPDATEs and DELETEs of `version` may belong.

    Relations that may be former leaf partitions are included.
    """
    if version.relation.relation_id != root.oid:
        versions_by_oid = {version.relation.relation_id: [version]}
    else:
        truncated_oids = {oid for _, truncate in contents.truncates for oid in truncate.relation_ids}
        other_leaves = contents.versions.keys() - contents.changed_oids - truncated_oids
        versions_by_oid = {oid: list(contents.versions[oid]) for oid in sorted(other_leaves)}
    versions_with_changes = []
    for oid, versions in versions_by_oid.items():
        leaf = catalog.tables.get(oid)
        if (
            can_send_updates_or_deletes(leaf, root, publications, catalog)
            if leaf is not None and leaf.ancestors
            else any({"update", "delete"} & publication.operations for publication in publications)
        ):
            versions_with_changes += versions
    return versions_with_changes


def _name_partitions(root: Table, version: RelationVersion, contents: SliceContents) -> tuple[str, ...]:
    """Name the partitions through which the changes of a version came."""
    oid = version.relation.relation_id
    oids = (contents.versions.keys() & {*root.leaves}) if oid == root.oid else {oid}
    relations = [contents.versions[relation_id][-1].relation for relation_id in oids]
    return tuple(quote_qualified(relation.namespace or "pg_catalog", relation.name) for relation in relations)


def _make_published_relation(relation: Relation) -> PublishedRelation:
    """Make the published relation of a relation in a slice that the publisher has filtered.

    In such a slice, the changes are published under the name in their Relation message.
    """
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
        columns=tuple(column.name for column in relation.columns),
        publications=(),
    )


def find_table_truncates(
    subscription: Subscription, contents: SliceContents, catalog: Catalog
) -> dict[Name, list[OrderKey]]:
    """Maps each replica to the order keys of its TRUNCATEs."""
    truncates_by_table: dict[Name, list[OrderKey]] = {}
    for order, truncate in contents.truncates:
        if subscription.slot_stream.filtered:
            # Before a TRUNCATE, the publisher describes each of its relations (pgoutput_truncate() in pgoutput.c).
            tables = [_find_described_table(contents.versions[oid], order) for oid in truncate.relation_ids]
        else:
            publications = subscription.slot_stream.publications(catalog, subscription.name)
            tables = find_truncated_tables(truncate.relation_ids, catalog, publications)
        for table in tables:
            truncates_by_table.setdefault((table.schema, table.name), []).append(order)
    return truncates_by_table


def _find_described_table(versions: Sequence[RelationVersion], order: OrderKey) -> Table:
    """Find the table that the newest version before an order key describes."""
    return _make_published_relation(
        next(version for version in reversed(versions) if version.begin < order).relation
    ).publish_as


def _summarize_batches(batches: Iterable[pa.RecordBatch]) -> str:
    summary = SliceSummary()
    for _ in summary.collect(batches):
        pass
    return summary.to_json()
