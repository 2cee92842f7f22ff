"""The catalog as of a slice, by which this process filters and routes changes as pgoutput would.

In: a feed that captures unfiltered changes. Its catalog is recorded whenever it was altered (`Catalogs.append`). If
one catalog is proven to hold for a whole slice (`Catalogs.unaltered`, `Unaltered.covers`), it decides the slice
(`Catalogs.of_slice`). Otherwise the publisher has to decide. `as_published` is the feed of the publisher's decisions
for one subscription, read from the same slot before it is advanced. Its slices are listed before the feed's own slice
is committed. After a crash in between, the next run replaces the listed slice by a longer one with the same begin
(`AlteredSlices`).
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.resources.lake.delta.records import version_of
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.alterations import Look, examined_catalog, look
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.slot import slot_state

#: One row per recorded catalog. It is proven to decide from `lsn` and `transaction` on, for changes of the relations
#: `known`, and for the `subscriptions` for which the slot was read. `captured` is a digest of what the slot captures;
#: `alike` says whether it also holds for older transactions. The server keeps removed catalog rows for a while: `gone`
#: are rows whose removal was final, `unsure` rows whose removal was in progress. Older lakes have only the first four
#: columns.
CATALOGS = pa.schema(
    {
        "lsn": pa.int64(),
        "digest": pa.string(),
        "catalog": pa.string(),
        "subscriptions": pa.list_(pa.string()),
        "relations": pa.string(),
        "transaction": pa.int64(),
        "known": pa.list_(pa.int64()),
        "captured": pa.string(),
        "alike": pa.bool_(),
        "gone": pa.list_(pa.int64()),
        "unsure": pa.list_(pa.int64()),
    }
)

#: The slices [begin, slice) that the publisher decided for a subscription.
ALTERED = pa.schema({"subscription": pa.string(), "begin": pa.int64(), "slice": pa.int64()})


def read_examined(connection: psycopg.Connection[Any], feed: Feed) -> tuple[Look, Catalog]:
    """The publisher's catalog, and a look: a digest of all in it and in pgsieve.yaml that decides the feed's changes.

    The look is empty if the publisher filters, since then it is not needed.
    """
    if feed.filtered:
        return Look("", ""), present_catalog(connection)
    observed, catalog = examined_catalog(connection, _publications(feed), feed.capture_names())
    return _with_configuration(feed, observed), catalog


def _publications(feed: Feed) -> list[str]:
    """The server's publications that the feed's subscriptions name."""
    named = {p for publications in feed.subscriptions.values() for p in publications}
    return sorted(named - feed.defined.keys())


def _with_configuration(feed: Feed, observed: Look) -> Look:
    configured = [dict(feed.subscriptions), {name: asdict(defined) for name, defined in feed.defined.items()}]
    text = json.dumps(configured, sort_keys=True, default=sorted)
    return replace(observed, digest=f"{observed.digest} {hashlib.sha256(text.encode()).hexdigest()}")


def _relations(feed: Feed, catalog: Catalog) -> list[int]:
    """The relations that are published or captured, and all relations of their partition trees."""
    names = [*_publications(feed), *feed.capture_names()]
    chosen = [catalog.publications[name] for name in names if name in catalog.publications]
    listed = {t.oid for t in catalog.tables.values() if any(p.contains(t) for p in chosen)}
    trees = listed | {above for oid in listed for above in catalog.tables[oid].ancestors}
    return sorted(
        trees | {leaf for oid in trees if oid in catalog.tables for leaf in catalog.tables[oid].leaves}
    )


def decided_by_server(feed: Feed, subscription: str) -> bool:
    """Whether the server can decide what a subscription gets: it has no history of publications in pgsieve.yaml."""
    return not feed.filtered and not feed.defined.keys() & set(feed.subscriptions[subscription])


def as_published(feed: Feed, subscription: str) -> Feed:
    """The feed of what the publisher itself sends to one subscription.

    Its change log has only slices with an alteration.
    """
    only = {subscription: feed.subscriptions[subscription]}
    return replace(feed, name=f"{feed.name}/as_published/{subscription}", filtered=True, subscriptions=only)


@dataclass(frozen=True)
class Catalogs:
    """The table `catalogs` of one feed, written when its slot is made ready."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.catalogs(self.feed.name)

    def is_recorded(self, observed: Look) -> bool:
        """Whether the last record has this look, and records all that is known now.

        True if the publisher filters: no record is needed.
        """
        newest = None if self.feed.filtered else self._newest()
        if newest is None or not _is_same(newest, observed):
            return self.feed.filtered
        unknown = (observed.removed or frozenset()) - {*newest["gone"]}
        return not unknown or (unknown <= {*newest["unsure"]} and not _gone(newest, observed) & unknown)

    def unread_subscriptions(self) -> set[str]:
        """The subscriptions for which the slot had not been read when a catalog was last recorded."""
        newest = None if self.feed.filtered else self._newest()
        return set() if newest is None else self.feed.subscriptions.keys() - set(newest["subscriptions"])

    def append(self, lsn: int, transaction: int, observed: Look, catalog: Catalog, restart_lsn: int) -> None:
        """Record the catalog; the slot captures all that the catalog publishes from `lsn` and `transaction` on.

        The next transactions that the slot sends began after `restart_lsn`, and may have begun before the
        present capture.
        """
        newest, captured = self._newest() or {}, self._captured(catalog)
        alike = newest.get("captured") == captured and (newest["alike"] or restart_lsn >= newest["lsn"])
        gone = _gone(newest, observed)
        row = {
            "lsn": lsn,
            "digest": observed.digest,
            "catalog": catalog_to_json(catalog, _publications(self.feed)),
            "subscriptions": sorted(self.feed.subscriptions),
            "relations": observed.relations,
            "transaction": transaction,
            "known": _relations(self.feed, catalog),
            "captured": captured,
            "alike": alike,
            "gone": sorted(gone),
            "unsure": sorted((observed.removed or frozenset()) - gone),
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CATALOGS))

    def _captured(self, catalog: Catalog) -> str:
        """A digest of what the slot captures."""
        names = [name for name in self.feed.capture_names() if name in catalog.publications]
        captured = [asdict(catalog.publications[name]) for name in names]
        text = json.dumps(captured, sort_keys=True, default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()

    def unaltered(self, connection: psycopg.Connection[Any], position: int) -> "Unaltered | None":
        """The part of a slice that begins at `position` for which one catalog is proven to decide; None without one.

        The call does not see later alterations: read the slot's messages before it. The slot must not be confirmed
        beyond `position`, because the slot makes the server keep the catalog rows that were removed since.
        """
        if self.feed.filtered:
            return Unaltered(None, None)
        newest, state = self._newest(position), slot_state(connection, self.feed.slot)
        observed = look(connection, _publications(self.feed), self.feed.capture_names())
        observed = _with_configuration(self.feed, observed)
        if newest is None or state is None or not _is_same(newest, observed):
            return None
        if observed.removed is None or not observed.removed <= {*newest["gone"]}:
            return None
        relations = frozenset(newest["known"])
        # The next transactions that the slot sends began after restart_lsn.
        if state.restart_lsn >= newest["lsn"]:
            return Unaltered(None, relations)
        return Unaltered(newest["transaction"], relations) if newest["alike"] else None

    def of_slice(self, end: int) -> tuple[Catalog, Sequence[str]] | None:
        """The catalog of a slice without an alteration, and the subscriptions that the slot was read for.

        None where none was recorded yet.
        """
        newest = self._newest(end)
        return None if newest is None else (catalog_from_json(newest["catalog"]), newest["subscriptions"])

    def since(self, lsn: int) -> list[Catalog]:
        """The catalogs that were recorded after an LSN; empty where the publisher filters."""
        rows = [] if self.feed.filtered else self.lake.records.rows(self.path, f"lsn > {lsn:d}")
        return [catalog_from_json(row["catalog"]) for row in rows]

    def newest(self) -> tuple[int, Catalog] | None:
        """The last recorded catalog, and the LSN from which it holds; None where none is recorded."""
        newest = None if self.feed.filtered else self._newest()
        return None if newest is None else (newest["lsn"], catalog_from_json(newest["catalog"]))

    def _newest(self, lsn: int | None = None) -> dict[str, Any] | None:
        """The newest of the recorded catalogs, up to an LSN."""
        return max(
            (row for row in self.lake.records.rows(self.path) if lsn is None or row["lsn"] <= lsn),
            key=lambda row: (int(row["lsn"]), version_of(row)),
            default=None,
        )


def _is_same(recorded: dict[str, Any], observed: Look) -> bool:
    has_relations = recorded.get("known") is not None
    return has_relations and observed.is_like(recorded["digest"], recorded["relations"])


def _gone(recorded: dict[str, Any], observed: Look) -> frozenset[int]:
    """The removed rows whose removal is final: transactions in progress at the earlier look have ended."""
    gone = {*(recorded.get("gone") or ())}
    if recorded.get("unsure") and _is_later(observed.oldest, recorded["transaction"]):
        gone.update(recorded["unsure"])
    return (observed.removed or frozenset()) & gone


def _is_later(transaction: int, than: int) -> bool:
    """Whether a transaction identifier is the other one or later: identifiers form a circle, half of it later (section 66.1)."""
    return (transaction - than) % 2**32 < 2**31


@dataclass(frozen=True)
class Unaltered:
    """The transactions and relations for which one catalog is proven to decide; None stands for all of them.

    `since` is a transaction identifier: later transactions have changed nothing before the catalog was
    recorded. pgoutput decides by the catalog as of a change, not as of its commit. An unknown relation was
    created and dropped in between.
    """

    since: int | None
    relations: frozenset[int] | None

    @property
    def is_all(self) -> bool:
        """Whether everything is covered, since the publisher filters."""
        return self.since is None and self.relations is None

    def covers(self, transactions: Iterable[int], relations: Iterable[int]) -> bool:
        """Whether the transactions and changed relations of a slice are covered."""
        if self.relations is not None and not self.relations.issuperset(relations):
            return False
        return self.since is None or all(_is_later(xid, self.since) for xid in transactions)


@dataclass(frozen=True)
class AlteredSlices:
    """The table `altered` of one feed: slot consumption writes it before it commits the slice itself."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.altered(self.feed.name)

    def append(self, subscription: str, begin: int, end: int) -> None:
        """List a slice that the subscription has as published. Its messages are durable already."""
        row = {"subscription": subscription, "begin": begin, "slice": end}
        self.lake.records.append(self.path, pa.Table.from_pylist([row], ALTERED))

    def ends(self, subscription: str, durable: int) -> set[int]:
        """The ends of the slices, up to `durable`, that the subscription has as published."""
        ends: dict[int, int] = {}
        for row in [] if self.feed.filtered else self.lake.records.rows(self.path):
            if row["subscription"] == subscription:
                ends[row["begin"]] = max(row["slice"], ends.get(row["begin"], 0))
        return {end for end in ends.values() if end <= durable}
