"""The jobs in Dagster. Schedules, sensors (`pgsieve.pipelines.automation`) and people start them.

In: the streams and subscriptions of a project. A slot stream is a replication slot with the subscriptions that read it.
Out: the jobs. Most jobs belong to a stream; the jobs that copy tables belong to a subscription.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgsieve.assets.checks import FRESHNESS, SYNC_STATE, describe_slot_problem
from pgsieve.assets.initial_sync import tables_partitions
from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.translator import AssetKind, DagsterNames, slot_stream_asset, subscription_asset
from pgsieve.pipelines.project import Project
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.slot import make_resync_hint, read_slot_state


@dataclass(frozen=True)
class Jobs:
    """The jobs of a project, in the order of its streams and subscriptions.

    - `increments`: for each stream, a job that reads the slot and applies the changes to the replicas
    - `single_increments`: the same for one subscription of a stream with several subscriptions. Only people start these.
    - `copies`: for each subscription, a job that copies tables
    - `maintenance`: for each stream, a job that deletes old changes and files
    - `alarms`: for each stream, a job that fails as long as the slot has a problem
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


def make_jobs(project: Project, dagster_names: DagsterNames) -> Jobs:
    """Make the jobs of all streams and subscriptions."""
    slot_streams = list(project.slot_streams.values())
    return Jobs(
        increments=[
            _make_increments_job(slot_stream, project.find_subscriptions(slot_stream), dagster_names)
            for slot_stream in slot_streams
        ],
        single_increments=[
            _make_increments_job(slot_stream, [subscription], dagster_names, f"_{subscription.name}")
            for slot_stream in slot_streams
            if len(project.find_subscriptions(slot_stream)) > 1
            for subscription in project.find_subscriptions(slot_stream)
        ],
        copies=[
            _make_copy_job(subscription, dagster_names) for subscription in project.subscriptions.values()
        ],
        maintenance=[
            _make_maintenance_job(project, slot_stream, dagster_names) for slot_stream in slot_streams
        ],
        alarms=[_make_slot_alarm_job(slot_stream, dagster_names) for slot_stream in slot_streams],
    )


def _make_increments_job(
    slot_stream: SlotStream,
    subscriptions: Sequence[Subscription],
    dagster_names: DagsterNames,
    name_part: str = "",
) -> UnresolvedAssetJobDefinition:
    """Make the job that reads the slot of a stream and applies the changes to the replicas of some of its subscriptions.

    If the job is for one of several subscriptions, `name_part` distinguishes its name.
    """
    names = ", ".join(subscription.name for subscription in subscriptions)
    return dg.define_asset_job(
        dagster_names.prefixed_name(
            f"{slot_stream.name}_{name_part}_increments" if name_part else f"{slot_stream.name}_increments"
        ),
        _select_increments(slot_stream, subscriptions, dagster_names),
        description=f"Reads slot {slot_stream.slot}, and applies the changes to the replicas of {names}.",
    )


def _select_increments(
    slot_stream: SlotStream, subscriptions: Sequence[Subscription], dagster_names: DagsterNames
) -> dg.AssetSelection:
    """Select the assets and asset checks that an increments job materialises.

    The assets of the replicas are not selected: if a run fails, Dagster shows all selected assets as failed, although
    most replicas may be up to date. Instead, the run itself reports the replicas that it has changed.
    """
    change_log_key = dagster_names.asset_key(slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG))
    asset_keys, check_keys = [change_log_key], [dg.AssetCheckKey(change_log_key, "slot_health")]
    for subscription in subscriptions:
        cut_key = dagster_names.asset_key(subscription_asset(subscription, AssetKind.CUT))
        asset_keys += [
            dagster_names.asset_key(subscription_asset(subscription, AssetKind.TABLE_CHANGES)),
            cut_key,
        ]
        check_keys += [dg.AssetCheckKey(cut_key, check_name) for check_name in (SYNC_STATE, FRESHNESS)]
    return dg.AssetSelection.assets(*asset_keys).without_checks() | dg.AssetSelection.checks(*check_keys)


