"""The slot that a feed reads, held against what Delta has of it; and a slot made anew where that one is lost.

In: the slot and cluster as they are, and those that the feed's table `feed` tells of. Out: SlotError subclasses
that name the gap and the command which closes it, or a new slot after which every table is copied again.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa

from assets.frames.schema import CHANGE_LOG, FEED
from assets.steps.prepared import prepared_position, record_nothing_prepared
from assets.steps.subscription import Feed
from assets.steps.table_states import INITIALIZE, READY, TableState, set_states, table_states
from decoding.errors import PgsieveError
from decoding.lsn import format_lsn
from resources.delta import Lake
from resources.failpoints import Failpoint, reach
from resources.lake_errors import LakeError, LakeUnavailableError
from resources.slot import (
    SlotError,
    SlotState,
    create_slot,
    drop_slot,
    enable_failover,
    inserted_lsn,
    slot_state,
    system_identifier,
    verify_slot,
)
from resources.timeline import current_timeline, refuse_divergence


class OtherClusterError(PgsieveError):
    """The source is another cluster than the one that Delta has changes of: their LSNs do not compare."""


def durable_position(lake: Lake, feed: Feed) -> int | None:
    """The LSN up to which Delta holds the feed's changes, as its newest commit says; None before the first."""
    return lake.records.position(lake.change_log(feed.name))


def record_position(lake: Lake, feed: Feed, position: int) -> None:
    """Record a position with no changes before it, in a commit of its own."""
    lake.records.append(lake.change_log(feed.name), CHANGE_LOG.empty_table(), position)
    reach(Failpoint.POSITION_RECORDED)


