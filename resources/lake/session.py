"""The Spark session: local, the warm engine's, a cluster's, or a Spark Connect server's.

In: a master and settings (`spark` of pgsieve.yaml). Out: a session with Delta, started at its first use.
Callers use only the features of Spark Connect: no sparkContext, no RDD, no JVM object. Functions are sent to a
cluster's executors by value, within the plan. So executors need Python with numpy, pyarrow, psycopg and ADBC,
but not pgsieve. Raises `SparkUnavailableError` if no session is available.
"""

import atexit
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from threading import Lock, RLock
from typing import Any, cast

import dagster as dg
from pydantic import Field, PrivateAttr
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.engine import control
from pgsieve.resources.lake.engine.channel import EngineChannel
from pgsieve.resources.lake.engine.record import EngineError, EngineFolder
from pgsieve.resources.lake.jars import Packages, class_path, delta_packages, fetch, s3_packages
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import archive_file
from pgsieve.resources.lake.masters import cores_of, threads_of
from pgsieve.resources.lake.module_search import cache_module_search
from pgsieve.resources.lake.stores import log_store
from pgsieve.resources.lake.stores.storage import Storage, storage_of
from pgsieve.resources.passwords import remember
from pgsieve.resources.time_limit import limit_time

#: Settings that a session may change at any time, also on Spark Connect.
SESSION_SETTINGS: dict[str, str] = {
    # The publisher's values must not change by this machine's time zone or by lenient casts.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "true",
    # A quoted name such as "${HOME}" is the publisher's, and must not be replaced by a variable's value.
    "spark.sql.variable.substitute": "false",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    # Readers other than Spark support no other timestamps, and INT96 cannot represent distant years.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # As in the files that this process writes (`pgsieve.resources.lake.delta.parquet_files`).
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.databricks.delta.properties.defaults.enableDeletionVectors": "true",
    # A batch comes from one committed version of a table, so Delta may read it twice.
    "spark.databricks.delta.merge.materializeSource": "none",
}

#: Settings of a session that this process starts itself.
LOCAL_SETTINGS: dict[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    # Spark's default pattern, extended by the names of Azure's secrets.
    "spark.redaction.regex": "(?i)secret|password|passphrase|token|access[.]?key|account[.]key",
    # Spark's defaults for clusters cost seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "4g",
}

#: Settings of a session in one process: only this machine can reach its ports.
LOOPBACK_SETTINGS: dict[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # The secret is random, as no other process needs it.
    "spark.authenticate": "true",
}
#: The module that forks the Python workers of such a session. The workers of other sessions may lack pgsieve.
_DAEMON = "pgsieve.resources.lake.python_daemon"
_LOCAL_MASTER = re.compile(r"local(\[.*\])?")

#: How often a request to the engine is repeated, within four seconds.
_ENGINE_RETRIES = 4
#: How long a server may take to end a session.
_END_TIMEOUT_SECONDS = 5.0

_LOGGER = logging.getLogger(__name__)
#: Lets the first thread that needs Spark start it; the others wait.
_START_LOCK = RLock()
#: Values that are not secret, whatever the name of their setting.
_NOT_SECRET = re.compile(r"(?i)true|false|\d+[a-z]{0,2}|.{0,7}")


def conceal_settings(conf: Mapping[str, str]) -> None:
    """Keep the values of secret settings out of texts; the settings' names show which are secret."""
    secret = re.compile(LOCAL_SETTINGS["spark.redaction.regex"])
    remember(
        *(value for name, value in conf.items() if secret.search(name) and not _NOT_SECRET.fullmatch(value))
    )


#: A statement about a missing table, which only Delta understands; a setting of every Databricks session.
_DELTA_STATEMENT = "describe history delta.`/pgsieve/no such table`"
_DATABRICKS = "spark.databricks.clusterUsageTags.clusterId"

#: The packages whose functions run on executors.
SHIPPED_PACKAGES = ("pgsieve.decoding", "pgsieve.resources", "pgsieve.assets")


#: Delta's setting that chooses the log store of all schemes.
_ANY_LOG_STORE = "spark.delta.logStore.class"


