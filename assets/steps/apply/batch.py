"""Applies a batch of slices to the replicas, the copies of the publisher's tables in the lake.

A slice has the changes that were read from the slot in one go. A batch has several consecutive slices. A table's change
history is the Delta table that has the changes of all slices.

In: the changes of a batch, by table. Out: a `TableResult` for each table, which has the problem if the table fails.

For each replica, its head is read: its Delta version, and its position (the LSN up to which it has all changes). The
changes that this version lacks are planned. The commit succeeds only if the replica still has this version. If another
process has committed meanwhile, the plan is made again.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from pgsieve.assets.steps.apply.by_files import (
    KEY_BYTES,
    FilesWriter,
    ManyChanges,
    StoredChanges,
    add_net_change,
)
from pgsieve.assets.steps.apply.by_key_parts import KeyPartsWriter
from pgsieve.assets.steps.apply.choice import ApplyChoice, apply_by_ways
from pgsieve.assets.steps.apply.damaged_tables import describe_missing_columns
from pgsieve.assets.steps.apply.in_process import read_few_changes
from pgsieve.assets.steps.apply.key_conflicts import INSERT_EXISTS, ConflictSearch, KeyConflictError
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableBatch, TableResult, read_heads
from pgsieve.assets.steps.apply.ways import Way
from pgsieve.assets.steps.apply.writer import ReplicaWriter
from pgsieve.assets.steps.history.shared_rows import SHARED_BYTES, SharedRows
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, describe_error_fully, is_damage
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.committers import InProcessCommitter, SparkCommitter
from pgsieve.resources.lake.delta.errors import LakeError, OvertakenError, retry_after_conflict
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import marks_rows_in_merge
from pgsieve.resources.lake.stores.store import RowGroup
from pgsieve.resources.work import name_jobs

#: Tables with many changes are applied one at a time. Each needs memory for all its keys in the batch, and keeps all
#: cores busy.
_LARGE_APPLY = Lock()


def find_lacking_changes(
    changes: Sequence[TableChanges], state: TableState, head: TableHead
) -> list[TableChanges]:
    """Find the changes of a table that its replica lacks."""
    since_lsn = max(state.lsn, head.position or 0)
    return [change for change in changes if change.slice_end > since_lsn]


@dataclass(frozen=True)
class Plan:
    """The changes of a batch that a replica lacks, and the state of its table.

    - `is_examined`: True if `Batch.examine` has searched the changes and found no key conflict (a change that gives a row
      a key that another row has)
    - `examined_changes`: the changes, with the net change (what they do together) that this search computed. None if it
      kept none, for example because they do not fit in memory.
    """

    pending: PendingChanges
    state: TableState
    is_examined: bool = False
    examined_changes: ManyChanges | None = None


@dataclass(frozen=True)
class AppliedChanges:
    """What a batch has done to one replica: its changes by key, and the rows that it added and removed.

    The same changes are then made to the table of all former and present versions of the rows (`history: scd2`).
    `slice_ends` are the ends of the slices that have the changes, and `groups` are the row groups of the change history
    that have them. Changes before the LSN `since_lsn` are left out, as the replica had them already.
    """

    slice_ends: Sequence[int]
    since_lsn: int
    groups: Sequence[RowGroup]
    keyed_changes: KeyedChanges
    shared_rows: SharedRows = field(default_factory=lambda: SharedRows(0))


class AppliedChangesByTable:
    """Keeps the `AppliedChanges` of a batch's tables, as far as they fit in memory.

    Several threads apply tables at the same time, so a lock guards each access.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._row_stores, self._changes_by_table = list[SharedRows](), dict[Name, AppliedChanges]()

    def make_row_store(self, key: Sequence[str]) -> SharedRows:
        """Return an empty store for the rows of one more table, whose key has these columns.

        It may use the memory that the other tables have left.
        """
        with self._lock:
            max_bytes = SHARED_BYTES - sum(rows.nbytes for rows in self._row_stores)
            self._row_stores.append(SharedRows(max_bytes, key))
            return self._row_stores[-1]

    def add(self, name: Name, applied_changes: AppliedChanges) -> None:
        """Add the changes of a table, unless the changes of all tables would take more than `KEY_BYTES`."""
        with self._lock:
            size = sum(changes.keyed_changes.nbytes for changes in self._changes_by_table.values())
            if size + applied_changes.keyed_changes.nbytes <= KEY_BYTES:
                self._changes_by_table[name] = applied_changes

    def get(self, name: Name) -> AppliedChanges | None:
        """The changes of a table; None if they are not in memory."""
        with self._lock:
            return self._changes_by_table.get(name)


