"""Freshness: how long a commit has been waiting to be applied to a subscription's replicas. The oldest commit counts.

A stream is a slot with the subscriptions that read it. Its change log has the messages that were read from the slot. A
slice of the change log has the messages from one position of the slot to another. A cut names a version of each replica
of a subscription; together these versions equal the publisher at one LSN.

In: the publisher and the lake
Out: the seconds since the oldest waiting commit, by the publisher's clock; 0 if no commit is waiting

If nothing that is published changes in a database, no commit waits, so the replicas are fresh. Raises SourceError if
the publisher does not answer.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    CommitPrepared,
    RollbackPrepared,
    decode,
    timestamp_to_unix_micros,
)
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import LockHeldError, SourceError
from pgsieve.resources.postgres.peeks import fetch_first_message, is_decoding_error, peek_query
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.slot import SlotInUseError, SlotState, read_slot_state
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn, read_flushed_lsn

#: To peek at a slot, its lock is needed, which another process may hold for a long time. A peek waits for it at most
#: this long.
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class _PeekResult:
    """The result of a peek at a slot.

    - `waiting_since`: the commit time of the first waiting transaction; None if there was none
    - `confirmed_lsn`: the LSN up to which the slot was confirmed
    - `publications`: the publications with which the slot was read
    - `wal_end_lsn`: the end of the WAL
    """

    confirmed_lsn: int
    publications: tuple[str, ...]
    wal_end_lsn: int
    waiting_since: datetime | None

    def is_valid_for(self, confirmed_lsn: int, publications: tuple[str, ...], wal_end_lsn: int) -> bool:
        """True if the result is still valid for a slot and WAL with these positions."""
        is_unchanged = (self.confirmed_lsn, self.publications) == (confirmed_lsn, publications)
        return is_unchanged and (self.waiting_since is not None or self.wal_end_lsn == wal_end_lsn)


#: Maps a source and a slot to the result of the last peek.
_PEEK_RESULT_BY_SLOT: dict[tuple[Source, str], _PeekResult] = {}


@dataclass(frozen=True)
class _SlotPublications:
    """The names of the publications with which a slot is read, as found for a stream and a catalog.

    All subscriptions of the slot share the stream and the catalog. The names are valid only for these two objects.
    """

    slot_stream: SlotStream
    catalog: Catalog
    names: tuple[str, ...]


#: Maps a source and a slot to the publications that were found last.
_PUBLICATIONS_BY_SLOT: dict[tuple[Source, str], _SlotPublications] = {}


@dataclass(frozen=True)
class Freshness:
    """For how many seconds the oldest commit has been waiting, and the LSN before which everything is applied.

    `problem` is the reason why nothing can be applied at all.
    """

    seconds: float
    lsn: int
    problem: str | None = None


def check_freshness(subscription: Subscription, lake: Lake, last_cut: Cut | None = None) -> Freshness:
    """Find out how far the replicas of a subscription are behind.

    `last_cut` is the newest cut. Without it, the cut is read.
    """
    slot_stream = subscription.slot_stream
    log_position = ChangeLog(lake, slot_stream).read_position()
    with slot_stream.source.connect() as connection:
        slot = read_slot_state(connection, slot_stream.slot)
        if log_position is None or slot is None:
            return Freshness(0, log_position or 0, f'replication slot "{slot_stream.slot}" does not exist')
        applied_lsn, waiting_since = find_unapplied_commit(
            ReplicaProgress(subscription, lake), log_position, last_cut
        )
        if applied_lsn >= log_position:
            waiting_since = find_unread_time(connection, lake, slot_stream, slot)
        return Freshness(compute_seconds_since(connection, waiting_since), applied_lsn)


def compute_seconds_since(connection: psycopg.Connection[Any], time: datetime | None) -> float:
    """Compute the seconds from a time to now, by the publisher's clock; 0 for None."""
    if time is None:
        return 0.0
    row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    seconds: float = (row[0] - time).total_seconds()
    return max(0.0, seconds)


def find_unapplied_commit(
    progress: ReplicaProgress, change_log_lsn: int, last_cut: Cut | None = None
) -> tuple[int, datetime | None]:
    """Find the LSN before which everything is applied, and the time of the first commit after it in the change log.

    `change_log_lsn` is the LSN at which the change log ends. The time is None if the change log has nothing more to
    apply.
    """
    subscription, lake = progress.subscription, progress.lake
    cut = last_cut or Cuts(lake, subscription.name).read_last()
    if cut is not None and cut.lsn >= change_log_lsn:
        return cut.lsn, None  # The cut has all changes of the change log, so no other record has to be read.
    applied_lsn, transformed_lsn = progress.find_applied_lsn(), progress.read_transformed_lsn()
    if applied_lsn >= transformed_lsn:
        applied_lsn = progress.find_complete_lsn(transformed_lsn)
    return applied_lsn, _find_first_commit_time(
        lake, subscription.slot_stream, applied_lsn
    ) if applied_lsn < change_log_lsn else None


