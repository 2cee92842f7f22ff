"""Spark's writes as compare-and-set: rows that cannot be written once their table has a version after their plan's.

Delta takes the newest version when its transaction begins, whatever the plan was made from. So the rows that are written
are joined by a task without any, which fails where the log has a version that the plan has not seen. Delta evaluates it
with them, after its transaction has begun (WriteIntoDelta.run and MergeIntoCommand.runMerge in Delta's sources): what was
committed before makes the task fail. What is committed after is Delta's to refuse: another position, another schema, and
for an overwrite or a MERGE any change of rows. Only an append follows a compaction or a repair that comes after the task.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from pgsieve.decoding.errors import PgsieveError


class NewerVersionError(PgsieveError):
    """The table has a version that the plan of a write has not seen."""


def guarded(frame: DataFrame, path: str, base: int | None) -> DataFrame:
    """The frame; evaluating it raises NewerVersionError where the table has a version after `base`.

    Only a log in the file system can be looked into by every executor: elsewhere the frame stays as it is.
    """
    if base is None or (log := _log(path)) is None:
        return frame
    newer, version = str(Path(log, f"{base + 1:020d}.json")), base + 1

    def look(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if Path(newer).exists():
            raise NewerVersionError(f"version {version} is there")
        yield from ()

    columns = [StructField(f"c{number}", field.dataType) for number, field in enumerate(frame.schema)]
    nothing = frame.sparkSession.range(0, 1, 1, 1).mapInArrow(look, StructType(columns))
    return frame.union(nothing.toDF(*frame.columns))


def _log(path: str) -> str | None:
    """The folder of a table's log; None where it is in no file system."""
    if "://" not in path and not path.startswith("file:"):
        return f"{path}/_delta_log"
    parsed = urlparse(path)
    return f"{unquote(parsed.path)}/_delta_log" if parsed.scheme == "file" else None
