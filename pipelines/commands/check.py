"""`pgsieve check`: compares each replica with the publisher's table, and repairs differences on request.

In: the configuration
Out: a `CheckReport`
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from pgsieve.assets.consistency import CheckReporter
from pgsieve.assets.steps.checks.consistency import TableConsistency, check_consistency
from pgsieve.assets.steps.checks.repair import RepairResult, repair
from pgsieve.assets.steps.checks.sequences import compare_sequences
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.log import Log, no_log
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.sequences import Sequences
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.pipelines.commands.failures import Failures
from pgsieve.pipelines.commands.in_process import DEFAULT_NAMES, open_instance
from pgsieve.pipelines.commands.results import CheckedTable, CheckReport, Progress
from pgsieve.pipelines.commands.sequences import CheckedSequence
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import find_published_tables
from pgsieve.resources.lake.lake import Lake


def check(
    config: Config,
    subscription_configs: Sequence[SubscriptionConfig],
    progress: Progress,
    *,
    is_repair_requested: bool = False,
) -> CheckReport:
    """Bring each selected subscription up to one LSN, and compare all of its tables with the publisher at that LSN.

    With `is_repair_requested`, the publisher's rows at a later LSN then replace the rows that differ. If a subscription
    cannot be checked, the others still are.
    """
    project = build_project(config)
    failures, warnings = Failures(), list[str]()
    subscriptions = [project.subscriptions[s.name] for s in subscription_configs]
    with open_instance(config) as instance:
        tables_by_subscription = find_published_tables(project, subscriptions)

        def check_one(subscription: Subscription) -> tuple[list[CheckedTable], list[CheckedSequence]]:
            lake, tables = project.lake.open(), tables_by_subscription[subscription.name]
            reporter = CheckReporter(instance, subscription, lake, tables, DEFAULT_NAMES)
            return _Check(subscription, lake, progress, warnings.append, reporter).run(
                is_repair_requested=is_repair_requested
            )

        checked_subscriptions = failures.for_each(subscriptions, check_one)
    tables, sequences = (
        ([*chain.from_iterable(results)] for results in zip(*checked_subscriptions, strict=True))
        if checked_subscriptions
        else ((), ())
    )
    return CheckReport(tuple(tables), failures.group_by_error(), tuple(sequences), tuple(warnings))


@dataclass(frozen=True)
class _Check:
    """The check of one subscription, whose results and changes `reporter` reports to Dagster."""

    subscription: Subscription
    lake: Lake
    progress: Progress
    warn: Log
    reporter: CheckReporter

    def run(self, *, is_repair_requested: bool) -> tuple[list[CheckedTable], list[CheckedSequence]]:
        """Compare the tables and the sequences, and repair differences on request."""
        subscription, lake, reporter = self.subscription, self.lake, self.reporter
        with _log_as_tasks(self.progress, f"check {subscription.name}") as log:
            # Sequences are compared first, because the comparison of tables reads the slot, and then also records the
            # publisher's present values of the sequences.
            sequences = _check_sequences(subscription, lake)
            results = self._compare(log, lambda warning: self.warn(f"{subscription.name}: {warning}"))
            if is_repair_requested:
                results = self._copy_and_compare_again(results, log)
            reporter.send_replicas()
            reporter.send_results(results)
            differing_tables = [(c.schema, c.table) for c in results if c.differing]
            repair_results = list[RepairResult]()
            if is_repair_requested and differing_tables:
                repair_results = repair(subscription, lake, differing_tables, log, reporter.add_applied)
                for repaired in repair_results:
                    reporter.add_repaired(repaired)
                reporter.send_replicas()
        return _make_checked_tables(subscription.name, results, repair_results), sequences

    def _compare(self, log: Log, warn: Log, names: Collection[Name] | None = None) -> list[TableConsistency]:
        return check_consistency(self.subscription, self.lake, log, names, warn, self.reporter.add_applied)

    def _copy_and_compare_again(
        self, results: Sequence[TableConsistency], log: Log
    ) -> list[TableConsistency]:
        """Copy the tables with a problem that the next run would copy, and compare them again.

        For example, a table whose columns have changed cannot be compared before it is copied.

        Returns the results of all tables: the new ones of the copied tables, and the old ones of the others.
        """
        results_by_name = {(r.schema, r.table): r for r in results}
        names_with_problem = {name for name, r in results_by_name.items() if r.problem}
        names_to_copy = (
            [name for name in find_tables_to_copy(self.subscription, self.lake) if name in names_with_problem]
            if names_with_problem
            else []
        )
        if names_to_copy:
            copy_tables(self.subscription, self.lake, names_to_copy, log)
            new_results = self._compare(log, no_log, names_to_copy)
            results_by_name |= {(r.schema, r.table): r for r in new_results}
        return list(results_by_name.values())


def _make_checked_tables(
    subscription: str, results: Sequence[TableConsistency], repair_results: Sequence[RepairResult]
) -> list[CheckedTable]:
    repair_results_by_name = {(r.schema, r.table): r for r in repair_results}
    tables = []
    for result in results:
        repair_result = repair_results_by_name.get((result.schema, result.table))
        problems = [p for p in (result.problem, repair_result and repair_result.problem) if p]
        tables.append(
            CheckedTable(
                subscription=subscription,
                schema=result.schema,
                name=result.table,
                rows_publisher=result.publisher_rows,
                rows_replica=result.replica_rows,
                equal=result.equal,
                differing_keys=result.keys,
                only_publisher=result.counts.only_publisher,
                only_replica=result.counts.only_replica,
                different=result.counts.different,
                lsn=format_lsn(result.lsn),
                repaired=(repair_result.inserted, repair_result.deleted)
                if repair_result and not repair_result.problem
                else None,
                problem="; ".join(problems) or None,
            )
        )
    return tables


def _check_sequences(subscription: Subscription, lake: Lake) -> list[CheckedSequence]:
    return [
        CheckedSequence(
            subscription=subscription.name,
            schema=result.schema,
            name=result.name,
            recorded=result.recorded_value.last_value if result.recorded_value else None,
            publisher=result.present_value.last_value if result.present_value else None,
            equal=result.is_equal,
            moved=result.has_moved,
            problem=result.problem,
        )
        for result in compare_sequences(subscription, Sequences(lake, subscription.name))
    ]


@contextmanager
def _log_as_tasks(progress: Progress, task: str) -> Iterator[Log]:
    """Show a task as long as the block runs. Each line that the block logs replaces the task that is shown."""
    current_task = task
    progress.start(current_task)

    def log(message: str) -> None:
        nonlocal current_task
        progress.finish(current_task)
        current_task = message
        progress.start(current_task)

    try:
        yield log
    finally:
        progress.finish(current_task)
