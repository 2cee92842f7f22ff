"""Reads a slice once for each subscription, filtered by the publisher, if pgsieve cannot filter the slice itself.

Mostly this is so because publications were altered within the slice. A slice is the changes from one position of the
slot to another. A stream is a slot with the subscriptions that read it. Other slices are read with pgsieve's own
publications (capture publications), which do not filter.

In: how the slot of a stream is read, and the positions at which the slice begins and ends
Out: the slice, in a change log (a table of a slot's messages) that belongs to one subscription. The slice is listed in
     the table `altered` before it is committed to the stream's change log.

Raises SourceError, OvertakenError if another process was faster, and LakeError.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.records.catalogs import (
    AlteredSlices,
    can_publisher_decide,
    make_publisher_slot_stream,
)
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA, ChangeLog
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.slices import Slices, SliceSummary
from pgsieve.assets.steps.slot_consumption.appending import Peek, Reading, append_slices, make_peek_options
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.missing_publications import UNDEFINED_OBJECT_SQLSTATE


def read_greatest_end(lake: Lake, subscription_slot_streams: Sequence[SlotStream]) -> int:
    """Read the greatest position of the change logs of these streams. The next slice must not end before it.

    An interrupted run may already have appended the slice up to this position.
    """
    return max(ChangeLog(lake, each).read_position() or 0 for each in subscription_slot_streams)


def make_publisher_slot_streams(lake: Lake, slot_stream: SlotStream) -> tuple[SlotStream, ...]:
    """Make streams of a single subscription each. The slot is read with these if the publisher has to filter.

    There is one for each subscription for which the publisher can filter (`can_publisher_decide`). As long as a
    prepared transaction waits for COMMIT PREPARED or ROLLBACK PREPARED, there are none, because that transaction was
    received with the capture publications.
    """
    path = PreparedTransactions(lake, slot_stream).path
    if not lake.is_reached_by_spark_only and lake.records.exists(path) and lake.records.count_rows(path):
        return ()
    return tuple(
        make_publisher_slot_stream(slot_stream, name)
        for name in slot_stream.subscriptions
        if can_publisher_decide(slot_stream, name)
    )


def prepare_base_version(
    lake: Lake,
    slot_stream: SlotStream,
    subscription_slot_streams: Sequence[SlotStream],
    head: TableHead,
    end: int,
) -> int:
    """Prepare the stream's change log for a slice, which is first appended to the streams of single subscriptions.

    Returns the version that the change log must have when the slice is appended to it.

    The streams of single subscriptions may already have a slice that the change log lacks, from a run that died or is
    about to commit the slice. In that case a commit without rows makes a new version, so that a commit of that run fails.
    Raises OvertakenError if another process was faster.
    """
    path, position = ChangeLog(lake, slot_stream).path, head.position or 0
    reached_position = max(ChangeLog(lake, each).read_position() or 0 for each in subscription_slot_streams)
    if reached_position <= position:
        return head.version
    if reached_position > end:
        raise OvertakenError(path)
    lake.records.append(path, CHANGE_LOG_SCHEMA.empty_table(), expected_version=head.version)
    return head.version + 1


def append_publisher_slice(lake: Lake, peek: Peek, slot_stream: SlotStream, begin: int, end: int) -> bool:
    """Append the changes that the publisher sends to one subscription of a stream.

    Returns false if the publisher cannot decode them. Before this call, the slot must be confirmed up to `begin`.
    """
    subscription_slot_stream = peek.slot_stream
    try:
        former_position = ChangeLog(lake, subscription_slot_stream).read_position() or 0
        for _, has_rows in append_slices(lake, Reading(peek, begin, [end]), former_position):
            if not has_rows:
                append_empty_slice(lake, subscription_slot_stream, end)
    except SourceError as error:
        if error.sqlstate != UNDEFINED_OBJECT_SQLSTATE:
            raise
        # Before PostgreSQL 18, a publisher cannot decode WAL that is older than one of the publications.
        return False
    record_altered_slice(lake, slot_stream, subscription_slot_stream, begin, end)
    return True


def make_publisher_peek(peek: Peek, subscription_slot_stream: SlotStream) -> Peek:
    """Make the peek (a reading that confirms nothing) at the slot with the publications of one subscription."""
    (publications,) = subscription_slot_stream.subscriptions.values()
    options = replace(make_peek_options(peek.slot_stream, publications), binary=peek.options.binary)
    return replace(peek, slot_stream=subscription_slot_stream, options=options)


def append_empty_slice(lake: Lake, subscription_slot_stream: SlotStream, end: int) -> None:
    """Append an empty slice, because the subscription gets no changes in it."""
    ChangeLog(lake, subscription_slot_stream).record_position(
        end, ChangeLog(lake, subscription_slot_stream).read_position() or 0
    )
    Slices(lake, subscription_slot_stream).append(end, SliceSummary().to_row())


def record_altered_slice(
    lake: Lake, slot_stream: SlotStream, subscription_slot_stream: SlotStream, begin: int, end: int
) -> None:
    """List a slice that the publisher has filtered. The subscription's own change log already has the slice."""
    (subscription,) = subscription_slot_stream.subscriptions
    AlteredSlices(lake, slot_stream).append(subscription, begin, end)
    lake.access.make_durable()
    reach(Failpoint.ALTERATION_RECORDED)