def _select_maintenance(
    project: Project, slot_stream: SlotStream, dagster_names: DagsterNames
) -> dg.AssetSelection:
    """Select the maintenance assets of a stream and its subscriptions."""
    maintenance_assets = [
        subscription_asset(s, AssetKind.MAINTENANCE) for s in project.find_subscriptions(slot_stream)
    ]
    return dg.AssetSelection.assets(
        *map(
            dagster_names.asset_key,
            [slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG_MAINTENANCE), *maintenance_assets],
        )
    )


def _make_copy_job(subscription: Subscription, dagster_names: DagsterNames) -> UnresolvedAssetJobDefinition:
    """Make the job that copies tables of a subscription; each table is a Dagster partition."""
    return dg.define_asset_job(
        dagster_names.prefixed_name(f"{subscription.name}_copies"),
        dg.AssetSelection.assets(
            dagster_names.asset_key(subscription_asset(subscription, AssetKind.INITIAL_SYNC))
        ),
        description=f"Copies the tables of subscription {subscription.name} that are chosen as Dagster partitions.",
        partitions_def=tables_partitions(subscription.name),
    )


def _make_maintenance_job(
    project: Project, slot_stream: SlotStream, dagster_names: DagsterNames
) -> UnresolvedAssetJobDefinition:
    return dg.define_asset_job(
        dagster_names.prefixed_name(f"{slot_stream.name}_maintenance"),
        _select_maintenance(project, slot_stream, dagster_names),
        description=f"Deletes changes of {slot_stream.name} that are older than their retention, compacts tables, and removes old files.",
    )


def _make_slot_alarm_job(slot_stream: SlotStream, dagster_names: DagsterNames) -> dg.JobDefinition:
    """Make the job that fails as long as the slot has a problem."""
    name = dagster_names.prefixed_name(f"{slot_stream.name}_slot_alarm")

    @dg.op(name=f"{name}_if_unhealthy", required_resource_keys={dagster_names.lake_resource_key})
    def slot_alarm(context: dg.OpExecutionContext) -> None:
        with run_as_step(context):
            lake = getattr(context.resources, dagster_names.lake_resource_key).open()
            problem = find_slot_problem(slot_stream, lake)
        if problem is not None:
            raise dg.Failure(
                description=problem.text,
                metadata={
                    "what to do": problem.remedy,
                    "slot": slot_stream.slot,
                    "source": slot_stream.source.name,
                },
                allow_retries=False,
            )
        context.log.info(f"replication slot {slot_stream.slot} is healthy again")

    @dg.job(
        name=name,
        description=f"Fails when replication slot {slot_stream.slot} is missing, has lost WAL, or lags 1 GiB or more.",
    )
    def alarm() -> None:
        slot_alarm()

    return alarm


@dataclass(frozen=True)
class SlotProblem:
    """A problem of a slot, and its remedy."""

    text: str
    remedy: str


def find_slot_problem(slot_stream: SlotStream, lake: Lake) -> SlotProblem | None:
    """The problem of a slot; None if it has none.

    The first run creates the slot, so a missing slot is no problem before the first run.
    """
    try:
        with slot_stream.source.connect() as connection:
            slot = read_slot_state(connection, slot_stream.slot)
    except SourceError as error:
        return SlotProblem(error.message, error.hint or "check whether the server is running")
    if slot is None and ChangeLog(lake, slot_stream).read_position() is None:
        return None
    if (text := describe_slot_problem(slot_stream.slot, slot)) is None:
        return None
    if slot is None or slot.wal_status == "lost":
        return SlotProblem(text, make_resync_hint(slot_stream.subscriptions))
    return SlotProblem(text, "run the increments more often, and look for failed runs")
