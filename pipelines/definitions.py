"""The Dagster definitions of one configuration file: its assets, asset checks, jobs, schedules and sensors.

In: the configuration file, which the environment variable PGSIEVE_CONFIG names, or else ./pgsieve.yaml
Out: Dagster definitions. They are empty if there is no such file.

The published tables are read from a file (`pipelines/published.py`), not from the sources. So a Dagster code location
loads quickly, and loads all assets even if a source does not answer. `build_definitions` is for the code location of a
user's own Dagster project.

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
from dagster import get_dagster_logger
from dagster_pyspark import LazyPySparkResource, PySparkResource

from pgsieve.assets.checks import (
    conformity_checks,
    freshness_checks,
    sync_state_checks,
)
from pgsieve.assets.consistency import consistency_checks
from pgsieve.assets.encoded_names import encode_partition_key
from pgsieve.assets.initial_sync import initial_sync_asset, tables_partitions
from pgsieve.assets.lake import PgsieveLake, lake_resources
from pgsieve.assets.maintenance import slot_stream_maintenance_asset, subscription_maintenance_asset
from pgsieve.assets.partition_roots import replica_tables_asset
from pgsieve.assets.published import Tables
from pgsieve.assets.slot_consumption import change_log_asset
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.assets.table_groups import group_paths
from pgsieve.assets.translator import (
    DagsterNames,
    PgsieveTranslator,
    source_table_asset,
)
from pgsieve.assets.update_transformation import table_changes_asset
from pgsieve.pipelines.automation import (
    make_copy_sensor,
    make_increments_schedule,
    make_maintenance_schedule,
    make_published_sensor,
    make_slot_lag_sensor,
)
from pgsieve.pipelines.config.model import Config, ConfigError, load_config
from pgsieve.pipelines.jobs import make_jobs
from pgsieve.pipelines.project import build_project
from pgsieve.pipelines.published import (
    RecordedCatalogs,
    find_recorded_tables,
    load_published,
    refresh_published,
)
from pgsieve.resources.lake.delta.layout import TableName
from pgsieve.resources.lake.pyspark_resource import make_pyspark_resource


@dg.definitions
def defs() -> dg.Definitions:
    """The definitions of the configured sources and subscriptions."""
    # Dagster 1.13 itself sets this parameter of the sensors when it adds their jobs, and warns of it.
    warnings.filterwarnings("ignore", "Parameter `owners` of initializer `SensorDefinition", dg.BetaWarning)
    try:
        config = load_config()
    except ConfigError as error:
        if error.line is None and not error.file.exists():
            return dg.Definitions()
        raise
    return build_ui_definitions(config)


def build_definitions(
    file: str | Path | None = None,
    *,
    prefix: str = "pgsieve",
    translator: PgsieveTranslator | None = None,
    spark: PySparkResource | LazyPySparkResource | None = None,
) -> dg.Definitions:
    """The definitions of a configuration file, which a user's code location merges with its other definitions.

    - `file`: by default the file that PGSIEVE_CONFIG names, or else ./pgsieve.yaml
    - `prefix`: the names of jobs, schedules, sensors and ops begin with it; the resources are `<prefix>_lake` and
      `<prefix>_spark`. Two files in one code location need two prefixes.
    - `translator`: decides asset keys, groups and other attributes of the assets
    - `spark`: the project's own dagster-pyspark resource. The steps use its Spark application instead of the one that
      the file's `spark` describes, and start it when they first need it.

    Runs use the executor of the code location. Raises ConfigError for a problem in the file. Raises PgsieveError if
    Dagster does not accept a name that the prefix or the translator makes.
    """
    config = load_config(None if file is None else Path(file))
    dagster_names = DagsterNames(prefix, translator or PgsieveTranslator())
    return assemble_definitions(config, load_published(config), dagster_names, spark=spark)


def build_ui_definitions(config: Config) -> dg.Definitions:
    """The definitions for `pgsieve ui`."""
    project_definitions = assemble_definitions(config, load_published(config), DagsterNames())
    # A run in one process needs only one Spark session.
    return dg.Definitions.merge(project_definitions, dg.Definitions(executor=dg.in_process_executor))


def assemble_definitions(
    config: Config,
    published: RecordedCatalogs,
    dagster_names: DagsterNames,
    *,
    is_authoritative: bool = False,
    spark: PySparkResource | LazyPySparkResource | None = None,
) -> dg.Definitions:
    """Build the definitions for the tables that `find_recorded_tables` finds with `is_authoritative`."""
    project = build_project(config)
    engine, folders = make_pyspark_resource(project.lake.engine, spark), project.lake.folders
    lake = PgsieveLake(uri=project.lake.uri, engine=engine, folders=folders)
    tables_by_subscription = find_recorded_tables(project, published, is_authoritative=is_authoritative)
    is_automated, find_subscriptions = config.dagster.automation, project.find_subscriptions
    subscriptions, streams = list(project.subscriptions.values()), list(project.slot_streams.values())
    jobs, retention = make_jobs(project, dagster_names), project.retention
    return dg.Definitions(
        assets=[
            *_make_source_table_specs(subscriptions, tables_by_subscription, dagster_names),
            *(initial_sync_asset(s, dagster_names, name_template=project.names) for s in subscriptions),
            *(change_log_asset(stream, find_subscriptions(stream), dagster_names) for stream in streams),
            *(table_changes_asset(s, dagster_names) for s in subscriptions),
            *(
                _make_replica_assets(s, tables_by_subscription[s.name], dagster_names, is_automated)
                for s in subscriptions
            ),
            *(
                slot_stream_maintenance_asset(stream, find_subscriptions(stream), retention, dagster_names)
                for stream in streams
            ),
            *(
                subscription_maintenance_asset(s, retention, dagster_names, name_template=project.names)
                for s in subscriptions
            ),
        ],
        asset_checks=[
            checks
            for s in subscriptions
            for make_checks in (consistency_checks, conformity_checks, freshness_checks, sync_state_checks)
            for checks in make_checks(s, tables_by_subscription[s.name], dagster_names)
        ],
        jobs=jobs.all,
        schedules=[
            *(make_increments_schedule(job, is_running=is_automated) for job in jobs.increments),
            *(make_maintenance_schedule(job, is_running=is_automated) for job in jobs.maintenance),
        ],
        sensors=[
            make_published_sensor(tables_by_subscription, dagster_names),
            *(
                make_copy_sensor(s, job, dagster_names, is_running=is_automated)
                for s, job in zip(subscriptions, jobs.copies, strict=True)
            ),
            *(
                make_slot_lag_sensor(stream, job, dagster_names, is_running=is_automated)
                for stream, job in zip(streams, jobs.alarms, strict=True)
            ),
        ],
        resources=lake_resources(lake, dagster_names),
    )


def _make_replica_assets(
    subscription: Subscription, tables: Tables, dagster_names: DagsterNames, is_automated: bool
) -> dg.AssetsDefinition:
    """The assets of a subscription's replicas and of its cut. The cut has a freshness policy if `is_automated` is true."""
    freshness_policy = _make_freshness_policy(subscription) if is_automated else None
    return replica_tables_asset(subscription, tables, dagster_names, freshness_policy=freshness_policy)


