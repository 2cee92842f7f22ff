"""Schedules and sensors, all off until somebody turns them on.

Increments on a schedule; a sensor that copies tables which have no replica yet or whose definition changed; a
sensor that fails, and so raises Dagster's alarm, when a slot retains too much WAL.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from pgsieve.assets.checks import LAG_ALARM_BYTES
from pgsieve.assets.dagster_names import table_partition
from pgsieve.assets.initial_sync import LACKING, range_tags, stretches, tables_partitions
from pgsieve.assets.metadata import initial_sync_key
from pgsieve.assets.steps.initial_sync.copy import tables_to_copy
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import LakeResource
from pgsieve.resources.postgres.slot import SlotError, slot_state

#: So long the sensor waits for a copy that it requested: Dagster may never hear of a run that was killed. A request too
#: many finds nothing to copy.
_WAITING = timedelta(hours=1)


def increments_schedule(job: UnresolvedAssetJobDefinition) -> dg.ScheduleDefinition:
    """Run the increments of a feed every five minutes."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule="*/5 * * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )


def maintenance_schedule(job: UnresolvedAssetJobDefinition) -> dg.ScheduleDefinition:
    """Maintain a feed and the subscriptions that read it every night."""
    return dg.ScheduleDefinition(
        name=f"{job.name}_schedule",
        job=job,
        cron_schedule="0 3 * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )


def copy_sensor(subscription: Subscription) -> dg.SensorDefinition:
    """Copy tables that were published, or changed their columns, since the last time."""

    @dg.sensor(
        name=f"{subscription.name}_new_tables",
        target=dg.AssetSelection.assets(initial_sync_key(subscription)),
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description="Starts the initial sync of tables that have no replica, or whose columns changed.",
    )
    def new_tables(
        context: dg.SensorEvaluationContext, lake: LakeResource
    ) -> dg.SensorResult | dg.SkipReason:
        opened = lake.open()
        if not SubscriptionRecord(opened, subscription.name).state().enabled:
            return dg.SkipReason("the subscription is disabled")
        keys = [table_partition(name) for name in tables_to_copy(subscription, opened)]
        if not keys:
            return dg.SkipReason("every published table has its replica")
        last = _last_copy(context.instance, subscription)
        if last and not last.dagster_run.is_finished and datetime.now(UTC) - last.create_timestamp < _WAITING:
            return dg.SkipReason(f"run {last.dagster_run.run_id} copies what was lacking before")
        partitions = tables_partitions(subscription)
        present = partitions.get_partition_keys(dynamic_partitions_store=context.instance)
        new = sorted(set(keys) - set(present))
        order = [*present, *new]
        # What is asked for after the same run is the same request.
        number = last.dagster_run.run_id if last else "first"
        return dg.SensorResult(
            run_requests=[
                dg.RunRequest(
                    run_key=f"{number} {stretch[0]}", tags={LACKING: subscription.name, **range_tags(stretch)}
                )
                for stretch in stretches(order, keys)
            ],
            dynamic_partitions_requests=[partitions.build_add_request(new)] if new else [],
        )

    return new_tables


def _last_copy(dagster: dg.DagsterInstance, subscription: Subscription) -> dg.RunRecord | None:
    """The newest run that copies, or copied, what a subscription lacked."""
    records = dagster.get_run_records(dg.RunsFilter(tags={LACKING: subscription.name}), limit=1)
    return records[0] if records else None


def slot_lag_sensor(feed: Feed) -> dg.SensorDefinition:
    """Raise an alarm, as a failed tick, when the slot is gone or retains too much WAL."""

    @dg.sensor(
        name=f"{feed.name}_slot_lag",
        job_name=f"{feed.name}_increments",
        minimum_interval_seconds=60,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=f"Fails when replication slot {feed.slot} is missing, lost, or lags 1 GiB or more.",
    )
    def slot_lag(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        with feed.source.connect() as connection:
            state = slot_state(connection, feed.slot)
        if state is None:
            raise SlotError(f'replication slot "{feed.slot}" does not exist', hint="run `pgsieve run`")
        if state.wal_status == "lost" or state.lag >= LAG_ALARM_BYTES:
            raise SlotError(
                f'replication slot "{feed.slot}" lags {state.lag} bytes (wal_status {state.wal_status})',
                hint="run the increments oftener, and look for a run that fails",
            )
        context.update_cursor(format_lsn(state.confirmed_lsn))
        return dg.SkipReason(f"the slot lags {state.lag} bytes")

    return slot_lag
