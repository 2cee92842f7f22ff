"""Metrics that Spark observes while a query runs, so that nothing is computed twice to be counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Observation

from pgsieve.resources.lake.lake import Lake


def observation_for(lake: Lake) -> Observation:
    """An observation for queries of the lake's session, which is started first: Observation() depends on its kind."""
    _ = lake.spark
    return Observation()


def observed_metrics(
    observation: Observation, metrics: Sequence[Column], rows: Callable[[], DataFrame]
) -> Mapping[str, Any]:
    """The observed metrics by name; if Spark reports none, they are computed from `rows`, which are the same rows.

    A Spark Connect server waits a tenth of a second for a query's observations. A busy server leaves them out
    (Observation.getRowOrEmpty in Spark's sql/api).
    """
    return observation.get or aggregate_metrics(rows(), metrics)


def aggregate_metrics(rows: DataFrame, metrics: Sequence[Column]) -> Mapping[str, Any]:
    """The metrics of rows, computed by a query of their own."""
    row = rows.agg(*metrics).first()
    assert row is not None
    return row.asDict()
