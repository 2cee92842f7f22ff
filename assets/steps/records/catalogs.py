"""The publisher's catalog as of a slice, by which pgsieve filters and routes the slice's changes as pgoutput would.

A slice is the changes between two positions of a slot. A feed (a slot with its subscriptions) that captures unfiltered
changes records the catalog after each alteration (`Catalogs.append`). If one catalog is proven to be valid for a whole
slice (`Catalogs.unaltered`, `Unaltered.covers`), it decides the slice (`Catalogs.of_slice`). Otherwise the publisher
decides: before the slot is advanced, it is read once more with the publications of each subscription (`as_published`).
The slices that the publisher decided are listed in `AlteredSlices` before the feed's own slice is committed. After a
crash in between, the next run lists a longer slice with the same begin instead.
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
from pgsieve.resources.postgres.alterations import (
    CatalogFingerprint,
    fingerprint_catalog,
    read_with_fingerprint,
)
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.slot import slot_state

#: One row per recorded catalog. It is valid for commits from `lsn` on, of transactions from `transaction` on, for changes
#: of the relations `known`, and for the `subscriptions` for which the slot is read. `captured` is a digest of the capture
#: publications; `alike` says that the row is also valid for earlier transactions. The server keeps removed catalog rows
#: for a while: `gone` are rows whose removal has committed, `unsure` rows whose removal was in progress. Lakes of earlier
#: versions have only the first four columns.
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


def read_catalog_with_fingerprint(
    connection: psycopg.Connection[Any], feed: Feed
) -> tuple[CatalogFingerprint, Catalog]:
    """The publisher's catalog, and the `CatalogFingerprint` of everything that decides the feed's changes.

    The fingerprint is empty if the publisher filters, since it is not needed then.
    """
    if feed.filtered:
        return CatalogFingerprint("", ""), present_catalog(connection)
    fingerprint, catalog = read_with_fingerprint(connection, _publications(feed), feed.capture_names())
    return _with_configuration(feed, fingerprint), catalog


def _publications(feed: Feed) -> list[str]:
    """The names of the feed's publications that are defined on the server."""
    names = {p for publications in feed.subscriptions.values() for p in publications}
    return sorted(names - feed.defined.keys())


def _with_configuration(feed: Feed, fingerprint: CatalogFingerprint) -> CatalogFingerprint:
    configured = [
        dict(feed.subscriptions),
        {name: asdict(definition) for name, definition in feed.defined.items()},
    ]
    text = json.dumps(configured, sort_keys=True, default=sorted)
    return replace(fingerprint, digest=f"{fingerprint.digest} {hashlib.sha256(text.encode()).hexdigest()}")


def _relations(feed: Feed, catalog: Catalog) -> list[int]:
    """The oids of the relations that are published or captured, and of all relations in their partition trees."""
    names = [*_publications(feed), *feed.capture_names()]
    publications = [catalog.publications[name] for name in names if name in catalog.publications]
    listed_oids = {t.oid for t in catalog.tables.values() if any(p.contains(t) for p in publications)}
    trees = listed_oids | {ancestor for oid in listed_oids for ancestor in catalog.tables[oid].ancestors}
    return sorted(
        trees | {leaf for oid in trees if oid in catalog.tables for leaf in catalog.tables[oid].leaves}
    )


def decided_by_server(feed: Feed, subscription: str) -> bool:
    """Whether the publisher can decide a subscription's changes: it does not know publications of pgsieve.yaml."""
    return not feed.filtered and not feed.defined.keys() & set(feed.subscriptions[subscription])


def as_published(feed: Feed, subscription: str) -> Feed:
    """The feed of the changes that the publisher itself sends to one subscription.

    Its change log has only the slices that the publisher decided, because of an alteration.
    """
    publications = {subscription: feed.subscriptions[subscription]}
    return replace(
        feed, name=f"{feed.name}/as_published/{subscription}", filtered=True, subscriptions=publications
    )


