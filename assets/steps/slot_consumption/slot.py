"""Compares a slot with the position of its change log, and replaces a slot that was lost.

A slot stream is a slot with the subscriptions that read it. The change log is the lake's table of the slot's messages.

In: the present slot and server cluster, and their record in the stream's table `feed`
Out: - a SlotError, which names the gap between slot and change log, and the command that closes it
     - or a new slot, after which all tables are copied again
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import psycopg

from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.databases import refuse_other_database
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.assets.steps.subscription import SlotStream
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
    read_slot_state,
    verify_slot,
    verify_wal_end,
)
from pgsieve.resources.postgres.timeline import read_current_timeline, verify_timeline
from pgsieve.resources.postgres.waits import PATIENT_SECONDS, limit_wait
from pgsieve.resources.postgres.wal import read_inserted_lsn, read_system_identifier


class SlotNotOwnedError(SlotError):
    """The slot existed before this lake used it, so another lake may need its changes."""


class OtherClusterError(PgsieveError):
    """The source is another cluster than the one whose changes the lake has, so their LSNs cannot be compared."""


def read_present_slot(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream
) -> SlotState:
    """The state of the stream's slot. Raises SourceError if it does not exist."""
    state = read_slot_state(connection, slot_stream.slot)
    if state is None:
        raise SourceError(
            f'source "{slot_stream.source.name}": replication slot "{slot_stream.slot}" is gone',
            sqlstate="42704",
        )
    return state


