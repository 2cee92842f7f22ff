"""Applies the transformed changes of a subscription to its replica tables, batch by batch, and writes cuts.

A slice has the changes from one position of the slot to another. It is transformed if its changes were decoded and
filtered for the subscription; each table's changes are in its change history, a Delta table.

In: the transformed slices that the replicas lack. Out: per batch, one commit for each replica with changes, and a cut
after these commits.

A batch has several consecutive slices, and only the net change of all of them (what they do together) is applied. Each
commit to a replica has the end of the batch as its position, the LSN up to which the replica has all changes. It
succeeds only if the replica still has the Delta version from which the commit was planned. If another process has
committed first, the changes that the replica still lacks are planned again. When all replicas have the batch, a cut is
written to `_cuts`: the LSN at which the batch ends, and the Delta version of each replica. A table that fails is set
aside: it gets no more changes until it is copied again.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from pgsieve.assets.steps.apply.batch import AppliedChangesByTable, Batch, Plan
from pgsieve.assets.steps.apply.damaged_tables import (
    IntactVersions,
    describe_put_back_replica,
    set_aside_damaged_tables,
)
from pgsieve.assets.steps.apply.layout import follow_layout
from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.apply.row_versions import VersionsDuringApply
from pgsieve.assets.steps.apply.table_result import TableResult
from pgsieve.assets.steps.history.repaired_tables import find_repaired_tables, record_partial_histories
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.own_versions import read_present_versions
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    add_copy_command,
    find_newest_version,
)
from pgsieve.assets.steps.records.transformed_slices import TableChanges, TransformedSlices
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.changes.sent_as import SentCounts, sum_counts
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake

#: The most slices in a batch.
BATCH_SLICES = 8
#: The most changes of a table in a batch. Their keys are in memory at the same time. A batch of one slice may have more.
BATCH_CHANGES = 4_000_000


@dataclass
class ApplyResult:
    """The result of `apply` for each table with changes, and the newest cut (None if there is none yet).

    `sent_as` counts the changes of each table since the previous cut, by two operations: the one that the source sent, and
    the one that the row filters made of it. For example, an UPDATE that moves a row out of the filter becomes a DELETE. A
    change that the filters dropped counts too.
    """

    tables: dict[Name, TableResult] = field(default_factory=dict)
    cut: Cut | None = None
    sent_as: dict[Name, SentCounts] = field(default_factory=dict)


def divide_slices(ends: Sequence[int]) -> Iterable[Sequence[int]]:
    """Divide slices, given by their ends, into batches."""
    return [ends[first : first + BATCH_SLICES] for first in range(0, len(ends), BATCH_SLICES)]


def divide_batch(ends: Sequence[int], slices: Mapping[int, Sequence[TableChanges]]) -> list[Sequence[int]]:
    """Divide a batch into smaller ones, so that no table has more than `BATCH_CHANGES` changes in a batch.

    `ends` are the ends of the batch's slices, and `slices` maps the end of each slice to its changes. A slice is never
    divided, so a batch of a single slice may have more changes.
    """
    parts, counts = list[list[int]](), Counter[Name]()
    for end in ends:
        slice_counts = Counter({change.name: sum(change.sent_counts.values()) for change in slices[end]})
        counts += slice_counts
        if not parts or (slice_counts.total() and max(counts[name] for name in slice_counts) > BATCH_CHANGES):
            parts.append([])
            counts = slice_counts
        parts[-1].append(end)
    return [*parts]


def apply(
    subscription: Subscription,
    lake: Lake,
    log: Log,
    only_tables: Sequence[Name] | None = None,
    *,
    divide: Callable[[Sequence[int]], Iterable[Sequence[int]]] = divide_slices,
) -> ApplyResult:
    """Apply the transformed slices that the replicas lack, and write a cut if anything changed.

    With `only_tables`, slices are applied only to these tables. Then no cut is written, since the other tables lack changes.
    `divide` divides the slices into batches. The division does not change which rows the replicas have in the end.
    """
    lake.access.begin_writing()
    with subscription.slot_stream.source.hold_lock(subscription.name):
        subscription_apply = _Apply(subscription, lake, log, only_tables)
        subscription_apply.run(divide)
        return subscription_apply.result


class _Apply:
    """One call of `apply`: the transformed slices, the replicas, and the results so far."""

    def __init__(
        self, subscription: Subscription, lake: Lake, log: Log, only_tables: Sequence[Name] | None
    ) -> None:
        self._subscription, self._lake, self._log, self._only_tables = subscription, lake, log, only_tables
        self.result = ApplyResult(cut=Cuts(lake, subscription.name).read_last())
        record = TransformedSlices(lake, subscription.name)
        self._transformed_lsn = record.read_position()
        self._slices = record.read_slices(self.result.cut.lsn if self.result.cut else 0)
        states = self._prepare_replicas()
        # A table that another process makes ready later is left out: it would lack the batches that were applied before.
        self._tables = {n for n, s in states.items() if s.is_applied}
        self.result.sent_as = self._count_sent_as(states)
        #: Whether a cut may be written: no table is left out, and no other process copies tables or applies changes.
        self._can_cut = only_tables is None and not _is_copied_by_others(states, self._tables)
        self._replicas = _Replicas(subscription, lake, states, self.result.cut, log)
        #: The tables whose replicas may lack changes of the batch.
        self._lagging_tables = set[Name]()
        self._begin_row_versions()

    def _begin_row_versions(self) -> None:
        """Find the LSN up to which the versions of each table's rows (`history: scd2`) have the changes.

        If `check --repair` has corrected a replica, the versions of its rows begin anew with its present rows.
        """
        replicas, subscription = self._replicas, self._subscription.name
        for name in self._repaired_tables:
            head = self._lake.records.head(self._lake.paths.replica(subscription, *name))
            self._set_aside_if_put_back(name, head)
        self._set_aside(replicas.row_versions.begin(replicas.states, self._repaired_tables))

    def _prepare_replicas(self) -> dict[Name, TableState]:
        """Set damaged tables aside, find repaired replicas, and set the Delta properties of the layout.

        Returns the states of all tables.
        """
        changed_tables = {
            change.name for changes in self._slices.values() for change in changes if change.has_changes
        }
        cut = self.result.cut
        states = set_aside_damaged_tables(self._subscription, self._lake, cut, changed_tables)
        self._repaired_tables = find_repaired_tables(self._subscription, self._lake, states, cut)
        if record_partial_histories(
            self._subscription.name, self._lake, [states[name] for name in self._repaired_tables], self._log
        ):
            states = TableStates(self._lake, self._subscription.name).read_newest()
        if versions_by_table := follow_layout(self._subscription, self._lake, states.values()):
            # Only properties have changed: the new versions have the same rows as the cut's.
            versions = cut.tables if cut else {}
            renew_cut(
                self._lake,
                self._subscription,
                {
                    name: new_version
                    for name, (old_version, new_version) in versions_by_table.items()
                    if (versions.get(name), new_version) == (old_version, old_version + 1)
                },
                has_same_rows=True,
            )
            self.result.cut = Cuts(self._lake, self._subscription.name).read_last()
        return states

    def _count_sent_as(self, states: Mapping[Name, TableState]) -> dict[Name, SentCounts]:
        """Count the changes for `ApplyResult.sent_as`; changes from before a table's copy do not count."""
        counts = dict[Name, SentCounts]()
        for change in (c for changes in self._slices.values() for c in changes if c.name in self._tables):
            if change.slice_end > states[change.name].lsn:
                counts[change.name] = sum_counts(counts.get(change.name, {}), change.sent_as)
        return counts

    def run(self, divide: Callable[[Sequence[int]], Iterable[Sequence[int]]]) -> None:
        """Apply batch by batch, and write a cut after each batch.

        `divide` divides the ends of the slices into batches. With `disable_on_error`, the first error of a change ends
        the work.
        """
        slices = self._slices
        batches = deque(part for ends in divide(list(slices)) for part in divide_batch(ends, slices))
        while batches:
            ends = batches.popleft()
            changes = [
                change
                for end in ends
                for change in slices[end]
                if change.has_changes and change.name in self._tables
            ]
            versioned_tables = self._replicas.row_versions.position_by_table
            batch = Batch(self._subscription.name, self._lake, ends[-1], changes, versioned_tables)
            plans = self._plan(batch)
            if self._subscription.disable_on_error:
                plans, failure = batch.examine(plans)
                if failure is not None:
                    conflict, failed_result = failure
                    if earlier_ends := [end for end in ends if end <= conflict.commit_lsn]:
                        batches.extendleft([[end for end in ends if end not in earlier_ends], earlier_ends])
                        continue
                    self._count_result(failed_result)
                    self._disable_subscription(failed_result.name, conflict.message)
                    return
            self._apply_batch(batch, plans)
            if self._is_disabled():
                return  # Some replicas have the batch, others have nothing of it. So no cut is written.
            self._apply_to_row_versions(changes, batch.applied_changes)
            tables = f"{quantity(len(plans), 'table')} of {self._subscription.name}"
            self._log(f"applied everything up to {format_lsn(batch.end)} to {tables}")
            self._replicas.record_history_positions(changes)
            self._write_cut(batch.end)
        progress = ReplicaProgress(self._subscription, self._lake)
        self._write_cut(progress.find_complete_lsn(max(self._transformed_lsn, *slices, 0)))

    def _plan(self, batch: Batch) -> list[Plan]:
        """Plan a batch. A table whose replica was put back to an earlier version meanwhile is set aside."""
        plans, head_by_table_ahead, states = batch.plan(self._only_tables)
        self._replicas.states = states
        self._can_cut = self._can_cut and not _is_copied_by_others(states, self._tables)
        put_back_tables = {
            name for name, head in head_by_table_ahead.items() if self._set_aside_if_put_back(name, head)
        }
        skipped_tables = {n for n in states if self._only_tables is not None and n not in self._only_tables}
        self._lagging_tables = put_back_tables | skipped_tables
        return [plan for plan in plans if plan.pending.name not in put_back_tables]

    def _apply_batch(self, batch: Batch, plans: Sequence[Plan]) -> None:
        """Apply the plans of a batch.

        A table that fails is set aside. With `disable_on_error`, its error disables the subscription instead.
        """
        former_heads = {plan.pending.name: plan.pending.head for plan in plans}
        for result in batch.apply(plans):
            outcome = result
            if result.problem is None:
                problem = self._replicas.advance(result.name, former_heads[result.name], result.head)
                outcome = replace(result, problem=problem, damaged=problem is not None)
                self._can_cut = self._can_cut and not result.is_overtaken
            elif self._subscription.disable_on_error and not result.damaged:
                self._disable_subscription(result.name, result.problem)
            else:
                self._replicas.set_aside(result.name, result.problem)
            if outcome.problem is not None or result.is_overtaken:
                self._lagging_tables.add(result.name)
            self._count_result(outcome)

    def _apply_to_row_versions(
        self, changes: Sequence[TableChanges], applied_changes: AppliedChangesByTable
    ) -> None:
        """Apply a batch to the versions of rows. A table whose versions cannot be written is set aside."""
        row_versions, states = self._replicas.row_versions, self._replicas.states
        self._set_aside(row_versions.follow(states, changes, self._lagging_tables, applied_changes))

    def _set_aside_if_put_back(self, name: Name, head: TableHead) -> bool:
        """Set a table aside if its replica was put back to an earlier version, and return whether it was.

        `head` is the replica's present Delta version and position. The result gets the problem.
        """
        if (problem := self._replicas.advance(name, None, head)) is None:
            return False
        self._count_result(TableResult(*name, problem=problem, damaged=True))
        return True

    def _set_aside(self, problems: Mapping[Name, str]) -> None:
        """Set aside the tables whose versions of rows have problems."""
        for name, problem in problems.items():
            self._replicas.set_aside(name, problem)
            self._count_result(TableResult(*name, problem=problem, damaged=True))

    def _count_result(self, result: TableResult) -> None:
        tables = self.result.tables
        tables[result.name] = _combine_table_results(tables.get(result.name), result)

    def _disable_subscription(self, table: Name, problem: str) -> None:
        """Disable the subscription. The stored change would fail again, so the reason says how to copy the table again."""
        subscription = self._subscription.name
        SubscriptionRecord(self._lake, subscription).disable(add_copy_command(subscription, table, problem))

    def _is_disabled(self) -> bool:
        """Whether a table's error has disabled the subscription."""
        tables = self.result.tables.values()
        return self._subscription.disable_on_error and any(
            result.problem and not result.damaged for result in tables
        )

    def _write_cut(self, lsn: int) -> None:
        """Write a cut at an LSN if `_can_cut`."""
        if self._can_cut:
            self._replicas.write_cut(self.result, lsn)


