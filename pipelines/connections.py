"""Makes the objects for everything to which a configuration connects: the lake's storage, Spark, and the sources.

In: the configuration
Out: the storage, the settings of Spark, and the sources. Nothing is connected yet.

Raises PgsieveError if the lake's store could lose a commit. The module imports neither `pgsieve.assets` nor Dagster, so
that a command can connect while it still imports them (`pgsieve.pipelines.commands.early_start`).
"""

from collections.abc import Mapping

from pgsieve.decoding.errors import PgsieveError
from pgsieve.pipelines.config.model import Config, SourceConfig
from pgsieve.resources.lake.secret_settings import conceal_settings, hide_settings
from pgsieve.resources.lake.spark_settings import SparkSettings, verify_log_store_settings
from pgsieve.resources.lake.stores.storage import Storage, declare_storage
from pgsieve.resources.postgres.source import Source


def prepare_storage(config: Config) -> Storage:
    """The storage of the lake. From this call on, `find_storage` finds it by its address, and log messages conceal its secrets."""
    storage = config.storage.make_storage(config.lake)
    _refuse_unsafe_store(storage, config.spark.conf)
    declare_storage(storage)
    conceal_settings(config.spark.master, config.spark.conf)
    return storage


def make_spark_settings(config: Config) -> SparkSettings:
    """The settings of Spark. `prepare_storage` must have been called before."""
    lake = config.storage.make_storage(config.lake).address
    master, spark_config = hide_settings(lake, config.spark.master, config.spark.conf)
    return SparkSettings(
        master,
        spark_config,
        lake,
        config.spark.engine,
        str(config.state_folder / "engine"),
        config.spark.engine_idle.total_seconds(),
    )


def make_source(source_name: str, source_config: SourceConfig) -> Source:
    """The source that a section of the configuration describes."""
    return Source(
        source_name,
        source_config.conninfo.get_secret_value(),
        source_config.password.get_secret_value() if source_config.password else None,
        tuple(part.get_secret_value() for part in source_config.password_command or ()),
        source_config.standby,
        source_config.allow_untested_server,
    )


def _refuse_unsafe_store(storage: Storage, conf: Mapping[str, str]) -> None:
    """Raise PgsieveError if the lake's store may lose a commit.

    Such a store is allowed if the user says that a single Spark session is the only writer of the lake.
    """
    if storage.is_written_only_by_spark:
        return
    if not storage.has_atomic_commits:
        raise PgsieveError(
            f'the lake is at "{storage.scheme}://", where a commit could be lost: it is not certain that this store refuses'
            " the second of two commits of one version",
            hint="move the lake to s3://, abfss://, gs://, hdfs:// or a folder; or, if a single Spark session or Spark Connect"
            " server is the only writer there, set `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )
    verify_log_store_settings(storage, conf)
