"""Computes a DataFrame once, so that later queries read its rows instead of computing them again."""

from pyspark.sql import DataFrame


def checkpoint(frame: DataFrame) -> DataFrame:
    """The same rows as a local checkpoint. On Spark Connect, the DataFrame itself, which each query computes again.

    A cache cannot be used instead: Delta's MERGE reads its source twice, and refuses a source that is cached. A Spark
    Connect server 4.1 loses checkpoints ("No DataFrame with id ... is found in the session"). On such a server the
    rows are written to the sink `noop` instead, so that Spark's observations (`Observation`) get their values.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        frame.write.format("noop").mode("overwrite").save()
        return frame
    return frame.localCheckpoint()