def _make_source_table_specs(
    subscriptions: list[Subscription],
    tables_by_subscription: Mapping[str, Tables],
    dagster_names: DagsterNames,
) -> Iterator[dg.AssetSpec]:
    """The specs of the publishers' tables as external assets. A table that several subscriptions replicate has one spec."""
    comments_by_source = defaultdict[str, dict[TableName, str | None]](dict)
    for subscription in subscriptions:
        table_comments = {
            name: table.comment for name, table in tables_by_subscription[subscription.name].items()
        }
        comments_by_source[subscription.slot_stream.source.name].update(table_comments)
    for source_name, comments_by_name in sorted(comments_by_source.items()):
        for name, path in group_paths(comments_by_name).items():
            yield dagster_names.asset_spec(
                source_table_asset(source_name, name, path, comments_by_name[name])
            )


def _make_freshness_policy(subscription: Subscription) -> dg.FreshnessPolicy:
    """The policy that a cut is late if it was not materialised within the subscription's `freshness`."""
    return dg.FreshnessPolicy.time_window(fail_window=subscription.freshness)


def register_tables(config: Config, instance: dg.DagsterInstance) -> None:
    """Read the published tables from the sources, record them for the definitions, and add them to Dagster's partitions.

    Each published table is a partition of the initial sync of its subscription. If a source does not answer, the tables
    that were recorded last are kept.
    """
    project = build_project(config)
    for error in refresh_published(config, project):
        get_dagster_logger().warning(str(error))
    for subscription_name, tables in find_recorded_tables(project, load_published(config)).items():
        partitions = tables_partitions(subscription_name)
        assert partitions.name is not None
        instance.add_dynamic_partitions(
            partitions.name, sorted(encode_partition_key(table_name) for table_name in tables)
        )
