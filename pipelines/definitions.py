"""Dagster's table of contents: the assets, checks, jobs, schedules and sensors of one configuration file.

In: the file that PGSIEVE_CONFIG names, or ./pgsieve.yaml; without one there are no definitions. What is published was read
before (`pipelines/published.py`): loading asks no source, so a source that fails makes a code location neither slow nor
empty. `build_definitions` is for a code location of one's own.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import dagster as dg
from dagster import get_dagster_logger
from dagster_pyspark import LazyPySparkResource, PySparkResource

from pgsieve.assets.checks import (
    FRESHNESS,
    SYNC_STATE,
    conformity_checks,
    consistency_checks,
    freshness_checks,
    sync_state_checks,
)
from pgsieve.assets.dagster_names import table_partition
from pgsieve.assets.initial_sync import initial_sync_asset, tables_partitions
from pgsieve.assets.lake import PgsieveLake, resources
from pgsieve.assets.maintenance import feed_maintenance_asset, subscription_maintenance_asset
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.subscription import Feed, Subscription
from pgsieve.assets.translator import (
    AssetKind,
    Naming,
    PgsieveTranslator,
    of_feed,
    of_source_table,
    of_subscription,
)
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.pipelines.automation import (
    copy_sensor,
    increments_schedule,
    maintenance_schedule,
    slot_alarm_job,
    slot_lag_sensor,
)
from pgsieve.pipelines.config.model import Config, ConfigError, load_config
from pgsieve.pipelines.project import Project, project
from pgsieve.pipelines.published import Published, kept_published, known_tables, refresh_published
from pgsieve.resources.lake.pyspark_resource import pyspark_resource


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


def build_definitions(
    file: str | Path | None = None,
    *,
    prefix: str = "pgsieve",
    translator: PgsieveTranslator | None = None,
    spark: PySparkResource | LazyPySparkResource | None = None,
) -> dg.Definitions:
    """The definitions of a configuration file, to be merged into a code location's own.

    Without a file it is the one that PGSIEVE_CONFIG names, or ./pgsieve.yaml. Jobs, schedules, sensors, ops
    and the resources `<prefix>_lake` and `<prefix>_spark` begin with the prefix; two files in one code
    location need two. The translator decides asset keys, groups and the like. `spark` is the project's own
    resource: the steps use its application instead of the file's `spark`, and start it when they need it.
    There is no executor: runs use the code location's. Raises ConfigError, and PgsieveError for a prefix or a
    translation whose names Dagster does not accept.
    """
    config = load_config(None if file is None else Path(file))
    naming = Naming(prefix, translator or PgsieveTranslator())
    return assemble(config, kept_published(config), naming, spark=spark)


def definitions(config: Config) -> dg.Definitions:
    """The definitions of a configuration by itself, as `pgsieve ui` has them."""
    own = assemble(config, kept_published(config), Naming())
    # One process, so one Spark session per run.
    return dg.Definitions.merge(own, dg.Definitions(executor=dg.in_process_executor))


def assemble(
    config: Config,
    published: Published,
    naming: Naming,
    *,
    authoritative: bool = False,
    spark: PySparkResource | LazyPySparkResource | None = None,
) -> dg.Definitions:
    """The definitions of a configuration, with the tables known from `published` (see `known_tables`)."""
    declared = project(config)
    lake = declared.lake
    lake = PgsieveLake(uri=lake.uri, engine=pyspark_resource(lake.engine, spark), folders=lake.folders)
    tables = known_tables(declared, published, authoritative=authoritative)
    automated = config.dagster.automation
    subscriptions, feeds = list(declared.subscriptions.values()), list(declared.feeds.values())
    increments = [
        dg.define_asset_job(
            naming.name(f"{feed.name}_increments"), _increments(feed, declared.reading(feed), naming)
        )
        for feed in feeds
    ]
    # For a person: what one subscription has to do, where the feed has several.
    of_one = [
        dg.define_asset_job(
            naming.name(f"{feed.name}__{each.name}_increments"), _increments(feed, [each], naming)
        )
        for feed in feeds
        if len(declared.reading(feed)) > 1
        for each in declared.reading(feed)
    ]
    maintenance = [
        dg.define_asset_job(naming.name(f"{feed.name}_maintenance"), _maintenance(declared, feed, naming))
        for feed in feeds
    ]
    alarms = [slot_alarm_job(feed, naming) for feed in feeds]
    return dg.Definitions(
        assets=[
            *_source_tables(subscriptions, tables, naming),
            *(initial_sync_asset(s, naming, names=declared.names) for s in subscriptions),
            *(change_log_asset(f, declared.reading(f), naming) for f in feeds),
            *(table_changes_asset(s, naming) for s in subscriptions),
            *(
                replica_tables_asset(
                    s, tables[s.name], naming, freshness_policy=_freshness(s) if automated else None
                )
                for s in subscriptions
            ),
            *(feed_maintenance_asset(f, declared.reading(f), declared.retention, naming) for f in feeds),
            *(
                subscription_maintenance_asset(s, declared.retention, naming, names=declared.names)
                for s in subscriptions
            ),
        ],
        asset_checks=[
            checks
            for s in subscriptions
            for factory in (consistency_checks, conformity_checks, freshness_checks, sync_state_checks)
            for checks in factory(s, tables[s.name], naming)
        ],
        jobs=[*increments, *of_one, *maintenance, *alarms],
        schedules=[
            *(increments_schedule(job, running=automated) for job in increments),
            *(maintenance_schedule(job, running=automated) for job in maintenance),
        ],
        sensors=[
            *(copy_sensor(s, naming, running=automated) for s in subscriptions),
            *(
                slot_lag_sensor(f, job, naming, running=automated)
                for f, job in zip(feeds, alarms, strict=True)
            ),
        ],
        resources=resources(lake, naming),
    )


def _source_tables(
    subscriptions: list[Subscription], tables: Mapping[str, Tables], naming: Naming
) -> Iterator[dg.AssetSpec]:
    """The publishers' tables, each once; no step here materialises them."""
    for source, name in sorted(
        {(s.feed.source.name, name) for s in subscriptions for name in tables[s.name]}
    ):
        yield naming.spec(of_source_table(source, name))


