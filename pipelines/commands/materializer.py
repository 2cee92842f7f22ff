"""Does the work of a run for one subscription.

A slice is the changes between two positions of the slot. To transform a slice means to decode its messages, and to
apply the row filters. If an error concerns one table, the table is set aside: it gets no more changes until it is
copied again.

In: a subscription of a project
Out: - materializations of assets, by Dagster runs in this process
     - a `SubscriptionRun`, the result of the run for this subscription
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import dagster as dg

from pgsieve.assets.checks import read_reported_problems
from pgsieve.assets.encoded_names import encode_partition_key
from pgsieve.assets.initial_sync import (
    ONLY_MISSING_TAG,
    divide_into_ranges,
    initial_sync_asset,
    range_tags,
    tables_partitions,
)
from pgsieve.assets.outcome import StepCallbacks, find_subscription_problems
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables, split_tables
from pgsieve.assets.runless_events import report_cut
from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.operations.registration import Registration
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, disabled_error
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TableChanges, TransformedSlices
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.translator import AssetKind, subscription_asset
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.decoding.changes.sent_as import (
    SentCounts,
    count_by_result,
    count_received,
    group_by_origin,
    sum_counts,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.commands.in_process import DEFAULT_NAMES, materialize
from pgsieve.pipelines.commands.results import (
    AppliedTable,
    CopiedTable,
    Progress,
    SubscriptionRun,
    TransformedTable,
    WorkCost,
)
from pgsieve.pipelines.project import Project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.waits import BRIEF_SECONDS, PATIENT_SECONDS
from pgsieve.resources.tracing import span
from pgsieve.resources.work import Work, measure_work

_logger = logging.getLogger(__name__)


class Materializer:
    """Does the work of a run for one subscription, and collects the results for `summarize`."""

    def __init__(
        self,
        project: Project,
        subscription: Subscription,
        instance: dg.DagsterInstance,
        progress: Progress,
        waiting_tables: dict[Name, tuple[str, ...]] | None = None,
    ) -> None:
        self.project = project
        self.subscription = subscription
        self.instance = instance
        self.progress = progress
        self.lake: Lake = project.lake.open()
        self.cut_before = Cuts(self.lake, subscription.name).read_last()
        self.notice_before = SubscriptionRecord(self.lake, subscription.name).read_state().notice
        self.copied_tables: list[CopiedTable] = []
        self.applied_tables: dict[tuple[str, str], AppliedTable] = {}
        #: The warnings that were found when the publications were examined last.
        self.warnings: list[str] = []
        self.sent_counts: dict[Name, SentCounts] = {}
        #: What it has cost so far to copy tables, and to transform and apply changes.
        self.total_work = Work()
        #: Maps each table whose copy has to wait to the ids of the transactions for which it waits. There are no ids if
        #: it waits for a foreign server that does not answer. `copy` leaves these tables out.
        self.waiting_tables: dict[Name, tuple[str, ...]] = {} if waiting_tables is None else waiting_tables
        #: True if a copy may wait for other transactions for a long time.
        self.is_patient = False

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.subscription.name

    @property
    def is_enabled(self) -> bool:
        """True if the subscription is enabled. It is read anew, because an error may just have disabled the subscription."""
        return SubscriptionRecord(self.lake, self.subscription.name).read_state().enabled

    def copy(self, chosen_tables: Sequence[tuple[str, str]] = ()) -> None:
        """Copy tables, by materialising the initial sync of the subscription.

        These are the tables that `chosen_tables` names; if it is empty, all tables that need a copy.
        """
        if not self.is_enabled:
            return
        names = chosen_tables or self._find_tables_to_copy()
        if not names:
            return
        wait_seconds = PATIENT_SECONDS if self.is_patient else BRIEF_SECONDS
        asset = initial_sync_asset(
            self.subscription,
            DEFAULT_NAMES,
            show_progress=self.progress.tell,
            seconds=wait_seconds,
            callbacks=StepCallbacks(report=self._record_copies, add_work=self.total_work.add),
        )
        only_missing_tags = {} if chosen_tables else {ONLY_MISSING_TAG: "true"}
        partitions_definition = tables_partitions(self.subscription.name)
        assert partitions_definition.name is not None
        partition_keys = {encode_partition_key(name) for name in names}
        self.instance.add_dynamic_partitions(partitions_definition.name, sorted(partition_keys))
        ordered_keys = list(partitions_definition.get_partition_keys(dynamic_partitions_store=self.instance))
        for key_range in divide_into_ranges(ordered_keys, partition_keys):
            task = f"copy {quantity(len(key_range), 'table')} of {self.subscription.name}"
            materialize(
                self.instance,
                self.project,
                [asset],
                self.progress,
                task,
                range_tags(key_range) | only_missing_tags,
            )

    def _find_tables_to_copy(self) -> list[Name]:
        """The tables that need a copy, except those whose copy has to wait."""
        self.warnings.clear()
        names = find_tables_to_copy(self.subscription, self.lake, self.warnings.append)
        return [name for name in names if name not in self.waiting_tables]

    def _record_copies(self, results: Sequence[CopyResult]) -> None:
        """Record which tables were copied, and which have to wait."""
        self.waiting_tables |= {
            (result.schema, result.table): result.awaited_transactions
            for result in results
            if result.awaited_transactions or result.must_be_repeated
        }
        self.copied_tables += [
            CopiedTable(result.schema, result.table, result.rows, result.seconds)
            for result in results
            if not result.problem
        ]

    def retry(self, names: Sequence[Name]) -> None:
        """Let the next copy include these tables, which had to wait, and let it wait longer for other transactions."""
        for name in names:
            del self.waiting_tables[name]
        self.is_patient |= bool(names)

    def has_to_copy(self) -> bool:
        """True if a table needs a copy, and the copy does not have to wait."""
        return self.is_enabled and bool(self._find_tables_to_copy())

    def get_if_enabled(self) -> "Materializer | None":
        """The materializer itself; None if its subscription is disabled."""
        return self if self.is_enabled else None

    def make_table_changes_asset(
        self,
        receive_error: Callable[[Exception], None],
        prefetched_work: PrefetchedWork[Sequence[TableChanges]] | None,
    ) -> dg.AssetsDefinition:
        """Make the asset of the transformed changes.

        - `receive_error`: gets the error of the step, if it fails
        - `prefetched_work`: a function that waits for the result of the step's work; None if the step does the work itself
        """
        callbacks = StepCallbacks(
            report=self._record_transformed, add_work=self.total_work.add, fail=receive_error
        )
        return table_changes_asset(
            self.subscription, DEFAULT_NAMES, wait_for_prefetched_work=prefetched_work, callbacks=callbacks
        )

    def transform_changes(self, log: Log) -> Sequence[TableChanges]:
        """Do the work of the asset that `make_table_changes_asset` makes."""
        return transform(self.subscription, self.lake, log)

    def make_replica_tables_asset(
        self,
        changed_tables: Tables,
        unchanged_tables: Tables,
        receive_error: Callable[[Exception], None],
        prefetched_work: PrefetchedWork[tuple[Cut | None, ApplyResult]] | None,
    ) -> dg.AssetsDefinition:
        """Make the assets of the cut and of the replicas that have changed.

        A cut names a version of each replica; together these versions equal the publisher at one LSN. The cut
        includes `unchanged_tables`, too. `receive_error` and `prefetched_work` are as in `make_table_changes_asset`.
        """
        return replica_tables_asset(
            self.subscription,
            changed_tables,
            DEFAULT_NAMES,
            unchanged_tables=unchanged_tables,
            wait_for_prefetched_work=prefetched_work,
            callbacks=StepCallbacks(
                report=self._record_applied, add_work=self.total_work.add, fail=receive_error
            ),
        )

    def apply_changes(self, log: Log) -> tuple[Cut | None, ApplyResult]:
        """Do the work of the asset that `make_replica_tables_asset` makes.

        Returns the cut before the work, and the result.
        """
        return Cuts(self.lake, self.name).read_last(), apply(self.subscription, self.lake, log)

    def split_published_tables(
        self, read_published_tables: Callable[[], Mapping[str, Tables]]
    ) -> tuple[Tables, Tables]:
        """Divide the replicas into those with changes to report, and the others.

        Both parts are empty if there are no changes. `read_published_tables` returns the tables of each subscription. It is called
        only if there are changes, because it asks the publisher. A subscription that an error has just disabled may
        still have changes to report: those that were applied before the error. A table that
        was set aside counts as changed until a run has reported its problem.
        """
        name = self.subscription.name
        paths = [record_type(self.lake, name).path for record_type in (Cuts, TransformedSlices, TableStates)]
        with self.lake.consistent_read(*paths):
            changed_names = (
                ReplicaProgress(self.subscription, self.lake).find_tables_beyond_cut()
                | self._find_newly_set_aside()
            )
        if not changed_names:
            return {}, {}
        return split_tables(read_published_tables()[self.subscription.name], changed_names)

    def _find_newly_set_aside(self) -> set[Name]:
        """The tables that are set aside, and whose problems no run has reported yet."""
        states, record = (
            TableStates(self.lake, self.name).read_newest(),
            SubscriptionRecord(self.lake, self.name),
        )
        problems = find_subscription_problems(self.name, self.lake, states, record.read_state())
        key = DEFAULT_NAMES.asset_key(subscription_asset(self.subscription, AssetKind.CUT))
        reported_texts = read_reported_problems(self.instance, key) if problems else set()
        return {
            name for name, problem in problems.items() if name is not None and problem not in reported_texts
        }

    def report_cut(self) -> None:
        """Report the cut without a Dagster run, because no table has changed.

        If tables have left the publications, a new cut without them is made first.
        """
        self._record_applied(apply(self.subscription, self.lake, _logger.info))
        report_cut(self.instance, self.subscription, self.lake, DEFAULT_NAMES)

    def apply_slice(self) -> tuple[Sequence[TableChanges], ApplyResult] | None:
        """Transform and apply a slice without a Dagster run. Returns None if the subscription is disabled."""
        if not self.is_enabled:
            return None
        with measure_work() as cost:
            with span("transform", subscription=self.name):
                changes = self.transform_changes(_logger.info)
            with span("apply", subscription=self.name):
                result = apply(self.subscription, self.lake, _logger.info)
        self.total_work.add(cost)
        self._record_transformed(changes)
        self._record_applied(result)
        return changes, result

    def _record_transformed(self, changes: Sequence[TableChanges]) -> None:
        """Add the counts of each table to the counts so far."""
        for change in changes:
            self.sent_counts[change.name] = sum_counts(self.sent_counts.get(change.name, {}), change.sent_as)

    def _record_applied(self, result: ApplyResult) -> None:
        """Add the changes of each replica to those that were applied before."""
        for name, table_result in result.tables.items():
            if not (
                table_result.inserted
                or table_result.updated
                or table_result.deleted
                or table_result.truncated
            ):
                continue
            earlier_counts = self.applied_tables.get(name)
            self.applied_tables[name] = AppliedTable(
                *name,
                inserted=table_result.inserted + (earlier_counts.inserted if earlier_counts else 0),
                updated=table_result.updated + (earlier_counts.updated if earlier_counts else 0),
                deleted=table_result.deleted + (earlier_counts.deleted if earlier_counts else 0),
                truncated=table_result.truncated or bool(earlier_counts and earlier_counts.truncated),
                version=result.cut.tables.get(name, table_result.head.version)
                if result.cut
                else table_result.head.version,
            )

    def register(self) -> None:
        """Register the replicas in Spark's catalog, if the configuration has a template for their names."""
        if self.project.names is not None and self.is_enabled:
            Registration(self.subscription, self.lake, self.project.names).register()

    def needs_another_copy(self) -> bool:
        """True if a table needs a copy after the changes were applied, for example because its columns have changed.

        Tables whose copy has to wait do not count.
        """
        table_states = TableStates(self.lake, self.subscription.name).read_newest().values()
        return (
            any(
                table_state.state not in {SyncState.READY, SyncState.REMOVED, SyncState.SET_ASIDE}
                for table_state in table_states
            )
            and self.has_to_copy()
        )

    def summarize(self) -> SubscriptionRun:
        """The result so far."""
        name = self.subscription.name
        cuts, table_states, work = Cuts(self.lake, name), TableStates(self.lake, name), self.total_work
        record, change_log = (
            SubscriptionRecord(self.lake, name),
            ChangeLog(self.lake, self.subscription.slot_stream),
        )
        sequences = Sequences(self.lake, name)
        with self.lake.consistent_read(
            cuts.path, table_states.path, record.path, change_log.path, sequences.path
        ):
            cut, states, subscription_state = (
                cuts.read_last(),
                table_states.read_newest().values(),
                record.read_state(),
            )
            position = change_log.read_position() or 0
            cut_version = self.lake.records.version(cuts.path) if cut else None
            sequence_problems = sequences.describe_problems()
        problems = tuple(
            f"{quote_qualified(*state.name)} is {state.state.meaning}: {state.reason}"
            for state in states
            if state.reason and state.state not in {SyncState.READY, SyncState.REMOVED}
        )
        problems += tuple(sequence_problems)
        if not subscription_state.enabled:
            problems += (str(disabled_error(self.subscription.name, subscription_state).message),)
        return SubscriptionRun(
            name=self.subscription.name,
            copied=tuple(self.copied_tables),
            tables=tuple(self.applied_tables.values()),
            from_lsn=format_lsn(self.cut_before.lsn if self.cut_before else 0),
            # A disabled subscription has not applied what the change log has.
            to_lsn=format_lsn(max(position if subscription_state.enabled else 0, cut.lsn if cut else 0)),
            cut_version=cut_version,
            changed=bool(self.copied_tables or self.applied_tables),
            problems=problems,
            warnings=tuple(self.warnings),
            notice=subscription_state.notice if subscription_state.notice != self.notice_before else None,
            spent=WorkCost(work.engine_text, work.task_count, work.written_bytes, work.seconds),
            transformed=tuple(
                _make_transformed_table(name, *origin, counts)
                for name, table_counts in sorted(self.sent_counts.items())
                for origin, counts in group_by_origin(table_counts).items()
            ),
        )


def _make_transformed_table(
    name: Name, source: str, row_filter: str | None, counts: SentCounts
) -> TransformedTable:
    """Make the counts of the changes that came from one relation (`source`) and met one row filter."""
    received, updates = count_received(counts), count_by_result(counts)
    return TransformedTable(
        *name,
        source=source,
        row_filter=row_filter,
        inserts=received["insert"],
        updates=received["update"],
        deletes=received["delete"],
        updates_sent_as_insert=updates["insert"],
        updates_sent_as_update=updates["update"],
        updates_sent_as_delete=updates["delete"],
        updates_not_sent=updates[None],
    )
