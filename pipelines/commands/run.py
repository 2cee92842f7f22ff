"""`pgsieve run`: materialise the assets of subscriptions up to the source's current LSN.

In: the configuration. Out: a `RunSummary`. These are the assets of the web interface, which also shows the
runs; Dagster materialises them in this process. First come the copies of tables that need one, then the
change log, the transformed changes and the replicas. An error ends only the work for the subscriptions that
it concerns.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import TypeVar

import dagster as dg

from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.done import Done
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.feed import FeedRecord
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, disabled_error
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.records.transformed import Transformed
from pgsieve.assets.steps.slot_consumption.slot import claim_slot
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.wording import counted
from pgsieve.pipelines.commands.dagster_runs import COMMAND
from pgsieve.pipelines.commands.failures import Failures, never
from pgsieve.pipelines.commands.in_process import (
    NAMING,
    instance,
    materialize,
    refused_by_dagster,
    run_failure,
)
from pgsieve.pipelines.commands.materializer import Materializer
from pgsieve.pipelines.commands.prefetched_work import prefetched_work
from pgsieve.pipelines.commands.results import Progress, RunSummary, SubscriptionRun
from pgsieve.pipelines.config.model import Config, SubscriptionConfig
from pgsieve.pipelines.project import Project, build_project
from pgsieve.pipelines.published import published_tables
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.shared_jobs import jobs_shared
from pgsieve.resources.lake.stores.shared_reads import reads_shared
from pgsieve.resources.postgres.kept_sessions import sessions_kept

T = TypeVar("T")

#: A run copies, drains and applies at most this often: again if a table's columns changed meanwhile.
_ROUNDS = 3
#: A line of progress names at most this many subscriptions.
_NAMED = 3


def take_over(config: Config, selected: Sequence[SubscriptionConfig]) -> None:
    """Claim the slots of the selected subscriptions for this lake, also if another lake has read them.

    Raises PgsieveError if the lake has replicas of another database.
    """
    project = build_project(config)
    lake = project.lake.open()
    lake.access.check_writable()
    for feed in project.feeds_of([project.subscriptions[s.name] for s in selected]):
        with feed.exclusively(), feed.source.connect() as connection:
            claim_slot(connection, feed, lake)


def run(config: Config, selected: Sequence[SubscriptionConfig], progress: Progress) -> RunSummary:
    """Run the selected subscriptions; if one fails, the others go on, and its durable work stays.

    Disabled subscriptions do not run; the summary names them. Raises SubscriptionDisabledError if all are
    disabled.
    """
    project = build_project(config)
    subscriptions, failures = [project.subscriptions[s.name] for s in selected], Failures()
    lake = project.lake.open()
    with lake.consistent_read(*_first_reads(lake, subscriptions)):
        enabled = enabled_ones(project, subscriptions, failures)
    with instance(config) as dagster, sessions_kept():
        with lake.consistent_read(*_subscription_records(lake, subscriptions)):
            results = failures.each(subscriptions, lambda s: Materializer(project, s, dagster, progress))
        for feed in project.feeds_of(enabled):
            run_feed(feed, [r for r in results if r.subscription.feed.name == feed.name], failures)
        failures.each(results, Materializer.register)
        return RunSummary(summaries(results, failures), failures.listed())


def _subscription_records(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables about whole subscriptions."""
    return [
        table.path for s in subscriptions for table in (Cuts(lake, s.name), SubscriptionRecord(lake, s.name))
    ]


def _first_reads(lake: Lake, subscriptions: Sequence[Subscription]) -> list[str]:
    """The paths of pgsieve's own tables that every run reads first, so that they are opened in parallel."""
    states = [each(lake, s.name).path for s in subscriptions for each in (TableStates, Transformed)]
    feeds = {s.feed.name: s.feed for s in subscriptions}.values()
    return [
        *_subscription_records(lake, subscriptions),
        *states,
        *(each(lake, feed).path for feed in feeds for each in (ChangeLog, Catalogs, FeedRecord)),
    ]


def enabled_ones(
    project: Project, subscriptions: Sequence[Subscription], failures: Failures
) -> list[Subscription]:
    """The enabled subscriptions; raises SubscriptionDisabledError if none is enabled."""
    lake = project.lake.open()
    states = failures.each(
        subscriptions, lambda s: (s, SubscriptionRecord(lake, s.name).refuse_other_folders())
    )
    enabled = [subscription for subscription, state in states if state.enabled]
    if not enabled and len(states) == len(subscriptions):
        subscription, state = states[0]
        raise disabled_error(subscription.name, state)
    return enabled


