"""Metrics that are observed while a query runs, so that nothing is computed twice to be counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Observation

from pgsieve.resources.lake.lake import Lake


def observation_for(lake: Lake) -> Observation:
    """An observation for queries of the lake's session, which is started first: its kind decides which kind this is."""
    _ = lake.spark
    return Observation()


def observed(
    observation: Observation, metrics: Sequence[Column], rows: Callable[[], DataFrame]
) -> Mapping[str, Any]:
    """What was observed, by the metrics' names; of `rows`, which are the same, where Spark does not tell.

    A Spark Connect server waits a tenth of a second for what a query observed, and a busy one leaves it out then
    (Observation.getRowOrEmpty in Spark's sql/api).
    """
    return observation.get or aggregated(rows(), metrics)


def aggregated(rows: DataFrame, metrics: Sequence[Column]) -> Mapping[str, Any]:
    """The metrics of rows that are there."""
    row = rows.agg(*metrics).first()
    assert row is not None
    return row.asDict()
