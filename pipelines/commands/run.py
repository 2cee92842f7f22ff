"""`pgsieve run`: brings the replicas of subscriptions up to the current LSN of their sources.

In: the configuration
Out: a `RunSummary`

The command materialises Dagster assets in this process. The web interface shows the same assets, and these runs. The
order is: copies of tables that need one, the change log, the transformed changes, the replicas. An error ends the work
only for the subscriptions that it concerns.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TypeVar

import dagster as dg

from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, disabled_error
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.slot_consumption.slot import claim_slot
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.wording import quantity
from pgsieve.pipelines.commands.dagster_runs import COMMAND
from pgsieve.pipelines.commands.failures import Failures, never
from pgsieve.pipelines.commands.in_process import (
    NAMING,
    instance,
    materialize,
    run_failure,
    unwrap_step_errors,
)
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.prefetched_work import prefetched_work
from pgsieve.pipelines.commands.results import Progress, RunSummary, SubscriptionRun
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, build_project
from pgsieve.pipelines.published import published_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.shared_jobs import share_jobs
from pgsieve.resources.lake.stores.batch_cache import share_batch_cache
from pgsieve.resources.postgres.session_pool import pool_sessions

T = TypeVar("T")

#: The largest number of rounds. A round copies tables, reads the slot, and applies the changes. Another round follows
#: if the columns of a table have changed in between.
_MAX_ROUNDS = 3
#: The largest number of subscriptions that are named in a line of progress; more are only counted.
_MAX_NAMES = 3


def take_over(config: Config, selected: Sequence[SubscriptionConfig]) -> None:
    """Claim the slots of the selected subscriptions for this lake, even if another lake has read them before.

    Raises PgsieveError if this lake has replicas of another database.
    """
    project = build_project(config)
    lake = project.lake.open()
    lake.access.check_writable()
    for feed in project.feeds_of([project.subscriptions[s.name] for s in selected]):
        with feed.hold_lock(), feed.source.connect() as connection:
            claim_slot(connection, feed, lake)


def run(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions. If one of them fails, the others go on, and what was done for it stays done.

    Disabled subscriptions do not run, and the summary names them. Raises SubscriptionDisabledError if all are disabled.
    """
    project = build_project(config)
    subscriptions, failures = [project.subscriptions[s.name] for s in selected], Failures()
    lake = project.lake.open()
    with lake.consistent_read(*_first_reads(lake, subscriptions)):
        enabled = enabled_subscriptions(project, subscriptions, failures)
    with instance(config) as dagster, pool_sessions():
        with lake.consistent_read(*_subscription_records(lake, subscriptions)):
            results = failures.for_each(subscriptions, lambda s: Materializer(project, s, dagster, progress))
        for feed in project.feeds_of(enabled):
            run_feed(feed, [r for r in results if r.subscription.feed.name == feed.name], failures)
        failures.for_each(results, Materializer.register)
        return RunSummary(summaries(results, failures), failures.grouped())


