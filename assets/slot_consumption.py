"""Slot consumption as an asset: the raw, durable, replayable messages of one slot."""

from collections.abc import Callable, Sequence

import dagster as dg

from pgsieve.assets.metadata import KINDS, change_log_key, initial_sync_key, standard
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.slot_consumption.drain import drain
from pgsieve.assets.steps.slot_consumption.reading import Drained
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.lake import LakeResource


def change_log_asset(
    feed: Feed, subscriptions: Sequence[Subscription], append: Callable[[], Drained] | None = None
) -> dg.AssetsDefinition:
    """The asset `<source>/change_log`: append committed transactions up to the current LSN, then confirm.

    `append` does it instead, for what a continuous run has received.
    """

    @dg.asset(
        key=change_log_key(feed),
        deps=[initial_sync_key(s) for s in subscriptions],
        kinds=KINDS,
        group_name=feed.source.name,
        description=f"The messages of replication slot {feed.slot}, appended whole transaction by transaction;"
        " the slot is confirmed only after they are durable.",
        pool=f"slot_{feed.slot}",
    )
    def change_log(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult[None]:
        opened = lake.open()
        drained = append() if append else drain(feed, opened, subscriptions, context.log.info)
        return dg.MaterializeResult(
            metadata={
                "from LSN": format_lsn(drained.from_lsn),
                "to LSN": format_lsn(drained.to_lsn),
                "slices": drained.slices,
                "lag in bytes": drained.lag,
                "slot": feed.slot,
                **standard(uri=ChangeLog(opened, feed).path, table=f"{feed.name}.change_log"),
            }
        )

    return change_log