class _Replicas:
    """The replicas of a subscription while batches are applied: their states, and their Delta versions for the next cut."""

    def __init__(
        self,
        subscription: Subscription,
        lake: Lake,
        states: dict[Name, TableState],
        cut: Cut | None,
        log: Log,
    ) -> None:
        self.states = states
        self._subscription, self._lake, self._cut = subscription, lake, cut
        self._versions: dict[Name, int] = dict(cut.tables) if cut else {}
        self._intact_versions = IntactVersions(lake, cut, self._find_path, cut.tables if cut else {})
        #: The positions that the change histories have reached, without those of tables that were copied since the cut.
        histories = cut.histories.items() if cut else ()
        self._position_by_history = {
            n: at for n, at in histories if n in states and cut and cut.has_state(states[n])
        }
        self.row_versions = VersionsDuringApply(subscription, lake, cut, log)
        #: The greatest position of the replicas that were read.
        self._max_position = 0

    def advance(self, name: Name, former_head: TableHead | None, head: TableHead) -> str | None:
        """Check and record the new Delta version of a table's replica.

        If the replica was put back to an earlier version, set the table aside and return the problem; otherwise None.
        """
        problem = self._find_problem(name, former_head, head)
        self._record_head(name, head, problem)
        return problem

    def _find_problem(self, name: Name, former_head: TableHead | None, head: TableHead) -> str | None:
        state = self.states[name]
        return (
            None
            if self._intact_versions.advance(state, former_head, head)
            else describe_put_back_replica(self._find_path(state))
        )

    def _find_path(self, state: TableState) -> str:
        return self._lake.paths.replica(self._subscription.name, *state.name)

    def _record_head(self, name: Name, head: TableHead, problem: str | None) -> None:
        if problem is not None:
            self.set_aside(name, problem)
            return
        self._versions[name] = head.version
        self._max_position = max(self._max_position, head.position or 0)

    def record_history_positions(self, changes: Sequence[TableChanges]) -> None:
        """Record that the change histories have the changes of a batch."""
        self._position_by_history |= {change.name: change.slice_end for change in changes}

    def set_aside(self, name: Name, problem: str) -> None:
        """Set a table aside, so that nothing more is applied to it."""
        self.states[name] = self.states[name].with_problem(self._subscription.name, problem)
        TableStates(self._lake, self._subscription.name).append([self.states[name]])

    def write_cut(self, result: ApplyResult, lsn: int) -> None:
        """Write a cut at an LSN, unless a replica has changes from after this LSN."""
        max_copy_lsn = max((s.lsn for s in self.states.values() if s.state == SyncState.READY), default=0)
        if max(max_copy_lsn, self._max_position) <= lsn and self._read_copied_versions(lsn):
            ready_tables = [name for name, state in self.states.items() if state.state == SyncState.READY]
            tables = {name: self._versions[name] for name in ready_tables}
            states_version = find_newest_version(self.states.values())
            versioned, scd2 = (
                {name: number for name, number in numbers.items() if name in tables}
                for numbers in (self.row_versions.position_by_table, self.row_versions.version_by_table)
            )
            time, histories = datetime.now(UTC), dict(self._position_by_history)
            cut = Cut(lsn, tables, time, states_version, histories=histories, versioned=versioned, scd2=scd2)
            _write_cut(self._lake, self._subscription, result, cut)
            self._cut = result.cut

    def _read_copied_versions(self, lsn: int) -> bool:
        """Read the Delta versions of the tables that were copied, or got another definition, since the cut.

        Returns False if the replica of such a table has a position beyond the LSN.
        """
        cut_versions = self._cut.tables if self._cut else {}
        path_by_table = {}
        for name, state in self.states.items():
            if state.state != SyncState.READY:
                continue
            is_copied = self._cut is None or not self._cut.has_state(state)
            if name not in self._versions or (is_copied and self._versions[name] == cut_versions.get(name)):
                path_by_table[name] = self._lake.paths.replica(self._subscription.name, *name)
        head_by_table = dict(
            zip(path_by_table, self._lake.read_heads(list(path_by_table.values())), strict=True)
        )
        if any((head.position or 0) > lsn for head in head_by_table.values()):
            return False
        # Each check waits for an answer of the store, so the checks run in parallel.
        problems = self._lake.map_in_parallel(
            lambda name: self._find_problem(name, None, head_by_table[name]), list(head_by_table)
        )
        for name, problem in zip(head_by_table, problems, strict=True):
            self._record_head(name, head_by_table[name], problem)
        return True


