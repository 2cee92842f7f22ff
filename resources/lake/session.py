"""Starts the Spark session, or connects to one.

The session is local, or belongs to the warm engine (a process that keeps Spark running between commands), to a
cluster, or to a Spark Connect server.

In: the address of Spark's master, and settings (`spark` in pgsieve.yaml).
Out: a session with Delta, which starts when it is first used.

Raises `SparkUnavailableError` if there is no session.

Callers use no sparkContext, no RDD, and no Java object, because Spark Connect has none of these. Functions are sent
to the executors of a cluster by value, as a part of the plan. So executors need Python with numpy, pyarrow, psycopg
and ADBC, but they do not need pgsieve.
"""

import atexit
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from importlib import import_module
from threading import Lock, RLock
from typing import Any, cast

import dagster as dg
from pydantic import Field, PrivateAttr
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.errors import SparkUnavailableError, get_first_message_line
from pgsieve.resources.lake.engine import control
from pgsieve.resources.lake.engine.channel import EngineChannel
from pgsieve.resources.lake.engine.record import EngineError
from pgsieve.resources.lake.java import jvm
from pgsieve.resources.lake.java.class_archive import find_archive_path
from pgsieve.resources.lake.module_search import cache_module_search
from pgsieve.resources.lake.secret_settings import find_hidden_settings, split_address
from pgsieve.resources.lake.spark_settings import (
    SESSION_SETTINGS,
    SparkSettings,
    make_storage_settings,
    verify_log_store_settings,
)
from pgsieve.resources.lake.stores.storage import Storage, find_storage
from pgsieve.resources.slow_block import report_if_slow
from pgsieve.resources.time_limit import limit_time

#: How often a request to the engine is repeated. The repetitions take four seconds.
_ENGINE_RETRIES = 4
#: The environment variable by which pyspark knows that a process uses Spark Connect.
_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
#: How long a server may take to end a session.
_END_TIMEOUT_SECONDS = 5.0
#: If a Spark Connect server has not answered for this time, a line says so. pyspark repeats the request for ten minutes.
_SILENT_SECONDS = 10.0

_LOGGER = logging.getLogger(__name__)
#: The first thread that needs Spark starts it with this lock, and the other threads wait.
_START_LOCK = RLock()

#: A statement about a table that does not exist. Only Spark with Delta understands it.
_DELTA_STATEMENT = "describe history delta.`/pgsieve/no such table`"
#: A setting that each session of Databricks has.
_DATABRICKS_SETTING = "spark.databricks.clusterUsageTags.clusterId"

#: The packages whose functions run on executors.
SENT_PACKAGES = ("pgsieve.decoding", "pgsieve.resources", "pgsieve.assets")


def verify_log_store(session: SparkSession, storage: Storage) -> None:
    """Raise UnsafeLogStoreError if a session that pgsieve did not start could overwrite other writers' commits."""
    verify_log_store_settings(
        storage, {name: session.conf.get(name, "") or "" for name in storage.log_store_settings()}
    )


def verify_delta(session: SparkSession, owner: str) -> None:
    """Raise SparkUnavailableError if a session that pgsieve did not configure has no Delta.

    `owner` names the session in the message. The settings of the session prove nothing: if the jar of an extension
    is missing, Spark only logs a warning.
    """
    try:
        session.sql(_DELTA_STATEMENT).collect()
    except PySparkException as error:
        # An error of Delta's shows that the session has Delta. It says that the table does not exist.
        if (error.getCondition() or "").startswith("DELTA_"):
            return
    if session.conf.get(_DATABRICKS_SETTING, ""):  # Databricks always has Delta, but reports other errors.
        return
    raise SparkUnavailableError(
        f"{owner} has no Delta Lake",
        hint="start it with Delta's jars, as `pgsieve jars` names them, spark.sql.extensions ="
        " io.delta.sql.DeltaSparkSessionExtension and spark.sql.catalog.spark_catalog ="
        " org.apache.spark.sql.delta.catalog.DeltaCatalog; if it has these, its log names the class that was not found",
    )


#: The loggers by which pyspark's client writes errors to stderr. Their lines contain tracebacks of executors, and
#: values of cells.
_CLIENT_LOGGERS = ("pyspark.sql.connect.logging", "SQLQueryContextLogger", "DataFrameQueryContextLogger")
#: The environment variable with which a user enables the first of these loggers.
_CLIENT_LOG_LEVEL = "SPARK_CONNECT_LOG_LEVEL"
_SILENCE_LOCK = Lock()


