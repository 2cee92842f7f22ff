"""Spark's writes as compare-and-set: rows that cannot be written once their table has a version after their plan's.

Delta takes the newest version when its transaction begins, whatever the plan was made from. So a task without
rows is joined to the written rows; it fails where the log has a version that the plan has not seen. Delta
evaluates it with the rows, after its transaction has begun (WriteIntoDelta.run and MergeIntoCommand.runMerge
in Delta's sources), so an earlier commit makes the task fail. A later commit is refused by Delta: another
position, another schema, and for an overwrite or a MERGE any change of rows. Only an append may follow a
compaction or a repair that comes after the task.
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.stores.store import Store


class NewerVersionError(PgsieveError):
    """The table has a version that the plan of a write has not seen."""


def guarded(frame: DataFrame, path: str, base: int | None, store: Store) -> DataFrame:
    """The DataFrame; evaluating it raises NewerVersionError where the table has a version after `base`.

    Executors cannot read a log that only Spark reaches: there the DataFrame stays as it is.
    """
    if base is None or not store.reaches(path):
        return frame
    newer, version = f"{path}/_delta_log/{base + 1:020d}.json", base + 1

    def look(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if store.has(newer):
            raise NewerVersionError(f"version {version} is there")
        yield from ()

    columns = [StructField(f"c{number}", field.dataType) for number, field in enumerate(frame.schema)]
    nothing = frame.sparkSession.range(0, 1, 1, 1).mapInArrow(look, StructType(columns))
    return frame.union(nothing.toDF(*frame.columns))