def _is_copied_by_others(states: Mapping[Name, TableState], applied_tables: Collection[Name]) -> bool:
    """Whether another process has copied a table since `apply` began, so that the table was left out."""
    return any(
        state.state == SyncState.FINISHED_COPY
        or (state.state == SyncState.READY and name not in applied_tables)
        for name, state in states.items()
    )


def _write_cut(lake: Lake, subscription: Subscription, result: ApplyResult, new_cut: Cut) -> None:
    """Write a cut, unless no table is in it, or the newest cut has the same versions."""
    last_cut, tables = result.cut, new_cut.tables
    contents = (tables, new_cut.versioned, new_cut.scd2)
    if not tables or (last_cut and (last_cut.tables, last_cut.versioned, last_cut.scd2) == contents):
        return
    cuts = Cuts(lake, subscription.name)
    cut = cuts.make_cut(new_cut.lsn, tables, new_cut.states, last_cut)
    result.cut = replace(
        cut,
        histories=new_cut.histories,
        records=read_present_versions(lake, subscription),
        versioned=new_cut.versioned,
        scd2=new_cut.scd2,
        rows_at=new_cut.rows_at,
    )
    cuts.append(result.cut)
    reach(Failpoint.CUT_WRITTEN)


def renew_cut(
    lake: Lake, subscription: Subscription, version_by_table: Mapping[Name, int], *, has_same_rows: bool
) -> None:
    """Write the newest cut again with other Delta versions of some tables.

    `has_same_rows` says that these versions have the same rows as those in the cut.
    """
    if (cut := Cuts(lake, subscription.name).read_last()) is not None:
        renewed_versions = {name: version_by_table.get(name, version) for name, version in cut.tables.items()}
        renewed_cut = replace(cut, tables=renewed_versions, rows_at=cut.rows_time if has_same_rows else None)
        _write_cut(lake, subscription, ApplyResult(cut=cut), renewed_cut)


def combine_results(first: ApplyResult, second: ApplyResult) -> ApplyResult:
    """Combine the results of two successive calls of `apply`."""
    tables = dict(first.tables)
    for name, table_result in second.tables.items():
        tables[name] = _combine_table_results(tables.get(name), table_result)
    sent_as = {
        name: sum_counts(first.sent_as.get(name, {}), counts) for name, counts in second.sent_as.items()
    }
    return ApplyResult(tables, second.cut or first.cut, first.sent_as | sent_as)


def _combine_table_results(first: TableResult | None, second: TableResult) -> TableResult:
    if first is None:
        return second
    return TableResult(
        second.schema,
        second.table,
        inserted=first.inserted + second.inserted,
        updated=first.updated + second.updated,
        deleted=first.deleted + second.deleted,
        truncated=first.truncated or second.truncated,
        missing=first.missing + second.missing,
        insert_exists=first.insert_exists + second.insert_exists,
        update_exists=first.update_exists + second.update_exists,
        head=second.head,
        problem=second.problem or first.problem,
        damaged=second.damaged or first.damaged,
        through=tuple(sorted({*first.through, *second.through})),
    )