def silence_client() -> None:
    """Keep pyspark's client from logging the errors that it raises. The log would contain values of cells.

    The loggers get a level above that of all messages. If they were disabled instead, logging.config.dictConfig,
    which Dagster calls, would enable them again.
    """
    # PySparkLogger.getLogger changes the class of all new loggers to pyspark's for a moment, and then restores the former
    # class. If two threads did this at the same time, the second could take pyspark's class for the former one, and
    # restore it. Then Dagster's next run could not create a logger.
    with _SILENCE_LOCK:
        for name in _CLIENT_LOGGERS:
            if name != _CLIENT_LOGGERS[0] or _CLIENT_LOG_LEVEL not in os.environ:
                PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def send_code_in_plans() -> None:
    """Make Spark send the code of pgsieve's functions to executors, as a part of the plan, and not only their names.

    Executors may have no pgsieve, or another version of it.
    """
    cache_module_search()
    for package in SENT_PACKAGES:
        cloudpickle.register_pickle_by_value(import_module(package))  # type: ignore[no-untyped-call]


def _report_waiting(address: str) -> None:
    """Say on stderr and in the log that a server does not answer."""
    line = f'waiting for Spark Connect at "{address}", for up to ten minutes'
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    _LOGGER.warning(line)


@contextmanager
def _skip_ml_cleanup() -> Iterator[None]:
    """Let clients that are created within the block send no request when this process ends.

    The request would remove models of machine learning, and pgsieve has none. While no server answers, pyspark would repeat
    it for ten minutes, also after Ctrl-C.
    """
    from pyspark.sql.connect.client import SparkConnectClient

    client_class: Any = SparkConnectClient
    # pyspark has no public name for it, and another version may not have it.
    if (cleanup := getattr(client_class, "_cleanup_ml_cache", None)) is None:
        yield
        return
    client_class._cleanup_ml_cache = lambda _: None  # noqa: SLF001
    try:
        yield
    finally:
        client_class._cleanup_ml_cache = cleanup  # noqa: SLF001


def _create_connect_session(server: str | EngineChannel) -> SparkSession:
    """Create a session of a Spark Connect server. `server` is the server's address, or the channel of the warm engine."""
    had_connect_mode = _CONNECT_MODE in os.environ
    try:
        if isinstance(server, str):
            session: SparkSession = SparkSession.builder.remote(server).create()
            return session
        from pyspark.sql.connect.session import SparkSession as ConnectSession

        # pyspark sets this only for an address. Without it, pyspark's functions require a JVM of this process.
        os.environ[_CONNECT_MODE] = "1"
        return cast("SparkSession", ConnectSession.builder.channelBuilder(server.make_builder()).create())
    except BaseException:
        # As long as the variable is set, no local session can start in this process.
        if not had_connect_mode:
            os.environ.pop(_CONNECT_MODE, None)
        raise