def verified_slot(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> SlotState | None:
    """The feed's slot, None where it is still to be made; raises OtherClusterError, or SlotError on a gap.

    On a standby that was promoted, what Delta holds has to be in its history, too.
    """
    newest = refuse_other_cluster(connection, feed, lake)
    state, durable = slot_state(connection, feed.slot), _known_position(lake, feed)
    timeline, known = current_timeline(connection), newest.get("timeline")
    if state is None and newest.get("given_up"):
        return None
    if durable is None and state is not None and _has_copies(lake, feed):
        raise _lost(lake, feed, f"is gone, and the slot is confirmed up to {format_lsn(state.confirmed_lsn)}")
    if durable is not None and known not in {None, timeline}:
        refuse_divergence(feed.source, known, durable, timeline, feed.subscriptions)
    verify_slot(state, feed.source.name, feed.slot, durable, feed.subscriptions)
    if state is None:
        return None
    if state.two_phase and durable is not None and prepared_position(lake, feed) is None:
        raise SlotError(
            f'source "{feed.source.name}": replication slot "{feed.slot}" sends prepared transactions, but what of them'
            f' was received is not in "{lake.prepared(feed.name)}"',
            hint=f"copy every table again: `pgsieve resync {next(iter(feed.subscriptions))}`",
            sqlstate="55000",
        )
    if feed.failover and not state.failover:
        enable_failover(feed.source, feed.slot)
    if not newest or newest["given_up"] or known != timeline:
        _note(lake, feed, system_identifier(connection), timeline, given_up=False)
    return state


def known_timeline(lake: Lake, feed: Feed) -> int | None:
    """The timeline that the feed's LSNs are of."""
    timeline: int | None = _newest(lake, feed).get("timeline")
    return timeline


def note_timeline(lake: Lake, feed: Feed, timeline: int) -> None:
    """Record that what is read from now on is of a timeline whose history has all that was read before."""
    newest = _newest(lake, feed)
    if newest.get("timeline") != timeline:
        _note(lake, feed, newest.get("system_identifier"), timeline, given_up=False)


class ChangeLogLostError(SlotError):
    """The change log is gone or unreadable: what it held and no replica has is lost."""


def _lost(lake: Lake, feed: Feed, problem: str) -> ChangeLogLostError:
    commands = " and ".join(f"`pgsieve resync {name}`" for name in feed.subscriptions)
    return ChangeLogLostError(
        f'source "{feed.source.name}": the change log "{lake.change_log(feed.name)}" {problem}: changes that it held are'
        " lost where no replica has them",
        hint=f"restore it from a backup, or copy every table again: {commands}",
        sqlstate="55000",
    )


def _known_position(lake: Lake, feed: Feed) -> int | None:
    """The durable position; raises ChangeLogLostError where the change log cannot be read."""
    try:
        return durable_position(lake, feed)
    except LakeUnavailableError:
        raise
    except LakeError as error:
        raise _lost(lake, feed, f"cannot be read ({error.message})") from error


def _has_copies(lake: Lake, feed: Feed) -> bool:
    """Whether a replica relies on the slot: a slot that is still to be begun has none."""
    return any(s.state == READY for name in feed.subscriptions for s in table_states(lake, name).values())


def refuse_other_cluster(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake
) -> Mapping[str, Any]:
    """What is recorded of the feed's cluster; raises OtherClusterError where the server is another one."""
    newest, found = _newest(lake, feed), system_identifier(connection)
    known = newest.get("system_identifier") or found
    if known == found:
        return newest
    again = " and ".join(f"`pgsieve drop {s} --leave-slot --delete-tables`" for s in feed.subscriptions)
    raise OtherClusterError(
        f'source "{feed.source.name}": the server is the cluster with system identifier {found}, but Delta holds changes'
        f" up to {format_lsn(durable_position(lake, feed) or 0)} of the cluster {known}: their LSNs do not compare",
        hint=f"replicate it into another `lake`, or begin from scratch: {again}, then `pgsieve run`",
        sqlstate="55000",
    )


def give_up(lake: Lake, feed: Feed) -> None:
    """Remember that nobody needs the slot any more: the next one begins from scratch."""
    newest = _newest(lake, feed)
    if not newest.get("given_up"):
        _note(lake, feed, newest.get("system_identifier"), newest.get("timeline"), given_up=True)


def _newest(lake: Lake, feed: Feed) -> Mapping[str, Any]:
    rows = [row for row in lake.records.rows(lake.feed(feed.name)) if row["given_up"] is not None]
    return max(rows, key=lambda row: row["at"], default={})


def deleted_up_to(lake: Lake, feed: Feed) -> int:
    """The LSN up to which maintenance may have deleted slices of the change log; 0 where it never did."""
    return max((row.get("deleted_up_to") or 0 for row in lake.records.rows(lake.feed(feed.name))), default=0)


def note_deleted(lake: Lake, feed: Feed, upto: int) -> None:
    """Record that slices are deleted, before they are: who is behind them, by a restored backup, lacks them."""
    if upto > deleted_up_to(lake, feed):
        _append(lake, feed, {"deleted_up_to": upto})


def _note(lake: Lake, feed: Feed, identifier: str | None, timeline: int | None, *, given_up: bool) -> None:
    _append(lake, feed, {"system_identifier": identifier, "timeline": timeline, "given_up": given_up})


def _append(lake: Lake, feed: Feed, row: Mapping[str, Any]) -> None:
    told = pa.Table.from_pylist([{"at": datetime.now(UTC), **row}], FEED)
    lake.records.append(lake.feed(feed.name), told)


def begin_slot(connection: psycopg.Connection[tuple[object, ...]], feed: Feed, lake: Lake) -> None:
    """Make the feed's slot, and have every table of its subscriptions copied again: it knows of nothing before.

    Raises SlotError where the server's LSNs are not beyond what Delta holds: a position never goes back.
    """
    reached, durable = inserted_lsn(connection), durable_position(lake, feed) or 0
    if reached < durable:
        raise SlotError(
            f'source "{feed.source.name}": Delta holds changes up to {format_lsn(durable)}, which the server, at'
            f" {format_lsn(reached)}, has not reached again",
            hint="repeat it when the server has written more WAL (`SELECT pg_switch_wal()` goes on to the next 16 MB)",
            sqlstate="55000",
        )
    forget_copies(lake, feed.subscriptions)
    start = create_slot(
        connection,
        feed.source.name,
        feed.slot,
        two_phase=feed.options.two_phase,
        failover=feed.failover,
    )
    reach(Failpoint.SLOT_CREATED)
    try:
        _note(lake, feed, system_identifier(connection), current_timeline(connection), given_up=False)
        if feed.options.two_phase:
            record_nothing_prepared(lake, feed, start)
        record_position(lake, feed, start)
    except Exception:
        if durable_position(lake, feed) != start:  # Else only the answer was lost.
            drop_slot(connection, feed.source.name, feed.slot)
        raise


def forget_copies(lake: Lake, subscriptions: Iterable[str]) -> None:
    """Have tables copied again that were ready; what the last copy was made of is kept, to tell what changed."""
    for name in subscriptions:
        states = table_states(lake, name).values()
        again = [TableState(*s.name, INITIALIZE, definition=s.definition) for s in states if s.state == READY]
        set_states(lake, name, again)


def replace_lost_slot(feed: Feed, lake: Lake) -> SlotError | None:
    """Replace a slot that is missing, invalidated, or ahead of Delta; returns what was wrong, None where nothing is.

    Killed in between, it can be repeated: the slot is then missing, or ahead of Delta. Raises OtherClusterError.
    """
    with feed.source.connect() as connection:
        try:
            verified_slot(connection, feed, lake)
        except SlotError as lost:
            if isinstance(lost.__cause__, LakeError):
                lake.remove_log(lake.change_log(feed.name))
            drop_slot(connection, feed.source.name, feed.slot)
            begin_slot(connection, feed, lake)
            return lost
    return None