def _subscription_records(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that have records about whole subscriptions."""
    return [
        table.path for s in subscriptions for table in (Cuts(lake, s.name), SubscriptionRecord(lake, s.name))
    ]


def _first_reads(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that each run reads first. The caller opens them together, in parallel."""
    states = [table(lake, s.name).path for s in subscriptions for table in (TableStates, TransformedSlices)]
    feeds = {s.feed.name: s.feed for s in subscriptions}.values()
    return [
        *_subscription_records(lake, subscriptions),
        *states,
        *(table(lake, feed).path for feed in feeds for table in (ChangeLog, Catalogs, FeedRecord)),
    ]


def enabled_subscriptions(
    project: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """Those of these subscriptions that are enabled. Raises SubscriptionDisabledError if none is enabled."""
    lake = project.lake.open()
    states = failures.for_each(
        subscriptions, lambda s: (s, SubscriptionRecord(lake, s.name).refuse_other_folders())
    )
    enabled = [subscription for subscription, state in states if state.enabled]
    if not enabled and len(states) == len(subscriptions):
        subscription, state = states[0]
        raise disabled_error(subscription.name, state)
    return enabled


def run_feed(feed: Feed, materializers: Sequence[Materializer], failures: Failures) -> None:
    """Do the work of a run for a feed (a slot with its subscriptions), until no table has to be copied again.

    A round copies tables that need it, reads the slot, and applies the changes. If the copy of a table has to wait for
    other transactions, it is tried once more after the changes of the other tables were applied.
    """
    for _ in range(_MAX_ROUNDS):
        if not _run_round(feed, materializers, failures):
            return
        if not any(failures.for_each(materializers, lambda materializer: materializer.needs_another_copy())):
            break
    if waiting_materializers := [
        materializer
        for materializer in materializers
        if any(materializer.waiting_tables.values()) and materializer.name not in failures
    ]:
        for materializer in waiting_materializers:
            materializer.retry(list(materializer.waiting_tables))
        _run_round(feed, materializers, failures)


def _run_round(feed: Feed, materializers: Sequence[Materializer], failures: Failures) -> bool:
    """Copy tables, read the slot, and apply the changes once. Returns false if all subscriptions have failed."""
    failures.for_each(materializers, lambda each: each.copy())
    if not (remaining := [r for r in materializers if r.name not in failures]):
        return False
    first_materializer = remaining[0]
    with failures.catch(*(result.name for result in remaining)):
        assets = [change_log_asset(feed, first_materializer.project.subscriptions_of(feed), NAMING)]
        materialize(
            first_materializer.dagster,
            first_materializer.project,
            assets,
            first_materializer.progress,
            f"drain {feed.slot}",
        )
    apply_together(materializers, failures)
    return True


def apply_together(
    materializers: Sequence[Materializer],
    failures: Failures,
    *,
    unless: Callable[[Exception], bool] = never,
) -> None:
    """Materialise the transformed changes, and after that the replicas that have new changes or a new copy.

    For each of the two there is one Dagster run for all subscriptions, because a run costs more than most of its steps.
    An error of one subscription does not end the work for the others. If `unless` is true for an error, it is raised.
    """
    enabled = [
        m for m in failures.for_each(materializers, Materializer.if_enabled, unless=unless) if m is not None
    ]
    with ExitStack() as shared:
        if len(enabled) > 1:
            shared.enter_context(share_batch_cache())
            shared.enter_context(share_jobs())
            shared.enter_context(enabled[0].subscription.feed.source.share_lock_session())
        assets = {m: m.table_changes for m in enabled}
        _materialize_each("transform for", assets, Materializer.transform_changes, failures, unless)

    @cache
    def tables_by_subscription() -> Mapping[str, Tables]:
        return published_tables(enabled[0].project, [m.subscription for m in enabled])

    tables_to_report = dict(
        failures.for_each(enabled, lambda m: (m, m.tables_to_report(tables_by_subscription)), unless=unless)
    )
    replica_assets = {
        m: partial(m.replica_tables, *tables) for m, tables in tables_to_report.items() if tables[0]
    }
    _materialize_each("apply to", replica_assets, Materializer.apply_changes, failures, unless)
    failures.for_each(
        [m for m in tables_to_report if m not in replica_assets], Materializer.report, unless=unless
    )


#: A function that makes the asset of a subscription. It gets a function that receives the error of the step, and the
#: result of work that was done in advance.
_Asset = Callable[[Callable[[Exception], None], PrefetchedWork[T] | None], dg.AssetsDefinition]


def _materialize_each(
    task: str,
    assets: Mapping[Materializer, _Asset[T]],
    work: Callable[[Materializer, Log], T],
    failures: Failures,
    unless: Callable[[Exception], bool],
) -> None:
    """Materialise an asset for each subscription, in one Dagster run.

    - `task`: names the work in messages
    - `work`: the work of a step. It is done in advance, while Dagster records the steps before it.
    """
    if not assets:
        return
    first_materializer, names, errors = next(iter(assets)), [m.name for m in assets], dict[str, Exception]()
    with (
        failures.catch(*names, unless=unless),
        prefetched_work(first_materializer.lake, {m: partial(work, m) for m in assets}) as prefetched,
    ):
        result = materialize(
            first_materializer.dagster,
            first_materializer.project,
            [asset(partial(errors.__setitem__, m.name), prefetched.get(m)) for m, asset in assets.items()],
            first_materializer.progress,
            f"{task} {', '.join(names) if len(names) <= _MAX_NAMES else quantity(len(names), 'subscription')}",
            {COMMAND: f"{task} {', '.join(names)}"},
            raise_on_error=False,
        )
        if result is not None and not result.success and not errors:
            raise run_failure(result)
    for name, error in errors.items():
        with failures.catch(name, unless=unless), unwrap_step_errors():
            raise error


def summaries(materializers: Sequence[Materializer], failures: Failures) -> tuple[SubscriptionRun, ...]:
    """The results of subscriptions that have not failed, and of those that failed after something had changed."""
    results = []
    for each in materializers:
        with failures.catch(each.name):
            summary = each.summary()
            if summary.changed or each.name not in failures:
                results.append(summary)
    return tuple(results)
