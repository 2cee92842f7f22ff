"""Records the publisher's catalog, so that pgsieve can filter and route changes as pgoutput does on the publisher.

The catalog is the publisher's definitions of tables and publications. A slot stream is a replication slot with its change
log and its subscriptions. Its slot is read with pgsieve's own publications (capture publications), which do not filter. A
slice is the changes from one position of the slot to another. If the publisher does not filter the changes of a stream
(`row_filter: pipeline`), pgsieve has to decide which changes a subscription gets. For that it needs the catalog as it was
at each change:

- After each alteration of the catalog, the new catalog is recorded in the lake (`Catalogs.append`).
- Before a slice is committed, pgsieve tries to prove that one recorded catalog is valid for all of its changes
  (`Catalogs.find_validity`, `CatalogValidity.covers`). If it is, that catalog decides which changes a subscription gets
  (`Catalogs.read_for_slice`).
- Otherwise the publisher decides. Before the slot is advanced, its changes are read once more for each subscription,
  with the publications of that subscription (`make_publisher_slot_stream`). Such a slice is listed in `AlteredSlices` before it
  is committed to the stream's own change log. After a crash between the two commits, the next run lists another slice,
  with the same begin and a later end. Then the slice that was listed first no longer counts.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.recorded_catalog import catalog_from_json, catalog_to_json
from pgsieve.resources.lake.delta.records import get_commit_version
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.alterations import (
    CatalogFingerprint,
    fingerprint_catalog,
    is_same_or_later_xid,
    read_catalog_and_fingerprint,
)
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.slot import read_slot_state

#: The columns of the table `catalogs`, which has one row for each recorded catalog:
#:
#: - `lsn`, `transaction`: the catalog is valid for transactions with this or a later identifier (xid) that commit at or
#:   after this LSN
#: - `digest`, `relations`: the two digests of a `CatalogFingerprint`, which show whether the catalog was altered
#: - `catalog`: the catalog as JSON
#: - `subscriptions`: the names of the subscriptions for which the slot was read
#: - `known`: the oids of the relations for whose changes the catalog is valid
#: - `captured`: the digest of the capture publications, by which pgsieve reads the slot (`CatalogFingerprint.capture_digest`)
#: - `alike`: True if the capture publications were not altered after the start of the oldest transaction that the slot
#:   had still to send. If it is False, the row is valid only after the slot's restart_lsn has reached `lsn`.
#: - `gone`, `unsure`: catalog rows that were removed, and that the server still stores for a while. Each is an integer
#:   made of its catalog and its oid (`CatalogFingerprint.removed_rows`). The removal of `gone` had committed when the
#:   catalog was recorded, and the removal of `unsure` was perhaps in progress.
#: - `oldest`: all transactions with an earlier identifier (xid) had ended when the catalog was recorded
#:
#: The lakes of earlier versions of pgsieve have only `lsn`, `digest`, `catalog` and `subscriptions`.
CATALOG_SCHEMA = pa.schema(
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
        "oldest": pa.int64(),
    }
)

#: The columns of the table `altered`. Each row is a slice for which the publisher decided which changes a subscription
#: gets. The slice contains the transactions that commit at or after the LSN `begin` and before the LSN `slice`.
ALTERED_SCHEMA = pa.schema({"subscription": pa.string(), "begin": pa.int64(), "slice": pa.int64()})


def read_catalog_with_fingerprint(
    connection: psycopg.Connection[Any], slot_stream: SlotStream
) -> tuple[CatalogFingerprint, Catalog]:
    """Read the publisher's catalog, and the fingerprint of everything that decides which changes the stream's subscriptions get.

    A `CatalogFingerprint` has digests of catalog rows; if two fingerprints are equal, the catalog was not altered
    between them. The fingerprint is empty if the publisher filters the stream's changes, because it is not needed in that
    case.
    """
    if slot_stream.filtered:
        return CatalogFingerprint("", ""), read_present_catalog(connection)
    fingerprint, catalog = read_catalog_and_fingerprint(
        connection, _list_server_publications(slot_stream), slot_stream.capture_names()
    )
    return _add_configuration(slot_stream, fingerprint), catalog


def _list_server_publications(slot_stream: SlotStream) -> list[str]:
    """The names of the stream's publications, except those that pgsieve.yaml defines instead of the server."""
    names = {p for publications in slot_stream.subscriptions.values() for p in publications}
    return sorted(names - slot_stream.defined_publications.keys())


