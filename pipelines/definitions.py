"""Dagster's table of contents: the assets, checks, jobs, schedules and sensors of one configuration file.

The file is the one that PGSIEVE_CONFIG names, or ./pgsieve.yaml; without one there are no definitions. The
sources say which tables are published; for a source that does not answer, the tables that have replicas are shown.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import dagster as dg
from dagster import get_dagster_logger

from pgsieve.assets.checks import (
    conformity_checks,
    consistency_checks,
    freshness_checks,
    slot_health_check,
    sync_state_checks,
)
from pgsieve.assets.dagster_names import table_partition
from pgsieve.assets.initial_sync import initial_sync_asset, tables_partitions
from pgsieve.assets.maintenance import (
    feed_maintenance_asset,
    feed_maintenance_key,
    subscription_maintenance_asset,
    subscription_maintenance_key,
)
from pgsieve.assets.metadata import change_log_key, replica_key, table_changes_key
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable, Table
from pgsieve.pipelines.automation import (
    copy_sensor,
    increments_schedule,
    maintenance_schedule,
    slot_lag_sensor,
)
from pgsieve.pipelines.config.model import Config, ConfigError, load_config
from pgsieve.pipelines.project import Project, project
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.source import SourceUnreachableError

Tables = Mapping[tuple[str, str], ReplicatedTable]


@dg.definitions
def defs() -> dg.Definitions:
    """The definitions of the configured sources and subscriptions."""
    try:
        config = load_config()
    except ConfigError as error:
        if error.line is None and not error.file.exists():
            return dg.Definitions()
        raise
    return definitions(config)


def build_definitions(file: str | Path | None = None) -> dg.Definitions:
    """The definitions of a configuration file, to be merged into a code location's own.

    Without one it is the file that PGSIEVE_CONFIG names, or ./pgsieve.yaml. Raises ConfigError.
    """
    return definitions(load_config(None if file is None else Path(file)))


def definitions(config: Config) -> dg.Definitions:
    """The definitions of a configuration."""
    declared = project(config)
    tables = published_tables(declared, declared.subscriptions.values())
    increments = [
        dg.define_asset_job(f"{feed.name}_increments", _increments(declared, feed.name, tables))
        for feed in declared.feeds.values()
    ]
    maintenance = [
        dg.define_asset_job(f"{feed.name}_maintenance", _maintenance(declared, feed))
        for feed in declared.feeds.values()
    ]
    return dg.Definitions(
        assets=[
            *(initial_sync_asset(s) for s in declared.subscriptions.values()),
            *(change_log_asset(f, declared.reading(f)) for f in declared.feeds.values()),
            *(table_changes_asset(s) for s in declared.subscriptions.values()),
            *(
                replica_tables_asset(s, tables[s.name])
                for s in declared.subscriptions.values()
                if tables[s.name]
            ),
            *(
                feed_maintenance_asset(f, declared.reading(f), declared.retention)
                for f in declared.feeds.values()
            ),
            *(subscription_maintenance_asset(s, declared.retention) for s in declared.subscriptions.values()),
        ],
        asset_checks=[
            *(slot_health_check(f) for f in declared.feeds.values()),
            *(
                checks
                for s in declared.subscriptions.values()
                for factory in (consistency_checks, conformity_checks, freshness_checks, sync_state_checks)
                for checks in factory(s, tables[s.name])
            ),
        ],
        jobs=[*increments, *maintenance],
        schedules=[
            *(increments_schedule(job) for job in increments),
            *(maintenance_schedule(job) for job in maintenance),
        ],
        sensors=[
            *(copy_sensor(s) for s in declared.subscriptions.values()),
            *(slot_lag_sensor(f) for f in declared.feeds.values()),
        ],
        resources={"lake": declared.lake},
        # One process, so one Spark session a run.
        executor=dg.in_process_executor,
    )


def _increments(declared: Project, feed_name: str, tables: Mapping[str, Tables]) -> dg.AssetSelection:
    """The assets of a feed that an increment materialises: all but the initial sync."""
    feed = declared.feeds[feed_name]
    keys = [change_log_key(feed)]
    for subscription in declared.reading(feed):
        keys.append(table_changes_key(subscription))
        keys += [replica_key(subscription, name) for name in tables[subscription.name]]
    return dg.AssetSelection.assets(*keys).without_checks()


def _maintenance(declared: Project, feed: Feed) -> dg.AssetSelection:
    """The maintenance of a feed and of the subscriptions that read it."""
    keys = [subscription_maintenance_key(s) for s in declared.reading(feed)]
    return dg.AssetSelection.assets(feed_maintenance_key(feed), *keys)


def published_tables(declared: Project, subscriptions: Iterable[Subscription]) -> dict[str, Tables]:
    """The tables each subscription replicates, as its source's catalog says now.

    Where that is unknown (the source does not answer, a publication is missing), those that have replicas: what
    a run does says what is wrong, and the other subscriptions have theirs.
    """
    catalogs: dict[str, Catalog | None] = {}
    tables: dict[str, Tables] = {}
    for subscription in subscriptions:
        feed = subscription.feed
        if feed.source.name not in catalogs:
            catalogs[feed.source.name] = _catalog(feed)
        try:
            catalog = catalogs[feed.source.name]
            published = None if catalog is None else subscription.tables(feed.with_defined(catalog))
        except PgsieveError as error:
            get_dagster_logger().warning(f"{subscription.name}: {error}")
            published = None
        tables[subscription.name] = _replicas(declared, subscription) if published is None else published
    return tables


def register_tables(config: Config, dagster: dg.DagsterInstance) -> None:
    """Make every published table known as a Dagster partition of its initial sync, to be chosen for a copy."""
    declared = project(config)
    for name, tables in published_tables(declared, declared.subscriptions.values()).items():
        partitions = tables_partitions(declared.subscriptions[name])
        assert partitions.name is not None
        dagster.add_dynamic_partitions(partitions.name, sorted(table_partition(table) for table in tables))


def _catalog(feed: Feed) -> Catalog | None:
    try:
        with feed.source.connect() as connection:
            return present_catalog(connection)
    except SourceUnreachableError as error:
        get_dagster_logger().warning(str(error))
        return None


def _replicas(declared: Project, subscription: Subscription) -> Tables:
    """The tables that have a replica, as far as the lake tells without the source."""
    tables = {}
    for (schema, name), state in TableStates(declared.lake.open(), subscription.name).newest().items():
        if state.definition is not None:
            table = Table(0, schema, name, "r", "d", (), primary_key=state.definition.key)
            publications = subscription.feed.subscriptions[subscription.name]
            tables[schema, name] = ReplicatedTable(
                table, state.definition.names, None, publications, frozenset()
            )
    return tables
