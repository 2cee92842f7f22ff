"""UPDATE transformation as an asset: a subscription's changes in the slices appended since the last run."""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import transformation_metadata, work_metadata
from pgsieve.assets.outcome import NO_CALLBACKS, StepCallbacks, as_step
from pgsieve.assets.runless_events import report_if_disabled
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.translator import AssetKind, Naming, feed_asset, subscription_asset
from pgsieve.decoding.changes.sent_as import sum_counts
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.work import measure

#: The data version is the same in each run. With a new version, Dagster would call every replica "unsynced" whose table
#: has no new changes. The check `freshness` reports changes that wait.
_APPENDED = dg.DataVersion("appended")


def table_changes_asset(
    subscription: Subscription,
    naming: Naming,
    *,
    prefetched: PrefetchedWork[Sequence[TableChanges]] | None = None,
    callbacks: StepCallbacks[Sequence[TableChanges]] = NO_CALLBACKS,
) -> dg.AssetsDefinition:
    """The asset `<subscription>/table_changes`: decode, filter, transform.

    `prefetched` returns changes that a command has transformed before the step; the step then only reports them. The problem
    of a table is only logged: the later step of the replicas fails the run. A disabled subscription fails one run, and
    is left out by later runs.
    """
    data = subscription_asset(subscription, AssetKind.TABLE_CHANGES)
    upstream = [naming.key(feed_asset(subscription.feed, AssetKind.CHANGE_LOG))]

    @dg.multi_asset(
        specs=[naming.spec(data, upstream).replace_attributes(skippable=True)],
        name=naming.name(f"{subscription.name}__table_changes"),
        required_resource_keys=naming.resources,
        pool=f"subscription_{subscription.name}",
    )
    def table_changes(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        log = context.log.info
        with as_step(context), callbacks.reporting_errors():
            if prefetched is None:
                lake = open_lake(context, naming)
                if report_if_disabled(context.instance, subscription, lake, naming):
                    context.log.warning(f"subscription {subscription.name} is disabled")
                    return
                with measure() as work:
                    changes: Sequence[TableChanges] = transform(subscription, lake, log)
            else:
                changes, work = prefetched(log)
        callbacks.add_work(work)
        callbacks.report(changes)
        for table in (c for c in changes if c.problem):
            context.log.error(f"{quote_qualified(*table.name)}: {table.problem}")
        yield dg.MaterializeResult(
            metadata={**_metadata(changes), **work_metadata(work)}, data_version=_APPENDED
        )

    return table_changes


def _metadata(changes: Sequence[TableChanges]) -> dict[str, Any]:
    records = [
        dg.TableRecord(
            {
                "table": escape_controls(quote_qualified(*c.name)),
                **{
                    f"{operation}s received": c.received.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                **{
                    f"{operation}s sent": c.sent.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                "truncates": c.truncates,
                "partitions": escape_controls(", ".join(c.through)),
                "problem": escape_controls(c.problem or ""),
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
    return {"tables": table, **totals, **transformation_metadata(sum_counts(*(c.sent_as for c in changes)))}