def _add_configuration(slot_stream: SlotStream, fingerprint: CatalogFingerprint) -> CatalogFingerprint:
    """Add the stream's subscriptions and the publications of pgsieve.yaml to the digest of a fingerprint.

    An altered configuration changes what is replicated, as an altered catalog of the server does.
    """
    configuration = [
        dict(slot_stream.subscriptions),
        {name: asdict(definition) for name, definition in slot_stream.defined_publications.items()},
    ]
    text = json.dumps(configuration, sort_keys=True, default=sorted)
    return replace(fingerprint, digest=f"{fingerprint.digest} {hashlib.sha256(text.encode()).hexdigest()}")


def _find_covered_oids(slot_stream: SlotStream, catalog: Catalog) -> list[int]:
    """The oids of the tables in the stream's publications and capture publications, and in their partition trees.

    A partition tree is a partitioned table with all of its direct and indirect partitions.
    """
    names = [*_list_server_publications(slot_stream), *slot_stream.capture_names()]
    publications = [catalog.publications[name] for name in names if name in catalog.publications]
    listed_oids = {t.oid for t in catalog.tables.values() if any(p.contains(t) for p in publications)}
    tree_oids = listed_oids | {ancestor for oid in listed_oids for ancestor in catalog.tables[oid].ancestors}
    return sorted(
        tree_oids
        | {leaf for oid in tree_oids if oid in catalog.tables for leaf in catalog.tables[oid].leaves}
    )


def can_publisher_decide(slot_stream: SlotStream, subscription: str) -> bool:
    """True if pgsieve may ask the publisher which changes a subscription gets, where the recorded catalog does not say.

    False if the publisher already filters the stream's changes. Also false if the subscription has a publication that
    pgsieve.yaml defines, because the publisher does not know that publication.
    """
    return not slot_stream.filtered and not slot_stream.defined_publications.keys() & set(
        slot_stream.subscriptions[subscription]
    )


def make_publisher_slot_stream(slot_stream: SlotStream, subscription: str) -> SlotStream:
    """The stream for reading a slot with the publications of one subscription, so that the publisher filters.

    The change log of this stream has only some slices: those for which the publisher had to decide, because the catalog
    was altered.
    """
    publications = {subscription: slot_stream.subscriptions[subscription]}
    return replace(
        slot_stream,
        name=f"{slot_stream.name}/as_published/{subscription}",
        filtered=True,
        subscriptions=publications,
    )


