"""The feed's table `feed`, and the position of its change log: what Delta has of a slot.

Written by slot consumption, and by maintenance before it deletes slices. Rows of `feed` tell the cluster and timeline
that the LSNs are of, whether the slot was given up, and up to where slices are deleted; the newest row counts.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.records.columns import CHANGE_LOG, FEED
from pgsieve.assets.steps.subscription import Feed
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.records import in_order


def durable_position(lake: Lake, feed: Feed) -> int | None:
    """The LSN up to which Delta holds the feed's changes, as its newest commit says; None before the first."""
    return lake.records.position(lake.change_log(feed.name))


def record_position(
    lake: Lake, feed: Feed, position: int, after: int | None = None, base: int | None = None
) -> None:
    """Record a position with no changes before it since `after`, in a commit of its own.

    Raises OverrunError where another process has read on from there, or written to the version `base`.
    """
    empty = CHANGE_LOG.empty_table()
    lake.records.append(lake.change_log(feed.name), empty, position, base=base, after=after)
    reach(Failpoint.POSITION_RECORDED)


def known_timeline(lake: Lake, feed: Feed) -> int | None:
    """The timeline that the feed's LSNs are of."""
    timeline: int | None = newest_row(lake, feed).get("timeline")
    return timeline


def note_timeline(lake: Lake, feed: Feed, timeline: int) -> None:
    """Record that what is read from now on is of a timeline whose history has all that was read before."""
    newest = newest_row(lake, feed)
    if newest.get("timeline") != timeline:
        note_cluster(lake, feed, newest.get("system_identifier"), timeline, given_up=False)


def deleted_up_to(lake: Lake, feed: Feed) -> int:
    """The LSN up to which maintenance may have deleted slices of the change log; 0 where it never did."""
    return max((row.get("deleted_up_to") or 0 for row in lake.records.rows(lake.feed(feed.name))), default=0)


def note_deleted(lake: Lake, feed: Feed, upto: int) -> None:
    """Record that slices are deleted, before they are: who is behind them, by a restored backup, lacks them."""
    if upto > deleted_up_to(lake, feed):
        _append(lake, feed, {"deleted_up_to": upto})


def newest_row(lake: Lake, feed: Feed) -> Mapping[str, Any]:
    """The row of `feed` that counts; an empty one where there is none."""
    rows = [row for row in lake.records.rows(lake.feed(feed.name)) if row["given_up"] is not None]
    return next(reversed(in_order(rows)), {})


def note_cluster(
    lake: Lake, feed: Feed, identifier: str | None, timeline: int | None, *, given_up: bool
) -> None:
    """Record the cluster and timeline that LSNs are of from now on, and whether the slot was given up."""
    _append(lake, feed, {"system_identifier": identifier, "timeline": timeline, "given_up": given_up})


def _append(lake: Lake, feed: Feed, row: Mapping[str, Any]) -> None:
    told = pa.Table.from_pylist([{"at": datetime.now(UTC), **row}], FEED)
    lake.records.append_versioned(lake.feed(feed.name), told)
