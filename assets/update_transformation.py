"""UPDATE transformation as an asset: what a subscription gets of the slices appended since the last time."""

from collections.abc import Sequence

import dagster as dg

from pgsieve.assets.metadata import KINDS, change_log_key, table_changes_key
from pgsieve.assets.steps.records.transformed import TableChanges
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import LakeResource


def table_changes_asset(
    subscription: Subscription, done: Sequence[TableChanges] | None = None
) -> dg.AssetsDefinition:
    """The asset `<subscription>/table_changes`: decode, filter, transform.

    `done` is what a continuous run has transformed already: there is nothing left but to tell it.
    """

    @dg.asset(
        key=table_changes_key(subscription),
        deps=[change_log_key(subscription.feed)],
        kinds=KINDS,
        group_name=subscription.name,
        description="The changes of each table after row filters and the UPDATE transformation.",
        pool=f"subscription_{subscription.name}",
    )
    def table_changes(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult[None]:
        changes = transform(subscription, lake.open(), context.log.info) if done is None else done
        for table in (c for c in changes if c.problem):
            context.log.error(f"{quote_qualified(*table.name)}: {table.problem}")
        return dg.MaterializeResult(metadata=_metadata(changes))

    return table_changes


def _metadata(changes: Sequence[TableChanges]) -> dict[str, dg.MetadataValue | dg.TableMetadataValue]:
    records = [
        dg.TableRecord(
            {
                "table": quote_qualified(*c.name),
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
