"""The table `_transformed` of a subscription: counts of the transformed changes of each slice and table.

A slice is the changes from one position of the slot to another. The UPDATE transformation, which decodes and filters
changes, writes the table in one commit for each slice. The position of the commit is the end of the slice. The next
step, which applies the changes to the replicas, reads the table.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.sent_as import SentCounts, count_received, counts_from_rows, counts_to_rows
from pgsieve.resources.lake.lake import Lake

TRANSFORMED_SCHEMA = pa.schema(
    {
        "slice": pa.int64(),
        "schema": pa.string(),
        "table": pa.string(),
        "bytes": pa.int64(),
        "received_inserts": pa.int64(),
        "received_updates": pa.int64(),
        "received_deletes": pa.int64(),
        "inserts": pa.int64(),
        "updates": pa.int64(),
        "deletes": pa.int64(),
        "truncates": pa.int64(),
        "truncated_lsn": pa.int64(),
        "truncated_ordinal": pa.int64(),
        "key_changes": pa.int64(),
        "unchanged": pa.list_(pa.string()),
        "problem": pa.string(),
        "sent_as": pa.list_(
            pa.struct(
                {
                    "source": pa.string(),
                    "row_filter": pa.string(),
                    "operation": pa.string(),
                    "sent_as": pa.string(),
                    "changes": pa.int64(),
                }
            )
        ),
        "through": pa.list_(pa.string()),
    }
)


@dataclass(frozen=True)
class TableChanges:
    """The changes of one table in a slice, counted as received from the slot, and as sent to the replica.

    - `slice_end`: the LSN at which the slice ends
    - `size`: the size in bytes of the changes that are sent; if it is not known, an upper bound
    - `sent_as`: counts the received changes by what became of them. For example, an UPDATE may have been sent as an
      INSERT. Empty in records of earlier versions of pgsieve.
    - `sent_counts`: counts the changes that are sent, by operation
    - `truncate_count`: the number of TRUNCATEs
    - `last_truncate`: the order key (commit LSN, ordinal in the transaction) of the last TRUNCATE
    - `key_change_count`: the number of UPDATEs that give a row another key
    - `unsent_columns`: the columns whose values some change lacks, because they had not changed (TOAST)
    - `problem`: the reason why the changes cannot be transformed
    - `partition_names`: the partitions through which the changes came, if the table is a partition root and the messages
      name them
    """

    slice_end: int
    schema: str
    table: str
    size: int = 0
    sent_as: SentCounts = field(default_factory=Counter)
    sent_counts: Mapping[str, int] = field(default_factory=dict)
    truncate_count: int = 0
    last_truncate: OrderKey | None = None
    key_change_count: int = 0
    unsent_columns: tuple[str, ...] = ()
    problem: str | None = None
    partition_names: tuple[str, ...] = ()

    @property
    def name(self) -> Name:
        """The schema and the name of the table."""
        return self.schema, self.table

    @property
    def received_counts_by_operation(self) -> Mapping[str, int]:
        """The number of received changes of each operation."""
        return count_received(self.sent_as)

    @property
    def has_changes(self) -> bool:
        """True if there are changes to apply."""
        return bool(self.truncate_count or any(self.sent_counts.values()))

    def to_row(self) -> dict[str, object]:
        """The row of `_transformed` for these changes."""
        lsn, ordinal = self.last_truncate or (None, None)
        return {
            "slice": self.slice_end,
            "schema": self.schema,
            "table": self.table,
            "bytes": self.size,
            **{
                f"received_{operation}s": self.received_counts_by_operation[operation]
                for operation in ROW_OPERATIONS
            },
            **{f"{operation}s": self.sent_counts.get(operation, 0) for operation in ROW_OPERATIONS},
            "truncates": self.truncate_count,
            "truncated_lsn": lsn,
            "truncated_ordinal": ordinal,
            "key_changes": self.key_change_count,
            "unchanged": list(self.unsent_columns),
            "problem": self.problem,
            "sent_as": counts_to_rows(self.sent_as),
            "through": list(self.partition_names),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "TableChanges":
        """The changes that a row of `_transformed` records."""
        return cls(
            slice_end=row["slice"],
            schema=row["schema"],
            table=row["table"],
            size=row["bytes"],
            sent_counts={operation: row[f"{operation}s"] for operation in ROW_OPERATIONS},
            truncate_count=row["truncates"],
            last_truncate=None
            if row["truncated_lsn"] is None
            else (row["truncated_lsn"], row["truncated_ordinal"]),
            key_change_count=row["key_changes"],
            unsent_columns=tuple(row["unchanged"]),
            problem=row["problem"],
            sent_as=counts_from_rows(row.get("sent_as")),
            # Rows that an earlier version of pgsieve has written do not have this column.
            partition_names=tuple(row.get("through") or ()),
        )


@dataclass(frozen=True)
class TransformedSlices:
    """The table `_transformed` of one subscription. The step `update_transformation` writes it."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.transformed_slices(self.subscription)

    def read_position(self) -> int:
        """The LSN up to which the slot's changes have been transformed for the subscription."""
        return self.lake.records.position(self.path) or 0

    def append(self, slice_end: int, changes: Sequence[TableChanges], base_version: int) -> None:
        """Sync the changes of a slice to disk, and then record them.

        Raises OvertakenError if `base_version` is not the present version of `_transformed`.
        """
        self.lake.access.make_durable()
        rows = pa.Table.from_pylist(
            [table_changes.to_row() for table_changes in changes] or [{"slice": slice_end}],
            TRANSFORMED_SCHEMA,
        )
        self.lake.records.append(self.path, rows, slice_end, expected_version=base_version)

    def fence(self) -> int:
        """Make a commit without rows. If another process is transforming a slice now, this makes its commit fail.

        The other process then begins the slice again, with the present table states. Returns the end of the slices that
        were transformed with earlier states.
        """
        self.lake.records.append(self.path, TRANSFORMED_SCHEMA.empty_table())
        return self.read_position()

    def read_slices(self, after_lsn: int) -> dict[int, list[TableChanges]]:
        """Maps the end of each transformed slice after an LSN to its changes by table. The oldest slice comes first."""
        changes_by_slice: dict[int, list[TableChanges]] = {}
        if self.read_position() <= after_lsn:  # In a lake that only Spark reaches, this takes no job.
            return changes_by_slice
        rows = self.lake.records.rows(self.path, f"slice > {after_lsn:d}")
        for row in sorted(rows, key=lambda row: int(row["slice"])):
            slice_changes = changes_by_slice.setdefault(row["slice"], [])
            if row["table"] is not None:
                slice_changes.append(TableChanges.from_row(row))
        return changes_by_slice
