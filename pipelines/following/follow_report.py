"""Reports the work of `pgsieve run --follow` to Dagster.

The command applies a slice (the changes between two positions of the slot) every second or so, and a Dagster run for
each slice would cost more than the slice itself. So every few minutes, one run reports all slices since the last
report.

In: the results of each slice
Out: materializations of the assets that a run would have materialised, with the sums of the changes of all slices

If a report fails, the failure is only logged, because the tables in the lake are complete without the report.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import dagster as dg

from pgsieve.assets.outcome import IncompleteError
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import split_tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.apply.replica_tables import ApplyResult, combine_results
from pgsieve.assets.steps.prefetched import make_finished_work
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.slot_consumption.reading import DrainResult
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.decoding.changes.sent_as import sum_counts
from pgsieve.pipelines.commands.in_process import DEFAULT_NAMES, materialize
from pgsieve.pipelines.commands.results import Progress
from pgsieve.pipelines.project import Project
from pgsieve.pipelines.published import find_published_tables
from pgsieve.resources.lake.delta.layout import TableName

#: A report is due this many seconds after the first slice that it reports.
REPORT_SECONDS = 300.0

_REPORT_FAILURE_MESSAGE = "the followed changes are in the tables, but not in Dagster's records"

_logger = logging.getLogger(__name__)


class FollowReport:
    """Collects the results of a slot's slices, and reports them to Dagster.

    Only one thread may use it at a time.
    """

    def __init__(
        self,
        project: Project,
        slot_stream: SlotStream,
        subscriptions: Sequence[Subscription],
        instance: dg.DagsterInstance,
        progress: Progress,
    ) -> None:
        self._project, self._slot_stream, self._subscriptions = project, slot_stream, subscriptions
        self._instance, self._progress = instance, progress
        self._drain_result: DrainResult | None = None
        self._changes_by_subscription: dict[str, dict[TableName, TableChanges]] = {}
        self._results_by_subscription: dict[str, ApplyResult] = {}
        self._timer: threading.Timer | None = None

    @property
    def is_waiting(self) -> bool:
        """True if there are results that have not been reported."""
        return self._drain_result is not None

    def add_slice(self, drain_result: DrainResult, report_when_due: Callable[[], None]) -> None:
        """Add a slice that was appended to the change log (the table of the slot's messages).

        A further thread calls `report_when_due` when the report is due.
        """
        earlier_result = self._drain_result
        self._drain_result = drain_result
        if earlier_result:
            slice_count = earlier_result.slices + drain_result.slices
            self._drain_result = DrainResult(
                earlier_result.from_lsn, drain_result.to_lsn, slice_count, drain_result.lag
            )
        if self._timer is None:
            self._timer = threading.Timer(REPORT_SECONDS, report_when_due)
            self._timer.daemon = True
            self._timer.start()

    def add_changes(self, subscription: str, changes: Sequence[TableChanges], result: ApplyResult) -> None:
        """Add the changes of a subscription's tables, and the result of applying them."""
        changes_by_name = self._changes_by_subscription.setdefault(subscription, {})
        for change in changes:
            changes_by_name[change.name] = (
                _sum_changes(changes_by_name[change.name], change)
                if change.name in changes_by_name
                else change
            )
        self._results_by_subscription[subscription] = combine_results(
            self._results_by_subscription.get(subscription, ApplyResult()), result
        )

    def send(self) -> None:
        """Report the collected results to Dagster as materializations, and forget them."""
        if self._timer is not None:
            self._timer.cancel()
        drain_result = self._drain_result
        changes_by_subscription = self._changes_by_subscription
        results_by_subscription = self._results_by_subscription
        self._drain_result = None
        self._changes_by_subscription = {}
        self._results_by_subscription = {}
        self._timer = None
        if drain_result is None:
            return
        assets = [
            change_log_asset(
                self._slot_stream, self._subscriptions, DEFAULT_NAMES, append=lambda: drain_result
            )
        ]
        try:
            for subscription in self._subscriptions:
                if (result := results_by_subscription.get(subscription.name)) is None:
                    continue
                transformed_changes: Sequence[TableChanges] = list(
                    changes_by_subscription[subscription.name].values()
                )
                assets.append(
                    table_changes_asset(
                        subscription,
                        DEFAULT_NAMES,
                        wait_for_prefetched_work=make_finished_work(transformed_changes),
                    )
                )
                tables_of_subscription = find_published_tables(self._project, [subscription])[
                    subscription.name
                ]
                changed_tables, unchanged_tables = split_tables(tables_of_subscription, result.tables)
                if changed_tables:
                    assets.append(
                        replica_tables_asset(
                            subscription,
                            changed_tables,
                            DEFAULT_NAMES,
                            unchanged_tables=unchanged_tables,
                            wait_for_prefetched_work=make_finished_work((None, result)),
                        )
                    )
            task = f"follow {self._slot_stream.slot}"
            # If the step of one subscription fails, the steps of the others still report their results.
            run = materialize(
                self._instance, self._project, assets, self._progress, task, raise_on_error=False
            )
        except Exception:
            _logger.exception(_REPORT_FAILURE_MESSAGE)
            return
        for event in run.get_step_failure_events() if run else ():
            error = event.step_failure_data.error
            if error is not None and error.cls_name != IncompleteError.__name__:
                _logger.error("%s: %s", _REPORT_FAILURE_MESSAGE, error.message.strip())


def _sum_changes(first: TableChanges, second: TableChanges) -> TableChanges:
    """Add the changes of a table in two successive slices."""
    return replace(
        second,
        sent_as=sum_counts(first.sent_as, second.sent_as),
        sent_counts=_sum_operation_counts(first.sent_counts, second.sent_counts),
        truncate_count=first.truncate_count + second.truncate_count,
        problem=second.problem or first.problem,
    )


def _sum_operation_counts(*counts: Mapping[str, int]) -> Mapping[str, int]:
    """Add counts by operation."""
    return reduce(
        lambda first_counts, second_counts: {
            operation: first_counts.get(operation, 0) + second_counts.get(operation, 0)
            for operation in {*first_counts, *second_counts}
        },
        counts,
    )
