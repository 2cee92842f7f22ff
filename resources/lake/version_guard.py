"""Makes Spark's writes compare-and-set: a write fails if its table has a later version than its plan.

Delta's transaction begins from the newest version, even if the plan was made from an earlier one. So the
write gets a further task, without rows, which fails if the log has a version after the plan's. Delta runs this
task after its transaction has begun (WriteIntoDelta.run and MergeIntoCommand.runMerge in Delta's sources). A
commit before the task makes the task fail. A commit after the task makes Delta itself refuse the write, if that
commit changes the position, the schema or, for an overwrite or a MERGE, any row. Only an append may still
succeed if a compaction or a repair follows the task.
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.stores.store import Store


class NewerVersionError(PgsieveError):
    """The table has a later version than the plan of the write."""


def with_version_guard(frame: DataFrame, path: str, base: int | None, store: Store) -> DataFrame:
    """The DataFrame with a task that raises NewerVersionError if the table has a version after `base`.

    If only Spark reaches the log, the task could not read it, and the DataFrame is returned unaltered.
    """
    if base is None or not store.can_reach(path):
        return frame
    next_entry, version = f"{path}/_delta_log/{base + 1:020d}.json", base + 1

    def check(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if store.has_file(next_entry):
            raise NewerVersionError(f"version {version} exists")
        yield from ()

    columns = [StructField(f"c{number}", field.dataType) for number, field in enumerate(frame.schema)]
    empty_frame = frame.sparkSession.range(0, 1, 1, 1).mapInArrow(check, StructType(columns))
    return frame.union(empty_frame.toDF(*frame.columns))
