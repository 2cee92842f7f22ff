"""Compares a feed's slot with the position of its change log, and replaces a lost slot.

In: the present slot and cluster, and their record in the feed's table `feed`. Out: a SlotError that names the gap and
the command that closes it; or a new slot, after which every table is copied again.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import psycopg

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.databases import refuse_other_database
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import Feed
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, LakeUnavailableError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError, SourceUnreachableError
from pgsieve.resources.postgres.slot import (
    SlotAheadError,
    SlotError,
    SlotState,
    create_slot,
    drop_slot,
    enable_failover,
    slot_state,
    verify_slot,
    verify_wal_end,
)
from pgsieve.resources.postgres.timeline import current_timeline, refuse_divergence
from pgsieve.resources.postgres.waits import PATIENT_SECONDS, limit_wait
from pgsieve.resources.postgres.wal import inserted_lsn, system_identifier


class SlotNotOwnedError(SlotError):
    """The slot existed before this lake: another lake may need its changes."""


class OtherClusterError(PgsieveError):
    """The source is another cluster than the one whose changes the lake has: their LSNs cannot be compared."""


def present_slot(connection: psycopg.Connection[tuple[object, ...]], feed: Feed) -> SlotState:
    """The state of the feed's slot, which has to exist; raises SourceError if it was dropped."""
    state = slot_state(connection, feed.slot)
    if state is None:
        raise SourceError(
            f'source "{feed.source.name}": replication slot "{feed.slot}" is gone', sqlstate="42704"
        )
    return state


def take_slot(connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake) -> SlotState | None:
    """Check that the feed's slot continues the change log, and return its state; None if it does not exist yet.

    Also enables `failover` if it is wanted, and records a new timeline. On a promoted standby, the change log's position
    has to be in the history of the server's timeline. No server may be behind the position. Raises the errors of
    `refuse_other_publisher`, and SlotError for a gap or a lost record.
    """
    newest_row = refuse_other_publisher(connection, feed, lake)
    state, durable = slot_state(connection, feed.slot), _known_position(lake, feed)
    timeline, recorded_timeline = current_timeline(connection), newest_row.get("timeline")
    if state is None and newest_row.get("given_up"):
        return None
    if durable is None and state is not None and _has_copies(lake, feed):
        raise _change_log_lost(
            lake, feed, f"is gone, and the slot is confirmed up to {format_lsn(state.confirmed_lsn)}"
        )
    if durable is not None and not newest_row and _has_copies(lake, feed):
        raise FeedLostError(
            f'source "{feed.source.name}": "{FeedRecord(lake, feed).path}" is gone, the record of the'
            " change log's cluster and of its deleted slices",
            hint=_recovery_hint(feed),
            sqlstate="55000",
        )
    if durable is not None and recorded_timeline not in {None, timeline}:
        refuse_divergence(feed.source, recorded_timeline, durable, timeline, feed.subscriptions)
    verify_slot(state, feed.source.name, feed.slot, durable, feed.subscriptions)
    if durable is not None:
        verify_wal_end(connection, feed.source.name, durable, feed.subscriptions)
    if state is None:
        return None
    if state.two_phase and durable is not None and PreparedTransactions(lake, feed).position() is None:
        raise SlotError(
            f'source "{feed.source.name}": replication slot "{feed.slot}" sends prepared transactions, but'
            f' "{PreparedTransactions(lake, feed).path}" does not have those that were received',
            hint=f"copy every table again: `pgsieve resync {next(iter(feed.subscriptions))}`",
            sqlstate="55000",
        )
    if feed.failover and not state.failover:
        enable_failover(feed.source, feed.slot)
    _note_cluster(connection, FeedRecord(lake, feed), newest_row, timeline)
    return state


class ChangeLogLostError(SlotError):
    """The change log is gone or unreadable: changes that were not applied yet are lost."""


class FeedLostError(SlotError):
    """The record of the cluster is gone, but a change log and replicas exist: they may be of another server."""


def _recovery_hint(feed: Feed) -> str:
    commands = " and ".join(f"`pgsieve resync {name}`" for name in feed.subscriptions)
    return f"restore it from a backup, or copy every table again: {commands}"


def _change_log_lost(lake: Lake, feed: Feed, problem: str) -> ChangeLogLostError:
    return ChangeLogLostError(
        f'source "{feed.source.name}": the change log "{ChangeLog(lake, feed).path}" {problem}: its changes that no'
        " replica has are lost",
        hint=_recovery_hint(feed),
        sqlstate="55000",
    )


