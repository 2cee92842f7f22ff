"""The table `feed` of a stream: to which cluster and timeline its LSNs belong, and up to which LSN slices are deleted.

A slot stream is a slot with the subscriptions that read it, and a slice is the changes from one position of the slot to
another. The step `slot_consumption` writes the table. So do maintenance, before it deletes slices, and `pgsieve drop`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.resources.lake.delta.records import get_commit_version, sort_by_version
from pgsieve.resources.lake.lake import Lake

#: There are two kinds of rows. A row of the first kind has `system_identifier`, `timeline` and `given_up`, which is
#: true if the slot was dropped. The newest of these rows counts. A row of the second kind has `deleted_up_to`. The
#: greatest of these LSNs counts.
FEED_SCHEMA = pa.schema(
    {
        "at": pa.timestamp("us", "UTC"),
        "system_identifier": pa.string(),
        "timeline": pa.int64(),
        "given_up": pa.bool_(),
        "deleted_up_to": pa.int64(),
    }
)


@dataclass(frozen=True)
class SlotStreamRecord:
    """The table `feed` of one stream."""

    lake: Lake
    slot_stream: SlotStream

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.slot_stream(self.slot_stream.name)

    def read_timeline(self) -> int | None:
        """The timeline on which the stream's LSNs are; None if it is not recorded."""
        timeline: int | None = self.read_newest_cluster().get("timeline")
        return timeline

    def record_timeline(self, timeline: int) -> None:
        """Record the timeline of all later reads of the slot.

        The caller has made sure that this timeline's history has everything that was read before.
        """
        newest_row = self.read_newest_cluster()
        if newest_row.get("timeline") != timeline:
            self.record_cluster(newest_row.get("system_identifier"), timeline, given_up=False)

    def read_deleted_lsn(self) -> int:
        """The LSN up to which maintenance may have deleted slices of the change log; 0 if it never did."""
        return max((row.get("deleted_up_to") or 0 for row in self.lake.records.rows(self.path)), default=0)

    def record_deleted_lsn(self, end_lsn: int) -> None:
        """Record up to which LSN slices will be deleted.

        A subscription that is restored from a backup may still need them, and learns from the record that they are
        gone.
        """
        if end_lsn > self.read_deleted_lsn():
            self._append({"deleted_up_to": end_lsn})

    def read_newest_cluster(self) -> Mapping[str, Any]:
        """The newest row of the first kind; an empty mapping if there is none."""
        rows = [row for row in self.lake.records.rows(self.path) if row["given_up"] is not None]
        return next(reversed(sort_by_version(rows)), {})

    def find_counting_versions(self) -> set[int]:
        """The Delta versions of the rows that count: the newest of the first kind, and the one with the greatest LSN."""
        rows = self.lake.records.rows(self.path)
        deletion_row = max(
            rows, key=lambda row: (row.get("deleted_up_to") or 0, get_commit_version(row)), default={}
        )
        return {get_commit_version(row) for row in (self.read_newest_cluster(), deletion_row)}

    def record_cluster(self, identifier: str | None, timeline: int | None, *, given_up: bool) -> None:
        """Record the cluster and timeline of all later LSNs, and whether the slot was dropped (`given_up`)."""
        self._append({"system_identifier": identifier, "timeline": timeline, "given_up": given_up})

    def _append(self, row: Mapping[str, Any]) -> None:
        rows = pa.Table.from_pylist([{"at": datetime.now(UTC), **row}], FEED_SCHEMA)
        self.lake.records.append_versioned(self.path, rows)