def _set_retries(session: SparkSession, times: int) -> None:
    """While no server answers, let the client repeat a request up to `times` times, with growing pauses."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    connect: Any = session
    connect.client.set_retry_policies([DefaultPolicy(max_retries=times)] if times else [])


def _stop_session(session: SparkSession) -> None:
    """End a session. The server may be gone or hang, so this sends only one request, and limits the time."""
    _set_retries(session, 0)
    with suppress(TimeoutError), limit_time(_END_TIMEOUT_SECONDS):
        session.stop()


class SparkEngine(dg.ConfigurableResource["SparkEngine"], SparkSettings):
    """A Spark session with any kind of master. The session starts when it is first used.

    Dagster shows `master` and `spark_config`. So the caller takes the secrets out of them
    (`secret_settings.hide_settings`).
    """

    master: str = "local[*]"
    spark_config: dict[str, str] = Field(default={}, repr=False)
    #: The lake's address. `find_storage` returns the storage options for it.
    lake: str = ""
    #: Whether a session on this machine uses the warm engine. `off`: never; `use`: if an engine is running; `start`:
    #: always, and an engine is started if none is running.
    engine: str = "off"
    engine_folder: str = ""
    #: The engine ends after it was unused for this number of seconds.
    engine_idle: float = 0.0
    _local_session: SparkSession | None = PrivateAttr(default=None)
    _connect_session: SparkSession | None = PrivateAttr(default=None)
    _engine_use: control.EngineUse | None = PrivateAttr(default=None)

    @property
    def session(self) -> SparkSession:
        """The session, which the first call of any thread starts. Raises SparkUnavailableError."""
        with _START_LOCK:
            return self._open_session()

    def _open_session(self) -> SparkSession:
        silence_client()
        if not self.spark_master.startswith("local"):
            send_code_in_plans()
        if self.master.startswith("sc://"):
            # If pgsieve.yaml has no storage options, the server uses its own access to the store.
            storage = find_storage(self.lake)
            access_settings = make_storage_settings(storage, self.conf) if storage.options else {}
            _, parameters = find_hidden_settings(self.lake)
            return self._open_connect_session(self.master + parameters, {**access_settings, **self.conf})
        if self._local_session is None and self._use_engine() is not None:
            return self._open_engine_session()
        return self._open_local_session()

    @property
    def spark_session(self) -> SparkSession:
        """The same session, under the name that the resources of dagster-pyspark use."""
        return self.session

    def launch(self, owner_pid: int | None = None) -> None:
        """Start the engine, and do not wait for it.

        With an `owner_pid`, the engine ends when the process with this id ends.
        """
        self.fetch_jars()
        control.launch(self.folder, self.settings, timedelta(seconds=self.engine_idle), owner_pid)

    def _use_engine(self) -> control.EngineUse | None:
        """Use the warm engine until this process ends. None if this process must start its own session."""
        if self._engine_use is None and self.can_use_engine:
            if self.engine == "start":
                self.fetch_jars()
            settings = self.settings
            if self.engine == "start":
                with suppress(EngineError):
                    control.start(self.folder, settings, timedelta(seconds=self.engine_idle))
            self._engine_use = control.begin_use(self.folder, settings)
        return self._engine_use

    def _open_engine_session(self) -> SparkSession:
        """A new session of the warm engine, or the one that this object already has."""
        assert self._engine_use is not None
        if not self._engine_use.has_same_code:
            send_code_in_plans()
        # The engine has started with the settings in a file of its folder. Those of the store are not in the file, because
        # they contain secrets.
        settings = make_storage_settings(find_storage(self.lake), self.conf)
        channel = EngineChannel(self.folder.address, self._engine_use.target, self._engine_use.record.token)
        return self._open_connect_session(channel, settings)

    def check_store(self) -> None:
        """Raise UnsafeLogStoreError if the configured Spark Connect server could overwrite other writers' commits."""
        if self.master.startswith("sc://") and find_storage(self.lake).log_store_settings():
            # The session is opened only because `_open_connect_session` checks its log store.
            assert self.session

    def _open_local_session(self) -> SparkSession:
        """The session of this process. The first call starts it."""
        if self._local_session is None:
            self.fetch_jars()
            if not jvm.is_running():
                advice = (
                    ""
                    if find_archive_path().is_file()
                    else "; it starts in half the time after `pgsieve jars`"
                )
                _LOGGER.info("starting Spark, %s%s", self.spark_master, advice)
            storage = find_storage(self.lake)
            config = self.settings
            os.environ["PYSPARK_PYTHON"] = config["spark.pyspark.python"]
            try:
                self._local_session = jvm.start_session(config)
                for key, value in make_storage_settings(storage, config).items():
                    self._local_session.conf.set(key, value)
            except Exception as error:
                raise SparkUnavailableError(
                    f'no Spark session with master "{self.spark_master}": {get_first_message_line(error)}',
                    hint="check `spark` in pgsieve.yaml, and that Java 17 or 21 runs (`java -version`)",
                ) from error
        return self._local_session

    def _open_connect_session(self, server: str | EngineChannel, conf: Mapping[str, str]) -> SparkSession:
        """The session of a Spark Connect server or the warm engine. The first call creates it, with the settings `conf`."""
        if self._connect_session is None:
            address = split_address(str(server))[0]
            try:
                report = partial(_report_waiting, address)
                is_slow = (
                    report_if_slow(_SILENT_SECONDS, report) if isinstance(server, str) else nullcontext()
                )
                with is_slow, _skip_ml_cleanup():
                    session = _create_connect_session(server)
                # The engine's sessions have these settings already, and to set one takes a request.
                own_settings = {} if isinstance(server, EngineChannel) else SESSION_SETTINGS
                for key, value in {**own_settings, **conf}.items():
                    session.conf.set(key, value)
            except (PySparkException, ValueError) as error:
                # A ValueError is about the address, and shows the token.
                raise SparkUnavailableError(
                    f'no Spark Connect session at "{address}": {get_first_message_line(error)}',
                    hint="start the server, or choose another `spark.master` in pgsieve.yaml",
                ) from (error if isinstance(error, PySparkException) else None)
            # The log store of a server can only be chosen when the server starts, so check which one it has.
            try:
                if isinstance(server, str):
                    verify_delta(session, f'the server "{address}"')
                verify_log_store(session, find_storage(self.lake))
            except SparkUnavailableError:
                session.stop()
                raise
            if isinstance(server, EngineChannel):
                # By default pyspark repeats a request for ten minutes. An engine that does not answer sooner is gone.
                _set_retries(session, _ENGINE_RETRIES)
            # Without this, the garbage collector would close the channel while Python ends, and could hang.
            atexit.register(_stop_session, session)
            self._connect_session = session
        return self._connect_session
