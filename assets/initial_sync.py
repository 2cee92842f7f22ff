"""Initial row-filtered sync as an asset: its Dagster partitions are the published tables."""

import warnings
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import dagster as dg

from pgsieve.assets.dagster_names import partition_table
from pgsieve.assets.metadata import KINDS, column_schema, initial_sync_key
from pgsieve.assets.steps.initial_sync.one_table import Copied
from pgsieve.assets.steps.log import quiet
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import LakeResource

#: Tag of a run that was begun because tables lacked a copy: another may have made it by then.
LACKING = "pgsieve/lacking"


def tables_partitions(subscription: Subscription) -> dg.DynamicPartitionsDefinition:
    """The Dagster partitions of a subscription's initial sync: one a published table."""
    return dg.DynamicPartitionsDefinition(name=f"{subscription.name}_tables")


def stretches(order: Sequence[str], keys: Collection[str]) -> list[list[str]]:
    """The Dagster partitions to copy, as they stand one after the other in the order of all: a run each."""
    return [list(stretch) for wanted, stretch in groupby(order, key=set(keys).__contains__) if wanted]


def range_tags(stretch: Sequence[str]) -> dict[str, str]:
    """Tags of the run that copies a stretch."""
    return {
        "dagster/asset_partition_range_start": stretch[0],
        "dagster/asset_partition_range_end": stretch[-1],
    }


def initial_sync_asset(
    subscription: Subscription,
    tell: Callable[[str], None] = quiet,
    report: Callable[[Sequence[Copied]], None] | None = None,
) -> dg.AssetsDefinition:
    """The asset `<subscription>/initial_sync`: materialising a partition copies that table anew.

    `tell` hears what the run's log gets: how far a long copy is. `report` gets what was copied, in the process that
    does it. A run with the tag LACKING copies only those of its
    tables that still need it once it has its turn.
    """
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

            def log(line: str) -> None:
                context.log.info(line)
                tell(line)

            lacking = LACKING in context.run.tags
            copied = copy_tables(subscription, lake.open(), names, log, lacking=lacking)
            for table in (c for c in copied if c.problem):
                name = quote_qualified(table.schema, table.table)
                context.log.error(f"{name} cannot be copied: {table.problem}")
            if report:
                report(copied)
            return dg.MaterializeResult(metadata=_metadata(copied))

    return initial_sync


def _metadata(copied: list[Copied]) -> dict[str, dg.MetadataValue | dg.TableMetadataValue]:
    records = [
        dg.TableRecord(
            {
                "table": quote_qualified(c.schema, c.table),
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
