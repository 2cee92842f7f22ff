"""The table `change_log` of a slot stream (a slot with the subscriptions that read it): the messages of the slot.

Its position is the LSN up to which it has the messages. The step `slot_consumption` writes the table, in one commit for each
slice (the changes from one position of the slot to another). Maintenance deletes slices that all subscriptions have
applied.
"""

from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake

CHANGE_LOG_SCHEMA = pa.schema(
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
    """The table `change_log` of one slot stream."""

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.change_log(self.slot_stream.name)

    def read_position(self) -> int | None:
        """The LSN up to which the table has the messages of the slot; None before its first commit."""
        return self.lake.records.position(self.path)

    def record_position(
        self, position: int, expected_position: int | None = None, expected_version: int | None = None
    ) -> None:
        """Record a position in a commit without rows. Between `expected_position` and the position there are no changes.

        Raises OvertakenError if the position of the table is not `expected_position`, or if its version is not
        `expected_version`.
        """
        self.lake.records.append(
            self.path,
            CHANGE_LOG_SCHEMA.empty_table(),
            position,
            expected_version=expected_version,
            expected_position=expected_position,
        )
        reach(Failpoint.POSITION_RECORDED)
