"""`pgsieve run`: materialises the assets of subscriptions up to the source's current LSN.

In: the configuration. Out: a `RunSummary`. Dagster materialises the assets in this process; the web interface
shows the same assets, and these runs. The order is: copies of tables that need one, the change log, the
transformed changes, the replicas. An error ends the work only for the subscriptions that it concerns.
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
from pgsieve.resources.lake.stores.shared_reads import share_reads
from pgsieve.resources.postgres.session_pool import pool_sessions

T = TypeVar("T")

#: The largest number of rounds (copy, drain, apply); another one follows if a table's columns have changed.
_MAX_ROUNDS = 3
#: The largest number of subscriptions that a line of progress names.
_MAX_NAMES = 3


def take_over(config: Config, selected: Sequence[SubscriptionConfig]) -> None:
    """Claim the slots of the selected subscriptions for this lake, even if another lake has read them.

    Raises PgsieveError if this lake has replicas of another database.
    """
    project = build_project(config)
    lake = project.lake.open()
    lake.access.check_writable()
    for feed in project.feeds_of([project.subscriptions[s.name] for s in selected]):
        with feed.hold_lock(), feed.source.connect() as connection:
            claim_slot(connection, feed, lake)


def run(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions; if one fails, its durable work stays, and the others go on.

    Disabled subscriptions do not run; the summary names them. Raises SubscriptionDisabledError if all are
    disabled.
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
    """The paths of pgsieve's own tables about whole subscriptions."""
    return [
        table.path for s in subscriptions for table in (Cuts(lake, s.name), SubscriptionRecord(lake, s.name))
    ]


def _first_reads(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that every run reads first; they are opened together, in parallel."""
    states = [each(lake, s.name).path for s in subscriptions for each in (TableStates, TransformedSlices)]
    feeds = {s.feed.name: s.feed for s in subscriptions}.values()
    return [
        *_subscription_records(lake, subscriptions),
        *states,
        *(each(lake, feed).path for feed in feeds for each in (ChangeLog, Catalogs, FeedRecord)),
    ]


def enabled_subscriptions(
    project: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """The enabled subscriptions; raises SubscriptionDisabledError if none is enabled."""
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
    """Copy tables that need it, drain the feed's slot, and apply, until no table has to be copied again.

    A copy that waits for other transactions is tried once more, after the changes of other tables were
    applied.
    """
    for _ in range(_MAX_ROUNDS):
        if not _run_round(feed, materializers, failures):
            return
        if not any(failures.for_each(materializers, lambda each: each.needs_another_copy())):
            break
    if waiting := [
        each for each in materializers if any(each.waiting_tables.values()) and each.name not in failures
    ]:
        for each in waiting:
            each.retry(list(each.waiting_tables))
        _run_round(feed, materializers, failures)


def _run_round(feed: Feed, materializers: Sequence[Materializer], failures: Failures) -> bool:
    """Copy, drain and apply once; returns False if all subscriptions have failed."""
    failures.for_each(materializers, lambda each: each.copy())
    if not (active := [r for r in materializers if r.name not in failures]):
        return False
    first = active[0]
    with failures.catch(*(result.name for result in active)):
        assets = [change_log_asset(feed, first.project.subscriptions_of(feed), NAMING)]
        materialize(first.dagster, first.project, assets, first.progress, f"drain {feed.slot}")
    apply_together(materializers, failures)
    return True


def apply_together(
    materializers: Sequence[Materializer],
    failures: Failures,
    *,
    unless: Callable[[Exception], bool] = never,
) -> None:
    """Materialise the transformed changes, then the replicas that have new changes or a new copy.

    Dagster does each of the two in one run for all subscriptions, as a run costs more than most steps. An error
    of one subscription does not end the others. Raises an error for which `unless` is true.
    """
    active = [
        m for m in failures.for_each(materializers, Materializer.if_enabled, unless=unless) if m is not None
    ]
    with ExitStack() as shared:
        if len(active) > 1:
            shared.enter_context(share_reads())
            shared.enter_context(share_jobs())
            shared.enter_context(active[0].subscription.feed.source.share_lock_session())
        assets = {m: m.table_changes for m in active}
        _materialize_each("transform for", assets, Materializer.transform_changes, failures, unless)

    @cache
    def published() -> Mapping[str, Tables]:
        return published_tables(active[0].project, [m.subscription for m in active])

    changes = dict(failures.for_each(active, lambda m: (m, m.tables_to_report(published)), unless=unless))
    applying = {m: partial(m.replica_tables, *tables) for m, tables in changes.items() if tables[0]}
    _materialize_each("apply to", applying, Materializer.apply_changes, failures, unless)
    failures.for_each([m for m in changes if m not in applying], Materializer.report, unless=unless)


#: Makes an asset of a subscription. Parameters: a function that takes the step's error, and the result of
#: prefetched work.
_Asset = Callable[[Callable[[Exception], None], PrefetchedWork[T] | None], dg.AssetsDefinition]


def _materialize_each(
    what: str,
    assets: Mapping[Materializer, _Asset[T]],
    work: Callable[[Materializer, Log], T],
    failures: Failures,
    unless: Callable[[Exception], bool],
) -> None:
    """Materialise an asset of each subscription, in one run of Dagster; `what` names the work in messages.

    The `work` of a step is done while Dagster records the steps before it.
    """
    if not assets:
        return
    first, names, errors = next(iter(assets)), [m.name for m in assets], dict[str, Exception]()
    with (
        failures.catch(*names, unless=unless),
        prefetched_work(first.lake, {m: partial(work, m) for m in assets}) as done,
    ):
        result = materialize(
            first.dagster,
            first.project,
            [asset(partial(errors.__setitem__, m.name), done.get(m)) for m, asset in assets.items()],
            first.progress,
            f"{what} {', '.join(names) if len(names) <= _MAX_NAMES else quantity(len(names), 'subscription')}",
            {COMMAND: f"{what} {', '.join(names)}"},
            raise_on_error=False,
        )
        if result is not None and not result.success and not errors:
            raise run_failure(result)
    for name, error in errors.items():
        with failures.catch(name, unless=unless), unwrap_step_errors():
            raise error


def summaries(materializers: Sequence[Materializer], failures: Failures) -> tuple[SubscriptionRun, ...]:
    """The results of the subscriptions that have not failed, and of failed ones with changes."""
    results = []
    for each in materializers:
        with failures.catch(each.name):
            summary = each.summary()
            if summary.changed or each.name not in failures:
                results.append(summary)
    return tuple(results)
