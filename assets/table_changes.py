"""UPDATE transformation as an asset: what a subscription gets of the slices appended since the last time."""

from collections.abc import Sequence

import dagster as dg

from assets.metadata import KINDS, change_log_key, table_changes_key
from assets.steps.subscription import Subscription
from assets.steps.table_changes import TableChanges, transform
from resources.delta import LakeResource


def table_changes_asset(subscription: Subscription) -> dg.AssetsDefinition:
    """The asset `<subscription>/table_changes`: decode, filter, transform."""

    @dg.asset(
        key=table_changes_key(subscription),
        deps=[change_log_key(subscription.feed)],
        kinds=KINDS,
        group_name=subscription.name,
        description="The changes of each table after row filters and the UPDATE transformation.",
        pool=f"subscription_{subscription.name}",
    )
    def table_changes(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult[None]:
        with subscription.feed.source.exclusively(subscription.name):
            changes = transform(subscription, lake.open(), context.log.info)
        for table in (c for c in changes if c.problem):
            context.log.error(f"{table.schema}.{table.table}: {table.problem}")
        return dg.MaterializeResult(metadata=_metadata(changes))

    return table_changes


def _metadata(changes: Sequence[TableChanges]) -> dict[str, dg.MetadataValue | dg.TableMetadataValue]:
    records = [
        dg.TableRecord(
            {
                "table": f"{c.schema}.{c.table}",
                **{
                    f"{operation}s received": c.received.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                **{
                    f"{operation}s sent": c.sent.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                "truncates": c.truncates,
                "problem": c.problem or "",
            }
        )
        for c in changes
    ]
    totals = {}
    for operation in ("insert", "update", "delete"):
        totals[f"{operation}s before"] = dg.MetadataValue.int(
            sum(c.received.get(operation, 0) for c in changes)
        )
        totals[f"{operation}s after"] = dg.MetadataValue.int(sum(c.sent.get(operation, 0) for c in changes))
    table = dg.MetadataValue.table(records) if records else dg.MetadataValue.text("no changes")
    return {"tables": table, **totals}
