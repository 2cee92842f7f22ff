"""The feed's table `change_log`: the messages of its slot; its position is the LSN up to which it has them.

Slot consumption writes it, one commit per slice. Maintenance deletes slices that all subscriptions have applied.
"""

from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.subscription import Feed
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake

CHANGE_LOG = pa.schema(
    {
        "slice": pa.int64(),
        "commit_lsn": pa.int64(),
        "ordinal": pa.int64(),
        "number": pa.int64(),
        "commit_time": pa.timestamp("us", "UTC"),
        "xid": pa.int64(),
        "kind": pa.string(),
        "relation_id": pa.int64(),
        "data": pa.binary(),
    }
)


@dataclass(frozen=True)
class ChangeLog:
    """The table `change_log` of one feed."""

    lake: Lake
    feed: Feed

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.change_log(self.feed.name)

    def position(self) -> int | None:
        """The LSN up to which the change log has the feed's changes; None before its first commit."""
        return self.lake.records.position(self.path)

    def record_position(self, position: int, after: int | None = None, base: int | None = None) -> None:
        """Record a position in a commit without rows; there are no changes between `after` and the position.

        Raises OvertakenError if the change log's position is not `after`, or its version not `base`.
        """
        self.lake.records.append(self.path, CHANGE_LOG.empty_table(), position, base=base, after=after)
        reach(Failpoint.POSITION_RECORDED)
