"""The lake as a Dagster resource.

In: its URI, the Spark engine that reads and writes it, and pgsieve's own settings of the engine. Out: the
opened lake.
"""

from collections.abc import Callable

import dagster as dg
from pydantic import Field
from pyspark.sql import SparkSession

from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import REWRITTEN_BYTES_DEFAULT, SMALL_BYTES_DEFAULT
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.lake.spark_writes import WANT_VECTORS
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.unsynced import recover

#: A Spark setting of pgsieve: batches of a local lake up to this size are written without Spark.
SMALL_BYTES = "spark.pgsieve.smallBytes"
#: Another one: in replicas up to this size files are written again without deleted rows; in larger ones rows
#: are marked.
REWRITTEN_BYTES = "spark.pgsieve.rewrittenBytes"


class LakeResource(dg.ConfigurableResource["LakeResource"]):
    """The lake as a Dagster resource: its URI, the Spark engine that reads and writes it, and templates of folders.

    `folders` are those of subscriptions' replicas; for other subscriptions the lake has recorded them.
    """

    uri: str
    engine: SparkEngine
    folders: dict[str, str] = Field(default={})

    def open(self, session: Callable[[], SparkSession] | None = None) -> Lake:
        """The lake; its `session`, or else the engine's, starts at its first use.

        Commits that a power cut left half written are put back first.
        """
        if not is_uri(self.uri):
            recover(self.uri)
        small = int(self.engine.spark_config.get(SMALL_BYTES, SMALL_BYTES_DEFAULT))
        return Lake(
            self.uri,
            session or (lambda: self.engine.session),
            small,
            folders=self.folders,
            threads=self.engine.threads,
            cores=self.engine.cores,
            vectors=self.engine.spark_config.get(WANT_VECTORS, "true").lower() == "true",
            rewritten_bytes=int(self.engine.spark_config.get(REWRITTEN_BYTES, REWRITTEN_BYTES_DEFAULT)),
        )
