"""Makes the asset of the changes that a subscription receives in the slices since the last run.

A slice is the changes from one position of the slot to another. Row filters may turn an UPDATE into an INSERT or a
DELETE (the UPDATE transformation of PostgreSQL).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import transformation_metadata, work_metadata
from pgsieve.assets.outcome import NO_CALLBACKS, StepCallbacks, run_as_step
from pgsieve.assets.runless_events import report_if_disabled
from pgsieve.assets.steps.prefetched import PrefetchedWork
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord, SubscriptionState
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.steps.update_transformation.transform import transform
from pgsieve.assets.translator import AssetKind, DagsterNames, slot_stream_asset, subscription_asset
from pgsieve.decoding.changes.sent_as import sum_counts
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.visible import escape_controls
from pgsieve.resources.work import measure_work

#: Each run reports the same data version of this asset. Another one would make Dagster show all replicas (the tables
#: downstream) as unsynced, although most have no new changes. The check `freshness` reports changes that are waiting.
_CONSTANT_DATA_VERSION = dg.DataVersion("appended")


def table_changes_asset(
    subscription: Subscription,
    dagster_names: DagsterNames,
    *,
    wait_for_prefetched_work: PrefetchedWork[Sequence[TableChanges]] | None = None,
    callbacks: StepCallbacks[Sequence[TableChanges]] = NO_CALLBACKS,
) -> dg.AssetsDefinition:
    """Make the asset `<subscription>/table_changes`. Its step decodes changes, and applies the row filters to them.

    With `wait_for_prefetched_work` another thread transforms the changes in advance. The step calls this function to wait
    for the changes, and reports them. A problem of a table is only logged here; the later step that applies the changes
    fails the run. A subscription that was disabled is left out.
    """
    asset = subscription_asset(subscription, AssetKind.TABLE_CHANGES)
    upstream = [dagster_names.asset_key(slot_stream_asset(subscription.slot_stream, AssetKind.CHANGE_LOG))]

    @dg.multi_asset(
        specs=[dagster_names.asset_spec(asset, upstream).replace_attributes(skippable=True)],
        name=dagster_names.prefixed_name(f"{subscription.name}__table_changes"),
        required_resource_keys=dagster_names.resource_keys,
        pool=f"subscription_{subscription.name}",
    )
    def table_changes(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        log = context.log.info
        with run_as_step(context), callbacks.report_errors():
            lake = open_lake(context, dagster_names)
            if wait_for_prefetched_work is None:
                if report_if_disabled(context.instance, subscription, lake, dagster_names):
                    context.log.warning(f"subscription {subscription.name} is disabled")
                    return
                with measure_work() as work:
                    changes: Sequence[TableChanges] = transform(subscription, lake, log)
            else:
                changes, work = wait_for_prefetched_work(log)
            # An error may have disabled the subscription just now. Then the step that applies the changes fails the run.
            state = SubscriptionRecord(lake, subscription.name).read_state()
        callbacks.add_work(work)
        callbacks.report(changes)
        for change in changes:
            if change.problem:
                context.log.error(f"{quote_qualified(*change.name)}: {change.problem}")
        yield dg.MaterializeResult(
            metadata={**_make_metadata(changes, state), **work_metadata(work)},
            data_version=_CONSTANT_DATA_VERSION,
        )

    return table_changes


def _make_metadata(changes: Sequence[TableChanges], state: SubscriptionState) -> dict[str, Any]:
    """Entries with the number of changes before and after the transformation, for each table and in total.

    If the subscription is disabled, an entry has the reason.
    """
    records = [
        dg.TableRecord(
            {
                "table": escape_controls(quote_qualified(*change.name)),
                **{
                    f"{operation}s received": change.received_counts_by_operation.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                **{
                    f"{operation}s sent": change.sent_counts.get(operation, 0)
                    for operation in ("insert", "update", "delete")
                },
                "truncates": change.truncate_count,
                "partitions": escape_controls(", ".join(change.partition_names)),
                "problem": escape_controls(change.problem or ""),
            }
        )
        for change in changes
    ]
    totals = {}
    for operation in ("insert", "update", "delete"):
        totals[f"{operation}s before"] = dg.MetadataValue.int(
            sum(change.received_counts_by_operation.get(operation, 0) for change in changes)
        )
        totals[f"{operation}s after"] = dg.MetadataValue.int(
            sum(change.sent_counts.get(operation, 0) for change in changes)
        )
    table = dg.MetadataValue.table(records) if records else dg.MetadataValue.text("no changes")
    reason = {} if state.enabled else {"disabled": escape_controls(state.reason or "")}
    return {
        **reason,
        "tables": table,
        **totals,
        **transformation_metadata(
            sum_counts(*(change.sent_as for change in changes)),
            (name for change in changes for name in change.partition_names),
        ),
    }
