"""Makes the lake available as a Dagster resource.

In: - the URI of the lake
    - the Spark engine (a configured Spark session) that reads and writes it
    - pgsieve's own settings, which are among Spark's settings
Out: the opened lake.
"""

from collections.abc import Callable

import dagster as dg
from pydantic import Field
from pyspark.sql import SparkSession

from pgsieve.resources.lake.byte_limits import REWRITTEN_BYTES_DEFAULT, REWRITTEN_BYTES_SETTING
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import LakeSettings
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.spark_writes import VECTORS_DEFAULT_SETTING
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.unsynced import remove_half_written_commits


class LakeResource(dg.ConfigurableResource["LakeResource"]):
    """The lake as a Dagster resource.

    - `uri`: the lake's address
    - `engine`: the Spark engine that reads and writes the lake
    - `folders`: maps subscriptions to the templates of their replicas' folders, such as `{schema}/{table}`. If a
      subscription is not in it, the template that the lake has recorded is used.
    """

    uri: str
    engine: SparkEngine
    folders: dict[str, str] = Field(default={})

    def open(self, session: Callable[[], SparkSession] | None = None) -> Lake:
        """Open the lake. Before that, remove commits that were half-written when the power failed.

        `session` starts the Spark session of the lake when it is first used. The default is the session of the
        engine.
        """
        if not is_uri(self.uri):
            remove_half_written_commits(self.uri)
        return Lake(
            self.uri,
            session or (lambda: self.engine.session),
            make_lake_settings(self.engine),
            template_by_subscription=self.folders,
        )


def make_lake_settings(engine: SparkEngine) -> LakeSettings:
    """The settings for the work on a lake, from the settings and the master of Spark."""
    config = engine.spark_config
    return LakeSettings(
        engine.small_bytes,
        int(config.get(REWRITTEN_BYTES_SETTING, REWRITTEN_BYTES_DEFAULT)),
        config.get(VECTORS_DEFAULT_SETTING, "true").lower() == "true",
        engine.threads,
        engine.cores,
    )
