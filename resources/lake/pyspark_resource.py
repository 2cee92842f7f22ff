"""Spark as a resource of dagster-pyspark: with pgsieve's own session, or a session of the project's resource.

In: the engine of a configuration, and optionally a `PySparkResource` or `LazyPySparkResource`. Out: a
resource with dagster-pyspark's interface; its `spark_session` has Delta, and starts at its first use. Raises
SparkUnavailableError if there is no session. Only definitions import this module, not pgsieve's commands,
because the import takes a tenth of a second.
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
    ship_by_value,
    silence_client,
    storage_settings,
    verify_delta,
    verify_log_store,
)
from pgsieve.resources.lake.stores.storage import storage_of


class PgsieveSpark(SparkEngine, LazyPySparkResource):
    """The Spark of a pgsieve.yaml."""

    @property
    def spark_context(self) -> Any:
        """The SparkContext of the session; Spark Connect has none."""
        return self.session.sparkContext


def pyspark_resource(
    engine: SparkEngine, project: PySparkResource | LazyPySparkResource | None = None
) -> PgsieveSpark:
    """The engine as a resource of dagster-pyspark. The project's resource, if given, starts the session."""
    fields = {name: getattr(engine, name) for name in SparkEngine.model_fields}
    if project is None:
        return PgsieveSpark(**fields)

    given = project

    @cache
    def session() -> SparkSession:
        return _session_of(given, engine)

    class ProjectSpark(PgsieveSpark):
        """The Spark of a project. Dagster copies a resource by its fields, so the class has the project's resource."""

        @property
        def session(self) -> SparkSession:
            return session()

        @property
        def threads(self) -> int | None:
            return None

        @property
        def cores(self) -> int | None:
            return cores_of(str(given.spark_config.get("spark.master", "")))

        @property
        def can_use_engine(self) -> bool:
            return False

        def check_store(self) -> None:
            """Do nothing: the session is checked at its first use."""

    return ProjectSpark(**fields)


def _session_of(project: PySparkResource | LazyPySparkResource, engine: SparkEngine) -> SparkSession:
    """A session with pgsieve's settings, in the Spark application of the project's resource."""
    silence_client()
    ship_by_value()
    try:
        base_session = project.process_config_and_initialize().spark_session
        # Spark Connect has no `newSession`, but from 4.1 on `cloneSession`.
        begin = getattr(base_session, "newSession", None) or getattr(base_session, "cloneSession", None)
        session: SparkSession = begin() if begin else base_session
        storage = storage_of(engine.lake)
        for name, value in {**SESSION_SETTINGS, **storage_settings(storage, engine.spark_config)}.items():
            session.conf.set(name, value)
    except Exception as error:
        raise SparkUnavailableError(
            f"no session of the resource {type(project).__name__}: {(str(error).splitlines() or [''])[0]}",
            hint="check the resource that `build_definitions(spark=…)` got",
        ) from error
    verify_delta(session, f"the session of the resource {type(project).__name__}")
    verify_log_store(session, storage)
    return session