def run_feed(feed: Feed, reading: Sequence[Materializer], failures: Failures) -> None:
    """Copy tables that need it, drain the feed's slot, and apply, until no table has to be copied again.

    A copy that waits for other transactions is tried once more after the changes of the other tables were
    applied.
    """
    for _ in range(_ROUNDS):
        if not _run_round(feed, reading, failures):
            return
        if not any(failures.each(reading, lambda each: each.unfinished())):
            break
    if waiting := [each for each in reading if any(each.awaiting.values()) and each.name not in failures]:
        for each in waiting:
            each.try_again(list(each.awaiting))
        _run_round(feed, reading, failures)


def _run_round(feed: Feed, reading: Sequence[Materializer], failures: Failures) -> bool:
    """Copy, drain and apply once; returns False if all subscriptions have failed."""
    failures.each(reading, lambda each: each.copy())
    if not (active := [r for r in reading if r.name not in failures]):
        return False
    first = active[0]
    with failures.of(*(result.name for result in active)):
        assets = [change_log_asset(feed, first.project.reading(feed), NAMING)]
        materialize(first.dagster, first.project, assets, first.progress, f"drain {feed.slot}")
    apply_together(reading, failures)
    return True


def apply_together(
    materializers: Sequence[Materializer],
    failures: Failures,
    *,
    unless: Callable[[Exception], bool] = never,
) -> None:
    """Materialise the transformed changes, then the replicas that have new changes or a new copy.

    All subscriptions share one run of Dagster for the first, and one for the second, since a run costs more
    than most steps. An error of one subscription does not end the others. Raises an error for which `unless`
    is true.
    """
    active = [
        m for m in failures.each(materializers, Materializer.if_enabled, unless=unless) if m is not None
    ]
    with ExitStack() as shared:
        if len(active) > 1:
            shared.enter_context(reads_shared())
            shared.enter_context(jobs_shared())
            shared.enter_context(active[0].subscription.feed.source.locks_shared())
        assets = {m: m.table_changes for m in active}
        _materialize_each("transform for", assets, Materializer.transformed, failures, unless)

    @cache
    def published() -> Mapping[str, Tables]:
        return published_tables(active[0].project, [m.subscription for m in active])

    changes = dict(failures.each(active, lambda m: (m, m.tables_to_report(published)), unless=unless))
    applying = {m: partial(m.replica_tables, *tables) for m, tables in changes.items() if tables[0]}
    _materialize_each("apply to", applying, Materializer.brought_up_to_date, failures, unless)
    failures.each([m for m in changes if m not in applying], Materializer.report, unless=unless)


#: Makes an asset of a subscription. Parameters: a function that takes the step's error, and the result of
#: work that was done outside of the step.
_Asset = Callable[[Callable[[Exception], None], Done[T] | None], dg.AssetsDefinition]


def _materialize_each(
    what: str,
    assets: Mapping[Materializer, _Asset[T]],
    work: Callable[[Materializer, Log], T],
    failures: Failures,
    unless: Callable[[Exception], bool],
) -> None:
    """Materialise an asset of each subscription, in one run; `what` names the work in messages.

    The `work` of a step runs while Dagster records the steps before it.
    """
    if not assets:
        return
    first, names, errors = next(iter(assets)), [m.name for m in assets], dict[str, Exception]()
    with (
        failures.of(*names, unless=unless),
        prefetched_work(first.lake, {m: partial(work, m) for m in assets}) as done,
    ):
        result = materialize(
            first.dagster,
            first.project,
            [asset(partial(errors.__setitem__, m.name), done.get(m)) for m, asset in assets.items()],
            first.progress,
            f"{what} {', '.join(names) if len(names) <= _NAMED else counted(len(names), 'subscription')}",
            {COMMAND: f"{what} {', '.join(names)}"},
            raise_on_error=False,
        )
        if result is not None and not result.success and not errors:
            raise run_failure(result)
    for name, error in errors.items():
        with failures.of(name, unless=unless), refused_by_dagster():
            raise error


def summaries(materializers: Sequence[Materializer], failures: Failures) -> tuple[SubscriptionRun, ...]:
    """The results of the subscriptions that have not failed, and of failed ones that have changed."""
    results = []
    for each in materializers:
        with failures.of(each.name):
            summary = each.summary()
            if summary.changed or each.name not in failures:
                results.append(summary)
    return tuple(results)
