"""The lake as a resource: the steps write it, and the user's own assets read it at a cut.

In: the key of the steps' resource, or a subscription's name. Out: the opened lake; a subscription's replicas
as Spark DataFrames, or as delta-rs tables without a JVM. Raises LakeError where there is no cut.
"""

from collections.abc import Mapping

import dagster as dg
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from pgsieve.assets.steps.records.cuts import cut_before, frames_at, tables_at
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
        lake = self.open()
        return frames_at(lake, subscription, cut_before(lake, subscription, lsn))

    def tables_at_cut(self, subscription: str, lsn: str | None = None) -> dict[str, DeltaTable]:
        """The same as tables of the package `deltalake`, each at its version: for DuckDB, Polars or Arrow, without a JVM.

        This works only for lakes that delta-rs can reach.
        """
        lake = self.open()
        return tables_at(lake, subscription, cut_before(lake, subscription, lsn))


def opened(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, naming: Naming) -> Lake:
    """The lake of a run.

    Its Spark jobs use the session of the run's Spark resource, which starts with the first job.
    """
    resource, spark = (getattr(context.resources, name) for name in (naming.lake, naming.spark))
    assert isinstance(resource, LakeResource)
    return resource.open(lambda: spark.spark_session)


def resources(lake: LakeResource, naming: Naming) -> Mapping[str, LakeResource | SparkEngine]:
    """The resources that the steps need."""
    return {naming.lake: lake, naming.spark: lake.engine}