@dataclass(frozen=True)
class Catalogs:
    """The table `catalogs` of one stream in the lake. `slot_consumption.ready.prepare_slot` adds rows to it."""

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.catalogs(self.slot_stream.name)

    def is_recorded(self, fingerprint: CatalogFingerprint) -> bool:
        """True if the catalog with this fingerprint is the one that was recorded last.

        The record must also have all removed catalog rows of the fingerprint. If one is missing, it was added and
        removed since the record, so the catalog was altered for a while. Also true if the publisher filters the
        stream's changes, since no record is needed in that case.
        """
        newest_row = None if self.slot_stream.filtered else self._read_newest_row()
        if newest_row is None or not _is_same(newest_row, fingerprint):
            return self.slot_stream.filtered
        unknown_rows = (fingerprint.removed_rows or frozenset()) - {*newest_row["gone"]}
        return not unknown_rows or (
            unknown_rows <= {*newest_row["unsure"]}
            and not _find_certainly_removed_rows(newest_row, fingerprint) & unknown_rows
        )

    def find_xid_before_alteration(self, fingerprint: CatalogFingerprint) -> int | None:
        """Find the transaction identifier (xid) from which on the capture publications may have been altered.

        All transactions before it had ended when the newest catalog was recorded, so the record has what they did. None if
        the publications are as recorded, or if nothing was recorded.
        """
        newest_row = self._read_newest_row()
        if newest_row is None or newest_row.get("captured") == fingerprint.capture_digest:
            return None
        oldest_xid = newest_row.get("oldest")  # Earlier versions of pgsieve did not record it.
        return int(newest_row["transaction"] if oldest_xid is None else oldest_xid)

    def find_unread_subscriptions(self) -> set[str]:
        """The stream's subscriptions that are missing in the newest record: the slot was not read for them at that time."""
        newest_row = None if self.slot_stream.filtered else self._read_newest_row()
        return (
            set()
            if newest_row is None
            else self.slot_stream.subscriptions.keys() - set(newest_row["subscriptions"])
        )

    def append(
        self, lsn: int, first_xid: int, fingerprint: CatalogFingerprint, catalog: Catalog, restart_lsn: int
    ) -> None:
        """Record a catalog.

        - `lsn`, `first_xid`: the record is valid for commits from this LSN on, of transactions from this xid on. The
          capture publications send all changes of these transactions that the catalog's publications publish.
        - `fingerprint`: the fingerprint of the catalog
        - `restart_lsn`: that of the slot. All transactions that the slot still sends began after this LSN, some of them
          perhaps before the capture publications were altered.
        """
        newest_row = self._read_newest_row() or {}
        is_alike = newest_row.get("captured") == fingerprint.capture_digest and (
            newest_row["alike"] or restart_lsn >= newest_row["lsn"]
        )
        removed_rows = _find_certainly_removed_rows(newest_row, fingerprint)
        row = {
            "lsn": lsn,
            "digest": fingerprint.digest,
            "catalog": catalog_to_json(catalog, _list_server_publications(self.slot_stream)),
            "subscriptions": sorted(self.slot_stream.subscriptions),
            "relations": fingerprint.relations_digest,
            "transaction": first_xid,
            "known": _find_covered_oids(self.slot_stream, catalog),
            "captured": fingerprint.capture_digest,
            "alike": is_alike,
            "gone": sorted(removed_rows),
            "unsure": sorted((fingerprint.removed_rows or frozenset()) - removed_rows),
            "oldest": fingerprint.oldest_xid,
        }
        self.lake.records.append_versioned(self.path, pa.Table.from_pylist([row], CATALOG_SCHEMA))

    def find_validity(self, connection: psycopg.Connection[Any], position: int) -> "CatalogValidity | None":
        """Find for which transactions and relations the newest recorded catalog is valid after `position`.

        None if it is not proven valid. For example, there is no record up to `position`, or the catalog was altered since
        the newest of these records.

        An alteration after the call is not seen. So first fix the LSN up to which the slot is read, or receive the
        messages. The slot must not be confirmed beyond `position` before the call. Otherwise VACUUM may have freed the
        removed catalog rows. Only these show that a row was added and removed in between.
        """
        if self.slot_stream.filtered:
            return CatalogValidity(None, None)
        newest_row, state = (
            self._read_newest_row(position),
            read_slot_state(connection, self.slot_stream.slot),
        )
        fingerprint = fingerprint_catalog(
            connection, _list_server_publications(self.slot_stream), self.slot_stream.capture_names()
        )
        fingerprint = _add_configuration(self.slot_stream, fingerprint)
        if newest_row is None or state is None or not _is_same(newest_row, fingerprint):
            return None
        if fingerprint.removed_rows is None or not fingerprint.removed_rows <= {*newest_row["gone"]}:
            return None
        relations = frozenset(newest_row["known"])
        # All transactions that the slot still sends began after restart_lsn. If that is after the catalog was recorded,
        # the catalog is valid for each of them.
        if state.restart_lsn >= newest_row["lsn"]:
            return CatalogValidity(None, relations)
        return CatalogValidity(newest_row["transaction"], relations) if newest_row["alike"] else None

    def read_for_slice(self, slice_end: int) -> tuple[Catalog, Sequence[str]] | None:
        """The newest catalog that was recorded up to the end of a slice, and the subscriptions in that record.

        Returns None if no catalog had been recorded by that LSN. The catalog is valid for the whole slice
        only if the slice is not one of the `AlteredSlices`.
        """
        newest_row = self._read_newest_row(slice_end)
        return (
            None
            if newest_row is None
            else (catalog_from_json(newest_row["catalog"]), newest_row["subscriptions"])
        )

    def read_since(self, lsn: int) -> list[Catalog]:
        """The catalogs that were recorded after an LSN. Empty if the publisher filters the stream's changes."""
        rows = [] if self.slot_stream.filtered else self.lake.records.rows(self.path, f"lsn > {lsn:d}")
        return [catalog_from_json(row["catalog"]) for row in rows]

    def read_newest(self) -> tuple[int, Catalog] | None:
        """The catalog that was recorded last, and the LSN from which on it is valid; None if no catalog was recorded."""
        newest_row = None if self.slot_stream.filtered else self._read_newest_row()
        return None if newest_row is None else (newest_row["lsn"], catalog_from_json(newest_row["catalog"]))

    def _read_newest_row(self, lsn: int | None = None) -> dict[str, Any] | None:
        """Read the newest row; with `lsn`, the newest row up to this LSN. None if there is none."""
        return max(
            (row for row in self.lake.records.rows(self.path) if lsn is None or row["lsn"] <= lsn),
            key=lambda row: (int(row["lsn"]), get_commit_version(row)),
            default=None,
        )


