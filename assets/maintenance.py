"""Retention, compaction and vacuum as assets of their own: one a feed, one a subscription."""

from collections.abc import Sequence
from typing import Any

import dagster as dg

from pgsieve.assets.metadata import change_log_key, table_changes_key
from pgsieve.assets.steps.operations.maintenance import (
    MaintainedTable,
    Retention,
    maintain_feed,
    maintain_subscription,
)
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.resources.lake.lake import LakeResource

_KINDS = {"deltalake"}


def feed_maintenance_key(feed: Feed) -> dg.AssetKey:
    """`<source>/change_log_maintenance`, or the slot's where a subscription has one of its own."""
    return dg.AssetKey([feed.name, "change_log_maintenance"])


def subscription_maintenance_key(subscription: Subscription) -> dg.AssetKey:
    """`<subscription>/maintenance`."""
    return dg.AssetKey([subscription.name, "maintenance"])


def feed_maintenance_asset(
    feed: Feed, subscriptions: Sequence[Subscription], retention: Retention
) -> dg.AssetsDefinition:
    """The asset `<source>/change_log_maintenance`; `subscriptions` are all that read the feed."""

    @dg.asset(
        key=feed_maintenance_key(feed),
        deps=[change_log_key(feed)],
        kinds=_KINDS,
        group_name=feed.source.name,
        description="Deletes what every subscription has applied and is old enough from the change log, compacts it,"
        " and removes the files of old versions.",
        pool=f"slot_{feed.slot}",
    )
    def change_log_maintenance(
        context: dg.AssetExecutionContext, lake: LakeResource
    ) -> dg.MaterializeResult[None]:
        return _result(maintain_feed(feed, lake.open(), subscriptions, retention, context.log.info))

    return change_log_maintenance


def subscription_maintenance_asset(subscription: Subscription, retention: Retention) -> dg.AssetsDefinition:
    """The asset `<subscription>/maintenance`."""

    @dg.asset(
        key=subscription_maintenance_key(subscription),
        deps=[table_changes_key(subscription)],
        kinds=_KINDS,
        group_name=subscription.name,
        description="Deletes what is applied and old enough from the change history, old cuts first and then the"
        " versions that they name; compacts the tables.",
        pool=f"subscription_{subscription.name}",
    )
    def maintenance(context: dg.AssetExecutionContext, lake: LakeResource) -> dg.MaterializeResult[None]:
        return _result(maintain_subscription(subscription, lake.open(), retention, context.log.info))

    return maintenance


def _result(done: Sequence[MaintainedTable]) -> dg.MaterializeResult[None]:
    tables = [{"path": t.path, "rows deleted": t.rows, "files compacted": t.files} for t in done]
    totals: dict[str, Any] = {
        "rows deleted": sum(t.rows for t in done),
        "files compacted": sum(t.files for t in done),
        "tables": dg.MetadataValue.json(tables),
    }
    return dg.MaterializeResult(metadata=totals)
