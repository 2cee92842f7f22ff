"""What the publisher itself sends to one subscription, where something was altered in a slice of the captured changes.

In: how the feed's slot is read, and positions. Out: the slice of the subscription's own change log, listed in `altered`
before the feed's slice is committed. Raises SourceError, OverrunError where another process was faster, else LakeError.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.records.catalogs import AlteredSlices, as_published, decided_by_server
from pgsieve.assets.steps.records.change_log import CHANGE_LOG, ChangeLog
from pgsieve.assets.steps.records.prepared import Prepared
from pgsieve.assets.steps.records.slices import Slices
from pgsieve.assets.steps.slot_consumption.appending import Peek, append_slices, at_once
from pgsieve.assets.steps.subscription import Feed
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import OverrunError
from pgsieve.resources.lake.delta.records import Standing
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.slot import UNDEFINED


def published_up_to(lake: Lake, own: Sequence[Feed]) -> int:
    """Where the slices end that a run which died has read as they were published: a slice has to hold all of them."""
    return max(ChangeLog(lake, each).position() or 0 for each in own)


def published_feeds(lake: Lake, feed: Feed) -> tuple[Feed, ...]:
    """What to read besides where something was altered: for each subscription what the publisher sends to it.

    Nothing while a prepared transaction waits, which was received as it was captured.
    """
    path = Prepared(lake, feed).path
    if lake.local and lake.records.exists(path) and lake.records.count(path):
        return ()
    return tuple(as_published(feed, name) for name in feed.subscriptions if decided_by_server(feed, name))


def alone(lake: Lake, feed: Feed, own: Sequence[Feed], standing: Standing, end: int) -> int:
    """The version of the change log to which a slice is appended that `own` have as published.

    What they have of a slice that is not in the change log, which died or is still to come, must not be followed by it:
    a commit without rows makes its version another one. Raises OverrunError where another process was faster.
    """
    path, position = ChangeLog(lake, feed).path, standing.position or 0
    reached = max(ChangeLog(lake, each).position() or 0 for each in own)
    if reached <= position:
        return standing.version
    if reached > end:
        raise OverrunError(path)
    lake.records.append(path, CHANGE_LOG.empty_table(), base=standing.version)
    return standing.version + 1


def append_as_published(lake: Lake, published: Peek, feed: Feed, begin: int, end: int) -> bool:
    """Append what the publisher decided for one subscription of a feed; the slot has to be where the slice begins.

    False where the publisher cannot decode that.
    """
    own = published.feed
    try:
        after = ChangeLog(lake, own).position() or 0
        for _, holds in append_slices(lake, published, begin, [end], after, prepared=False):
            if not holds:
                append_nothing(lake, own, end)
    except SourceError as error:
        if error.sqlstate != UNDEFINED:
            raise
        # Before 18 the publisher cannot decode what was written before a publication was there, now or ever.
        return False
    list_as_published(lake, feed, own, begin, end)
    return True


def peek_as_published(peek: Peek, own: Feed) -> Peek:
    """How the slot is read with the publications of one subscription."""
    (publications,) = own.subscriptions.values()
    asked = replace(at_once(peek.feed, publications), binary=peek.options.binary)
    return replace(peek, feed=own, options=asked)


def append_nothing(lake: Lake, own: Feed, end: int) -> None:
    """Let a slice end of which the subscription gets nothing."""
    ChangeLog(lake, own).record_position(end, ChangeLog(lake, own).position() or 0)
    Slices(lake, own).append(end, {"bytes": 0, "relations": (), "messages": ()})


def list_as_published(lake: Lake, feed: Feed, own: Feed, begin: int, end: int) -> None:
    """List a slice that the subscription has as published; what it has of it is durable."""
    (subscription,) = own.subscriptions
    AlteredSlices(lake, feed).append(subscription, begin, end)
    lake.access.make_durable()
    reach(Failpoint.ALTERATION_RECORDED)