@dataclass(frozen=True)
class Batch:
    """The changes in consecutive slices up to the LSN `end`.

    `changes` has an element per slice and table, the oldest slice first.

    `versioned_tables` are the tables with versions of rows (`history: scd2`). If the changes of such a table fit in memory,
    they are kept in `applied_changes`, so that they need not be read again for the versions of rows. Changes that
    tasks apply, each task for a part of the keys, are not in this process's memory, and are not kept.
    """

    subscription: str
    lake: Lake
    end: int
    changes: Sequence[TableChanges]
    versioned_tables: Collection[Name] = ()
    applied_changes: AppliedChangesByTable = field(default_factory=AppliedChangesByTable, compare=False)

    def plan(
        self, only_tables: Collection[Name] | None
    ) -> tuple[list[Plan], dict[Name, TableHead], dict[Name, TableState]]:
        """Plan which changes of the batch are applied to its tables, or to those in `only_tables`.

        Out: - the plans of the tables whose replicas lack changes
             - the heads of replicas that have some slices of the batch already. For example, an earlier run died, was
               restricted to some tables, or is still at work.
             - the states of all tables
        """
        lake, name = self.lake, self.subscription
        changes_by_table: dict[Name, list[TableChanges]] = {}
        for change in self.changes:
            changes_by_table.setdefault(change.name, []).append(change)
        # The heads are read before the states. A process that copies or alters a replica makes its table ready only after
        # the replica's commit. Suppose it was at work when the head was read, but the state says that the table is
        # ready. Then the head's version is outdated, and the commit of this plan fails.
        head_by_table = read_heads(lake, name, changes_by_table)
        state_by_table = TableStates(lake, name).read_newest()
        plans, head_by_table_ahead = [], {}
        for table, changes in changes_by_table.items():
            state, head = state_by_table.get(table), head_by_table[table]
            if state is None or not state.is_applied or changes[-1].slice_end <= state.lsn:
                continue
            missing_changes = find_lacking_changes(changes, state, head)
            if len(missing_changes) < len([c for c in changes if c.slice_end > state.lsn]):
                head_by_table_ahead[table] = head
            if missing_changes and (only_tables is None or table in only_tables):
                plans.append(Plan(PendingChanges(missing_changes, head), state))
        return plans, head_by_table_ahead, state_by_table

    def apply(self, plans: Sequence[Plan]) -> list[TableResult]:
        """Apply the plans; the result of a table that fails has the problem."""
        results = self.lake.map_in_parallel(self._apply_plan, plans)
        return [*self._apply_before_conflicts(results), *results]

    def _apply_before_conflicts(self, results: Sequence[TableResult]) -> list[TableResult]:
        """For each table with a key conflict, apply the slices before the conflict.

        Otherwise the rows of the replica would depend on how slices are grouped into batches.
        """
        earlier_results: list[TableResult] = []
        for name, conflict_lsn in ((result.name, result.conflict_lsn) for result in results):
            changes = [
                change
                for change in self.changes
                if conflict_lsn is not None and change.name == name and change.slice_end <= conflict_lsn
            ]
            if changes:
                batch = replace(self, end=changes[-1].slice_end, changes=changes)
                earlier_results += batch.apply(batch.plan([name])[0])
        return earlier_results

    def examine(
        self, plans_to_examine: Sequence[Plan]
    ) -> tuple[list[Plan], tuple[KeyConflictError, TableResult] | None]:
        """Search the plans for key conflicts, without applying anything.

        Returns the plans, with what the search found out. If there are conflicts, also returns the one with the lowest
        commit LSN and the result for its table.
        """

        def examine_plan(plan: Plan) -> tuple[Plan, KeyConflictError | None]:
            search = _make_conflict_search(self.subscription, self.lake, plan)
            if not search.can_conflict:
                return plan, None
            try:
                changes = self._examine_changes(search)
            except KeyConflictError as conflict:
                # Another process may have applied this change meanwhile. Then there is no conflict: the row with the
                # same key is the change's own.
                path = self.lake.paths.replica(self.subscription, *plan.pending.name)
                return plan, None if is_overtaken(self.lake, path, plan.pending.head) else conflict
            except TABLE_ERRORS:
                return plan, None  # `apply` fails too, and reports it.
            if changes is not None and changes.nbytes > KEY_BYTES // len(plans_to_examine):
                changes = None
            return replace(plan, is_examined=True, examined_changes=changes), None

        outcomes = self.lake.map_in_parallel(examine_plan, plans_to_examine)
        plans = [plan for plan, _ in outcomes]
        conflicts = [(error, plan) for plan, error in outcomes if error]
        if not conflicts:
            return plans, None
        error, plan = min(conflicts, key=lambda pair: pair[0].commit_lsn)
        return plans, (error, _make_conflict_result(plan.pending.name, error))

    def _examine_changes(self, search: ConflictSearch) -> ManyChanges | None:
        """Raise KeyConflictError if there is a conflict.

        Otherwise return the changes with their net change. None if tasks decide them, each task for a part of the keys, or if
        they are merged.
        """
        batch = search.batch

        def examine_by(choice: ApplyChoice) -> ManyChanges | None:
            with _large_apply_lock(batch, choice):
                match choice.means:
                    case StoredChanges() as stored_changes if choice.way == Way.KEY_PARTS:
                        KeyPartsWriter(batch, self.end).examine(stored_changes)
                    case StoredChanges() as stored_changes:
                        changes = add_net_change(batch, stored_changes)
                        if changes.net_change is not None:
                            search.refuse_change(changes.net_change.conflict)
                        return changes
                    case InProcessCommitter() as committer:
                        search.refuse(read_few_changes(batch, committer))
                    case SparkCommitter():
                        search.refuse(SparkChanges.of_history(batch))
            return None

        return apply_by_ways(batch, examine_by)

    def _apply_plan(self, plan: Plan) -> TableResult:
        """Apply a plan. If the table fails, the result has the problem.

        If another process commits to the replica first, the changes that the replica still lacks are planned again.
        """
        name, path = plan.pending.name, self.lake.paths.replica(self.subscription, *plan.pending.name)
        plans, definition = [plan], plan.state.definition

        def attempt() -> TableResult:
            if not plans:
                plans.extend(self.plan([name])[0])
            if not plans:
                # Another process has applied the changes, or is about to copy the table.
                head = self.lake.records.head(path)
                return TableResult(*name, head=head, is_overtaken=(head.position or 0) < self.end)
            present_plan = plans.pop()
            try:
                search = _make_conflict_search(self.subscription, self.lake, present_plan)
                return self._commit(search, present_plan)
            except TABLE_ERRORS as error:
                if is_overtaken(self.lake, path, present_plan.pending.head):
                    raise OvertakenError(path) from error
                raise

        try:
            with name_jobs(self.subscription, f"{quote_qualified(*name)} up to {format_lsn(self.end)}"):
                return retry_after_conflict(attempt)()
        except KeyConflictError as error:
            return _make_conflict_result(name, error)
        except TABLE_ERRORS as error:
            problem, is_damaged = describe_error_fully(self.lake, error, name), is_damage(error)
            # Engines report missing columns in different words. This message names them.
            if (
                not is_damaged
                and definition
                and (altered := describe_missing_columns(self.lake, path, definition))
            ):
                problem, is_damaged = altered, True
            return TableResult(*name, problem=problem, damaged=is_damaged)

    def _commit(self, search: ConflictSearch, plan: Plan) -> TableResult:
        """Apply a plan in one commit: as files, or as a MERGE."""
        batch, end = search.batch, self.end

        def commit_by(choice: ApplyChoice) -> TableResult:
            with _large_apply_lock(batch, choice):
                match choice.means:
                    case StoredChanges() as stored_changes if choice.way == Way.KEY_PARTS:
                        result = KeyPartsWriter(batch, end).apply(stored_changes)
                    case StoredChanges() as stored_changes:
                        result = self._commit_files(search, plan, stored_changes)
                    case InProcessCommitter() as committer:
                        changes = read_few_changes(batch, committer)
                        writer = _make_replica_writer(search, plan, end)
                        with batch.lake.access.translate_errors(batch.path):
                            result = writer.apply_by_key(changes)
                    case SparkCommitter():
                        result = _merge_by_spark(search, plan, end)
            reach(Failpoint.REPLICA_COMMITTED)
            return result

        # If the driver has decided the changes already, tasks need not.
        unsuited_ways = {} if plan.examined_changes is None else {Way.KEY_PARTS: "the driver has decided"}
        return apply_by_ways(batch, commit_by, unsuited_ways)

    def _commit_files(self, search: ConflictSearch, plan: Plan, stored_changes: StoredChanges) -> TableResult:
        """Apply a plan by writing files. Raises one of `UNSUITED_ERRORS` if that is not possible."""
        batch, changes = search.batch, plan.examined_changes or add_net_change(search.batch, stored_changes)
        if changes.net_change is not None and not plan.is_examined:
            search.refuse_change(changes.net_change.conflict)
        with batch.lake.access.translate_errors(batch.path):
            shared_rows = self._make_row_store(batch.pending, changes, batch.definition.key)
            writer = FilesWriter(batch.lake, batch.path, batch.pending, self.end, shared_rows)
            result = writer.apply(changes)
            self._keep_applied_changes(batch.pending, changes, shared_rows)
        return result

    def _make_row_store(
        self, pending: PendingChanges, changes: ManyChanges, key: Sequence[str]
    ) -> SharedRows | None:
        """Make a store for the rows that are added and removed; None if the table has no versions of rows."""
        if changes.net_change is None or pending.name not in self.versioned_tables:
            return None
        return self.applied_changes.make_row_store(key)

    def _keep_applied_changes(
        self, pending: PendingChanges, changes: ManyChanges, shared_rows: SharedRows | None
    ) -> None:
        keyed_changes = (
            changes.net_change.keyed_changes
            if changes.net_change is not None and shared_rows is not None
            else None
        )
        if keyed_changes is not None and shared_rows is not None:
            self.applied_changes.add(
                pending.name,
                AppliedChanges(
                    pending.slice_ends, pending.since_lsn, changes.stored.groups, keyed_changes, shared_rows
                ),
            )


