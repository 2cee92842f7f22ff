"""The Dagster definitions of one configuration file: its assets, asset checks, jobs, schedules and sensors.

In: the configuration file: the file that the environment variable PGSIEVE_CONFIG names, or else ./pgsieve.yaml
Out: Dagster definitions. They are empty if there is no such file.

The published tables are read from a file (`pipelines/published.py`), not from the sources. So a Dagster code location
loads quickly, and loads all assets even if a source does not answer. `build_definitions` is for the code location of a
user's own Dagster project.
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
    """The definitions of a configuration file, which a user's code location merges with its other definitions.

    - `file`: by default the file that PGSIEVE_CONFIG names, or else ./pgsieve.yaml
    - `prefix`: the names of jobs, schedules, sensors and ops begin with it, and those of the resources `<prefix>_lake`
      and `<prefix>_spark`. Two files in one code location need two prefixes.
    - `translator`: decides asset keys, groups and other attributes of the assets
    - `spark`: the project's own dagster-pyspark resource. The steps use its Spark application instead of the one that
      the file's `spark` describes, and start it when they first need it.

    Runs use the executor of the code location. Raises ConfigError for a problem in the file. Raises PgsieveError if
    Dagster does not accept a name that the prefix or the translator makes.
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
    """Build the definitions of a configuration for the tables in `published`; `authoritative` is as in `recorded_tables`."""
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
    """The specs of the publishers' tables as external assets. A table that several subscriptions replicate has one spec."""
    comments = defaultdict[str, dict[Name, str | None]](dict)
    for subscription in subscriptions:
        table_comments = {name: table.comment for name, table in tables[subscription.name].items()}
        comments[subscription.feed.source.name].update(table_comments)
    for source, tables_of_source in sorted(comments.items()):
        for name, path in group_paths(tables_of_source).items():
            yield naming.spec(source_table_asset(source, name, path, tables_of_source[name]))


def _freshness_policy(subscription: Subscription) -> dg.FreshnessPolicy:
    """The policy that a cut is late if it was not materialised within the subscription's `freshness`.

    A cut is a version of each replica of a subscription, so that together they equal the publisher at one LSN.
    """
    return dg.FreshnessPolicy.time_window(fail_window=subscription.freshness)


def register_tables(config: Config, dagster: dg.DagsterInstance) -> None:
    """Read the published tables from the sources, record them for the definitions, and add them to Dagster's partitions.

    Each published table is a partition of the initial sync of its subscription. If a source does not answer, the tables
    that were recorded last are kept.
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