class UnsafeLogStoreError(SparkUnavailableError):
    """Spark's commits on S3 could overwrite commits of other writers."""

    def __init__(self, setting: str, needed: str) -> None:
        super().__init__(
            f"Spark's setting {setting} does not choose {needed}: with another log store on S3, Spark and other writers may"
            " overwrite each other's commits",
            hint=f"leave the setting out of `spark.conf`; start a Spark Connect server with {log_store.SETTING}={needed},"
            " and with pgsieve-log-store.jar on its class path; or, if this Spark is the lake's only writer, set"
            " `storage: {only_writer: spark}`",
            sqlstate="0A000",
        )


def session_config(master: str, conf: Mapping[str, str], storage: Storage) -> dict[str, str]:
    """The configuration of a session that this process starts. The user's settings (`conf`) take precedence.

    The user's jars are added to pgsieve's.
    """
    settings = {**LOCAL_SETTINGS, **SESSION_SETTINGS, "spark.master": master, "spark.app.name": "pgsieve"}
    settings |= storage.log_store_settings()
    if master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2)
    if _LOCAL_MASTER.fullmatch(master):
        settings |= LOOPBACK_SETTINGS | {"spark.python.daemon.module": _DAEMON}
    settings["spark.pyspark.python"] = sys.executable
    jars = [str(log_store.JAR)] if storage.platform == "s3" else []
    return {**settings, **conf, **class_path(_needed_packages(storage), jars, conf)}


def _needed_packages(storage: Storage) -> list[Packages]:
    """The packages that a session needs in addition to Spark's own jars."""
    return [delta_packages(), *([s3_packages()] if storage.platform == "s3" else [])]


def verify_log_store_settings(storage: Storage, conf: Mapping[str, str]) -> None:
    """Raise UnsafeLogStoreError if Spark with these settings could lose commits to the lake."""
    if storage.only_spark:
        return
    for name, log_store_class in storage.log_store_settings().items():
        for each in (name, _ANY_LOG_STORE):
            if conf.get(each, log_store_class) != log_store_class:
                raise UnsafeLogStoreError(each, log_store_class)


def verify_log_store(session: SparkSession, storage: Storage) -> None:
    """Raise UnsafeLogStoreError if a session that pgsieve did not start could lose commits to the lake."""
    verify_log_store_settings(
        storage, {name: session.conf.get(name, "") or "" for name in storage.log_store_settings()}
    )


def verify_delta(session: SparkSession, owner: str) -> None:
    """Raise SparkUnavailableError if a session that pgsieve did not configure lacks Delta.

    `owner` names the session in the message. The session's settings prove nothing, because Spark only logs a
    warning if the jar of an extension is missing.
    """
    try:
        session.sql(_DELTA_STATEMENT).collect()
    except PySparkException as error:
        # Delta reports the missing table.
        if (error.getCondition() or "").startswith("DELTA_"):
            return
    if session.conf.get(_DATABRICKS, ""):  # Databricks always has Delta, but reports other errors.
        return
    raise SparkUnavailableError(
        f"{owner} has no Delta Lake",
        hint="start it with Delta's jars, as `pgsieve jars` names them, spark.sql.extensions ="
        " io.delta.sql.DeltaSparkSessionExtension and spark.sql.catalog.spark_catalog ="
        " org.apache.spark.sql.delta.catalog.DeltaCatalog; if it has these, its log names the class that was not found",
    )


def storage_settings(storage: Storage, conf: Mapping[str, str]) -> dict[str, str]:
    """The settings of the lake's file system that the user's settings (`conf`) lack, for a running session.

    If they were set at the start, the command that starts the JVM would show them to every user of the
    machine.
    """
    settings = storage.spark_settings()
    return {
        name: value for name, value in settings.items() if not {name, f"spark.hadoop.{name}"} & conf.keys()
    }


