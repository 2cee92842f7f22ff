"""The catalog as of a slice: what pgoutput decided by, where this process decides what a subscription gets.

In: a feed that captures unfiltered changes. Its catalog is recorded each time that it is found altered
(`Catalogs.append`); between two equal digests nothing was. So a slice is evaluated by a catalog (`Catalogs.of_slice`), or
something was altered inside of it (`Catalogs.is_altered`), and then the publisher itself has to say what it publishes:
`as_published` is the feed of just that, read from the same slot before it is advanced. Its slices are listed
before the feed's own slice is committed; one that was listed by a run that died in between is replaced by the
longer one of the next run, which begins where it began (`AlteredSlices`).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.resources.lake.delta.records import version_of
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.alterations import catalog_digest, digested_catalog
from pgsieve.resources.postgres.present_catalog import present_catalog

#: What decided what the publications send, from an LSN on, and the subscriptions that the slot was read for.
CATALOGS = pa.schema(
    {
        "lsn": pa.int64(),
        "digest": pa.string(),
        "catalog": pa.string(),
        "subscriptions": pa.list_(pa.string()),
    }
)

#: The slices [begin, slice) that a subscription has as the publisher decided.
ALTERED = pa.schema({"subscription": pa.string(), "begin": pa.int64(), "slice": pa.int64()})


def read_digested(connection: psycopg.Connection[Any], feed: Feed) -> tuple[str, Catalog]:
    """The publisher's catalog, and a digest of what in it and in pgsieve.yaml decides what the feed's subscriptions get.

    Where the publisher filters nobody needs a digest: it is empty.
    """
    if feed.filtered:
        return "", present_catalog(connection)
    digest, catalog = digested_catalog(connection, _publications(feed))
    return _with_configuration(feed, digest), catalog


def _publications(feed: Feed) -> list[str]:
    """The server's publications that the feed's subscriptions name."""
    named = {p for publications in feed.subscriptions.values() for p in publications}
    return sorted(named - feed.defined.keys())


def _with_configuration(feed: Feed, digest: str) -> str:
    configured = [dict(feed.subscriptions), {name: asdict(defined) for name, defined in feed.defined.items()}]
    text = json.dumps(configured, sort_keys=True, default=sorted)
    return f"{digest} {hashlib.sha256(text.encode()).hexdigest()}"


def decided_by_server(feed: Feed, subscription: str) -> bool:
    """Whether the catalog's history tells what a subscription gets: that of pgsieve.yaml is not in the WAL."""
    return not feed.filtered and not feed.defined.keys() & set(feed.subscriptions[subscription])


def as_published(feed: Feed, subscription: str) -> Feed:
    """The feed of what the publisher itself sends to one subscription; its change log holds only the slices in which something was altered."""
    only = {subscription: feed.subscriptions[subscription]}
    return replace(feed, name=f"{feed.name}/as_published/{subscription}", filtered=True, subscriptions=only)


@dataclass(frozen=True)
class Catalogs:
    """The table `catalogs` of one feed, written when its slot is made ready."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """Where it is."""
        return self.lake.catalogs(self.feed.name)

    def is_recorded(self, digest: str) -> bool:
        """Whether the catalog that was recorded last has this digest; none is needed where the publisher filters."""
        newest = None if self.feed.filtered else self._newest()
        return self.feed.filtered or (newest is not None and newest["digest"] == digest)

    def unread_subscriptions(self) -> set[str]:
        """The subscriptions that the slot was not read for when a catalog was last recorded."""
        newest = None if self.feed.filtered else self._newest()
        return set() if newest is None else self.feed.subscriptions.keys() - set(newest["subscriptions"])

    def append(self, lsn: int, digest: str, catalog: Catalog) -> None:
        """Record the catalog, and that the slot captures all that it publishes from `lsn` on."""
        row = {
            "lsn": lsn,
            "digest": digest,
            "catalog": catalog_to_json(catalog, _publications(self.feed)),
            "subscriptions": sorted(self.feed.subscriptions),
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CATALOGS))

    def is_altered(self, connection: psycopg.Connection[Any], position: int) -> bool:
        """Whether something may have been altered since `position`; never where the publisher filters.

        What is altered after this was called is not found: what is read from the slot has to be older.
        """
        if self.feed.filtered:
            return False
        newest = self._newest(position)
        digest = _with_configuration(self.feed, catalog_digest(connection, _publications(self.feed)))
        return newest is None or newest["digest"] != digest

    def of_slice(self, end: int) -> tuple[Catalog, Sequence[str]] | None:
        """The catalog of a slice in which nothing was altered, and the subscriptions that the slot was read for.

        None where none was recorded yet.
        """
        newest = self._newest(end)
        return None if newest is None else (catalog_from_json(newest["catalog"]), newest["subscriptions"])

    def since(self, lsn: int) -> list[Catalog]:
        """The catalogs that were recorded after an LSN; none where the publisher filters."""
        rows = [] if self.feed.filtered else self.lake.records.rows(self.path, f"lsn > {lsn:d}")
        return [catalog_from_json(row["catalog"]) for row in rows]

    def newest(self) -> tuple[int, Catalog] | None:
        """The catalog that was recorded last, and from which LSN on it counts; None where none is recorded."""
        newest = None if self.feed.filtered else self._newest()
        return None if newest is None else (newest["lsn"], catalog_from_json(newest["catalog"]))

    def _newest(self, lsn: int | None = None) -> dict[str, Any] | None:
        """The newest of the recorded catalogs, up to an LSN."""
        return max(
            (row for row in self.lake.records.rows(self.path) if lsn is None or row["lsn"] <= lsn),
            key=lambda row: (int(row["lsn"]), version_of(row)),
            default=None,
        )


@dataclass(frozen=True)
class AlteredSlices:
    """The table `altered` of one feed, written by slot consumption before a slice that is in it."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """Where it is."""
        return self.lake.altered(self.feed.name)

    def append(self, subscription: str, begin: int, end: int) -> None:
        """List a slice that the subscription has as published; its messages are durable."""
        row = {"subscription": subscription, "begin": begin, "slice": end}
        self.lake.records.append(self.path, pa.Table.from_pylist([row], ALTERED))

    def ends(self, subscription: str, durable: int) -> set[int]:
        """The ends of the slices, up to `durable`, that the subscription has as published."""
        ends: dict[int, int] = {}
        for row in [] if self.feed.filtered else self.lake.records.rows(self.path):
            if row["subscription"] == subscription:
                ends[row["begin"]] = max(row["slice"], ends.get(row["begin"], 0))
        return {end for end in ends.values() if end <= durable}