def _is_same(row: dict[str, Any], fingerprint: CatalogFingerprint) -> bool:
    """True if a row of `catalogs` has the digests of a fingerprint. False for a row of an earlier version of pgsieve."""
    has_relations = row.get("known") is not None
    return has_relations and fingerprint.matches(row["digest"], row["relations"], row["captured"])


def _find_certainly_removed_rows(row: dict[str, Any], fingerprint: CatalogFingerprint) -> frozenset[int]:
    """Find the catalog rows of a fingerprint that were certainly removed before the catalog was recorded.

    These are the rows in the record's column `gone`, and, once all transactions before the record's `transaction` have
    ended, also those in its column `unsure`.
    """
    removed_rows = {*(row.get("gone") or ())}
    if row.get("unsure") and is_same_or_later_xid(fingerprint.oldest_xid, row["transaction"]):
        removed_rows.update(row["unsure"])
    return (fingerprint.removed_rows or frozenset()) & removed_rows


@dataclass(frozen=True)
class CatalogValidity:
    """The transactions and relations for whose changes one recorded catalog is valid.

    - `first_xid`: a transaction identifier (xid); None stands for all transactions. Transactions with this or a later
      identifier made no change before the catalog was recorded. Earlier transactions may have changed rows under an
      earlier catalog, and pgoutput uses the catalog as it was at each change, not at the commit.
    - `relations`: oids of tables; None stands for all relations. A changed relation that is not among them was
      created after the catalog was recorded, and dropped again: if it still existed, the fingerprint would differ.
    """

    first_xid: int | None
    relations: frozenset[int] | None

    @property
    def covers_all(self) -> bool:
        """True if the catalog is valid for all transactions and relations, as it is if the publisher filters."""
        return self.first_xid is None and self.relations is None

    def covers(self, transactions: Iterable[int], relations: Iterable[int]) -> bool:
        """True if the catalog is valid for all changes of a slice, given its transactions and its changed relations."""
        if self.relations is not None and not self.relations.issuperset(relations):
            return False
        return self.first_xid is None or all(
            is_same_or_later_xid(xid, self.first_xid) for xid in transactions
        )


@dataclass(frozen=True)
class AlteredSlices:
    """The table `altered` of one stream in the lake, which lists slices for which the publisher decided.

    The step `slot_consumption` adds a row before it commits the slice to the stream's own change log.
    """

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.altered_slices(self.slot_stream.name)

    def append(self, subscription: str, begin_lsn: int, end_lsn: int) -> None:
        """List a slice for which the publisher decided which changes a subscription gets.

        The publisher's messages for the slice must be on disk before: later steps read a listed slice from there.
        """
        row = {"subscription": subscription, "begin": begin_lsn, "slice": end_lsn}
        self.lake.records.append(self.path, pa.Table.from_pylist([row], ALTERED_SCHEMA))

    def read_ends(self, subscription: str, max_end: int) -> set[int]:
        """Read the ends, up to `max_end`, of the slices for which the publisher decided what a subscription gets.

        If several slices have the same begin, only the last end counts. The other slices were listed by runs that were
        killed before they committed the slice itself.
        """
        ends: dict[int, int] = {}
        for row in [] if self.slot_stream.filtered else self.lake.records.rows(self.path):
            if row["subscription"] == subscription:
                ends[row["begin"]] = max(row["slice"], ends.get(row["begin"], 0))
        return {end for end in ends.values() if end <= max_end}
