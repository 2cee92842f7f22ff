"""Makes a write of Spark fail if its table has a later version than the version from which the write was planned.

In: the DataFrame that Spark will write, and the version of the table from which the DataFrame was planned.
Out: a DataFrame with the same rows, and with one more task that fails if the table has a later version.

Delta's transaction begins from the newest version of the table, even if the rows were planned from an earlier version.
Without the check a commit between these versions would be overlooked. The added task yields no rows. Delta runs it after
its transaction has begun (WriteIntoDelta.run and MergeIntoCommand.runMerge in Delta's sources). If another commit comes
before the task, the task fails. If another commit comes after the task, Delta itself refuses the write, provided that
the commit changes the position (the LSN in its `txn` action) or the schema. Delta also refuses an overwrite or a MERGE
if the commit changes any row. So only an append can succeed after a commit that it overlooks: a compaction or a repair
(`check --repair`).
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.lake.stores.store import Store


class NewerVersionError(PgsieveError):
    """The table has a later version than the version from which the write was planned."""


def add_version_guard(frame: DataFrame, path: str, expected_version: int | None, store: Store) -> DataFrame:
    """The DataFrame with a task that raises NewerVersionError if the table has a version after `expected_version`.

    If only Spark can reach the log of the table, the task could not read it. In that case the DataFrame is
    returned unchanged.
    """
    if expected_version is None or not store.can_reach(path):
        return frame
    next_entry, version = f"{path}/_delta_log/{expected_version + 1:020d}.json", expected_version + 1

    def check_version(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if store.has_file(next_entry):
            raise NewerVersionError(f"version {version} exists")
        yield from ()

    columns = [StructField(f"c{number}", field.dataType) for number, field in enumerate(frame.schema)]
    empty_frame = frame.sparkSession.range(0, 1, 1, 1).mapInArrow(check_version, StructType(columns))
    return frame.union(empty_frame.toDF(*frame.columns))
