"""The schedules and sensors of the Dagster definitions.

All except the last in this list are off until a user switches them on. If pgsieve.yaml has `dagster: {automation:
true}`, they are on from the beginning.

- Schedules start two kinds of runs. Every five minutes a run reads a slot, and applies the changes to the replicas of
  the subscriptions that read it. Every night a run maintains their tables.
- One sensor starts the copy of tables that have no replica yet, or whose columns have changed.
- One sensor watches each slot. If the slot is missing, has lost WAL or retains too much WAL, the sensor starts a run
  that fails. Dagster sends alerts for failed runs, but not for failed sensors.
- One sensor keeps the list of published tables in Dagster up to date. It is always on.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgsieve.assets.encoded_names import encode_partition_key
from pgsieve.assets.initial_sync import ONLY_MISSING_TAG, divide_into_ranges, range_tags, tables_partitions
from pgsieve.assets.steps.initial_sync.copy import find_tables_to_copy
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.translator import DagsterNames
from pgsieve.pipelines.jobs import find_slot_problem
from pgsieve.resources.lake.delta.layout import TableName

#: The sensor starts no other copy until the last one has ended, or was started longer ago than this. It does not wait
#: for ever, because Dagster may not notice that a run was killed. If the last run is alive after all, each of the two
#: leaves out tables that the other one has copied.
_MAX_COPY_WAIT = timedelta(hours=1)
#: While a slot has a problem, the sensor starts a failing run at this interval.
_ALARM_INTERVAL = timedelta(hours=1)


def make_increments_schedule(
    job: UnresolvedAssetJobDefinition, *, is_running: bool = False
) -> dg.ScheduleDefinition:
    """Return a schedule that runs the increments of a stream (read the slot, and apply the changes) every five minutes."""
    return _make_schedule(job, "*/5 * * * *", is_running=is_running)


def make_maintenance_schedule(
    job: UnresolvedAssetJobDefinition, *, is_running: bool = False
) -> dg.ScheduleDefinition:
    """Return a schedule that maintains a stream and its subscriptions every night."""
    return _make_schedule(job, "0 3 * * *", is_running=is_running)


def _make_schedule(
    job: UnresolvedAssetJobDefinition, cron: str, *, is_running: bool
) -> dg.ScheduleDefinition:
    status = dg.DefaultScheduleStatus.RUNNING if is_running else dg.DefaultScheduleStatus.STOPPED
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule=cron,
        default_status=status,
        description=job.description,
    )


def _choose_sensor_status(*, is_running: bool) -> dg.DefaultSensorStatus:
    return dg.DefaultSensorStatus.RUNNING if is_running else dg.DefaultSensorStatus.STOPPED


def make_published_sensor(
    tables_by_subscription: Mapping[str, Collection[TableName]], dagster_names: DagsterNames
) -> dg.SensorDefinition:
    """Return a sensor that adds each published table to the Dagster partitions of its subscription's initial sync.

    `tables_by_subscription` maps each subscription to the tables that were published when Dagster loaded the code. The sensor is always
    on, since it starts no run, and reads nothing but Dagster's own records.
    """

    @dg.sensor(
        name=dagster_names.prefixed_name("published_tables"),
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Lists the published tables as Dagster partitions of the initial syncs. It starts no run.",
    )
    def published_tables(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        partition_requests = []
        for subscription_name, names in tables_by_subscription.items():
            partitions = tables_partitions(subscription_name)
            present_keys = partitions.get_partition_keys(dynamic_partitions_store=context.instance)
            if new_keys := sorted({*map(encode_partition_key, names)} - set(present_keys)):
                partition_requests.append(partitions.build_add_request(new_keys))
        if not partition_requests:
            return dg.SkipReason("all tables are listed")
        return dg.SensorResult(dynamic_partitions_requests=partition_requests)

    return published_tables


def make_copy_sensor(
    subscription: Subscription,
    job: UnresolvedAssetJobDefinition,
    dagster_names: DagsterNames,
    *,
    is_running: bool = False,
) -> dg.SensorDefinition:
    """Return a sensor that starts the copy of tables that have no replica, or whose columns have changed."""

    @dg.sensor(
        name=dagster_names.prefixed_name(f"{subscription.name}_new_tables"),
        job=job,
        minimum_interval_seconds=60,
        required_resource_keys={dagster_names.lake_resource_key},
        default_status=_choose_sensor_status(is_running=is_running),
        description="Starts the initial sync of tables that have no replica, or whose columns changed.",
    )
    def new_tables(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        lake = getattr(context.resources, dagster_names.lake_resource_key).open()
        if not SubscriptionRecord(lake, subscription.name).read_state().enabled:
            return dg.SkipReason("the subscription is disabled")
        keys_to_copy = [encode_partition_key(name) for name in find_tables_to_copy(subscription, lake)]
        if not keys_to_copy:
            return dg.SkipReason("every published table has its replica")
        last_run = _find_last_copy_run(context.instance, subscription)
        if (
            last_run
            and not last_run.dagster_run.is_finished
            and datetime.now(UTC) - last_run.create_timestamp < _MAX_COPY_WAIT
        ):
            return dg.SkipReason(f"run {last_run.dagster_run.run_id} is copying tables")
        partitions = tables_partitions(subscription.name)
        present_keys = partitions.get_partition_keys(dynamic_partitions_store=context.instance)
        new_keys = sorted(set(keys_to_copy) - set(present_keys))
        ordered_keys = [*present_keys, *new_keys]
        # Dagster starts at most one run for each run key. The key contains the id of the last copying run, so the same
        # copy is requested again only after another run has started.
        last_run_id = last_run.dagster_run.run_id if last_run else "first"
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(
                    run_key=f"{last_run_id} {key_range[0]}",
                    tags={ONLY_MISSING_TAG: subscription.name, **range_tags(key_range)},
                )
                for key_range in divide_into_ranges(ordered_keys, keys_to_copy)
            ],
            dynamic_partitions_requests=[partitions.build_add_request(new_keys)] if new_keys else [],
        )

    return new_tables


def _find_last_copy_run(instance: dg.DagsterInstance, subscription: Subscription) -> dg.RunRecord | None:
    """Find the last run that the sensor of a subscription has started; None if it has started no run."""
    records = instance.get_run_records(dg.RunsFilter(tags={ONLY_MISSING_TAG: subscription.name}), limit=1)
    return records[0] if records else None


def make_slot_lag_sensor(
    slot_stream: SlotStream, job: dg.JobDefinition, dagster_names: DagsterNames, *, is_running: bool = False
) -> dg.SensorDefinition:
    """Return a sensor that starts a failing run when it notices a problem of the slot, and then every hour.

    `job` is the job that fails as long as the slot has a problem.
    """

    @dg.sensor(
        name=dagster_names.prefixed_name(f"{slot_stream.name}_slot_lag"),
        job=job,
        minimum_interval_seconds=60,
        required_resource_keys={dagster_names.lake_resource_key},
        default_status=_choose_sensor_status(is_running=is_running),
        description=f"Starts a run that fails when replication slot {slot_stream.slot} is missing, has lost WAL, or lags 1 GiB or more.",
    )
    def slot_lag(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        lake = getattr(context.resources, dagster_names.lake_resource_key).open()
        problem, current_time = find_slot_problem(slot_stream, lake), datetime.now(UTC)
        if problem is None:
            context.update_cursor("")
            return dg.SkipReason(f"replication slot {slot_stream.slot} is healthy")
        if context.cursor and current_time - datetime.fromisoformat(context.cursor) < _ALARM_INTERVAL:
            return dg.SkipReason(f"{problem.text}; a run has failed for it at {context.cursor}")
        context.update_cursor(current_time.isoformat())
        return dg.RunRequest()

    return slot_lag
