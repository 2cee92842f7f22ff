"""Copies the changes of a slice that committed before an LSN into the change history of a clone.

In: the slice of a table's history in one lake. Out: the same rows in another lake, and the record that a run would have
written of them. This process writes the files, one row group at a time; if column names are mapped, Spark does. Raises
LakeError, also if files of the slice are lost.
"""

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.moments.bases import Base
from pgsieve.assets.steps.observations import aggregate_metrics
from pgsieve.assets.steps.records.columns import Order
from pgsieve.assets.steps.records.transformed import TableChanges
from pgsieve.assets.steps.update_transformation.changes import spark_tally, written_changes
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.tally import Tally, count_changes, empty_tally
from pgsieve.resources.lake.committers import FileCommitter
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake, StoredSlices


def copy_slice(lake: Lake, into: Lake, base: Base, end: int, lsn: int, history: str) -> TableChanges:
    """Copy the rows of the slice at `end` that committed before `lsn` into a history of another lake.

    The copied slice ends at `lsn` if that is earlier than `end`. Returns the record of a run for these rows.
    """
    stored = lake.stored_slices(base.history, [end], every=True)
    if stored is None:
        return _copy_by_spark(lake, into, base, end, lsn, history)
    tally, truncates, size, ends = empty_tally(), list[Order](), 0, min(end, lsn)

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal size
        for part in _rows(lake, stored, end, lsn):
            size += part.nbytes
            emptied = part.filter(pc.equal(part["operation"], "truncate"))
            truncates.extend(
                zip(emptied["commit_lsn"].to_pylist(), emptied["ordinal"].to_pylist(), strict=True)
            )
            slices = pa.array([ends] * part.num_rows, pa.int64())
            yield from part.set_column(0, part.schema.field(0), slices).to_batches()

    def count(batch: pa.RecordBatch, _: Tally) -> None:
        count_changes(batch, base.definition.key, tally)

    def written() -> pa.Table:
        files = write_files(history, stored.schema, rows(), count, into.store)
        return pa.Table.from_batches(files, FILE_SCHEMA)

    committer = into.policy.file_committer(history, stored.schema)
    assert isinstance(committer, FileCommitter)
    committer.commit(written, history, stored.schema, Commit(ends))
    return _changes(base, ends, size, tally, truncates)


def _rows(lake: Lake, stored: StoredSlices, end: int, lsn: int) -> Iterator[pa.Table]:
    """The rows of a slice that committed before an LSN, with all columns of the history, of which `slice` is the first."""
    assert stored.schema.names[0] == "slice"
    for _, read in lake.store.readers(stored.groups):
        rows = read(stored.schema.names)
        within = pc.and_(pc.equal(rows["slice"], end), pc.less(rows["commit_lsn"], lsn))
        if (part := rows.filter(within)).num_rows:
            yield conform(part, stored.schema)


def _copy_by_spark(lake: Lake, into: Lake, base: Base, end: int, lsn: int, history: str) -> TableChanges:
    ends, key = min(end, lsn), base.definition.key
    rows = lake.read_slices(base.history, [end], every=True).where(F.col("commit_lsn") < lsn)
    into.write(
        rows.withColumn("slice", F.lit(ends).cast("bigint")),
        history,
        Commit(ends),
    )
    counts = aggregate_metrics(written_changes(rows, key), spark_tally())
    emptied = rows.where(F.col("operation") == "truncate").select("commit_lsn", "ordinal").collect()
    tally = {**counts, "unchanged": json.loads(counts["unchanged"] or "[]")}
    size = lake.records.size(base.history)
    return _changes(base, ends, size, tally, [(row["commit_lsn"], row["ordinal"]) for row in emptied])


def _changes(base: Base, end: int, size: int, tally: Tally, truncates: list[Order]) -> TableChanges:
    """The record of a run for a slice of a table."""
    return TableChanges(
        slice=end,
        schema=base.name[0],
        table=base.name[1],
        size=size,
        sent={operation: tally.get(operation, 0) for operation in ROW_OPERATIONS},
        truncates=len(truncates),
        truncated_at=max(truncates, default=None),
        key_changes=tally["key_changes"],
        unchanged=tuple(tally["unchanged"]),
    )
