"""Computes a DataFrame once, so that later queries read its result instead of computing it again."""

from pyspark.sql import DataFrame


def checkpoint(frame: DataFrame) -> DataFrame:
    """The DataFrame's rows as a local checkpoint; on Spark Connect the DataFrame itself, which is computed again.

    A cache would not do: Delta's MERGE reads its source twice, and refuses a cached one. A Spark Connect
    server 4.1 loses checkpoints ("No DataFrame with id ... is found in the session"); the write to `noop` only
    fills the observations.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        frame.write.format("noop").mode("overwrite").save()
        return frame
    return frame.localCheckpoint()
