"""Retention, compaction and vacuum as assets: one per feed, one per subscription.

The asset of a subscription also registers new replicas in the catalog, and updates comments.
"""

from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

import dagster as dg

from pgsieve.assets.lake import open_lake
from pgsieve.assets.metadata import SECONDS
from pgsieve.assets.outcome import as_step
from pgsieve.assets.steps.operations.maintenance import (
    MaintainedTable,
    Retention,
    maintain_feed,
    maintain_subscription,
)
from pgsieve.assets.steps.operations.registration import Registration
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.translator import AssetKind, Naming, feed_asset, subscription_asset


def feed_maintenance_asset(
    feed: Feed, subscriptions: Sequence[Subscription], retention: Retention, naming: Naming
) -> dg.AssetsDefinition:
    """The asset `<source>/change_log_maintenance`; `subscriptions` are all subscriptions that read the feed."""
    data = feed_asset(feed, AssetKind.CHANGE_LOG_MAINTENANCE)

    @dg.multi_asset(
        specs=[naming.spec(data, [naming.key(feed_asset(feed, AssetKind.CHANGE_LOG))])],
        name=naming.name(f"{feed.name}__change_log_maintenance"),
        required_resource_keys=naming.resources,
        pool=f"slot_{feed.slot}",
    )
    def change_log_maintenance(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        begin = monotonic()
        with as_step(context):
            lake = open_lake(context, naming)
            return _result(maintain_feed(feed, lake, subscriptions, retention, context.log.info), begin)

    return change_log_maintenance


def subscription_maintenance_asset(
    subscription: Subscription, retention: Retention, naming: Naming, *, names: str | None = None
) -> dg.AssetsDefinition:
    """The asset `<subscription>/maintenance`; `names` is the template of the replicas' names in the catalog."""
    data = subscription_asset(subscription, AssetKind.MAINTENANCE)

    @dg.multi_asset(
        specs=[naming.spec(data, [naming.key(subscription_asset(subscription, AssetKind.TABLE_CHANGES))])],
        name=naming.name(f"{subscription.name}__maintenance"),
        required_resource_keys=naming.resources,
        pool=f"subscription_{subscription.name}",
    )
    def maintenance(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        begin = monotonic()
        with as_step(context):
            lake = open_lake(context, naming)
            yield _result(maintain_subscription(subscription, lake, retention, context.log.info), begin)
            if names is not None:
                Registration(subscription, lake, names).register()

    return maintenance


def _result(maintained: Sequence[MaintainedTable], begin: float) -> dg.MaterializeResult[None]:
    tables = [{"path": t.path, "rows deleted": t.rows, "files compacted": t.files} for t in maintained]
    totals: dict[str, Any] = {
        "rows deleted": sum(t.rows for t in maintained),
        "files compacted": sum(t.files for t in maintained),
        "tables": dg.MetadataValue.json(tables),
        SECONDS: monotonic() - begin,
    }
    return dg.MaterializeResult(metadata=totals)
