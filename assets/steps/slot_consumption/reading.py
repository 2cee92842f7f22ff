"""The reading loop: a ready slot up to an LSN -> slices of the change log, then confirmed.

In: a slot that is ready, and its publications. Out: `Drained`. Readings grow while they succeed. A reading
that a fault of the server ends is repeated in smaller parts. Where another process reads the slot too, this
one continues from there.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.catalogs import Catalogs, Unaltered
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.failures import passes, reason
from pgsieve.assets.steps.records.table_states import SyncState, TableStates
from pgsieve.assets.steps.slot_consumption.appending import Peek, UnprovenError, append_slices, at_once
from pgsieve.assets.steps.slot_consumption.as_published import (
    alone,
    append_as_published,
    peek_as_published,
    published_feeds,
    published_up_to,
)
from pgsieve.assets.steps.slot_consumption.backlog import BESIDE_BYTES, Stride, halves
from pgsieve.assets.steps.slot_consumption.slot import present_slot
from pgsieve.assets.steps.slot_consumption.two_phase import keeps_prepared, recover_prepared
from pgsieve.assets.steps.slot_consumption.unsendable import OtherWays, unsendable
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, OverrunError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.confirmation import confirm
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.slot import described_in, slot_state, truncated_relations
from pgsieve.resources.postgres.slot_copy import has_spare_slots

#: A slice reads at most this many bytes of WAL.
SLICE_BYTES = 512 * 1024 * 1024
#: With nothing to read, the position is recorded and confirmed once the WAL has grown by this much.
IDLE_BYTES = 4 * 1024 * 1024

#: A drain continues at most this often from where another process has read the slot meanwhile.
_OVERRUNS = 6


@dataclass(frozen=True)
class Drained:
    """What a drain did: its positions as LSNs, the slices written, the slot's lag in bytes at the end."""

    from_lsn: int
    to_lsn: int
    slices: int
    lag: int


def drain_to(
    connection: psycopg.Connection[tuple[object, ...]],
    feed: Feed,
    lake: Lake,
    publications: Sequence[str],
    target: int,
    log: Log,
    subscriptions: Sequence[Subscription] = (),
    *,
    leaves: Sequence[frozenset[int]] = (),
    recording: bool = False,
) -> Drained:
    """Append and confirm what commits before `target`.

    With `recording`, record the position even when nothing was read.

    A TRUNCATE of every leaf in one of `leaves` may have been a TRUNCATE of the root; only the publisher
    knows.
    """
    source, version = feed.source, connection.info.server_version
    state = present_slot(connection, feed)
    durable = ChangeLog(lake, feed).position()
    begin = position = durable if durable is not None else state.confirmed_lsn
    peek = Peek(feed, source.executor_conninfo(), at_once(feed, publications), version)
    # Read after the target, so that every alteration before the target is seen.
    unaltered = Catalogs(lake, feed).unaltered(connection, position)
    prepared = keeps_prepared(feed, state)
    stride, confirmed = Stride(SLICE_BYTES), position
    slices = overruns = 0
    copies, unproven = True, False
    while position < target:
        standing = lake.records.standing(ChangeLog(lake, feed).path)
        if (reached := standing.position or position) > position:
            # Another process reads the slot too: this one continues from there.
            if prepared:
                recover_prepared(feed, lake, publications, version, reached)
            confirm(connection, source, feed.slot, reached, peek.options, lake.access.make_durable)
            position = begin = confirmed = reached
            continue
        asking = unaltered is None or unproven
        single = asking or prepared or lake.local is None
        ends = stride.ends(position, target, single=single)
        try:
            asking = asking or _is_to_be_asked(connection, lake, peek, leaves, unaltered, ends[-1])
            own = published_feeds(lake, feed) if asking else ()
            if own:
                ends = [max(ends[0], published_up_to(lake, own))]
                # Before any append: what all have is one slice.
                if (refused := unsendable(connection, peek, own, ends[0])) is not None:
                    raise refused
            base = alone(lake, feed, own, standing, ends[0]) if own else None
            for each in own:
                append_as_published(lake, peek_as_published(peek, each), feed, position, ends[0])
            first, beside = ends, list[int]()
            if copies and not (single or own) and _pays_beside(connection, feed, position, ends[-1]):
                first, beside = halves(position, ends)
            idle = False
            reading = (
                append_slices(
                    lake,
                    peek,
                    position,
                    first,
                    position,
                    base,
                    beside=beside,
                    unaltered=None if asking else unaltered,
                    prepared=prepared,
                )
                if publications
                else ((end, False) for end in ends)
            )
            for end, holds in reading:
                if holds:
                    slices += 1
                elif (
                    own
                    or recording
                    or end < target
                    or end - begin >= IDLE_BYTES
                    or _copied_after(lake, subscriptions, begin)
                ):
                    ChangeLog(lake, feed).record_position(end, position, base)
                else:
                    idle = True
                    break
                log(f"change log of {feed.name} holds everything before {format_lsn(end)}")
                position = begin = end
            # Once for everything that was read: after a small reading, this too decodes from restart_lsn.
            if confirmed < position:
                confirm(connection, source, feed.slot, position, peek.options, lake.access.make_durable)
                reach(Failpoint.SLOT_CONFIRMED)
            if idle:
                break
            if position < ends[-1]:
                log(f'the server does not move a copy of the slot "{feed.slot}": it is read by one session')
                copies = False
            stride.succeeded()
            unproven = False
        except UnprovenError:
            log(
                f"what is published was altered in what follows {format_lsn(position)}: the server is asked what it published"
            )
            unproven = True
            # Otherwise the slices appended before would be read once more.
            confirm(connection, source, feed.slot, position, peek.options, lake.access.make_durable)
        except OverrunError:
            overruns += 1
            if overruns == _OVERRUNS:
                raise
            time.sleep(random.uniform(0, 2**overruns / 10))  # noqa: S311 - no secret
            # Otherwise the slices appended before would be read once more.
            confirm(connection, source, feed.slot, position, peek.options, lake.access.make_durable)
        except PgsieveError as fault:
            if isinstance(fault, SourceUnreachableError | LakeError):
                raise
            if not passes(fault):
                confirm(connection, source, feed.slot, position, peek.options, lake.access.make_durable)
                otherwise = OtherWays(connection, lake, peek, log, prepared=prepared)
                try:
                    position = begin = otherwise.read(fault, position, ends[-1])
                    slices += 1
                except OverrunError:
                    overruns += 1
                    if overruns == _OVERRUNS:
                        raise
            elif stride.failed(ends[-1] - position):
                log(f"{fault.message}; it is read again in smaller parts, from {format_lsn(position)}")
            else:
                raise
            # Otherwise the slices appended before the fault would be read once more.
            confirm(connection, source, feed.slot, position, peek.options, lake.access.make_durable)
        confirmed = position
    return Drained(durable if durable is not None else begin, position, slices, lag=0)


