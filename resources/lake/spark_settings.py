"""Computes the settings of a Spark session, before the session starts.

In: `spark` of pgsieve.yaml, and the lake's storage.
Out: the settings with which a session starts, and whether this process starts one.

Raises `UnsafeLogStoreError` if Spark could overwrite other writers' commits, and `SparkUnavailableError` if Java or jars
are missing. The module imports neither Dagster nor Spark's client, which takes most of a second. So a command can start
the JVM before (`pgsieve.pipelines.commands.early_start`).
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pgsieve.resources.lake.byte_limits import SMALL_BYTES_DEFAULT, SMALL_BYTES_SETTING
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.engine.record import EngineFolder
from pgsieve.resources.lake.jars import (
    Packages,
    fetch_packages,
    list_delta_packages,
    list_s3_packages,
    make_class_path_settings,
)
from pgsieve.resources.lake.masters import parse_core_count, parse_thread_count
from pgsieve.resources.lake.python_daemon import PURGE_DELAY, WORKER_PURGE_DELAY
from pgsieve.resources.lake.secret_settings import REDACTION_REGEX, find_hidden_settings
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.storage import Storage, find_storage

#: Settings that can be changed at any time during a session, even with Spark Connect.
SESSION_SETTINGS: dict[str, str] = {
    # Neither the time zone of this machine nor a lenient cast may change the publisher's values.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "true",
    # A name that the publisher has quoted, such as "${HOME}", must not be replaced by the value of a variable.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # Other readers than Spark support only these timestamps. Spark's default, INT96, cannot represent distant years.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Files that this process writes itself have the same codec (`pgsieve.resources.lake.delta.parquet_files`).
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.databricks.delta.properties.defaults.enableDeletionVectors": "true",
    # Delta reads the source of a MERGE twice. It need not store the source in between, because a source of pgsieve is
    # one committed version of a table, and the second read gives the same rows.
    "spark.databricks.delta.merge.materializeSource": "none",
}

#: Settings of a session that pgsieve starts itself, in this process or in the warm engine.
LOCAL_SETTINGS: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.redaction.regex": REDACTION_REGEX,
    # Spark's default for this setting is for clusters, and would take seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "4g",
    # How long Python workers on a cluster's executors keep freed memory. `python_daemon` sets the same on this machine.
    f"spark.executorEnv.{PURGE_DELAY}": WORKER_PURGE_DELAY,
}

#: Settings of a session that runs within one process. Only this machine can reach its ports.
LOOPBACK_SETTINGS: dict[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Spark chooses a random secret, because no other process needs to know it.
    "spark.authenticate": "true",
}
#: The module that starts the Python workers of a session within one process. Other sessions do not use it, because
#: pgsieve may be missing where their workers run.
_DAEMON_MODULE = "pgsieve.resources.lake.python_daemon"
_LOCAL_MASTER = re.compile(r"local(\[.*\])?")

#: Delta's setting that chooses the same log store for all kinds of stores. A log store is the class that writes
#: commits.
_ANY_LOG_STORE = "spark.delta.logStore.class"


class UnsafeLogStoreError(SparkUnavailableError):
    """Commits of Spark on S3 could overwrite commits of other writers."""

    def __init__(self, setting: str, log_store_class: str) -> None:
        super().__init__(
            f"Spark's setting {setting} does not choose {log_store_class}: with another log store on S3, Spark and other writers may"
            " overwrite each other's commits",
            hint=f"leave the setting out of `spark.conf`; start a Spark Connect server with {log_store.SETTING}={log_store_class},"
            " and with pgsieve-log-store.jar on its class path; or, if this Spark is the lake's only writer, set"
            " `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )


def make_session_config(master: str, conf: Mapping[str, str], storage: Storage) -> dict[str, str]:
    """The configuration of a session that pgsieve starts, in this process or in the warm engine.

    The user's settings (`conf`) take precedence. The user's jars are added to pgsieve's jars.
    """
    settings = {**LOCAL_SETTINGS, **SESSION_SETTINGS, "spark.master": master, "spark.app.name": "pgsieve"}
    settings |= storage.log_store_settings()
    if master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2)
    if _LOCAL_MASTER.fullmatch(master):
        settings |= LOOPBACK_SETTINGS | {"spark.python.daemon.module": _DAEMON_MODULE}
    settings["spark.pyspark.python"] = sys.executable
    jars = [str(log_store.JAR)] if storage.platform == "s3" else []
    return {**settings, **conf, **make_class_path_settings(_list_needed_packages(storage), jars, conf)}


def _list_needed_packages(storage: Storage) -> list[Packages]:
    """The Maven packages that a session needs besides the jars that come with Spark."""
    return [list_delta_packages(), *([list_s3_packages()] if storage.platform == "s3" else [])]


def verify_log_store_settings(storage: Storage, conf: Mapping[str, str]) -> None:
    """Raise UnsafeLogStoreError if Spark with these settings could overwrite other writers' commits to the lake."""
    if storage.is_written_only_by_spark:
        return
    for name, log_store_class in storage.log_store_settings().items():
        for setting in (name, _ANY_LOG_STORE):
            if conf.get(setting, log_store_class) != log_store_class:
                raise UnsafeLogStoreError(setting, log_store_class)


