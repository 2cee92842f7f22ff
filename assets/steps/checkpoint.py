"""A frame computed once: what follows reads the result, not the plan."""

from pyspark.sql import DataFrame


def checkpointed(frame: DataFrame) -> DataFrame:
    """The frame's rows, kept by the executors where they can be.

    A cache would not do: Delta's MERGE reads its source twice, and refuses a cached one. A Spark Connect server
    4.1 loses checkpoints ("No DataFrame with id ... is found in the session"), so there the frame is computed
    by each action that reads it; observations are filled by an action of their own.
    """
    if type(frame).__module__.startswith("pyspark.sql.connect"):
        frame.write.format("noop").mode("overwrite").save()
        return frame
    return frame.localCheckpoint()
