"""The lake as a Dagster resource: the steps write it, and a user's own assets read replicas from it.

In: the resources of a run, or the name of a subscription
Out: - the opened lake
     - the replicas of a subscription at a cut or at any moment, as Spark DataFrames, or as delta-rs tables without a
       JVM

A cut names a version of each replica of a subscription; together these versions equal the publisher at one LSN. Raises
LakeError if there is no cut, and MomentError if a moment cannot be read.
"""

from collections.abc import Mapping
from datetime import datetime

import dagster as dg
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from pgsieve.assets.steps.moments.moment import Moment
from pgsieve.assets.steps.moments.reading import find_tables, read_frames
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.translator import DagsterNames
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.resource import LakeResource
from pgsieve.resources.lake.session import SparkEngine


class PgsieveLake(LakeResource):
    """The lake of a pgsieve.yaml. The steps use it. A user's own assets may use it to read the replicas."""

    def read_at_cut(self, subscription: str, lsn: str | None = None) -> dict[str, DataFrame]:
        """The replicas of a subscription as they were at one LSN, in the same form as `pgsieve.read_at_cut` returns them.

        Maps the name of each table, such as `public.orders`, to a DataFrame of the configured Spark session.
        """
        cuts = Cuts(self.open(), subscription)
        return cuts.read_frames(cuts.find_newest(lsn))

    def tables_at_cut(self, subscription: str, lsn: str | None = None) -> dict[str, DeltaTable]:
        """The same replicas as `read_at_cut` returns, as tables of the package `deltalake`, for DuckDB, Polars or Arrow.

        No JVM is needed, but delta-rs has to be able to reach the lake.
        """
        cuts = Cuts(self.open(), subscription)
        return cuts.open_tables(cuts.find_newest(lsn))

    def read_at(
        self, subscription: str, moment: str | datetime, scratch: str | None = None
    ) -> dict[str, DataFrame]:
        """The replicas of a subscription as they were at any moment. The parameters are those of `pgsieve.read_at`."""
        return read_frames(Moment.from_user_input(self.open(), subscription, moment), scratch)

    def tables_at(self, subscription: str, moment: str | datetime) -> dict[str, DeltaTable]:
        """The same replicas as `read_at` returns, as tables of the package `deltalake`.

        No JVM is needed, but delta-rs has to be able to reach the lake. A table that has changed between the last cut and
        the moment is cloned, into the lake or into a folder for temporary files. The clone is deleted when this process
        ends.
        """
        tables = find_tables(Moment.from_user_input(self.open(), subscription, moment))
        return {table.qualified_name: table.open_table() for table in tables}


def open_lake(
    context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, dagster_names: DagsterNames
) -> Lake:
    """Open the lake for a run.

    Its Spark jobs use the run's Spark resource. The resource starts a session for the first job.
    """
    resource, spark = (
        getattr(context.resources, name)
        for name in (dagster_names.lake_resource_key, dagster_names.spark_resource_key)
    )
    assert isinstance(resource, LakeResource)
    return resource.open(lambda: spark.spark_session)


def lake_resources(
    lake: LakeResource, dagster_names: DagsterNames
) -> Mapping[str, LakeResource | SparkEngine]:
    """The resources that the steps need, by the keys under which they are defined."""
    return {dagster_names.lake_resource_key: lake, dagster_names.spark_resource_key: lake.engine}
