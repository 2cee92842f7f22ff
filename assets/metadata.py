"""Asset keys, and the metadata people look for, in Dagster's standard names."""

from collections.abc import Iterable, Mapping
from typing import Any

import dagster as dg

from pgsieve.assets.dagster_names import Name, component
from pgsieve.assets.steps.subscription import Feed, Subscription

KINDS = {"postgres", "spark", "deltalake"}


def initial_sync_key(subscription: Subscription) -> dg.AssetKey:
    """`<subscription>/initial_sync`."""
    return dg.AssetKey([subscription.name, "initial_sync"])


def change_log_key(feed: Feed) -> dg.AssetKey:
    """`<source>/change_log`, or `<slot>/change_log` where a subscription has a slot of its own."""
    return dg.AssetKey([feed.name, "change_log"])


def table_changes_key(subscription: Subscription) -> dg.AssetKey:
    """`<subscription>/table_changes`."""
    return dg.AssetKey([subscription.name, "table_changes"])


def replica_key(subscription: Subscription, name: Name) -> dg.AssetKey:
    """`<subscription>/<schema>/<table>`, written as `assets/dagster_names.py` says."""
    return dg.AssetKey([subscription.name, *map(component, name)])


def column_schema(columns: Iterable[tuple[str, str]]) -> dg.TableSchema:
    """Columns and Spark types as Dagster shows them."""
    return dg.TableSchema([dg.TableColumn(name, spark) for name, spark in columns])


def standard(
    *,
    rows: int | None = None,
    columns: Iterable[tuple[str, str]] | None = None,
    table: str | None = None,
    uri: str | None = None,
) -> dict[str, Any]:
    """Dagster's standard metadata entries, those that are known."""
    entries: Mapping[str, Any] = {
        "dagster/row_count": rows,
        "dagster/column_schema": None if columns is None else column_schema(columns),
        "dagster/table_name": table,
        "dagster/uri": uri,
    }
    return {key: value for key, value in entries.items() if value is not None}