#: The loggers by which pyspark's client writes errors to stderr, with tracebacks of executors and values of
#: cells.
_CLIENT_LOGGERS = ("pyspark.sql.connect.logging", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
#: The environment variable with which a user enables the first of these loggers.
_CLIENT_LOG_LEVEL = "SPARK_CONNECT_LOG_LEVEL"
_SILENCE_LOCK = Lock()


def silence_client() -> None:
    """Keep pyspark's client from logging errors, which it raises, too: the messages contain values of cells.

    The loggers get a level above all messages. If they were disabled instead, Dagster's
    logging.config.dictConfig would enable them again.
    """
    # For a moment getLogger makes pyspark's class the class of all new loggers. The second of two threads would
    # restore pyspark's class instead of the original one, and Dagster's next run could not make a logger.
    with _SILENCE_LOCK:
        for name in _CLIENT_LOGGERS:
            if name != _CLIENT_LOGGERS[0] or _CLIENT_LOG_LEVEL not in os.environ:
                PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def ship_by_value() -> None:
    """Make Spark send pgsieve's functions within the plan: executors may lack pgsieve, or have another version."""
    cache_module_search()
    for package in SHIPPED_PACKAGES:
        cloudpickle.register_pickle_by_value(import_module(package))  # type: ignore[no-untyped-call]


def _create_connect_session(server: str | EngineChannel) -> SparkSession:
    """Create a session of a Spark Connect server, by its address or by the engine's channel."""
    if isinstance(server, str):
        session: SparkSession = SparkSession.builder.remote(server).create()
        return session
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    return cast("SparkSession", ConnectSession.builder.channelBuilder(server.builder()).create())


def _set_retries(session: SparkSession, times: int) -> None:
    """Make a client repeat a request up to `times` if no server answers, with growing pauses."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    connect: Any = session
    connect.client.set_retry_policies([DefaultPolicy(max_retries=times)] if times else [])


def _stop_session(session: SparkSession) -> None:
    """End a session, with one request and a time limit, as the server may be gone or hang."""
    _set_retries(session, 0)
    with suppress(TimeoutError), limit_time(_END_TIMEOUT_SECONDS):
        session.stop()


class SparkEngine(dg.ConfigurableResource["SparkEngine"]):
    """A session with any kind of master, started at its first use."""

    master: str = "local[*]"
    spark_config: dict[str, str] = Field(default={}, repr=False)
    #: The lake's address; `storage_of` returns its storage.
    lake: str = ""
    #: Whether a session on this machine uses the warm engine: `off`; `use` a running one; or `start` one.
    engine: str = "off"
    engine_folder: str = ""
    #: Seconds after which an unused engine ends.
    engine_idle: float = 0.0
    _local: SparkSession | None = PrivateAttr(default=None)
    _connect: SparkSession | None = PrivateAttr(default=None)
    _use: control.EngineUse | None = PrivateAttr(default=None)

    @property
    def session(self) -> SparkSession:
        """The session, started at the first call of any thread; raises SparkUnavailableError."""
        with _START_LOCK:
            return self._open_session()

    def _open_session(self) -> SparkSession:
        silence_client()
        if not self.spark_master.startswith("local"):
            ship_by_value()
        if self.master.startswith("sc://"):
            # Without options the server uses its own access to the store.
            storage = storage_of(self.lake)
            access = storage_settings(storage, self.spark_config) if storage.options else {}
            return self._connect_session(self.master, {**access, **self.spark_config})
        if self._local is None and self._used_engine() is not None:
            return self._engine_session()
        return self._local_session()

    @property
    def spark_session(self) -> SparkSession:
        """The session, by the name that dagster-pyspark's resources give it."""
        return self.session

    @property
    def threads(self) -> int | None:
        """How many threads of this process replace Spark where possible; None if none do."""
        return threads_of(self.master)

    @property
    def spark_master(self) -> str:
        """The master of Spark itself; with `threads[N]` a local one, for work that only Spark can do."""
        return f"local[{self.threads}]" if self.threads else self.master

    @property
    def cores(self) -> int | None:
        """How many parts Spark runs at a time; None if its master does not show it."""
        return cores_of(self.spark_master)

    @property
    def can_use_engine(self) -> bool:
        """Whether the configuration allows a warm engine, which works only on Linux: there it can prove its identity."""
        is_wanted = self.engine != "off" and bool(self.engine_folder)
        return is_wanted and self.spark_master.startswith("local") and sys.platform == "linux"

    @property
    def starts_own_session(self) -> bool:
        """Whether this process starts a session itself: not if it uses a server or a warm engine."""
        if self.master.startswith("sc://"):
            return False
        return not self.can_use_engine or (self.engine == "use" and not self.folder.is_serving())

    @property
    def folder(self) -> EngineFolder:
        """The folder of the warm engine."""
        return EngineFolder(Path(self.engine_folder))

    @property
    def settings(self) -> dict[str, str]:
        """The settings of a session that this process starts. They identify a warm engine, too."""
        return session_config(self.spark_master, self.spark_config, storage_of(self.lake))

    def check_java(self) -> None:
        """Raise SparkUnavailableError if Spark would start on this machine, and Java is missing."""
        if self.spark_master.startswith("sc://") or "JAVA_HOME" in os.environ or shutil.which("java"):
            return
        hint = "install a JDK or JRE 17 or 21, or set JAVA_HOME"
        if self.threads is None:
            hint += f'; or have threads of pgsieve replace Spark: `spark: {{master: "threads[{os.cpu_count() or 2}]"}}`'
        raise SparkUnavailableError("Spark needs Java, and no `java` is on the PATH", hint=hint)

    def fetch_jars(self) -> None:
        """Fetch missing jars of a session that this process starts; raises SparkUnavailableError."""
        self.check_java()
        fetch(_needed_packages(storage_of(self.lake)), self.spark_config)

    def launch(self, owner: int | None = None) -> None:
        """Start the engine without waiting for it; with an `owner`, it lives as long as that process."""
        self.fetch_jars()
        control.launch(self.folder, self.settings, timedelta(seconds=self.engine_idle), owner)

    def _used_engine(self) -> control.EngineUse | None:
        """Use the engine until this process ends; None if this process has to start its own session."""
        if self._use is None and self.can_use_engine:
            if self.engine == "start":
                self.fetch_jars()
            settings = self.settings
            if self.engine == "start":
                with suppress(EngineError):
                    control.start(self.folder, settings, timedelta(seconds=self.engine_idle))
            self._use = control.use(self.folder, settings)
        return self._use

    def _engine_session(self) -> SparkSession:
        """A session of the warm engine."""
        assert self._use is not None
        if self._connect is None:
            ship_by_value()
        # The engine has all other settings already. The store's settings have secrets, which no file of its folder
        # may contain.
        settings = storage_settings(storage_of(self.lake), self.spark_config)
        channel = EngineChannel(self.folder.address, self._use.target, self._use.record.token)
        return self._connect_session(channel, settings)

    def check_store(self) -> None:
        """Raise UnsafeLogStoreError if a Spark Connect server could lose commits to the lake."""
        if self.master.startswith("sc://") and storage_of(self.lake).log_store_settings():
            assert self.session

    def _local_session(self) -> SparkSession:
        if self._local is None:
            self.fetch_jars()
            if not jvm.is_running():
                advice = (
                    "" if archive_file().is_file() else "; it starts in half the time after `pgsieve jars`"
                )
                _LOGGER.info("starting Spark, %s%s", self.spark_master, advice)
            storage = storage_of(self.lake)
            config = self.settings
            os.environ["PYSPARK_PYTHON"] = config["spark.pyspark.python"]
            try:
                self._local = jvm.session(config)
                for key, value in storage_settings(storage, config).items():
                    self._local.conf.set(key, value)
            except Exception as error:
                raise SparkUnavailableError(
                    f'no Spark session with master "{self.spark_master}": {str(error).splitlines()[0]}',
                    hint="check `spark` in pgsieve.yaml, and that Java 17 or 21 runs (`java -version`)",
                ) from error
        return self._local

    def _connect_session(self, server: str | EngineChannel, conf: Mapping[str, str]) -> SparkSession:
        if self._connect is None:
            try:
                session = _create_connect_session(server)
                for key, value in {**SESSION_SETTINGS, **conf}.items():
                    session.conf.set(key, value)
            except PySparkException as error:
                raise SparkUnavailableError(
                    f'no Spark Connect session at "{server}": {str(error).splitlines()[0]}',
                    hint="start the server, or choose another `spark.master` in pgsieve.yaml",
                ) from error
            # A server's log store can be set only at its start, and is Delta's own by default.
            try:
                if isinstance(server, str):
                    verify_delta(session, f'the server "{server.partition("/;")[0]}"')
                verify_log_store(session, storage_of(self.lake))
            except SparkUnavailableError:
                session.stop()
                raise
            if isinstance(server, EngineChannel):
                # By default pyspark repeats a request for ten minutes. An engine that does not answer is gone.
                _set_retries(session, _ENGINE_RETRIES)
            # Otherwise the garbage collector would close the channel as Python ends, and might hang.
            atexit.register(_stop_session, session)
            self._connect = session
        return self._connect
