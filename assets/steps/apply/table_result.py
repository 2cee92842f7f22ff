"""What is needed to apply a batch of changes to one replica table (`PendingChanges`), and the result (`TableResult`).

Both are the same for each way in which the changes are written: as files, or by a MERGE of delta-rs or Spark. A slice has
the changes from one position of the slot to another, and a batch has the changes of several consecutive slices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.extent import Extent
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class TableResult:
    """The result for one replica table.

    - `inserted`, `updated`, `deleted`: numbers of rows
    - `truncated`: True if a TRUNCATE was applied
    - `missing`: the number of UPDATEs and DELETEs that did not find their row: the conflicts update_missing and
      delete_missing (PostgreSQL documentation, 29.8 Conflicts)
    - `insert_exists`, `update_exists`: the numbers of changes with a new key that the replica has already
    - `conflict_lsn`: the commit LSN of the first such change
    - `head`: the replica's Delta version, and its position (the LSN up to which it has all changes)
    - `problem`: why the table failed; None if it did not
    - `damaged`: True if the cause of `problem` is a damaged replica, not a change
    - `is_overtaken`: True if another process works on the table, so that the replica may lack the batch
    - `through`: the partitions through which changes came, if the table is a partition root
    """

    schema: str
    table: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    truncated: bool = False
    missing: int = 0
    insert_exists: int = 0
    update_exists: int = 0
    conflict_lsn: int | None = None
    head: TableHead = field(default_factory=TableHead)
    problem: str | None = None
    damaged: bool = False
    is_overtaken: bool = False
    through: tuple[str, ...] = ()

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


@dataclass(frozen=True)
class PendingChanges:
    """A table's changes in the slices that its replica lacks, oldest first.

    `head` is the Delta version and position that the replica had when the changes were planned.
    """

    slices: Sequence[TableChanges]
    head: TableHead

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.slices[0].name

    @property
    def slice_ends(self) -> Sequence[int]:
        """The LSNs at which the slices end."""
        return [c.slice_end for c in self.slices]

    @property
    def since_lsn(self) -> int:
        """The LSN from which changes are applied. The first slice may have earlier changes, which the replica has already."""
        return self.head.position or 0

    @property
    def extent(self) -> Extent:
        """Tells which changes of the change history (the Delta table with all changes) to apply."""
        return Extent(self.slice_ends, self.since_lsn, self.truncated_at)

    @property
    def size_bytes(self) -> int:
        """An upper bound of the bytes of the changes' messages."""
        return sum(c.size for c in self.slices)

    @property
    def truncated_at(self) -> tuple[int, int] | None:
        """The order key (commit LSN, ordinal) of the last TRUNCATE; None if there is none.

        Changes before the last TRUNCATE have no effect.
        """
        since = (self.since_lsn, -1)
        return max(
            (c.last_truncate for c in self.slices if c.last_truncate and c.last_truncate > since),
            default=None,
        )

    @property
    def key_change_count(self) -> int:
        """The number of UPDATEs that move a row to another key."""
        return sum(c.key_change_count for c in self.slices)

    @property
    def unsent_columns(self) -> frozenset[str]:
        """The columns that some change did not send, as their TOASTed value was unchanged."""
        return frozenset(column for c in self.slices for column in c.unsent_columns)

    @property
    def partition_names(self) -> tuple[str, ...]:
        """The partitions through which changes came."""
        return tuple(sorted({partition for c in self.slices for partition in c.partition_names}))

    @property
    def row_change_count(self) -> int:
        """The number of changes of rows, including those before a TRUNCATE."""
        return self.count("insert", "update", "delete")

    def count(self, *operations: str) -> int:
        """Count the changes with these operations, including those before a TRUNCATE."""
        return sum(c.sent_counts.get(o, 0) for c in self.slices for o in operations)

    def adjust_row_counts(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Adjust the counts of `NetChange.count_rows`: in a batch with a TRUNCATE, no row counts as missing."""
        return {**counts, **({"missing": 0} if self.truncated_at is not None else {})}


@dataclass(frozen=True)
class TableBatch:
    """A batch of one table, and its Delta tables: the replica (`path`), and the change history (`changes_path`)."""

    lake: Lake
    path: str
    changes_path: str
    definition: Definition
    pending: PendingChanges


def find_key_alteration_lsn(definition: Definition) -> int:
    """Find the LSN from which on all changes have the present key; 0 if the key was not altered.

    Earlier changes may be from before the alteration, and several of their rows may have the same value of the present
    key.
    """
    former_definition = definition.former
    return (
        0
        if former_definition is None or former_definition.key == definition.key_numbers
        else former_definition.until
    )


def read_heads(lake: Lake, subscription: str, names: Iterable[Name]) -> dict[Name, TableHead]:
    """Map each of the tables to the Delta version and position of its replica."""
    path_by_table = {name: lake.paths.replica(subscription, *name) for name in names}
    return dict(zip(path_by_table, lake.read_heads(list(path_by_table.values())), strict=True))


def make_batch_result(
    lake: Lake, path: str, pending: PendingChanges, end: int | None, **counts: int
) -> TableResult:
    """Make the result of a batch that ends at `end`, with the replica's present head. `end` is None for a repair.

    `counts` maps fields of `TableResult` to numbers of rows.
    """
    head = lake.records.head(path)
    # If the position is before `end`, the batch wrote nothing. So any version after the planned one is another process's.
    if end is not None and (head.position or 0) < end:
        head = pending.head
    return TableResult(
        *pending.name,
        inserted=counts.get("inserted", 0),
        updated=counts.get("updated", 0),
        deleted=counts.get("deleted", 0),
        truncated=pending.truncated_at is not None,
        missing=counts.get("missing", 0),
        head=head,
        through=pending.partition_names,
    )
