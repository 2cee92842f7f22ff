"""A run's work for one subscription: its assets, their steps, and the result.

In: a subscription of a project. Out: materialised assets, by runs of Dagster in this process, and a
`SubscriptionRun`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import dagster as dg

from pgsieve.assets.checks import reported_problems
from pgsieve.assets.dagster_names import encode_partition_key
from pgsieve.assets.initial_sync import (
    LACKING_TAG,
    initial_sync_asset,
    partition_ranges,
    range_tags,
    tables_partitions,
)
from pgsieve.assets.outcome import StepCallbacks, subscription_problems
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables, split_tables
from pgsieve.assets.runless_events import report_cut
from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, apply
from pgsieve.assets.steps.initial_sync.copy import tables_to_copy
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
    counts_by_origin,
    counts_by_result,
    received_counts,
    sum_counts,
)
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.commands.in_process import NAMING, materialize
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
from pgsieve.resources.work import Work, measure

_logger = logging.getLogger(__name__)


class Materializer:
    """Does a run's work for one subscription, and collects its results for `summary`."""

    def __init__(
        self,
        project: Project,
        subscription: Subscription,
        dagster: dg.DagsterInstance,
        progress: Progress,
        waiting_tables: dict[Name, tuple[str, ...]] | None = None,
    ) -> None:
        self.project, self.subscription, self.dagster, self.progress = (
            project,
            subscription,
            dagster,
            progress,
        )
        self.lake: Lake = project.lake.open()
        self.cut_before = Cuts(self.lake, subscription.name).last()
        self.notice_before = SubscriptionRecord(self.lake, subscription.name).state().notice
        self.copied: list[CopiedTable] = []
        self.applied: dict[tuple[str, str], AppliedTable] = {}
        #: The warnings of the newest examination of the publications.
        self.warnings: list[str] = []
        self.sent_as: dict[Name, SentCounts] = {}
        #: The costs of copies, transformations and applies so far.
        self.work = Work()
        #: The tables whose copy waits, which `copy` leaves out: with the ids of the transactions that they
        #: wait for, or without ids if they wait for a foreign server.
        self.waiting_tables: dict[Name, tuple[str, ...]] = {} if waiting_tables is None else waiting_tables
        #: Whether a copy may wait long for other transactions.
        self.is_patient = False

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.subscription.name

    @property
    def is_enabled(self) -> bool:
        """Whether the subscription is enabled; an error may just have disabled it."""
        return SubscriptionRecord(self.lake, self.subscription.name).state().enabled

    def copy(self, chosen: Sequence[tuple[str, str]] = ()) -> None:
        """Materialise the initial sync of the chosen tables; by default, of all tables that need it."""
        if not self.is_enabled:
            return
        names = chosen or self._tables_to_copy()
        if not names:
            return
        seconds = PATIENT_SECONDS if self.is_patient else BRIEF_SECONDS
        asset = initial_sync_asset(
            self.subscription,
            NAMING,
            tell=self.progress.tell,
            seconds=seconds,
            callbacks=StepCallbacks(report=self._record_copies, add_work=self.work.add),
        )
        lacking_tags = {} if chosen else {LACKING_TAG: "true"}
        partitions = tables_partitions(self.subscription.name)
        assert partitions.name is not None
        keys = {encode_partition_key(name) for name in names}
        self.dagster.add_dynamic_partitions(partitions.name, sorted(keys))
        order = list(partitions.get_partition_keys(dynamic_partitions_store=self.dagster))
        for key_range in partition_ranges(order, keys):
            task = f"copy {quantity(len(key_range), 'table')} of {self.subscription.name}"
            materialize(
                self.dagster, self.project, [asset], self.progress, task, range_tags(key_range) | lacking_tags
            )

    def _tables_to_copy(self) -> list[Name]:
        self.warnings.clear()
        needed = tables_to_copy(self.subscription, self.lake, self.warnings.append)
        return [name for name in needed if name not in self.waiting_tables]

    def _record_copies(self, copied: Sequence[CopyResult]) -> None:
        self.waiting_tables |= {(c.schema, c.table): c.awaits for c in copied if c.awaits or c.again}
        self.copied += [CopiedTable(c.schema, c.table, c.rows, c.seconds) for c in copied if not c.problem]

    def retry(self, names: Sequence[Name]) -> None:
        """Let the next copy include these waiting tables, and wait longer for other transactions."""
        for name in names:
            del self.waiting_tables[name]
        self.is_patient |= bool(names)

    def has_to_copy(self) -> bool:
        """Whether a table needs a copy that does not have to wait."""
        return self.is_enabled and bool(self._tables_to_copy())

    def if_enabled(self) -> "Materializer | None":
        """The materializer; None if its subscription is disabled."""
        return self if self.is_enabled else None

    def table_changes(
        self, fail: Callable[[Exception], None], done: PrefetchedWork[Sequence[TableChanges]] | None
    ) -> dg.AssetsDefinition:
        """The asset of the transformed changes; with `done`, its step takes the result of prefetched work."""
        callbacks = StepCallbacks(report=self._record_transformed, add_work=self.work.add, fail=fail)
        return table_changes_asset(self.subscription, NAMING, prefetched=done, callbacks=callbacks)

    def transform_changes(self, log: Log) -> Sequence[TableChanges]:
        """The work of the asset `table_changes`."""
        return transform(self.subscription, self.lake, log)

    def replica_tables(
        self,
        tables: Tables,
        unchanged: Tables,
        fail: Callable[[Exception], None],
        done: PrefetchedWork[tuple[Cut | None, ApplyResult]] | None,
    ) -> dg.AssetsDefinition:
        """The assets of the cut and of the changed replica tables; the cut includes `unchanged` tables, too."""
        return replica_tables_asset(
            self.subscription,
            tables,
            NAMING,
            unchanged=unchanged,
            prefetched=done,
            callbacks=StepCallbacks(report=self._record_applied, add_work=self.work.add, fail=fail),
        )

    def apply_changes(self, log: Log) -> tuple[Cut | None, ApplyResult]:
        """The work of the asset `replica_tables`; returns also the cut before it."""
        return Cuts(self.lake, self.name).last(), apply(self.subscription, self.lake, log)

    def tables_to_report(self, published: Callable[[], Mapping[str, Tables]]) -> tuple[Tables, Tables]:
        """The replica tables with changes to report, and the other ones; both are empty without changes.

        `published` returns the tables of each subscription; it is called only if there are changes. A
        subscription that an error has just disabled may have changes, too: its earlier commits are applied. A
        table that is set aside counts as changed once, so that exactly one run fails for it.
        """
        name = self.subscription.name
        paths = [each(self.lake, name).path for each in (Cuts, TransformedSlices, TableStates)]
        with self.lake.consistent_read(*paths):
            changed = (
                ReplicaProgress(self.subscription, self.lake).tables_beyond_cut() | self._newly_set_aside()
            )
        if not changed:
            return {}, {}
        return split_tables(published()[self.subscription.name], changed)

    def _newly_set_aside(self) -> set[Name]:
        """The tables that are set aside without a failed run that reports it."""
        states, record = TableStates(self.lake, self.name).newest(), SubscriptionRecord(self.lake, self.name)
        problems = subscription_problems(self.name, self.lake, states, record.state())
        key = NAMING.key(subscription_asset(self.subscription, AssetKind.CUT))
        reported = reported_problems(self.dagster, key) if problems else set()
        return {name for name, problem in problems.items() if name is not None and problem not in reported}

    def report(self) -> None:
        """Apply and report the cut even without changed tables: it no longer has tables that were dropped."""
        self._record_applied(apply(self.subscription, self.lake, _logger.info))
        report_cut(self.dagster, self.subscription, self.lake, NAMING)

    def apply_slice(self) -> tuple[Sequence[TableChanges], ApplyResult] | None:
        """Transform and apply a slice without a run of Dagster; None for a disabled subscription."""
        if not self.is_enabled:
            return None
        with measure() as work:
            with span("transform", subscription=self.name):
                changes = self.transform_changes(_logger.info)
            with span("apply", subscription=self.name):
                result = apply(self.subscription, self.lake, _logger.info)
        self.work.add(work)
        self._record_transformed(changes)
        self._record_applied(result)
        return changes, result

    def _record_transformed(self, changes: Sequence[TableChanges]) -> None:
        for change in changes:
            self.sent_as[change.name] = sum_counts(self.sent_as.get(change.name, {}), change.sent_as)

    def _record_applied(self, result: ApplyResult) -> None:
        for name, applied in result.tables.items():
            if not (applied.inserted or applied.updated or applied.deleted or applied.truncated):
                continue
            earlier = self.applied.get(name)
            self.applied[name] = AppliedTable(
                *name,
                inserted=applied.inserted + (earlier.inserted if earlier else 0),
                updated=applied.updated + (earlier.updated if earlier else 0),
                deleted=applied.deleted + (earlier.deleted if earlier else 0),
                truncated=applied.truncated or bool(earlier and earlier.truncated),
                version=result.cut.tables.get(name, applied.head.version)
                if result.cut
                else applied.head.version,
            )

    def register(self) -> None:
        """Register the replicas in Spark's catalog, if the configuration has a template for names."""
        if self.project.names is not None and self.is_enabled:
            Registration(self.subscription, self.lake, self.project.names).register()

    def needs_another_copy(self) -> bool:
        """Whether the columns of a table have changed during the run, so that it has to be copied again.

        Waiting tables do not count.
        """
        states = TableStates(self.lake, self.subscription.name).newest().values()
        return (
            any(s.state not in {SyncState.READY, SyncState.REMOVED, SyncState.SET_ASIDE} for s in states)
            and self.has_to_copy()
        )

    def summary(self) -> SubscriptionRun:
        """The result so far."""
        name = self.subscription.name
        cuts, states_of, work = Cuts(self.lake, name), TableStates(self.lake, name), self.work
        record, change_log = SubscriptionRecord(self.lake, name), ChangeLog(self.lake, self.subscription.feed)
        sequences = Sequences(self.lake, name)
        with self.lake.consistent_read(
            cuts.path, states_of.path, record.path, change_log.path, sequences.path
        ):
            cut, states, state = cuts.last(), states_of.newest().values(), record.state()
            position = change_log.position() or 0
            cut_version = self.lake.records.version(cuts.path) if cut else None
            unread = sequences.problems()
        problems = tuple(
            f"{quote_qualified(*s.name)} is {s.state.meaning}: {s.reason}"
            for s in states
            if s.reason and s.state not in {SyncState.READY, SyncState.REMOVED}
        )
        problems += tuple(unread)
        if not state.enabled:
            problems += (str(disabled_error(self.subscription.name, state).message),)
        return SubscriptionRun(
            name=self.subscription.name,
            copied=tuple(self.copied),
            tables=tuple(self.applied.values()),
            from_lsn=format_lsn(self.cut_before.lsn if self.cut_before else 0),
            to_lsn=format_lsn(max(position, cut.lsn if cut else 0)),
            cut_version=cut_version,
            changed=bool(self.copied or self.applied),
            problems=problems,
            warnings=tuple(self.warnings),
            notice=state.notice if state.notice != self.notice_before else None,
            spent=WorkCost(work.engine, work.tasks, work.bytes, work.seconds),
            transformed=tuple(
                _transformed_table(name, *origin, counts)
                for name, of_table in sorted(self.sent_as.items())
                for origin, counts in counts_by_origin(of_table).items()
            ),
        )


def _transformed_table(
    name: Name, source: str, row_filter: str | None, counts: SentCounts
) -> TransformedTable:
    received, updates = received_counts(counts), counts_by_result(counts)
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
