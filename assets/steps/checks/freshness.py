"""Freshness: how long the oldest commit that a subscription's replicas do not have yet has been waiting.

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
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    CommitPrepared,
    RollbackPrepared,
    decode,
    timestamp_to_unix_micros,
)
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import LockHeldError, SourceError
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.slot import (
    SlotInUseError,
    SlotState,
    first_message,
    is_decoding_error,
    peek_query,
    slot_state,
)
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import current_lsn, flushed_lsn

#: To peek at a slot, its lock is needed, which another process may hold for a long time. A peek waits for it at most
#: this long.
_LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class _Answer:
    """The result of a peek at a slot.

    - `since`: the commit time of the first waiting transaction; None if there was none
    - `confirmed`: the LSN up to which the slot was confirmed
    - `publications`: the publications with which the slot was read
    - `upto`: the end of the WAL
    """

    confirmed: int
    publications: tuple[str, ...]
    upto: int
    since: datetime | None

    def holds(self, confirmed: int, publications: tuple[str, ...], upto: int) -> bool:
        """True if the result is still valid for a slot and WAL with these positions."""
        is_same_position = (self.confirmed, self.publications) == (confirmed, publications)
        return is_same_position and (self.since is not None or self.upto == upto)


#: Maps a source and a slot to the result of the last peek.
_ANSWERS: dict[tuple[Source, str], _Answer] = {}


@dataclass(frozen=True)
class Freshness:
    """For how many seconds the oldest commit has been waiting, and the LSN before which everything is applied.

    `problem` is the reason why nothing can be applied at all.
    """

    seconds: float
    lsn: int
    problem: str | None = None


def check_freshness(subscription: Subscription, lake: Lake) -> Freshness:
    """How far the replicas of a subscription are behind."""
    feed = subscription.feed
    log_position = ChangeLog(lake, feed).position()
    with feed.source.connect() as connection:
        state = slot_state(connection, feed.slot)
        if log_position is None or state is None:
            return Freshness(0, log_position or 0, f'replication slot "{feed.slot}" does not exist')
        applied, waiting_since = unapplied_since(ReplicaProgress(subscription, lake), log_position)
        if applied >= log_position:
            waiting_since = unread_since(connection, lake, feed, state)
        return Freshness(seconds_since(connection, waiting_since), applied)


def seconds_since(connection: psycopg.Connection[Any], since: datetime | None) -> float:
    """The seconds from a time to now, by the publisher's clock; 0 for None."""
    if since is None:
        return 0.0
    row = connection.execute("select clock_timestamp()").fetchone()
    assert row is not None
    seconds: float = (row[0] - since).total_seconds()
    return max(0.0, seconds)


def unapplied_since(progress: ReplicaProgress, durable: int) -> tuple[int, datetime | None]:
    """The LSN before which everything is applied, and the time of the first commit after it in the change log.

    `durable` is the LSN at which the change log ends. The time is None if the change log has nothing more to apply.
    """
    subscription, lake = progress.subscription, progress.lake
    cut = Cuts(lake, subscription.name).last()
    if cut is not None and cut.lsn >= durable:
        return cut.lsn, None  # The cut has all changes of the change log, so no other record has to be read.
    applied_lsn, transformed_lsn = progress.applied_up_to(), progress.transformed_up_to()
    if applied_lsn >= transformed_lsn:
        applied_lsn = progress.complete_up_to(transformed_lsn)
    return applied_lsn, _first_commit(lake, subscription.feed, applied_lsn) if applied_lsn < durable else None


def unread_since(
    connection: psycopg.Connection[Any], lake: Lake, feed: Feed, state: SlotState, *, peeking: bool = True
) -> datetime | None:
    """The commit time of the first transaction that is in the slot and not yet in the change log; None if there is none.

    If another process is reading the slot, or without `peeking`, the result is the earliest time that is possible. A
    peek takes the lock of the slot, so that steps that read the slot wait, instead of failing.
    """
    if peeking and not state.active:
        try:
            return _first_waiting(connection, feed, state)
        except SourceError as error:
            # Some transactions cannot be sent (`pgsieve.assets.steps.slot_consumption.unsendable_changes`). They wait, too.
            if not isinstance(error, LockHeldError | SlotInUseError) and not is_decoding_error(error):
                raise
    return _earliest_unread(connection, lake, feed, ChangeLog(lake, feed).position() or 0)


def _first_commit(lake: Lake, feed: Feed, applied: int) -> datetime | None:
    """The time of the first commit in the change log at or after an LSN; None if there is none."""
    path = ChangeLog(lake, feed).path
    slices = lake.records.slices(path, applied)
    first_time = lake.column_bound("min", path, "commit_time", f"slice = {slices[0]:d}") if slices else None
    return None if first_time is None else first_time.astimezone(UTC)


def _first_waiting(connection: psycopg.Connection[Any], feed: Feed, state: SlotState) -> datetime | None:
    """The commit time of the first transaction that waits in the slot; None if there is none.

    For a peek the server decodes WAL from the slot's restart_lsn on, which may be much earlier than the confirmed LSN
    (PostgreSQL documentation, 49.2.2 Replication Slots). So the result is kept in memory, for all subscriptions of the
    slot. It is valid until the slot is confirmed further. If no transaction is waiting, it is valid only until WAL is
    written.
    """
    lsn = flushed_lsn(connection)
    if lsn <= state.confirmed_lsn:
        return None  # All WAL is confirmed.
    catalog = feed.with_defined_publications(present_catalog(connection))
    names = tuple(feed.without_missing_publications(catalog).slot_publications(catalog))
    answer = _ANSWERS.get((feed.source, feed.slot))
    if answer is None or not answer.holds(state.confirmed_lsn, names, lsn):
        with feed.hold_lock(_LOCK_SECONDS):
            since = _peek_first_waiting(connection, feed, names, lsn)
        answer = _ANSWERS[feed.source, feed.slot] = _Answer(state.confirmed_lsn, names, lsn, since)
    return answer.since


def _peek_first_waiting(
    connection: psycopg.Connection[Any], feed: Feed, names: tuple[str, ...], upto: int
) -> datetime | None:
    """Peek at the first message in the slot; returns its commit time."""
    options = replace(feed.options, publications=names, streaming="off")
    query = peek_query(feed.slot, upto, options, connection.info.server_version, limit=1)
    message = first_message(connection, feed.source.name, feed.slot, query) if names else None
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


def _earliest_unread(
    connection: psycopg.Connection[Any], lake: Lake, feed: Feed, durable: int
) -> datetime | None:
    """The earliest time at which a waiting transaction may have committed: when the change log was last written.

    A process that reads the slot writes the change log at least every ten seconds, even if there are no changes.
    """
    if current_lsn(connection) <= durable:
        return None
    return lake.last_commit_time(ChangeLog(lake, feed).path)
