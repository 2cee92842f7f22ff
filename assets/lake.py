"""The lake as a Dagster resource: the steps write it, and the user's own assets read replicas at a cut or at any moment.

A cut is a version of each replica of a subscription, so that together they equal the publisher at one LSN.
In: a run with its resources, or a subscription's name. Out: the opened lake; a subscription's replicas
as Spark DataFrames, or as delta-rs tables without a JVM. Raises LakeError if there is no cut, and MomentError
if a moment cannot be read.
"""

from collections.abc import Mapping
from datetime import datetime

import dagster as dg
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from pgsieve.assets.steps.moments.moment import Moment
from pgsieve.assets.steps.moments.reading import frames, tables_at
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.translator import Naming
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.resource import LakeResource
from pgsieve.resources.lake.session import SparkEngine


class PgsieveLake(LakeResource):
    """The lake of a pgsieve.yaml, for the steps and for assets that read the replicas."""

    def read_at_cut(self, subscription: str, lsn: str | None = None) -> dict[str, DataFrame]:
        """The replicas of a subscription as they were at one LSN, as `pgsieve.read_at_cut` returns them.

        They are DataFrames of the configured Spark session, by the table's name, such as `public.orders`.
        """
        cuts = Cuts(self.open(), subscription)
        return cuts.frames(cuts.newest(lsn))

    def tables_at_cut(self, subscription: str, lsn: str | None = None) -> dict[str, DeltaTable]:
        """The same replicas as tables of the package `deltalake`, for DuckDB, Polars or Arrow; needs no JVM.

        Only for lakes that delta-rs can reach.
        """
        cuts = Cuts(self.open(), subscription)
        return cuts.tables(cuts.newest(lsn))

    def read_at(
        self, subscription: str, moment: str | datetime, scratch: str | None = None
    ) -> dict[str, DataFrame]:
        """The replicas of a subscription as they were at any moment, as `pgsieve.read_at` returns them."""
        return frames(Moment.of(self.open(), subscription, moment), scratch)

    def tables_at(self, subscription: str, moment: str | datetime) -> dict[str, DeltaTable]:
        """The same replicas as tables of the package `deltalake`, without a JVM; only for lakes that delta-rs reaches.

        The tables are clones beside the lake or on this machine, and are deleted when this process ends.
        """
        tables = tables_at(Moment.of(self.open(), subscription, moment))
        return {each.qualified: each.table() for each in tables}


def open_lake(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, naming: Naming) -> Lake:
    """The lake of a run.

    Its Spark jobs use the run's Spark resource, whose session starts with the first job.
    """
    resource, spark = (getattr(context.resources, name) for name in (naming.lake, naming.spark))
    assert isinstance(resource, LakeResource)
    return resource.open(lambda: spark.spark_session)


def lake_resources(lake: LakeResource, naming: Naming) -> Mapping[str, LakeResource | SparkEngine]:
    """The resources that the steps need."""
    return {naming.lake: lake, naming.spark: lake.engine}
