"""Repair: makes replicas equal to the publisher's filtered tables, by replacing the rows that differ.

At the LSN of a new snapshot, the rows that differ are read from both sides (`pgsieve.assets.steps.checks.comparison`). A row
that the replica has too often is deleted, and a row that it lacks is inserted. These changes are applied in one commit for
each table, as the changes of the slot are. If a replica keeps deleted rows, a row is not deleted, but marked as deleted.
Another writer may have added rows to it whose key has a NULL. Nothing finds these by their key, so they are deleted.

The position of the replica (the LSN up to which it has all changes) stays the same, because the replica had reached the
snapshot's LSN before. So later changes are still applied, and a repair can be repeated. After the repair, the table's
change history counts as incomplete, and the versions of its rows (`history: scd2`) begin anew. Then the newest cut gets
the new versions: a cut is an LSN, and for each replica the Delta version that equals the publisher's table at this LSN.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial, reduce
from operator import or_

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.by_files import FilesWriter, StoredChanges, add_net_change
from pgsieve.assets.steps.apply.choice import ApplyChoice, apply_by_ways
from pgsieve.assets.steps.apply.in_process import read_few_changes
from pgsieve.assets.steps.apply.replica_tables import apply, renew_cut
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch
from pgsieve.assets.steps.apply.ways import Way
from pgsieve.assets.steps.apply.writer import ReplicaWriter
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.checks.comparison import TableSides
from pgsieve.assets.steps.checks.consistency import (
    ALTERED_PROBLEM,
    REWRITTEN_PROBLEM,
    OnApplied,
    SubscriptionAtLsn,
    TableNames,
    hold_at_one_lsn,
    ignore_applied,
    repeat_for_altered_tables,
)
from pgsieve.assets.steps.history.copied_rows import CHANGES_PROPERTIES
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observations import aggregate_metrics
from pgsieve.assets.steps.records.columns import format_changes_ddl
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Definition, Subscription, arrow_types
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.changes.corrections import SLICE_BY_OPERATION, Corrections
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.records import REPAIRED_KEY, Commit, TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import name_jobs

#: If a replica keeps deleted rows, a correction may also mark a row that equals the publisher's: if another writer has
#: given its key to another row, too. The next correction inserts the row again. Before these, one correction deletes the
#: rows whose key has a NULL.
_MAX_ROUNDS = 3
#: The changes of one of Spark's tasks have numbers below this power of 2, above the number of the task.
_TASK_NUMBER_BITS = 40


@dataclass(frozen=True)
class RepairResult:
    """The result for one replica.

    - `inserted`, `deleted`: the numbers of rows
    - `version`: the Delta version for the cut; None if the replica has changes from after the LSN, or was put back to
      an earlier version meanwhile
    - `problem`: the reason why nothing was repaired
    """

    schema: str
    table: str
    lsn: int
    inserted: int = 0
    deleted: int = 0
    version: int | None = None
    problem: str | None = None


def repair(
    subscription: Subscription,
    lake: Lake,
    names: Collection[Name],
    log: Log,
    receive_applied: OnApplied = ignore_applied,
) -> list[RepairResult]:
    """Make these replicas equal to the publisher's tables at one LSN.

    `receive_applied` gets what was applied to reach the LSN. A result may have a problem, for example if there is no such
    table. If a table is altered or rewritten while it is read, it is repaired at a later LSN.
    """
    final_result_by_table: dict[Name, RepairResult] = {}

    def repair_tables(names: TableNames) -> list[Name]:
        with hold_at_one_lsn(subscription, lake, log) as subscription_at_lsn:
            receive_applied(subscription_at_lsn.applied)
            result_by_table = {name: _repair_table(subscription_at_lsn, name, log) for name in names or ()}
            version_by_table = {
                name: result.version for name, result in result_by_table.items() if result.version is not None
            }
            is_any_changed = any(result.inserted or result.deleted for result in result_by_table.values())
            if is_any_changed:
                # `apply` also begins the versions of the rows anew. If this process dies here, the next run does that.
                apply(subscription, lake, log)
            renew_cut(lake, subscription, version_by_table, has_same_rows=not is_any_changed)
        final_result_by_table.update(result_by_table)
        return [
            name
            for name, result in result_by_table.items()
            if result.problem in {ALTERED_PROBLEM, REWRITTEN_PROBLEM}
        ]

    repeat_for_altered_tables(repair_tables, names)
    return list(final_result_by_table.values())


def _repair_table(subscription_at_lsn: SubscriptionAtLsn, name: Name, log: Log) -> RepairResult:
    """Repair one replica."""
    lsn, lake = subscription_at_lsn.snapshot.lsn, subscription_at_lsn.lake
    if problem := subscription_at_lsn.find_problem(name):
        return RepairResult(*name, lsn, problem=problem)
    replicated_table = subscription_at_lsn.table_by_name[name]
    if not replicated_table.columns:
        return RepairResult(*name, lsn, problem="it has no columns, so its rows cannot be told apart")
    log(f"repairing {replicated_table.table.quoted_name} of {subscription_at_lsn.subscription.name}")
    with (
        subscription_at_lsn.translate_errors(name, "repair"),
        name_jobs(subscription_at_lsn.subscription.name, f"repair of {replicated_table.table.quoted_name}"),
    ):
        path = lake.paths.replica(subscription_at_lsn.subscription.name, *name)
        version = lake.records.version(path)
        counts = _correct_rows(subscription_at_lsn, name)
        if counts is None:
            return RepairResult(*name, lsn, problem=REWRITTEN_PROBLEM)
        head = lake.records.head(path)
        # If another writer has restored the replica meanwhile, the cut must not name the version after the RESTORE.
        # Otherwise later checks would not notice the RESTORE.
        is_intact = head.version == version or not lake.records.is_restored(path, version)
    cut_version = head.version if is_intact and (head.position or 0) <= lsn else None
    return RepairResult(*name, lsn, *counts, cut_version)


def _correct_rows(subscription_at_lsn: SubscriptionAtLsn, name: Name) -> tuple[int, int] | None:
    """Correct the rows of one replica; returns how many were inserted and deleted. None if the table was rewritten."""
    all_inserted, all_deleted = 0, 0
    for _ in range(_MAX_ROUNDS):
        sides = subscription_at_lsn.make_sides(name)
        rows = _keep(sides.find_differing_rows())
        inserted, deleted = _count_rows(rows)
        if not (inserted or deleted):
            break
        is_by_key = bool(sides.soft_delete_columns)
        if is_by_key and deleted:
            rows_without_key = _select_rows_without_key(rows, sides.key_columns)
            if (counts_without_key := _count_rows(rows_without_key)) != (0, 0):
                rows, (inserted, deleted), is_by_key = rows_without_key, counts_without_key, False
        # A table that was rewritten meanwhile may have been read as empty. A repair would then remove all rows of the
        # replica.
        if subscription_at_lsn.find_rewritten_tables([name]):
            return None
        _ReplicaRepair.make(subscription_at_lsn, name, sides, inserted, deleted, is_by_key=is_by_key).correct(
            rows
        )
        all_inserted, all_deleted = all_inserted + inserted, all_deleted + deleted
        if not (sides.soft_delete_columns and deleted):
            break
    return all_inserted, all_deleted


def _keep(rows: pa.Table | DataFrame) -> pa.Table | DataFrame:
    """Compute a DataFrame only once, although several queries read it."""
    return rows if isinstance(rows, pa.Table) else checkpoint(rows)


def _count_rows(rows: pa.Table | DataFrame) -> tuple[int, int]:
    """Count the rows to insert and to delete."""
    if isinstance(rows, pa.Table):
        counts = rows["count"].to_numpy()
        return int(counts[counts > 0].sum()), int(-counts[counts < 0].sum())
    counts_by_name = {"inserted": "count", "deleted": "-count"}
    totals = aggregate_metrics(
        rows, [F.expr(f"sum(greatest({count}, 0))").alias(name) for name, count in counts_by_name.items()]
    )
    return int(totals["inserted"] or 0), int(totals["deleted"] or 0)


def _select_rows_without_key(rows: pa.Table | DataFrame, key_columns: Sequence[str]) -> pa.Table | DataFrame:
    """Select the rows whose key has a NULL. Only another writer adds such rows to a replica."""
    if isinstance(rows, pa.Table):
        return rows.filter(reduce(pc.or_, [pc.is_null(rows[name]) for name in key_columns]))
    return rows.where(reduce(or_, [F.col(name).isNull() for name in key_columns]))


@dataclass(frozen=True)
class _ReplicaRepair:
    """Corrects one replica by changes, which are applied as those of the slot are.

    - `path`: the replica
    - `changes_folder`: the folder for the changes, if this process can write them
    - `definition`: has a key only if rows are marked as deleted. All other rows are deleted by their values: a row that
      another writer has added may have the key of an equal row.
    - `version`: the Delta version of the replica that was compared
    - `sent_counts`: how many rows are deleted and inserted
    """

    lake: Lake
    name: Name
    path: str
    changes_folder: str
    definition: Definition
    version: int
    sent_counts: Mapping[str, int]
    corrections: Corrections

    @classmethod
    def make(
        cls,
        subscription_at_lsn: SubscriptionAtLsn,
        name: Name,
        sides: TableSides,
        inserted: int,
        deleted: int,
        *,
        is_by_key: bool,
    ) -> "_ReplicaRepair":
        """Plan the repair of a replica into which rows are inserted, and from which rows are deleted.

        With `is_by_key`, rows are found by their key and marked as deleted; otherwise they are found by their values.
        """
        lake, subscription = subscription_at_lsn.lake, subscription_at_lsn.subscription
        definition = subscription_at_lsn.state_by_table[name].definition
        assert definition is not None
        return cls(
            lake,
            name,
            sides.path,
            lake.paths.corrections(subscription.name, *name),
            replace(definition, former=None, key=definition.key if is_by_key else ()),
            sides.version,
            {"delete": deleted, "insert": inserted},
            Corrections(
                [column.name for column in sides.columns],
                definition.metadata,
                changes_schema(arrow_types(subscription, name, definition)),
                subscription_at_lsn.snapshot.lsn,
                datetime.now(UTC),
            ),
        )

    def correct(self, rows: pa.Table | DataFrame) -> None:
        """Correct the replica, in one commit. `rows` are the differing rows."""
        lake, path = self.lake, self.changes_path
        if lake.delta_rs is None:
            frame = self._make_frame(rows)
            self._apply(lambda: frame, lake.records.size_bytes(self.path))
        else:
            try:
                self._store_changes(lake.delta_rs, rows)
                size_bytes = rows.nbytes if isinstance(rows, pa.Table) else lake.records.size_bytes(path)
                self._apply(partial(lake.read_table, path), size_bytes)
            finally:
                lake.remove(self.changes_folder)
        reach(Failpoint.REPLICA_COMMITTED)

    def _store_changes(self, delta_rs: DeltaRsRecords, rows: pa.Table | DataFrame) -> None:
        commit = Commit(overwrite=True, properties=CHANGES_PROPERTIES)
        with self.lake.access.translate_errors(self.changes_path):
            if isinstance(rows, pa.Table):
                delta_rs.write(self.changes_path, self._make_few_changes(rows), commit)
            else:
                self.lake.write(self._make_changes_by_spark(rows), self.changes_path, commit)

    @property
    def changes_path(self) -> str:
        """Where the changes are. A process that has lost its lock may repair the same replica, but at another LSN."""
        return f"{self.changes_folder}/{self.corrections.lsn:X}"

    def _make_few_changes(self, rows: pa.Table) -> pa.Table:
        batches = list[pa.RecordBatch]()
        for batch in rows.to_batches():
            first_number = sum(earlier_batch.num_rows for earlier_batch in batches)
            batches.append(self.corrections.to_changes(batch, first_number))
        return pa.Table.from_batches(batches)

    def _make_changes_by_spark(self, rows: DataFrame) -> DataFrame:
        ddl = format_changes_ddl(self.definition.columns)
        return rows.mapInArrow(_make_change_function(self.corrections), ddl)

    def _make_frame(self, rows: pa.Table | DataFrame) -> DataFrame:
        """Make a DataFrame of the changes."""
        if not isinstance(rows, pa.Table):
            return checkpoint(self._make_changes_by_spark(rows))
        changes, ddl = self._make_few_changes(rows), format_changes_ddl(self.definition.columns)
        return self.lake.spark.createDataFrame(changes, ddl)

    def _apply(self, read_changes: Callable[[], DataFrame], size_bytes: int) -> None:
        """Apply the changes, which Spark reads by `read_changes`. They have `size_bytes` bytes."""
        lake, path, definition, metadata = self.lake, self.path, self.definition, self._commit_metadata
        had_vectors = lake.records.has_deletion_vectors(path)

        def apply_to(version: int) -> None:
            pending = self._make_pending(version, size_bytes)
            batch = TableBatch(lake, path, self.changes_path, definition, pending)
            writer = ReplicaWriter(lake, path, definition, pending, None, None, metadata)

            def apply_choice(choice: ApplyChoice) -> None:
                match choice.means:
                    case StoredChanges() as stored_changes:
                        changes = add_net_change(batch, stored_changes)
                        FilesWriter(lake, path, pending, None, metadata=metadata).apply(changes)
                    case InProcessCommitter() as committer:
                        writer.apply_by_key(read_few_changes(batch, committer))
                    case SparkCommitter():
                        writer.apply_by_spark(
                            SparkChanges(lake, path, read_changes, definition, pending, bool(had_vectors))
                        )

            # Tasks that decide by parts of the keys would set the replica's position.
            apply_by_ways(batch, apply_choice, {Way.KEY_PARTS: "a repair keeps the position"})

        try:
            apply_to(self.version)
        except OvertakenError:
            # Perhaps the attempt itself has enabled deletion vectors, by a commit of its own.
            has_vectors = lake.records.has_deletion_vectors(path)
            if had_vectors or not has_vectors or lake.records.version(path) != self.version + 1:
                raise
            apply_to(self.version + 1)

    def _make_pending(self, version: int, size_bytes: int) -> PendingChanges:
        """Describe the changes as a batch for a version of the replica. Each operation is a slice."""
        slices = [
            TableChanges(
                SLICE_BY_OPERATION[operation], *self.name, size_bytes, sent_counts={operation: count}
            )
            for operation, count in self.sent_counts.items()
            if count
        ]
        return PendingChanges(slices, TableHead(version))

    @property
    def _commit_metadata(self) -> Mapping[str, int]:
        return {REPAIRED_KEY: self.corrections.lsn}


def _make_change_function(
    corrections: Corrections,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a function that turns the rows of one of Spark's tasks into changes."""

    def make_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        next_number = context.partitionId() << _TASK_NUMBER_BITS
        for batch in batches:
            changes = corrections.to_changes(batch, next_number)
            next_number += changes.num_rows
            yield changes

    return make_changes
