"""Spark as a resource of dagster-pyspark: with pgsieve's own session, or a session of the project's resource.

In: the engine of a configuration, and optionally a `PySparkResource` or `LazyPySparkResource`. Out: a
resource with dagster-pyspark's interface, whose `spark_session` is a session with Delta, started at its first
use. Raises SparkUnavailableError if there is no session. The import takes a tenth of a second, so only
definitions import this module, not pgsieve's commands.
"""

from functools import cache
from typing import Any

from dagster_pyspark import LazyPySparkResource, PySparkResource
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.masters import cores_of
from pgsieve.resources.lake.session import (
    SESSION_SETTINGS,
    SparkEngine,
    refuse_log_store_of,
    refuse_without_delta,
    ship_by_value,
    silence_client,
    storage_settings,
)
from pgsieve.resources.lake.stores.storage import storage_of


class PgsieveSpark(SparkEngine, LazyPySparkResource):
    """The Spark of a pgsieve.yaml."""

    @property
    def spark_context(self) -> Any:
        """The session's context; a session of Spark Connect has none."""
        return self.session.sparkContext


def pyspark_resource(
    engine: SparkEngine, own: PySparkResource | LazyPySparkResource | None = None
) -> PgsieveSpark:
    """The engine as a resource of dagster-pyspark.

    `own` is the project's resource, which then starts the session.
    """
    fields = {name: getattr(engine, name) for name in SparkEngine.model_fields}
    if own is None:
        return PgsieveSpark(**fields)

    chosen = own

    @cache
    def session() -> SparkSession:
        return _session_of(chosen, engine)

    class ProjectSpark(PgsieveSpark):
        """The Spark of a project.

        Dagster copies a resource by its fields, so the class keeps the project's resource.
        """

        @property
        def session(self) -> SparkSession:
            return session()

        @property
        def threads(self) -> int | None:
            return None

        @property
        def cores(self) -> int | None:
            return cores_of(str(chosen.spark_config.get("spark.master", "")))

        @property
        def is_warmed(self) -> bool:
            return False

        def check_store(self) -> None:
            """Do nothing: the session is checked at its first use."""

    return ProjectSpark(**fields)


def _session_of(own: PySparkResource | LazyPySparkResource, engine: SparkEngine) -> SparkSession:
    """A session in the Spark application of the project's resource, but with its own settings."""
    silence_client()
    ship_by_value()
    try:
        theirs = own.process_config_and_initialize().spark_session
        # Spark Connect has no `newSession`, but from 4.1 on `cloneSession`.
        begin = getattr(theirs, "newSession", None) or getattr(theirs, "cloneSession", None)
        session: SparkSession = begin() if begin else theirs
        storage = storage_of(engine.lake)
        for name, value in {**SESSION_SETTINGS, **storage_settings(storage, engine.spark_config)}.items():
            session.conf.set(name, value)
    except Exception as error:
        raise SparkUnavailableError(
            f"no session of the resource {type(own).__name__}: {(str(error).splitlines() or [''])[0]}",
            hint="check the resource that `build_definitions(spark=…)` got",
        ) from error
    refuse_without_delta(session, f"the session of the resource {type(own).__name__}")
    refuse_log_store_of(session, storage)
    return session
