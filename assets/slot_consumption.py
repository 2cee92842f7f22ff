"""The asset `change_log`, which has the undecoded messages of one slot, and the check of the slot's health."""

from collections.abc import Callable, Iterator, Sequence

import dagster as dg

from pgsieve.assets.checks import check_slot_health, slot_health_spec
from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import LAG_BYTES, standard_metadata, work_metadata
from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.slot_consumption.drain import drain_slot
from pgsieve.assets.steps.slot_consumption.reading import DrainResult
from pgsieve.assets.steps.subscription import SlotStream, Subscription
from pgsieve.assets.translator import AssetKind, DagsterNames, slot_stream_asset, subscription_asset
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.work import measure_work


def change_log_asset(
    slot_stream: SlotStream,
    subscriptions: Sequence[Subscription],
    dagster_names: DagsterNames,
    *,
    append: Callable[[], DrainResult] | None = None,
) -> dg.AssetsDefinition:
    """Make the asset `<stream>/change_log`.

    A stream is a slot with the subscriptions that read it. The step appends the committed transactions up to the
    current LSN to the change log, and then confirms them to the slot. `pgsieve run --follow` has received the messages
    already, and passes a function that appends them (`append`).
    """
    asset = slot_stream_asset(slot_stream, AssetKind.CHANGE_LOG)
    key = dagster_names.asset_key(asset)
    upstream = [dagster_names.asset_key(subscription_asset(s, AssetKind.INITIAL_SYNC)) for s in subscriptions]

    @dg.multi_asset(
        specs=[dagster_names.asset_spec(asset, upstream)],
        check_specs=[slot_health_spec(slot_stream, dagster_names)],
        name=dagster_names.prefixed_name(f"{slot_stream.name}__change_log"),
        required_resource_keys=dagster_names.resource_keys,
        pool=f"slot_{slot_stream.slot}",
        can_subset=True,
    )
    def change_log(
        context: dg.AssetExecutionContext,
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        with run_as_step(context):
            yield from append_messages(context)

    def append_messages(
        context: dg.AssetExecutionContext,
    ) -> Iterator[dg.MaterializeResult[None] | dg.AssetCheckResult]:
        if context.selected_asset_keys:
            lake = open_lake(context, dagster_names)
            with measure_work() as work:
                drain_result = (
                    append() if append else drain_slot(slot_stream, lake, subscriptions, context.log.info)
                )
            yield dg.MaterializeResult(
                asset_key=key,
                metadata={
                    "from LSN": format_lsn(drain_result.from_lsn),
                    "to LSN": format_lsn(drain_result.to_lsn),
                    "slices": drain_result.slices,
                    LAG_BYTES: drain_result.lag,
                    **work_metadata(work),
                    "slot": slot_stream.slot,
                    **standard_metadata(
                        uri=ChangeLog(lake, slot_stream).path, table=f"{slot_stream.name}.change_log"
                    ),
                },
            )
        if context.selected_asset_check_keys:
            yield check_slot_health(slot_stream, dagster_names)

    return change_log