def _increments(feed: Feed, subscriptions: Iterable[Subscription], naming: Naming) -> dg.AssetSelection:
    """What an increment of these subscriptions is asked for, and the checks that speak for all of it.

    It records the replicas that it has changed: Dagster calls every table failed that a failing run was asked for.
    """
    log = naming.key(of_feed(feed, AssetKind.CHANGE_LOG))
    keys, checks = [log], [dg.AssetCheckKey(log, "slot_health")]
    for subscription in subscriptions:
        cut = naming.key(of_subscription(subscription, AssetKind.CUT))
        keys += [naming.key(of_subscription(subscription, AssetKind.TABLE_CHANGES)), cut]
        checks += [dg.AssetCheckKey(cut, name) for name in (SYNC_STATE, FRESHNESS)]
    return dg.AssetSelection.assets(*keys).without_checks() | dg.AssetSelection.checks(*checks)


def _maintenance(declared: Project, feed: Feed, naming: Naming) -> dg.AssetSelection:
    """The maintenance of a feed and of the subscriptions that read it."""
    own = [of_subscription(s, AssetKind.MAINTENANCE) for s in declared.reading(feed)]
    return dg.AssetSelection.assets(*map(naming.key, [of_feed(feed, AssetKind.CHANGE_LOG_MAINTENANCE), *own]))


def _freshness(subscription: Subscription) -> dg.FreshnessPolicy:
    """All tables have been brought up to date within the subscription's `freshness`."""
    return dg.FreshnessPolicy.time_window(fail_window=subscription.freshness)


def register_tables(config: Config, dagster: dg.DagsterInstance) -> None:
    """Read the published tables for the definitions, and add each as a Dagster partition of its initial sync.

    A source that does not answer keeps its known tables.
    """
    declared = project(config)
    for error in refresh_published(config, declared):
        get_dagster_logger().warning(str(error))
    for name, tables in known_tables(declared, kept_published(config)).items():
        partitions = tables_partitions(declared.subscriptions[name])
        assert partitions.name is not None
        dagster.add_dynamic_partitions(partitions.name, sorted(table_partition(table) for table in tables))
