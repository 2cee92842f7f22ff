"""The maintenance assets, which delete old changes, compact tables, and delete old files.

There is one for each stream (a slot with the subscriptions that read it), and one for each subscription. The asset of a
subscription also registers new replicas in Spark's catalog, and updates their comments.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import work_metadata
from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.steps.operations.maintenance import (
    MaintainedTable,
    Retention,
    maintain_slot_stream,
    maintain_subscription,
)
from pgsieve.assets.steps.operations.registration import Registration
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.translator import AssetKind, DagsterNames, slot_stream_asset, subscription_asset
from pgsieve.resources.work import Work, measure_work


def slot_stream_maintenance_asset(
    slot_stream: SlotStream,
    subscriptions: Sequence[Subscription],
    retention: Retention,
    dagster_names: DagsterNames,
) -> dg.AssetsDefinition:
    """Make the asset `<stream>/change_log_maintenance`. `subscriptions` are all subscriptions that read the stream."""
    asset = slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG_MAINTENANCE)

    @dg.multi_asset(
        specs=[
            dagster_names.asset_spec(
                asset, [dagster_names.asset_key(slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG))]
            )
        ],
        name=dagster_names.prefixed_name(f"{slot_stream.name}__change_log_maintenance"),
        required_resource_keys=dagster_names.resource_keys,
        pool=f"slot_{slot_stream.slot}",
    )
    def change_log_maintenance(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            with measure_work() as work:
                maintained_tables = maintain_slot_stream(
                    slot_stream, lake, subscriptions, retention, context.log.info
                )
            return _make_result(maintained_tables, work)

    return change_log_maintenance


def subscription_maintenance_asset(
    subscription: Subscription,
    retention: Retention,
    dagster_names: DagsterNames,
    *,
    name_template: str | None = None,
) -> dg.AssetsDefinition:
    """Make the asset `<subscription>/maintenance`.

    `name_template` is the template for the names of the replicas in Spark's catalog; None if they are not registered
    there.
    """
    asset = subscription_asset(subscription, AssetKind.MAINTENANCE)

    @dg.multi_asset(
        specs=[
            dagster_names.asset_spec(
                asset, [dagster_names.asset_key(subscription_asset(subscription, AssetKind.TABLE_CHANGES))]
            )
        ],
        name=dagster_names.prefixed_name(f"{subscription.name}__maintenance"),
        required_resource_keys=dagster_names.resource_keys,
        pool=f"subscription_{subscription.name}",
    )
    def maintenance(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        with run_as_step(context):
            lake = open_lake(context, dagster_names)
            with measure_work() as work:
                maintained_tables = maintain_subscription(subscription, lake, retention, context.log.info)
            yield _make_result(maintained_tables, work)
            if name_template is not None:
                Registration(subscription, lake, name_template).register()

    return maintenance


def _make_result(maintained_tables: Sequence[MaintainedTable], work: Work) -> dg.MaterializeResult[None]:
    """Report what maintenance has done to each table, and what it cost (`work`)."""
    tables = [
        {"path": table.path, "rows deleted": table.rows, "files compacted": table.files}
        for table in maintained_tables
    ]
    totals: dict[str, Any] = {
        "rows deleted": sum(table.rows for table in maintained_tables),
        "files compacted": sum(table.files for table in maintained_tables),
        "tables": dg.MetadataValue.json(tables),
        **work_metadata(work),
    }
    return dg.MaterializeResult(metadata=totals)