def _known_position(lake: Lake, feed: Feed) -> int | None:
    """The change log's position, None before its first commit; raises ChangeLogLostError if it cannot be read."""
    try:
        return ChangeLog(lake, feed).position()
    except LakeUnavailableError:
        raise
    except LakeError as error:
        raise _change_log_lost(lake, feed, f"cannot be read ({error.message})") from error


def _has_copies(lake: Lake, feed: Feed) -> bool:
    """Whether a table of the feed's subscriptions is ready, so that its replica needs the slot."""
    return any(
        s.state == SyncState.READY
        for name in feed.subscriptions
        for s in TableStates(lake, name).newest().values()
    )


def refuse_other_publisher(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> Mapping[str, Any]:
    """The record of the feed's cluster. Commands call this before they read or alter the feed's tables.

    Raises OtherClusterError, OtherDatabaseError if it is another database of the cluster, and SlotNotOwnedError.
    """
    newest_row = refuse_other_cluster(connection, feed, lake)
    refuse_other_database(connection, lake, feed.subscriptions)
    refuse_slot_of_another_lake(connection, feed, lake)
    return newest_row


def refuse_slot_of_another_lake(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> None:
    """Raise SlotNotOwnedError if the slot exists, but this lake has no data of it and did not claim it.

    Changes that one lake confirms are lost for every other lake. A lake claims a slot before it creates the slot, so
    that after a crash the next run recognizes it.
    """
    if FeedRecord(lake, feed).newest() or _known_position(lake, feed) is not None:
        return
    # If pgsieve's own tables of a used lake are lost, a later error says that the lake is damaged.
    if any(TableStates(lake, name).newest() for name in feed.subscriptions):
        return
    if slot_state(connection, feed.slot) is None:
        return
    raise SlotNotOwnedError(
        f'source "{feed.source.name}": replication slot "{feed.slot}" exists, and the lake "{lake.uri}" has nothing of it: another lake'
        " may read it, and would lack every change that this one confirms",
        hint=f"give the source a `slot` of its own in pgsieve.yaml; or, where no other lake needs this one, take it over:"
        f" `pgsieve run {' '.join(feed.subscriptions)} --take-over`",
        sqlstate="55006",
    )


def refuse_slot_ahead(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake, hint: str
) -> None:
    """Raise SlotAheadError with a hint if the slot is ahead of the change log: another lake may read it."""
    try:
        verify_slot(
            slot_state(connection, feed.slot), feed.source.name, feed.slot, _known_position(lake, feed)
        )
    except SlotAheadError as error:
        raise SlotAheadError(error.message, hint=hint, sqlstate=error.sqlstate) from None
    except SlotError:
        pass  # The slot has lost changes, so no other lake can continue it either.


def claim_slot(connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake) -> None:
    """Record that the feed's slot belongs to this lake, before or after the slot is created.

    Raises OtherClusterError, OtherDatabaseError.
    """
    refuse_other_cluster(connection, feed, lake)
    refuse_other_database(connection, lake, feed.subscriptions)
    _claim(connection, feed, lake)


def _claim(connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake) -> None:
    """Record the slot's cluster if none is recorded."""
    record = FeedRecord(lake, feed)
    if not (newest_row := record.newest()):
        _note_cluster(connection, record, newest_row, current_timeline(connection))
        lake.access.make_durable()


def _note_cluster(
    connection: psycopg.Connection[tuple[object, ...]],
    record: FeedRecord,
    newest_row: Mapping[str, Any],
    timeline: int,
) -> None:
    """Record the cluster and timeline of the present slot if the newest row has others."""
    if not newest_row or newest_row["given_up"] or newest_row.get("timeline") != timeline:
        record.note_cluster(system_identifier(connection), timeline, given_up=False)


def refuse_other_publisher_if_it_answers(feed: Feed, lake: Lake) -> None:
    """As `refuse_other_publisher`, but nothing happens if the source does not answer: for commands that do not need it."""
    with suppress(SourceUnreachableError), feed.source.connect() as connection:
        refuse_other_publisher(connection, feed, lake)


def refuse_other_cluster(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> Mapping[str, Any]:
    """The record of the feed's cluster; raises OtherClusterError if the server is another one."""
    newest_row, present = FeedRecord(lake, feed).newest(), system_identifier(connection)
    recorded_identifier = newest_row.get("system_identifier") or present
    if recorded_identifier == present:
        return newest_row
    drop_commands = " and ".join(
        f"`pgsieve drop {s} --leave-slot --delete-tables`" for s in feed.subscriptions
    )
    raise OtherClusterError(
        f'source "{feed.source.name}": the server is the cluster with system identifier {present}, but Delta holds changes'
        f" up to {format_lsn(ChangeLog(lake, feed).position() or 0)} of the cluster {recorded_identifier}: their LSNs do not compare",
        hint=f"replicate it into another `lake`, or begin from scratch: {drop_commands}, then `pgsieve run`",
        sqlstate="55000",
    )


def give_up(lake: Lake, feed: Feed) -> None:
    """Record that the slot is given up: the next one begins anew."""
    newest_row = FeedRecord(lake, feed).newest()
    if not newest_row.get("given_up"):
        FeedRecord(lake, feed).note_cluster(
            newest_row.get("system_identifier"), newest_row.get("timeline"), given_up=True
        )


def begin_slot(connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake) -> None:
    """Create the feed's slot, and mark all tables of its subscriptions as to be copied: the slot has no earlier changes.

    Raises SlotError if the server's LSN is behind the change log's position, which never goes back.
    """
    server_lsn, durable = inserted_lsn(connection), ChangeLog(lake, feed).position() or 0
    if server_lsn < durable:
        raise SlotError(
            f'source "{feed.source.name}": Delta holds changes up to {format_lsn(durable)}, which the server, at'
            f" {format_lsn(server_lsn)}, has not reached again",
            hint="run again when the server has written more WAL (`SELECT pg_switch_wal()` advances to the next 16 MB)",
            sqlstate="55000",
        )
    forget_copies(lake, feed.subscriptions)
    _claim(connection, feed, lake)
    with limit_wait(feed.source, connection, PATIENT_SECONDS):
        start = create_slot(
            connection,
            feed.source.name,
            feed.slot,
            two_phase=feed.options.two_phase,
            failover=feed.failover,
        )
    reach(Failpoint.SLOT_CREATED)
    try:
        record = FeedRecord(lake, feed)
        _note_cluster(connection, record, record.newest(), current_timeline(connection))
        if feed.options.two_phase:
            PreparedTransactions(lake, feed).begin(start)
        ChangeLog(lake, feed).record_position(start)
    except Exception:
        # If the position is recorded, the commit succeeded and only its answer was lost.
        if ChangeLog(lake, feed).position() != start:
            drop_slot(connection, feed.source.name, feed.slot)
        raise


def forget_copies(lake: Lake, subscriptions: Iterable[str]) -> None:
    """Mark the copied tables of subscriptions as to be copied again.

    Their states keep the definition of the last copy, so that changes since then are noticed.
    """
    for name in subscriptions:
        states = TableStates(lake, name).newest().values()
        # In DATA_SYNC with an LSN, a run may have committed the copy and died before it made the table ready.
        copied_states = [
            s for s in states if s.state == SyncState.READY or (s.state == SyncState.DATA_SYNC and s.lsn)
        ]
        states_to_copy = [
            TableState(*s.name, SyncState.INITIALIZE, definition=s.definition) for s in copied_states
        ]
        TableStates(lake, name).append(states_to_copy)
    # If a power cut lost these states, the tables would lack changes.
    lake.access.make_durable()


def replace_lost_slot(feed: Feed, lake: Lake, *, take_over: bool = False) -> SlotError | None:
    """Replace a slot that is missing, invalidated, or ahead of the change log; returns its error, None if it has none.

    It can be repeated after a crash: the slot is then missing, or ahead of the change log. Raises the errors of
    `refuse_other_publisher`, and SlotAheadError without `take_over`, since another lake may read the slot.
    """
    with feed.hold_lock(), feed.source.connect() as connection:
        try:
            take_slot(connection, feed, lake)
        except SlotError as lost:
            if isinstance(lost, SlotAheadError) and not take_over:
                raise
            if isinstance(lost.__cause__, LakeError):
                lake.remove_log(ChangeLog(lake, feed).path)
            drop_slot(connection, feed.source.name, feed.slot)
            begin_slot(connection, feed, lake)
            return lost
    return None
