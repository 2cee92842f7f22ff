"""Dagster's definitions: the assets, checks, jobs, schedules and sensors of one configuration file.

In: the file that PGSIEVE_CONFIG names, or ./pgsieve.yaml; without a file there are no definitions. Loading
asks no source, but reads the published tables from a file (`pipelines/published.py`), so that a code location
loads fast and complete even if a source does not answer. `build_definitions` is for a user's code location.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
from dagster import get_dagster_logger
from dagster_pyspark import LazyPySparkResource, PySparkResource

from pgsieve.assets.checks import (
    conformity_checks,
    consistency_checks,
    freshness_checks,
    sync_state_checks,
)
from pgsieve.assets.dagster_names import Name, encode_partition_key
from pgsieve.assets.initial_sync import initial_sync_asset, tables_partitions
from pgsieve.assets.lake import PgsieveLake, lake_resources
from pgsieve.assets.maintenance import feed_maintenance_asset, subscription_maintenance_asset
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.table_groups import group_paths
from pgsieve.assets.translator import (
    Naming,
    PgsieveTranslator,
    source_table_asset,
)
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.pipelines.automation import (
    copy_sensor,
    increments_schedule,
    maintenance_schedule,
    published_sensor,
    slot_lag_sensor,
)
from pgsieve.pipelines.config.model import Config, ConfigError, load_config
from pgsieve.pipelines.jobs import jobs_of
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import Published, load_published, recorded_tables, refresh_published
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
    """The definitions of a configuration file, to be merged with a code location's other definitions.

    - `file`: by default the file that PGSIEVE_CONFIG names, or ./pgsieve.yaml
    - `prefix`: begins the names of jobs, schedules, sensors, ops and of the resources `<prefix>_lake` and
      `<prefix>_spark`; two files in one code location need two prefixes
    - `translator`: decides asset keys, groups and other attributes of the assets
    - `spark`: the project's own resource; the steps use its Spark application instead of the file's `spark`,
      and start it when they need it

    Runs use the code location's executor. Raises ConfigError, and PgsieveError for a prefix or a translation
    whose names Dagster does not accept.
    """
    config = load_config(None if file is None else Path(file))
    naming = Naming(prefix, translator or PgsieveTranslator())
    return assemble(config, load_published(config), naming, spark=spark)


def definitions(config: Config) -> dg.Definitions:
    """The definitions for `pgsieve ui`."""
    project_definitions = assemble(config, load_published(config), Naming())
    # A run in one process needs only one Spark session.
    return dg.Definitions.merge(project_definitions, dg.Definitions(executor=dg.in_process_executor))


def assemble(
    config: Config,
    published: Published,
    naming: Naming,
    *,
    authoritative: bool = False,
    spark: PySparkResource | LazyPySparkResource | None = None,
) -> dg.Definitions:
    """The definitions of a configuration, with the tables of `published` (see `recorded_tables`)."""
    project = build_project(config)
    engine, folders = pyspark_resource(project.lake.engine, spark), project.lake.folders
    lake = PgsieveLake(uri=project.lake.uri, engine=engine, folders=folders)
    tables = recorded_tables(project, published, authoritative=authoritative)
    is_automated = config.dagster.automation
    subscriptions, feeds = list(project.subscriptions.values()), list(project.feeds.values())
    jobs, retention = jobs_of(project, naming), project.retention
    return dg.Definitions(
        assets=[
            *_source_tables(subscriptions, tables, naming),
            *(initial_sync_asset(s, naming, names=project.names) for s in subscriptions),
            *(change_log_asset(f, project.subscriptions_of(f), naming) for f in feeds),
            *(table_changes_asset(s, naming) for s in subscriptions),
            *(
                replica_tables_asset(
                    s, tables[s.name], naming, freshness_policy=_freshness_policy(s) if is_automated else None
                )
                for s in subscriptions
            ),
            *(feed_maintenance_asset(f, project.subscriptions_of(f), retention, naming) for f in feeds),
            *(
                subscription_maintenance_asset(s, retention, naming, names=project.names)
                for s in subscriptions
            ),
        ],
        asset_checks=[
            checks
            for s in subscriptions
            for factory in (consistency_checks, conformity_checks, freshness_checks, sync_state_checks)
            for checks in factory(s, tables[s.name], naming)
        ],
        jobs=jobs.all,
        schedules=[
            *(increments_schedule(job, running=is_automated) for job in jobs.increments),
            *(maintenance_schedule(job, running=is_automated) for job in jobs.maintenance),
        ],
        sensors=[
            published_sensor(tables, naming),
            *(
                copy_sensor(s, job, naming, running=is_automated)
                for s, job in zip(subscriptions, jobs.copies, strict=True)
            ),
            *(
                slot_lag_sensor(f, job, naming, running=is_automated)
                for f, job in zip(feeds, jobs.alarms, strict=True)
            ),
        ],
        resources=lake_resources(lake, naming),
    )


def _source_tables(
    subscriptions: list[Subscription], tables: Mapping[str, Tables], naming: Naming
) -> Iterator[dg.AssetSpec]:
    """The publishers' tables, each once, as external assets."""
    comments = defaultdict[str, dict[Name, str | None]](dict)
    for subscription in subscriptions:
        table_comments = {name: table.comment for name, table in tables[subscription.name].items()}
        comments[subscription.feed.source.name].update(table_comments)
    for source, tables_of_source in sorted(comments.items()):
        for name, path in group_paths(tables_of_source).items():
            yield naming.spec(source_table_asset(source, name, path, tables_of_source[name]))


def _freshness_policy(subscription: Subscription) -> dg.FreshnessPolicy:
    """The policy that each table is up to date within the subscription's `freshness`."""
    return dg.FreshnessPolicy.time_window(fail_window=subscription.freshness)


def register_tables(config: Config, dagster: dg.DagsterInstance) -> None:
    """Record the published tables for the definitions, and add them as partitions of the initial syncs.

    A source that does not answer keeps its recorded tables.
    """
    project = build_project(config)
    for error in refresh_published(config, project):
        get_dagster_logger().warning(str(error))
    for name, tables in recorded_tables(project, load_published(config)).items():
        partitions = tables_partitions(name)
        assert partitions.name is not None
        dagster.add_dynamic_partitions(
            partitions.name, sorted(encode_partition_key(table) for table in tables)
        )
