"""Initial row-filtered sync as an asset: its Dagster partitions are the published tables."""

import warnings

import dagster as dg

from assets.metadata import KINDS, column_schema, initial_sync_key, partition_table
from assets.steps.initial_sync import Copied, copy_tables
from assets.steps.subscription import Subscription
from decoding.lsn import format_lsn
from resources.delta import LakeResource


def tables_partitions(subscription: Subscription) -> dg.DynamicPartitionsDefinition:
    """The Dagster partitions of a subscription's initial sync: one a published table."""
    return dg.DynamicPartitionsDefinition(name=f"{subscription.name}_tables")


def initial_sync_asset(subscription: Subscription) -> dg.AssetsDefinition:
    """The asset `<subscription>/initial_sync`: materialising a partition copies that table anew."""
    with warnings.catch_warnings():
        # Dagster calls the policy's parameter beta; a backfill has to copy its tables in one run.
        warnings.simplefilter("ignore", dg.BetaWarning)

        @dg.asset(
            key=initial_sync_key(subscription),
            partitions_def=tables_partitions(subscription),
            backfill_policy=dg.BackfillPolicy.single_run(),
            kinds=KINDS,
            group_name=subscription.name,
            description=f"Copies the published tables of {', '.join(subscription.feed.subscriptions[subscription.name])}"
            " at one snapshot, row filters evaluated by the publisher. A backfill copies the chosen tables again.",
            pool=f"slot_{subscription.feed.slot}",
        )
        def initial_sync(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult[None]:
            names = [partition_table(key) for key in context.partition_keys]
            # What is transformed meanwhile would leave these tables out, and they would lack it afterwards.
            with subscription.feed.source.exclusively(subscription.name):
                copied = copy_tables(subscription, lake.open(), names, context.log.info)
            for table in (c for c in copied if c.problem):
                context.log.error(f"{table.schema}.{table.table} cannot be copied: {table.problem}")
            return dg.MaterializeResult(metadata=_metadata(copied))

    return initial_sync


def _metadata(copied: list[Copied]) -> dict[str, dg.MetadataValue | dg.TableMetadataValue]:
    records = [
        dg.TableRecord(
            {
                "table": f"{c.schema}.{c.table}",
                "rows": c.rows,
                "seconds": round(c.seconds, 2),
                "row filter": c.row_filter or "",
                "LSN": format_lsn(c.lsn),
                "Delta version": c.version,
                "problem": c.problem or "",
            }
        )
        for c in copied
    ]
    metadata: dict[str, dg.MetadataValue | dg.TableMetadataValue] = {
        "tables": dg.MetadataValue.table(records) if records else dg.MetadataValue.text("none"),
        "dagster/row_count": dg.MetadataValue.int(sum(c.rows for c in copied)),
    }
    if len(copied) == 1:
        metadata["dagster/column_schema"] = dg.MetadataValue.table_schema(column_schema(copied[0].columns))
    return metadata