def take_slot(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> SlotState | None:
    """Check that the slot can deliver all changes that the change log lacks.

    Returns the state of the slot. None if there is rightly no slot: it was not created yet, or was dropped.

    If `failover` is wanted, it is enabled. A new timeline is recorded. If the server is a promoted standby, the history
    of its timeline must contain the position of the change log. The server must not be behind that position.
    Raises the errors of `refuse_other_publisher`, and SlotError for a gap or a lost record.
    """
    newest_row = refuse_other_publisher(connection, slot_stream, lake)
    state, log_position = read_slot_state(connection, slot_stream.slot), _read_position(lake, slot_stream)
    timeline, recorded_timeline = read_current_timeline(connection), newest_row.get("timeline")
    if state is None and newest_row.get("given_up"):
        return None
    if log_position is None and state is not None and _has_copies(lake, slot_stream):
        raise _make_change_log_error(
            lake, slot_stream, f"is gone, and the slot is confirmed up to {format_lsn(state.confirmed_lsn)}"
        )
    if log_position is not None and not newest_row and _has_copies(lake, slot_stream):
        raise SlotStreamLostError(
            f'source "{slot_stream.source.name}": "{SlotStreamRecord(lake, slot_stream).path}" is gone, which records the'
            " cluster of the change log, and which of its changes were deleted",
            hint=_make_recovery_hint(slot_stream),
            sqlstate="55000",
        )
    if log_position is not None and recorded_timeline not in {None, timeline}:
        verify_timeline(
            slot_stream.source, recorded_timeline, log_position, timeline, slot_stream.subscriptions
        )
    verify_slot(state, slot_stream.source.name, slot_stream.slot, log_position, slot_stream.subscriptions)
    if log_position is not None:
        verify_wal_end(connection, slot_stream.source.name, log_position, slot_stream.subscriptions)
    if state is None:
        return None
    if (
        state.has_two_phase
        and log_position is not None
        and PreparedTransactions(lake, slot_stream).read_position() is None
    ):
        raise SlotError(
            f'source "{slot_stream.source.name}": replication slot "{slot_stream.slot}" sends prepared transactions, but'
            f' "{PreparedTransactions(lake, slot_stream).path}" does not have those that were received',
            hint=f"copy every table again: `pgsieve resync {next(iter(slot_stream.subscriptions))}`",
            sqlstate="55000",
        )
    if slot_stream.failover and not state.has_failover:
        enable_failover(slot_stream.source, slot_stream.slot)
    _update_cluster_record(connection, SlotStreamRecord(lake, slot_stream), newest_row, timeline)
    return state


class ChangeLogLostError(SlotError):
    """The change log is gone, or cannot be read, so changes that were not applied yet are lost."""


class SlotStreamLostError(SlotError):
    """The record of the cluster is gone, but there are a change log and replicas. They may be of another server."""


def _make_recovery_hint(slot_stream: SlotStream) -> str:
    commands = " and ".join(f"`pgsieve resync {name}`" for name in slot_stream.subscriptions)
    return f"restore it from a backup, or copy every table again: {commands}"


def _make_change_log_error(lake: Lake, slot_stream: SlotStream, problem: str) -> ChangeLogLostError:
    return ChangeLogLostError(
        f'source "{slot_stream.source.name}": the change log "{ChangeLog(lake, slot_stream).path}" {problem}: its changes that no'
        " replica has are lost",
        hint=_make_recovery_hint(slot_stream),
        sqlstate="55000",
    )


def _read_position(lake: Lake, slot_stream: SlotStream) -> int | None:
    """The position of the change log; None before its first commit. Raises ChangeLogLostError if it cannot be read."""
    try:
        return ChangeLog(lake, slot_stream).read_position()
    except LakeUnavailableError:
        raise
    except LakeError as error:
        raise _make_change_log_error(lake, slot_stream, f"cannot be read ({error.message})") from error


def _has_copies(lake: Lake, slot_stream: SlotStream) -> bool:
    """True if a table of the stream's subscriptions needs all changes in the slot, because it has a copy."""
    return any(
        state.needs_all_changes
        for name in slot_stream.subscriptions
        for state in TableStates(lake, name).read_newest().values()
    )


def refuse_other_publisher(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> Mapping[str, Any]:
    """Return the record of the stream's cluster. Commands call this before they read or alter tables of the stream.

    Raises OtherClusterError if the server is another cluster, OtherDatabaseError if it is another database of the same
    cluster, and SlotNotOwnedError if another lake may read the slot.
    """
    newest_row = refuse_other_cluster(connection, slot_stream, lake)
    refuse_other_database(connection, lake, slot_stream.subscriptions)
    refuse_slot_of_another_lake(connection, slot_stream, lake)
    return newest_row


def refuse_slot_of_another_lake(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> None:
    """Raise SlotNotOwnedError for an existing slot that this lake has neither read nor claimed.

    Changes that one lake confirms are lost for every other lake. A lake claims a slot before it creates the slot, so
    that after a crash the next run recognises it.
    """
    if (
        SlotStreamRecord(lake, slot_stream).read_newest_cluster()
        or _read_position(lake, slot_stream) is not None
    ):
        return
    # This lake is in use, and has lost some of pgsieve's own tables. A later error says that it is damaged.
    if any(TableStates(lake, name).read_newest() for name in slot_stream.subscriptions):
        return
    if read_slot_state(connection, slot_stream.slot) is None:
        return
    raise SlotNotOwnedError(
        f'source "{slot_stream.source.name}": replication slot "{slot_stream.slot}" exists, and the lake "{lake.uri}" has no changes of it: another'
        " lake may read it, and would lack every change that this lake confirms",
        hint=f"give the source a `slot` of its own in pgsieve.yaml; or, if no other lake needs the slot, take it over:"
        f" `pgsieve run {' '.join(slot_stream.subscriptions)} --take-over`",
        sqlstate="55006",
    )


def refuse_slot_ahead(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake, hint: str
) -> None:
    """Raise SlotAheadError with this hint if the slot is ahead of the change log. Another lake may then have read it."""
    try:
        verify_slot(
            read_slot_state(connection, slot_stream.slot),
            slot_stream.source.name,
            slot_stream.slot,
            _read_position(lake, slot_stream),
        )
    except SlotAheadError as error:
        raise SlotAheadError(error.message, hint=hint, sqlstate=error.sqlstate) from None
    except SlotError:
        pass  # The slot has lost changes, so no other lake can read it any further.


def claim_slot(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> None:
    """Record that the stream's slot belongs to this lake, before or after the slot is created.

    Raises OtherClusterError and OtherDatabaseError.
    """
    refuse_other_cluster(connection, slot_stream, lake)
    refuse_other_database(connection, lake, slot_stream.subscriptions)
    _ensure_cluster_record(connection, slot_stream, lake)


def _ensure_cluster_record(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> None:
    """Record the cluster of the slot, if none is recorded."""
    record = SlotStreamRecord(lake, slot_stream)
    if not (newest_row := record.read_newest_cluster()):
        _update_cluster_record(connection, record, newest_row, read_current_timeline(connection))
        lake.access.make_durable()


def _update_cluster_record(
    connection: psycopg.Connection[tuple[object, ...]],
    record: SlotStreamRecord,
    newest_row: Mapping[str, Any],
    timeline: int,
) -> None:
    """Record the cluster and timeline of the present slot.

    Nothing is recorded if the newest row has this timeline, and does not say that the slot was dropped.
    """
    if not newest_row or newest_row["given_up"] or newest_row.get("timeline") != timeline:
        record.record_cluster(read_system_identifier(connection), timeline, given_up=False)


def refuse_other_publisher_if_it_answers(slot_stream: SlotStream, lake: Lake) -> None:
    """The same as `refuse_other_publisher`, except that a source that does not answer is no error.

    It is for commands that do not need the source.
    """
    with suppress(SourceUnreachableError), slot_stream.source.connect() as connection:
        refuse_other_publisher(connection, slot_stream, lake)


def refuse_other_cluster(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> Mapping[str, Any]:
    """Return the record of the stream's cluster. Raises OtherClusterError if the server is another cluster."""
    newest_row, present_identifier = (
        SlotStreamRecord(lake, slot_stream).read_newest_cluster(),
        read_system_identifier(connection),
    )
    recorded_identifier = newest_row.get("system_identifier") or present_identifier
    if recorded_identifier == present_identifier:
        return newest_row
    drop_commands = " and ".join(
        f"`pgsieve drop {s} --leave-slot --delete-tables`" for s in slot_stream.subscriptions
    )
    raise OtherClusterError(
        f'source "{slot_stream.source.name}": the server is the cluster with system identifier {present_identifier}, but Delta holds changes'
        f" up to {format_lsn(ChangeLog(lake, slot_stream).read_position() or 0)} of the cluster {recorded_identifier}: LSNs of two clusters cannot be compared",
        hint=f"replicate it into another `lake`, or begin from scratch: {drop_commands}, then `pgsieve run`",
        sqlstate="55000",
    )


def record_dropped_slot(lake: Lake, slot_stream: SlotStream) -> None:
    """Record that the slot was dropped, so that the next slot begins with new copies."""
    newest_row = SlotStreamRecord(lake, slot_stream).read_newest_cluster()
    if not newest_row.get("given_up"):
        SlotStreamRecord(lake, slot_stream).record_cluster(
            newest_row.get("system_identifier"), newest_row.get("timeline"), given_up=True
        )


def begin_slot(
    connection: psycopg.Connection[tuple[object, ...]], slot_stream: SlotStream, lake: Lake
) -> None:
    """Create the stream's slot, and mark the copied tables of its subscriptions as to be copied again.

    The slot does not have earlier changes, so these copies cannot be brought up to date. Raises SlotError if the server's LSN is
    behind the position of the change log, which never goes back.
    """
    server_lsn, log_position = (
        read_inserted_lsn(connection),
        ChangeLog(lake, slot_stream).read_position() or 0,
    )
    if server_lsn < log_position:
        raise SlotError(
            f'source "{slot_stream.source.name}": Delta holds changes up to {format_lsn(log_position)}, which the server, at'
            f" {format_lsn(server_lsn)}, has not reached again",
            hint="run again when the server has written more WAL (`SELECT pg_switch_wal()` advances to the next 16 MB)",
            sqlstate="55000",
        )
    forget_copies(lake, slot_stream.subscriptions)
    _ensure_cluster_record(connection, slot_stream, lake)
    with limit_wait(slot_stream.source, connection, PATIENT_SECONDS):
        start = create_slot(
            connection,
            slot_stream.source.name,
            slot_stream.slot,
            two_phase=slot_stream.options.two_phase,
            failover=slot_stream.failover,
        )
    reach(Failpoint.SLOT_CREATED)
    try:
        # Another process may have copied tables since the call above, at a snapshot from before the slot.
        forget_copies(lake, slot_stream.subscriptions)
        record = SlotStreamRecord(lake, slot_stream)
        _update_cluster_record(
            connection, record, record.read_newest_cluster(), read_current_timeline(connection)
        )
        if slot_stream.options.two_phase:
            PreparedTransactions(lake, slot_stream).begin(start)
        ChangeLog(lake, slot_stream).record_position(start)
    except Exception:
        # If the position is recorded, the commit has succeeded, and only the answer of the store was lost.
        if ChangeLog(lake, slot_stream).read_position() != start:
            drop_slot(connection, slot_stream.source.name, slot_stream.slot)
        raise


def forget_copies(lake: Lake, subscriptions: Iterable[str]) -> None:
    """Record that tables of these subscriptions are to be copied again, if they have a copy or are being copied.

    Their states keep the definition of the last copy (columns, key and others), so that changes of it are noticed.
    """
    for name in subscriptions:
        states = TableStates(lake, name).read_newest().values()
        states_to_copy = [
            TableState(*state.name, SyncState.INITIALIZE, definition=state.definition)
            for state in states
            if state.needs_all_changes or state.state == SyncState.DATA_SYNC or state.is_being_altered
        ]
        TableStates(lake, name).append(states_to_copy)
    # If a power cut made these states disappear, the tables would not get all changes.
    lake.access.make_durable()


def replace_lost_slot(slot_stream: SlotStream, lake: Lake, *, take_over: bool = False) -> SlotError | None:
    """Replace a slot that is missing, invalidated, or ahead of the change log.

    Returns the error about the replaced slot; None if the slot was not replaced.

    After a crash this can be repeated, because the slot is then missing, or ahead of the change log. The caller has made
    sure, by `refuse_other_publisher`, that the slot is this lake's. Raises OtherClusterError and OtherDatabaseError; and
    SlotNotOwnedError if another lake has created the slot meanwhile. Raises SlotAheadError without `take_over`, since
    another lake may read the slot.
    """
    with slot_stream.hold_lock(), slot_stream.source.connect() as connection:
        try:
            take_slot(connection, slot_stream, lake)  # Raises SlotError if the slot has to be replaced.
        except SlotNotOwnedError:
            raise
        except SlotError as slot_error:
            if isinstance(slot_error, SlotAheadError) and not take_over:
                raise
            if isinstance(slot_error.__cause__, LakeError):
                lake.remove_log(ChangeLog(lake, slot_stream).path)
            drop_slot(connection, slot_stream.source.name, slot_stream.slot)
            begin_slot(connection, slot_stream, lake)
            return slot_error
    return None
