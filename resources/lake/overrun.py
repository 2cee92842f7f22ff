"""Makes Spark's writes compare-and-set: a write fails if its table has a later version than its plan.

Delta's transaction begins from the newest version, whatever version the plan was made from. So a task that
yields no rows is added to the written rows; it fails if the log has a version after the plan's. Delta
evaluates the task with the rows, after its transaction has begun (WriteIntoDelta.run and
MergeIntoCommand.runMerge in Delta's sources). So an earlier commit makes the task fail. A commit after the
task makes Delta itself refuse the write, if it changes the position, the schema or, for an overwrite or a
MERGE, any row. Only an append may follow a compaction or a repair that comes after the task.
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.stores.store import Store


class NewerVersionError(PgsieveError):
    """The table has a later version than the plan of a write."""


def guarded(frame: DataFrame, path: str, base: int | None, store: Store) -> DataFrame:
    """The DataFrame; evaluating it raises NewerVersionError if the table has a version after `base`.

    If only Spark reaches the log, executors' Python cannot read it, and the DataFrame stays as it is.
    """
    if base is None or not store.reaches(path):
        return frame
    newer, version = f"{path}/_delta_log/{base + 1:020d}.json", base + 1

    def look(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if store.has(newer):
            raise NewerVersionError(f"version {version} exists")
        yield from ()

    columns = [StructField(f"c{number}", field.dataType) for number, field in enumerate(frame.schema)]
    nothing = frame.sparkSession.range(0, 1, 1, 1).mapInArrow(look, StructType(columns))
    return frame.union(nothing.toDF(*frame.columns))