def make_storage_settings(storage: Storage, conf: Mapping[str, str]) -> dict[str, str]:
    """The settings for the lake's file system, without those that the user has set (`conf`).

    Some of them are secret, so they are set only in a running session. The other settings of a warm engine are in a file.
    """
    settings = storage.make_spark_settings()
    return {
        name: value for name, value in settings.items() if not {name, f"spark.hadoop.{name}"} & conf.keys()
    }


@dataclass
class SparkSettings:
    """Where Spark runs, and with which settings. `SparkEngine` is the same as a Dagster resource, and has sessions."""

    master: str
    spark_config: dict[str, str]
    lake: str
    engine: str
    engine_folder: str
    engine_idle: float

    @property
    def conf(self) -> dict[str, str]:
        """The user's settings of Spark, with the secret ones."""
        hidden_settings, _ = find_hidden_settings(self.lake)
        return {**self.spark_config, **hidden_settings}

    @property
    def threads(self) -> int | None:
        """The number of threads of this process that replace Spark where possible; None if Spark does the work."""
        return parse_thread_count(self.master)

    @property
    def spark_master(self) -> str:
        """The address of Spark's own master. With `threads[N]` it is a local master, for work that only Spark can do."""
        return f"local[{self.threads}]" if self.threads else self.master

    @property
    def cores(self) -> int | None:
        """The number of tasks that Spark runs at the same time; None if the address of its master does not show it."""
        return parse_core_count(self.spark_master)

    @property
    def can_use_engine(self) -> bool:
        """True if the configuration allows a warm engine, and the system is Linux.

        On other systems the engine cannot prove its identity to this process.
        """
        is_wanted = self.engine != "off" and bool(self.engine_folder)
        return is_wanted and self.spark_master.startswith("local") and sys.platform == "linux"

    @property
    def starts_own_session(self) -> bool:
        """True if this process starts a session itself. False if it uses a Spark Connect server or a warm engine."""
        if self.master.startswith("sc://"):
            return False
        return not self.can_use_engine or (self.engine == "use" and not self.folder.is_serving())

    @property
    def folder(self) -> EngineFolder:
        """The folder of the warm engine."""
        return EngineFolder(Path(self.engine_folder))

    @property
    def small_bytes(self) -> int:
        """The user's value of `SMALL_BYTES_SETTING`, or the default."""
        return int(self.spark_config.get(SMALL_BYTES_SETTING, SMALL_BYTES_DEFAULT))

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a session that this process starts. Only an engine with the same settings is used."""
        return make_session_config(self.spark_master, self.conf, find_storage(self.lake))

    def check_java(self) -> None:
        """Raise SparkUnavailableError if Spark would start on this machine, but Java is missing."""
        if self.spark_master.startswith("sc://") or "JAVA_HOME" in os.environ or shutil.which("java"):
            return
        hint = "install a JDK or JRE 17 or 21, or set JAVA_HOME"
        if self.threads is None:
            hint += f'; or have threads of pgsieve replace Spark: `spark: {{master: "threads[{os.cpu_count() or 2}]"}}`'
        raise SparkUnavailableError("Spark needs Java, and no `java` is on the PATH", hint=hint)

    def fetch_jars(self) -> None:
        """Fetch the jars that a session of this process needs and that are missing. Raises SparkUnavailableError."""
        self.check_java()
        fetch_packages(_list_needed_packages(find_storage(self.lake)), self.conf)