def _make_conflict_result(name: Name, error: KeyConflictError) -> TableResult:
    is_insert = error.conflict_name == INSERT_EXISTS
    return TableResult(
        *name,
        problem=error.message,
        insert_exists=int(is_insert),
        update_exists=int(not is_insert),
        conflict_lsn=error.commit_lsn,
    )


def _make_conflict_search(subscription: str, lake: Lake, plan: Plan) -> ConflictSearch:
    pending, definition = plan.pending, plan.state.definition
    assert definition is not None
    path = lake.paths.replica(subscription, *pending.name)
    changes_path = lake.paths.change_history(subscription, *pending.name, definition.history.generation)
    return ConflictSearch(TableBatch(lake, path, changes_path, definition, pending))


def is_overtaken(lake: Lake, path: str, head: TableHead) -> bool:
    """Whether another process has written to a table since `head` was read. This write may have caused a failure."""
    try:
        return lake.records.head(path).version != head.version
    except LakeError:
        return False


def _large_apply_lock(batch: TableBatch, choice: ApplyChoice) -> AbstractContextManager[Any]:
    """Return `_LARGE_APPLY` if files are written for many changes, otherwise a context manager that does nothing."""
    writes_files = isinstance(choice.means, StoredChanges)
    is_large = writes_files and not batch.lake.policy.is_small(batch.pending.size_bytes)
    return _LARGE_APPLY if is_large else nullcontext()


def _make_replica_writer(search: ConflictSearch, plan: Plan, end: int) -> ReplicaWriter:
    batch = search.batch
    return ReplicaWriter(
        batch.lake, batch.path, batch.definition, batch.pending, end, None if plan.is_examined else search
    )


def _merge_by_spark(search: ConflictSearch, plan: Plan, end: int) -> TableResult:
    """Apply a plan by a MERGE of Spark. In a large replica it marks rows in deletion vectors.

    Enabling these is a commit of its own. Then OvertakenError is raised, and the changes are planned again.
    """
    batch = search.batch
    can_mark_rows = marks_rows_in_merge(batch.lake.records.size_bytes(batch.path))
    if can_mark_rows and batch.lake.enable_deletion_vectors(batch.path):
        raise OvertakenError(batch.path)
    changes = SparkChanges.of_history(batch, can_mark_rows=can_mark_rows)
    writer = _make_replica_writer(search, plan, end)
    with batch.lake.access.translate_errors(batch.path):
        return writer.apply_by_spark(changes)
