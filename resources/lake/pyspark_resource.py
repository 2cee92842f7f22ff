"""Makes Spark available as a Dagster resource with the interface of the library dagster-pyspark.

The Spark session is either pgsieve's own, or one of a Spark resource that the user's Dagster project already has.

In: - the engine: the Spark settings of pgsieve.yaml
    - optionally the project's own `PySparkResource` or `LazyPySparkResource`
Out: a resource. Its `spark_session` starts when it is first used, and supports Delta tables.

The session raises SparkUnavailableError if it cannot be started. Importing dagster-pyspark takes a tenth of a second,
so only Dagster definitions import this module. pgsieve's commands do not import it.
"""

from functools import cache
from typing import Any

from dagster_pyspark import LazyPySparkResource, PySparkResource
from pyspark.sql import SparkSession

from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.masters import parse_core_count
from pgsieve.resources.lake.session import (
    SparkEngine,
    send_code_in_plans,
    silence_client,
    verify_delta,
    verify_log_store,
)
from pgsieve.resources.lake.spark_settings import SESSION_SETTINGS, make_storage_settings
from pgsieve.resources.lake.stores.storage import find_storage


class PgsieveSpark(SparkEngine, LazyPySparkResource):
    """The Dagster resource for the Spark session that a pgsieve.yaml configures."""

    @property
    def spark_context(self) -> Any:
        """The SparkContext of the session. A session of Spark Connect has no SparkContext, and raises an error."""
        return self.session.sparkContext


def make_pyspark_resource(
    engine: SparkEngine, project_spark: PySparkResource | LazyPySparkResource | None = None
) -> PgsieveSpark:
    """Make a resource from the engine. If `project_spark` is given, it starts the session instead of the engine."""
    fields = {name: getattr(engine, name) for name in SparkEngine.model_fields}
    if project_spark is None:
        return PgsieveSpark(**fields)

    project_resource = project_spark

    @cache
    def session() -> SparkSession:
        return _project_session(project_resource, engine)

    class ProjectSpark(PgsieveSpark):
        """The Dagster resource for a session of the project's own Spark resource.

        Dagster copies a resource by copying its fields, and the project's resource is not one of them. So this class
        is defined within a function, and its methods use the variables of the function.
        """

        @property
        def session(self) -> SparkSession:
            return session()

        @property
        def threads(self) -> int | None:
            return None

        @property
        def cores(self) -> int | None:
            return parse_core_count(str(project_resource.spark_config.get("spark.master", "")))

        @property
        def can_use_engine(self) -> bool:
            return False

        def check_store(self) -> None:
            """Do nothing: the settings for the lake's store are checked when the session begins."""

    return ProjectSpark(**fields)


def _project_session(
    project_resource: PySparkResource | LazyPySparkResource, engine: SparkEngine
) -> SparkSession:
    """Begin a session with pgsieve's settings in the Spark application that the project's resource has started.

    It is a new session, if Spark can begin one, so that the project's own session keeps its settings. Raises
    SparkUnavailableError if there is no session, or if it does not support Delta.
    """
    silence_client()
    send_code_in_plans()
    try:
        base_session = project_resource.process_config_and_initialize().spark_session
        # A session of Spark Connect has no `newSession`. From Spark 4.1 on it has `cloneSession` instead. A session that
        # has neither is used itself.
        begin_session = getattr(base_session, "newSession", None) or getattr(
            base_session, "cloneSession", None
        )
        session: SparkSession = begin_session() if begin_session else base_session
        storage = find_storage(engine.lake)
        for name, value in {
            **SESSION_SETTINGS,
            **make_storage_settings(storage, engine.conf),
        }.items():
            session.conf.set(name, value)
    except Exception as error:
        raise SparkUnavailableError(
            f"no session of the resource {type(project_resource).__name__}: {(str(error).splitlines() or [''])[0]}",
            hint="check the resource that `build_definitions(spark=…)` got",
        ) from error
    verify_delta(session, f"the session of the resource {type(project_resource).__name__}")
    verify_log_store(session, storage)
    return session