@dataclass(frozen=True)
class Catalogs:
    """The table `catalogs` of one feed; `ready_slot` writes it."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.catalogs(self.feed.name)

    def is_recorded(self, fingerprint: CatalogFingerprint) -> bool:
        """Whether the last record has this fingerprint, with all removed rows that are known now.

        True if the publisher filters, since no record is needed.
        """
        newest_row = None if self.feed.filtered else self._newest()
        if newest_row is None or not _is_same(newest_row, fingerprint):
            return self.feed.filtered
        unknown_rows = (fingerprint.removed or frozenset()) - {*newest_row["gone"]}
        return not unknown_rows or (
            unknown_rows <= {*newest_row["unsure"]}
            and not _finally_removed(newest_row, fingerprint) & unknown_rows
        )

    def unread_subscriptions(self) -> set[str]:
        """The feed's subscriptions for which the slot was not read yet when a catalog was last recorded."""
        newest_row = None if self.feed.filtered else self._newest()
        return (
            set() if newest_row is None else self.feed.subscriptions.keys() - set(newest_row["subscriptions"])
        )

    def append(
        self, lsn: int, transaction: int, fingerprint: CatalogFingerprint, catalog: Catalog, restart_lsn: int
    ) -> None:
        """Record the catalog; from `lsn` and `transaction` on the slot captures everything that it publishes.

        The next transactions that the slot sends began after `restart_lsn`, perhaps before the present capture.
        """
        newest_row, captured = self._newest() or {}, self._captured(catalog)
        is_alike = newest_row.get("captured") == captured and (
            newest_row["alike"] or restart_lsn >= newest_row["lsn"]
        )
        removed_rows = _finally_removed(newest_row, fingerprint)
        row = {
            "lsn": lsn,
            "digest": fingerprint.digest,
            "catalog": catalog_to_json(catalog, _publications(self.feed)),
            "subscriptions": sorted(self.feed.subscriptions),
            "relations": fingerprint.relations_digest,
            "transaction": transaction,
            "known": _relations(self.feed, catalog),
            "captured": captured,
            "alike": is_alike,
            "gone": sorted(removed_rows),
            "unsure": sorted((fingerprint.removed or frozenset()) - removed_rows),
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CATALOGS))

    def _captured(self, catalog: Catalog) -> str:
        """A digest of the capture publications."""
        names = [name for name in self.feed.capture_names() if name in catalog.publications]
        captured = [asdict(catalog.publications[name]) for name in names]
        text = json.dumps(captured, sort_keys=True, default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()

    def unaltered(self, connection: psycopg.Connection[Any], position: int) -> "Unaltered | None":
        """The transactions and relations after `position` that one recorded catalog decides; None if no catalog does.

        The call does not see later alterations, so call it after reading the slot's messages. The slot must not be
        confirmed beyond `position`, since the server keeps removed catalog rows only because of the slot.
        """
        if self.feed.filtered:
            return Unaltered(None, None)
        newest_row, state = self._newest(position), slot_state(connection, self.feed.slot)
        fingerprint = fingerprint_catalog(connection, _publications(self.feed), self.feed.capture_names())
        fingerprint = _with_configuration(self.feed, fingerprint)
        if newest_row is None or state is None or not _is_same(newest_row, fingerprint):
            return None
        if fingerprint.removed is None or not fingerprint.removed <= {*newest_row["gone"]}:
            return None
        relations = frozenset(newest_row["known"])
        # The next transactions that the slot sends began after restart_lsn.
        if state.restart_lsn >= newest_row["lsn"]:
            return Unaltered(None, relations)
        return Unaltered(newest_row["transaction"], relations) if newest_row["alike"] else None

    def of_slice(self, end: int) -> tuple[Catalog, Sequence[str]] | None:
        """The catalog of a slice without an alteration, and the subscriptions for which the slot was read.

        None if no catalog was recorded by then.
        """
        newest_row = self._newest(end)
        return (
            None
            if newest_row is None
            else (catalog_from_json(newest_row["catalog"]), newest_row["subscriptions"])
        )

    def since(self, lsn: int) -> list[Catalog]:
        """The catalogs that were recorded after an LSN; empty if the publisher filters."""
        rows = [] if self.feed.filtered else self.lake.records.rows(self.path, f"lsn > {lsn:d}")
        return [catalog_from_json(row["catalog"]) for row in rows]

    def newest(self) -> tuple[int, Catalog] | None:
        """The last recorded catalog, and the LSN from which it is valid; None if none is recorded."""
        newest_row = None if self.feed.filtered else self._newest()
        return None if newest_row is None else (newest_row["lsn"], catalog_from_json(newest_row["catalog"]))

    def _newest(self, lsn: int | None = None) -> dict[str, Any] | None:
        """The row of the newest catalog that was recorded up to an LSN."""
        return max(
            (row for row in self.lake.records.rows(self.path) if lsn is None or row["lsn"] <= lsn),
            key=lambda row: (int(row["lsn"]), version_of(row)),
            default=None,
        )


def _is_same(row: dict[str, Any], fingerprint: CatalogFingerprint) -> bool:
    has_relations = row.get("known") is not None
    return has_relations and fingerprint.matches(row["digest"], row["relations"])


def _finally_removed(row: dict[str, Any], fingerprint: CatalogFingerprint) -> frozenset[int]:
    """The removed catalog rows whose removal has committed: transactions in progress at the recorded fingerprint have ended."""
    removed_rows = {*(row.get("gone") or ())}
    if row.get("unsure") and _is_later(fingerprint.oldest, row["transaction"]):
        removed_rows.update(row["unsure"])
    return (fingerprint.removed or frozenset()) & removed_rows


def _is_later(transaction: int, than: int) -> bool:
    """Whether a transaction identifier equals another one or is later; identifiers wrap around.

    PostgreSQL documentation, 66.1 Transactions and Identifiers.
    """
    return (transaction - than) % 2**32 < 2**31


@dataclass(frozen=True)
class Unaltered:
    """The transactions and relations that one recorded catalog decides; None stands for all.

    `since` is a transaction identifier: transactions with this or a later identifier have made no change before the
    catalog was recorded. This matters because pgoutput uses the catalog as of a change, not as of its commit. A relation
    that is not in `relations` was created and dropped in between.
    """

    since: int | None
    relations: frozenset[int] | None

    @property
    def covers_all(self) -> bool:
        """Whether all transactions and relations are covered, as if the publisher filters."""
        return self.since is None and self.relations is None

    def covers(self, transactions: Iterable[int], relations: Iterable[int]) -> bool:
        """Whether all transactions and changed relations of a slice are covered."""
        if self.relations is not None and not self.relations.issuperset(relations):
            return False
        return self.since is None or all(_is_later(xid, self.since) for xid in transactions)


@dataclass(frozen=True)
class AlteredSlices:
    """The table `altered` of one feed; slot consumption writes it before it commits the feed's own slice."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.altered(self.feed.name)

    def append(self, subscription: str, begin: int, end: int) -> None:
        """List a slice that the publisher decided for a subscription. Its messages have to be durable already."""
        row = {"subscription": subscription, "begin": begin, "slice": end}
        self.lake.records.append(self.path, pa.Table.from_pylist([row], ALTERED))

    def ends(self, subscription: str, durable: int) -> set[int]:
        """The ends of the slices up to `durable` that the publisher decided for a subscription."""
        ends: dict[int, int] = {}
        for row in [] if self.feed.filtered else self.lake.records.rows(self.path):
            if row["subscription"] == subscription:
                ends[row["begin"]] = max(row["slice"], ends.get(row["begin"], 0))
        return {end for end in ends.values() if end <= durable}
