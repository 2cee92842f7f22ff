"""Dagster's jobs, by feed or by subscription.

In: the feeds (slots with their subscriptions) and subscriptions of a project. Out: jobs, which schedules, sensors
(`pgsieve.pipelines.automation`) and people start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgsieve.assets.checks import FRESHNESS, SYNC_STATE, slot_problem
from pgsieve.assets.initial_sync import tables_partitions
from pgsieve.assets.outcome import as_step
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.translator import AssetKind, Naming, feed_asset, subscription_asset
from pgsieve.pipelines.project import Project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.slot import resync_hint, slot_state


@dataclass(frozen=True)
class Jobs:
    """The jobs of a project, in the order of its feeds and subscriptions.

    `increments`, `maintenance` and `alarms` have a job for each feed, `copies` one for each subscription.
    `single_increments` are increments of one subscription of a feed that has several. Only people start them.
    """

    increments: list[UnresolvedAssetJobDefinition]
    single_increments: list[UnresolvedAssetJobDefinition]
    copies: list[UnresolvedAssetJobDefinition]
    maintenance: list[UnresolvedAssetJobDefinition]
    alarms: list[dg.JobDefinition]

    @property
    def all(self) -> list[UnresolvedAssetJobDefinition | dg.JobDefinition]:
        """All jobs."""
        return [*self.increments, *self.single_increments, *self.copies, *self.maintenance, *self.alarms]


def jobs_of(project: Project, naming: Naming) -> Jobs:
    """The jobs of all feeds and subscriptions."""
    feeds = list(project.feeds.values())
    return Jobs(
        increments=[_increments_job(feed, project.subscriptions_of(feed), naming) for feed in feeds],
        single_increments=[
            _increments_job(feed, [each], naming, f"_{each.name}")
            for feed in feeds
            if len(project.subscriptions_of(feed)) > 1
            for each in project.subscriptions_of(feed)
        ],
        copies=[_copy_job(subscription, naming) for subscription in project.subscriptions.values()],
        maintenance=[_maintenance_job(project, feed, naming) for feed in feeds],
        alarms=[_slot_alarm_job(feed, naming) for feed in feeds],
    )


def _increments_job(
    feed: Feed, subscriptions: Sequence[Subscription], naming: Naming, subscription_name: str = ""
) -> UnresolvedAssetJobDefinition:
    names = ", ".join(subscription.name for subscription in subscriptions)
    return dg.define_asset_job(
        naming.name(
            f"{feed.name}_{subscription_name}_increments" if subscription_name else f"{feed.name}_increments"
        ),
        _increments(feed, subscriptions, naming),
        description=f"Reads slot {feed.slot}, and applies the changes to the replicas of {names}.",
    )


def _increments(feed: Feed, subscriptions: Sequence[Subscription], naming: Naming) -> dg.AssetSelection:
    """The assets and checks of an increment of these subscriptions.

    Replicas are not selected, as Dagster would show all of them as failed after a failed run. The run reports
    the replicas that it has changed.
    """
    log = naming.key(feed_asset(feed, AssetKind.CHANGE_LOG))
    keys, checks = [log], [dg.AssetCheckKey(log, "slot_health")]
    for subscription in subscriptions:
        cut = naming.key(subscription_asset(subscription, AssetKind.CUT))
        keys += [naming.key(subscription_asset(subscription, AssetKind.TABLE_CHANGES)), cut]
        checks += [dg.AssetCheckKey(cut, name) for name in (SYNC_STATE, FRESHNESS)]
    return dg.AssetSelection.assets(*keys).without_checks() | dg.AssetSelection.checks(*checks)


def _maintenance(project: Project, feed: Feed, naming: Naming) -> dg.AssetSelection:
    """The maintenance of a feed and of the subscriptions that read it."""
    maintenance_assets = [
        subscription_asset(s, AssetKind.MAINTENANCE) for s in project.subscriptions_of(feed)
    ]
    return dg.AssetSelection.assets(
        *map(naming.key, [feed_asset(feed, AssetKind.CHANGE_LOG_MAINTENANCE), *maintenance_assets])
    )


def _copy_job(subscription: Subscription, naming: Naming) -> UnresolvedAssetJobDefinition:
    """A job that copies tables; each table is a Dagster partition."""
    return dg.define_asset_job(
        naming.name(f"{subscription.name}_copies"),
        dg.AssetSelection.assets(naming.key(subscription_asset(subscription, AssetKind.INITIAL_SYNC))),
        description=f"Copies the tables of subscription {subscription.name} that are chosen as Dagster partitions.",
        partitions_def=tables_partitions(subscription.name),
    )


def _maintenance_job(project: Project, feed: Feed, naming: Naming) -> UnresolvedAssetJobDefinition:
    return dg.define_asset_job(
        naming.name(f"{feed.name}_maintenance"),
        _maintenance(project, feed, naming),
        description=f"Deletes changes of {feed.name} that are older than their retention, compacts tables, and removes old files.",
    )


def _slot_alarm_job(feed: Feed, naming: Naming) -> dg.JobDefinition:
    """A job that fails as long as the slot has a problem."""
    name = naming.name(f"{feed.name}_slot_alarm")

    @dg.op(name=f"{name}_if_unhealthy", required_resource_keys={naming.lake})
    def slot_alarm(context: dg.OpExecutionContext) -> None:
        with as_step(context):
            lake = getattr(context.resources, naming.lake).open()
            problem = problem_of_slot(feed, lake)
        if problem is not None:
            raise dg.Failure(
                description=problem.text,
                metadata={"what to do": problem.remedy, "slot": feed.slot, "source": feed.source.name},
                allow_retries=False,
            )
        context.log.info(f"replication slot {feed.slot} is healthy again")

    @dg.job(
        name=name,
        description=f"Fails when replication slot {feed.slot} is missing, has lost WAL, or lags 1 GiB or more.",
    )
    def alarm() -> None:
        slot_alarm()

    return alarm


@dataclass(frozen=True)
class SlotProblem:
    """A problem of a slot, and its remedy."""

    text: str
    remedy: str


def problem_of_slot(feed: Feed, lake: Lake) -> SlotProblem | None:
    """The problem of a slot, or None; before the first run, which creates it, a missing slot is no problem."""
    try:
        with feed.source.connect() as connection:
            state = slot_state(connection, feed.slot)
    except SourceError as error:
        return SlotProblem(error.message, error.hint or "check whether the server is running")
    if state is None and ChangeLog(lake, feed).position() is None:
        return None
    if (text := slot_problem(feed.slot, state)) is None:
        return None
    if state is None or state.wal_status == "lost":
        return SlotProblem(text, resync_hint(feed.subscriptions))
    return SlotProblem(text, "run the increments more often, and look for failed runs")
