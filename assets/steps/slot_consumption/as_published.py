"""The publisher's own decisions for one subscription, read where a slice of the captured changes has an alteration.

In: how the feed's slot is read, and positions. Out: the slice of the subscription's own change log. It is
listed in `altered` before the feed's slice is committed. Raises SourceError, OverrunError where another
process was faster, else LakeError.
"""

from collections.abc import Sequence
from dataclasses import replace

from pgsieve.assets.steps.records.catalogs import AlteredSlices, as_published, decided_by_server
from pgsieve.assets.steps.records.change_log import CHANGE_LOG, ChangeLog
from pgsieve.assets.steps.records.prepared import Prepared
from pgsieve.assets.steps.records.slices import Slices
from pgsieve.assets.steps.slot_consumption.appending import Peek, Reading, append_slices, at_once
from pgsieve.assets.steps.subscription import Feed
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import OverrunError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.missing_publications import UNDEFINED


def published_up_to(lake: Lake, own: Sequence[Feed]) -> int:
    """The end of the last slice that an interrupted run has already read as published.

    The next slice has to contain all such slices.
    """
    return max(ChangeLog(lake, each).position() or 0 for each in own)


def published_feeds(lake: Lake, feed: Feed) -> tuple[Feed, ...]:
    """The feeds to read too after an alteration: one per subscription, with the changes that the publisher sends to it.

    Empty while a prepared transaction waits: it was received as captured.
    """
    path = Prepared(lake, feed).path
    if lake.local and lake.records.exists(path) and lake.records.count(path):
        return ()
    return tuple(as_published(feed, name) for name in feed.subscriptions if decided_by_server(feed, name))


def version_to_append_to(lake: Lake, feed: Feed, own: Sequence[Feed], head: TableHead, end: int) -> int:
    """The version of the change log to which a slice is appended that the feeds `own` have as published.

    They may have rows of a slice that is not in the change log: a run died, or is about to commit it. Then a commit
    without rows makes a new version, which the other run does not expect. Raises OverrunError if another process was
    faster.
    """
    path, position = ChangeLog(lake, feed).path, head.position or 0
    reached = max(ChangeLog(lake, each).position() or 0 for each in own)
    if reached <= position:
        return head.version
    if reached > end:
        raise OverrunError(path)
    lake.records.append(path, CHANGE_LOG.empty_table(), base=head.version)
    return head.version + 1


def append_as_published(lake: Lake, published: Peek, feed: Feed, begin: int, end: int) -> bool:
    """Append the changes that the publisher sends to one subscription of a feed; False if it cannot decode them.

    The slot has to be where the slice begins.
    """
    own = published.feed
    try:
        after = ChangeLog(lake, own).position() or 0
        for _, holds in append_slices(lake, Reading(published, begin, [end]), after):
            if not holds:
                append_nothing(lake, own, end)
    except SourceError as error:
        if error.sqlstate != UNDEFINED:
            raise
        # Before PostgreSQL 18 the publisher can never decode WAL that is older than a publication for that
        # publication.
        return False
    list_as_published(lake, feed, own, begin, end)
    return True


def peek_as_published(peek: Peek, own: Feed) -> Peek:
    """How to read the slot with the publications of one subscription."""
    (publications,) = own.subscriptions.values()
    asked = replace(at_once(peek.feed, publications), binary=peek.options.binary)
    return replace(peek, feed=own, options=asked)


def append_nothing(lake: Lake, own: Feed, end: int) -> None:
    """Record the end of a slice in which the subscription receives nothing."""
    ChangeLog(lake, own).record_position(end, ChangeLog(lake, own).position() or 0)
    Slices(lake, own).append(end, {"bytes": 0, "relations": (), "messages": ()})


def list_as_published(lake: Lake, feed: Feed, own: Feed, begin: int, end: int) -> None:
    """List a slice that the subscription has as published; its rows are already durable."""
    (subscription,) = own.subscriptions
    AlteredSlices(lake, feed).append(subscription, begin, end)
    lake.access.make_durable()
    reach(Failpoint.ALTERATION_RECORDED)
