"""The subscription's table `_transformed`: counts of the transformed changes, by slice and table.

The UPDATE transformation writes it, one commit per slice, whose position is the slice's end. The apply reads it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.sent_as import SentCounts, counts_from_rows, counts_to_rows, received_counts
from pgsieve.resources.lake.lake import Lake

TRANSFORMED = pa.schema(
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
    """A slice's changes of one table, counted before and after the transformation.

    - `slice` is the LSN at which the slice ends.
    - `size` is the size in bytes of the changes that are sent if that is known, otherwise an upper bound.
    - `sent_as` counts the received changes by the operation that they are sent as; empty in records of earlier versions.
    - `sent` counts the changes that are sent, by operation; `key_changes` the UPDATEs that move a row to another key.
    - `truncated_at` is the order key of the last TRUNCATE.
    - `unchanged` are the columns whose unchanged values some change did not send.
    - `through` are the partitions through which the changes of a partition root came, as far as the publisher says.
    """

    slice: int
    schema: str
    table: str
    size: int = 0
    sent_as: SentCounts = field(default_factory=Counter)
    sent: Mapping[str, int] = field(default_factory=dict)
    truncates: int = 0
    truncated_at: Order | None = None
    key_changes: int = 0
    unchanged: tuple[str, ...] = ()
    problem: str | None = None
    through: tuple[str, ...] = ()

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table

    @property
    def received(self) -> Mapping[str, int]:
        """The number of received changes of each operation."""
        return received_counts(self.sent_as)

    @property
    def has_changes(self) -> bool:
        """Whether there are changes to apply."""
        return bool(self.truncates or any(self.sent.values()))

    def row(self) -> dict[str, object]:
        """The table's row in `_transformed`."""
        lsn, ordinal = self.truncated_at or (None, None)
        return {
            "slice": self.slice,
            "schema": self.schema,
            "table": self.table,
            "bytes": self.size,
            **{f"received_{o}s": self.received[o] for o in ROW_OPERATIONS},
            **{f"{o}s": self.sent.get(o, 0) for o in ROW_OPERATIONS},
            "truncates": self.truncates,
            "truncated_lsn": lsn,
            "truncated_ordinal": ordinal,
            "key_changes": self.key_changes,
            "unchanged": list(self.unchanged),
            "problem": self.problem,
            "sent_as": counts_to_rows(self.sent_as),
            "through": list(self.through),
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "TableChanges":
        """The changes that a row of `_transformed` records."""
        return cls(
            slice=row["slice"],
            schema=row["schema"],
            table=row["table"],
            size=row["bytes"],
            sent={o: row[f"{o}s"] for o in ROW_OPERATIONS},
            truncates=row["truncates"],
            truncated_at=None
            if row["truncated_lsn"] is None
            else (row["truncated_lsn"], row["truncated_ordinal"]),
            key_changes=row["key_changes"],
            unchanged=tuple(row["unchanged"]),
            problem=row["problem"],
            sent_as=counts_from_rows(row.get("sent_as")),
            # Rows of earlier versions of pgsieve lack it.
            through=tuple(row.get("through") or ()),
        )


@dataclass(frozen=True)
class TransformedSlices:
    """The table `_transformed` of one subscription."""

    lake: Lake
    subscription: str

    @property
    def path(self) -> str:
        """The table's path."""
        return self.lake.paths.transformed(self.subscription)

    def position(self) -> int:
        """The LSN up to which the change log is transformed for the subscription."""
        return self.lake.records.position(self.path) or 0

    def append(self, end: int, changes: Sequence[TableChanges], base: int) -> None:
        """Record the changes of a slice, after they are made durable.

        Raises OvertakenError if the version of `_transformed` is not `base`.
        """
        self.lake.access.make_durable()
        rows = pa.Table.from_pylist([c.row() for c in changes] or [{"slice": end}], TRANSFORMED)
        self.lake.records.append(self.path, rows, end, base=base)

    def fence(self) -> int:
        """Make other processes, if they are transforming a slice now, begin it anew with the present table states.

        It is a commit without rows, so that their commits fail. Returns the LSN up to which slices are transformed with
        former states.
        """
        self.lake.records.append(self.path, TRANSFORMED.empty_table())
        return self.position()

    def slices(self, after: int) -> dict[int, list[TableChanges]]:
        """The transformed slices that end after an LSN, oldest first, with the tables that each changes."""
        slices: dict[int, list[TableChanges]] = {}
        rows = self.lake.records.rows(self.path, f"slice > {after:d}")
        for row in sorted(rows, key=lambda r: int(r["slice"])):
            tables = slices.setdefault(row["slice"], [])
            if row["table"] is not None:
                tables.append(TableChanges.from_row(row))
        return slices
