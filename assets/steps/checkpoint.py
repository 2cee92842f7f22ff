"""A DataFrame computed once: later steps read its result instead of computing its plan again."""

from pyspark.sql import DataFrame


def checkpointed(frame: DataFrame) -> DataFrame:
    """The DataFrame's rows, kept by the executors where that is possible.

    A cache would not do: Delta's MERGE reads its source twice, and refuses a cached one. A Spark Connect
    server 4.1 loses checkpoints ("No DataFrame with id ... is found in the session"). So on Spark Connect
    nothing is kept, and each action computes the DataFrame again. The write to `noop` only fills its
    observations.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        frame.write.format("noop").mode("overwrite").save()
        return frame
    return frame.localCheckpoint()
