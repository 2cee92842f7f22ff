"""The lake as a Dagster resource.

In: the lake's URI, the Spark engine that reads and writes it, and pgsieve's settings among Spark's. Out: the
opened lake.
"""

from collections.abc import Callable

import dagster as dg
from pydantic import Field
from pyspark.sql import SparkSession

from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import REWRITTEN_BYTES_DEFAULT, SMALL_BYTES_DEFAULT, LakeSettings
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.spark_writes import WANT_VECTORS
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.unsynced import recover

#: pgsieve's setting among Spark's: batches of a lake that delta-rs reaches are written without Spark up to this
#: size.
SMALL_BYTES = "spark.pgsieve.smallBytes"
#: pgsieve's setting among Spark's: files are rewritten without deleted rows in replicas up to this size; in
#: larger replicas the rows are marked.
REWRITTEN_BYTES = "spark.pgsieve.rewrittenBytes"


class LakeResource(dg.ConfigurableResource["LakeResource"]):
    """The lake as a Dagster resource: its URI, the Spark engine that reads and writes it, and templates of folders.

    `folders` has the template of the replicas' folders for subscriptions. For others the lake's record counts.
    """

    uri: str
    engine: SparkEngine
    folders: dict[str, str] = Field(default={})

    def open(self, session: Callable[[], SparkSession] | None = None) -> Lake:
        """Open the lake, after half-written commits before a power cut were removed.

        `session` starts the lake's session at its first use; the default is the engine's.
        """
        if not is_uri(self.uri):
            recover(self.uri)
        return Lake(
            self.uri, session or (lambda: self.engine.session), settings_of(self.engine), folders=self.folders
        )


def settings_of(engine: SparkEngine) -> LakeSettings:
    """The user's settings for work on a lake, among those of Spark."""
    config = engine.spark_config
    return LakeSettings(
        int(config.get(SMALL_BYTES, SMALL_BYTES_DEFAULT)),
        int(config.get(REWRITTEN_BYTES, REWRITTEN_BYTES_DEFAULT)),
        config.get(WANT_VECTORS, "true").lower() == "true",
        engine.threads,
        engine.cores,
    )