def find_unread_time(
    connection: psycopg.Connection[Any],
    lake: Lake,
    slot_stream: SlotStream,
    state: SlotState,
    *,
    can_peek: bool = True,
) -> datetime | None:
    """Find the commit time of the first transaction in the slot that is not yet in the change log; None if there is none.

    Without `can_peek`, or if another process is reading the slot, the result is the earliest possible time. A peek
    takes the lock of the slot. So a step that reads the slot meanwhile waits for the peek, and does not fail.
    """
    if can_peek and not state.is_active:
        try:
            return _find_first_waiting_time(connection, slot_stream, state)
        except SourceError as error:
            # A transaction that cannot be sent (`pgsieve.assets.steps.slot_consumption.unsendable_changes`) waits, too.
            if not isinstance(error, LockHeldError | SlotInUseError) and not is_decoding_error(error):
                raise
    return _find_earliest_unread_time(
        connection, lake, slot_stream, ChangeLog(lake, slot_stream).read_position() or 0
    )


def _find_first_commit_time(lake: Lake, slot_stream: SlotStream, applied_lsn: int) -> datetime | None:
    """Find the least commit time in the first slice of the change log that ends after an LSN; None if none does."""
    path = ChangeLog(lake, slot_stream).path
    slices = lake.records.slices(path, applied_lsn)
    first_time = (
        lake.find_column_bound("min", path, "commit_time", f"slice = {slices[0]:d}") if slices else None
    )
    return None if first_time is None else first_time.astimezone(UTC)


def _find_first_waiting_time(
    connection: psycopg.Connection[Any], slot_stream: SlotStream, state: SlotState
) -> datetime | None:
    """Find the commit time of the first transaction that waits in the slot; None if there is none.

    For a peek the server decodes WAL from the slot's restart_lsn on, which may be much earlier than the confirmed LSN
    (PostgreSQL documentation, 49.2.2 Replication Slots). Since this may take long, the result of a peek is kept in
    memory, for all subscriptions of the slot. It is valid until the slot is confirmed further. A result without a
    waiting transaction is valid only until WAL is written.
    """
    wal_end_lsn = read_flushed_lsn(connection)
    if wal_end_lsn <= state.confirmed_lsn:
        return None  # All WAL is confirmed.
    publication_names = _find_slot_publications(slot_stream, read_present_catalog(connection))
    result = _PEEK_RESULT_BY_SLOT.get((slot_stream.source, slot_stream.slot))
    if result is None or not result.is_valid_for(state.confirmed_lsn, publication_names, wal_end_lsn):
        with slot_stream.hold_lock(_LOCK_SECONDS):
            waiting_since = _peek_first_waiting_time(connection, slot_stream, publication_names, wal_end_lsn)
        result = _PEEK_RESULT_BY_SLOT[slot_stream.source, slot_stream.slot] = _PeekResult(
            state.confirmed_lsn, publication_names, wal_end_lsn, waiting_since
        )
    return result.waiting_since


def _find_slot_publications(slot_stream: SlotStream, catalog: Catalog) -> tuple[str, ...]:
    """Find the publications with which a slot is read now. This is done once for all subscriptions of the slot."""
    slot = slot_stream.source, slot_stream.slot
    publications = _PUBLICATIONS_BY_SLOT.get(slot)
    if (
        publications is None
        or publications.slot_stream is not slot_stream
        or publications.catalog is not catalog
    ):
        whole_catalog = slot_stream.with_defined_publications(catalog)
        names = slot_stream.without_missing_publications(whole_catalog).slot_publications(whole_catalog)
        publications = _PUBLICATIONS_BY_SLOT[slot] = _SlotPublications(slot_stream, catalog, names)
    return publications.names


def _peek_first_waiting_time(
    connection: psycopg.Connection[Any],
    slot_stream: SlotStream,
    publication_names: tuple[str, ...],
    end_lsn: int,
) -> datetime | None:
    """Peek at the first message in the slot; returns its commit time."""
    options = replace(slot_stream.options, publications=publication_names, streaming="off")
    query = peek_query(slot_stream.slot, end_lsn, options, connection.info.server_version, max_messages=1)
    message = (
        fetch_first_message(connection, slot_stream.source.name, slot_stream.slot, query)
        if publication_names
        else None
    )
    if message is None:
        return None
    match decode(message):
        case Begin(commit_time=time) | CommitPrepared(commit_time=time):
            pass
        case BeginPrepare(prepare_time=time) | RollbackPrepared(rollback_time=time):
            pass
        case other_message:
            raise AssertionError(f"a transaction begins with {type(other_message).__name__}")
    return datetime.fromtimestamp(timestamp_to_unix_micros(time) / 1_000_000, UTC)


def _find_earliest_unread_time(
    connection: psycopg.Connection[Any], lake: Lake, slot_stream: SlotStream, change_log_lsn: int
) -> datetime | None:
    """Find the earliest time at which a waiting transaction may have committed: when the change log was last written.

    `pgsieve run --follow` writes the change log at least every ten seconds, even if there are no changes.
    """
    if read_current_lsn(connection) <= change_log_lsn:
        return None
    return lake.read_last_commit_time(ChangeLog(lake, slot_stream).path)