def _pays_beside(
    connection: psycopg.Connection[tuple[object, ...]], feed: Feed, position: int, end: int
) -> bool:
    """Whether a second session may read in parallel, and is worth it.

    It is not worth it where both would mostly decode what a long transaction holds back. A failover slot does
    not allow it: it waits until the standbys have what it sends (synchronized_standby_slots, section 19.6.2),
    and a temporary copy does not.
    """
    if end - position < BESIDE_BYTES:
        return False
    state = slot_state(connection, feed.slot)
    return (
        state is not None
        and not state.failover
        and position - state.restart_lsn <= end - position
        and has_spare_slots(connection)
    )


def _is_to_be_asked(
    connection: psycopg.Connection[tuple[object, ...]],
    lake: Lake,
    peek: Peek,
    leaves: Sequence[frozenset[int]],
    unaltered: Unaltered | None,
    end: int,
) -> bool:
    """Whether the publisher has to decide what is read up to `end`.

    Where Spark alone writes, this is not known later.
    """
    if lake.local is None and unaltered is not None and not unaltered.is_all:
        feed = peek.feed
        begun, described = described_in(connection, feed.source.name, feed.slot, peek.query(end))
        if not unaltered.covers(begun, described):
            return True
    return _truncates_root(connection, peek, leaves, end)


def _truncates_root(
    connection: psycopg.Connection[tuple[object, ...]],
    peek: Peek,
    leaves: Sequence[frozenset[int]],
    end: int,
) -> bool:
    """Whether a TRUNCATE before `end` names all of some `leaves`: only the publisher knows whether it named their root."""
    if not leaves:
        return False
    feed = peek.feed
    truncated = truncated_relations(connection, feed.source.name, feed.slot, peek.query(end))
    return any(tree <= named for named in truncated for tree in leaves)


def _copied_after(lake: Lake, subscriptions: Sequence[Subscription], position: int) -> bool:
    """Whether a table was copied at a later LSN: the position has to reach it before there is a cut."""
    for subscription in subscriptions:
        try:
            states = TableStates(lake, subscription.name).newest().values()
        except LakeError as error:
            reason(lake, error)  # Raises where the lake itself fails.
        else:
            if any(state.state == SyncState.READY and state.lsn > position for state in states):
                return True
    return False
