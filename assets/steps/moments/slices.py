"""Copies the changes of a slice that committed before an LSN into a change history of another lake.

A table's change history is the Delta table with its changes. A slice has the changes between two positions of the slot.

In: a slice of a table's change history in one lake, and the LSN
Out: these rows in the other lake, and the record about them that a run would have written

This process writes the files, one row group at a time. If Delta maps the names of columns, Spark writes the files
instead. Raises LakeError, for example if files of the slice are lost.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.moments.bases import TableBase
from pgsieve.assets.steps.observations import NotedRows, schema_with_note, with_note
from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.tally import Tally, count_changes_and_bytes, empty_tally, sum_tallies
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.slices import StoredSlices
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import to_arrow_schema, to_spark_schema


@dataclass
class _SliceCopier:
    """Copies a part of a slice: the changes that committed before `moment_lsn`. It can be sent to executors.

    It counts the changes while they pass (`tally`), and keeps the order keys (commit LSN, ordinal) of TRUNCATEs
    (`truncates`). The copied changes belong to a slice that ends at `end_lsn`.
    """

    end_lsn: int
    moment_lsn: int
    key: Sequence[str]
    tally: Tally = field(default_factory=empty_tally)
    truncates: list[OrderKey] = field(default_factory=list)

    def copy_batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the changes that are copied. The first column of the batches has to be `slice`."""
        for batch in batches:
            part = batch.filter(pc.less(batch.column("commit_lsn"), self.moment_lsn))
            count_changes_and_bytes(part, self.key, self.tally)
            truncates = part.filter(pc.equal(part.column("operation"), "truncate"))
            self.truncates += zip(
                *(truncates.column(name).to_pylist() for name in ("commit_lsn", "ordinal")), strict=True
            )
            slices = pa.array([self.end_lsn] * part.num_rows, pa.int64())
            yield part.set_column(0, part.schema.field(0), slices)

    def format_note(self) -> str:
        """The counts as JSON."""
        return json.dumps({"tally": self.tally, "truncates": self.truncates})


def copy_slice(
    lake: Lake, target_lake: Lake, base: TableBase, slice_end: int, moment_lsn: int, history_path: str
) -> TableChanges:
    """Copy the rows of the slice at `slice_end` that committed before `moment_lsn` into a history of another lake.

    If `moment_lsn` is earlier than `slice_end`, the copied slice ends at `moment_lsn`. Returns the record about these
    rows that a run would write.
    """
    stored_slices = lake.find_stored_slices(base.history_path, [slice_end], must_exist=True)
    committer = (
        None
        if stored_slices is None
        else target_lake.policy.choose_file_committer(history_path, stored_slices.schema)
    )
    if stored_slices is None or committer is None:
        return _copy_by_spark(lake, target_lake, base, slice_end, moment_lsn, history_path)
    slice_copier = _SliceCopier(min(slice_end, moment_lsn), moment_lsn, base.definition.key)

    def write_changes() -> pa.Table:
        files = write_files(
            history_path,
            stored_slices.schema,
            slice_copier.copy_batches(_read_slice(lake, stored_slices, slice_end)),
            target_lake.store,
        )
        return pa.Table.from_batches(files, FILE_SCHEMA)

    committer.commit(write_changes, history_path, stored_slices.schema, Commit(slice_copier.end_lsn))
    return _make_table_changes(base, slice_copier.end_lsn, [slice_copier.format_note()])


def _read_slice(lake: Lake, stored_slices: StoredSlices, slice_end: int) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a slice, with all columns of their history. `slice` is the first column."""
    assert stored_slices.schema.names[0] == "slice"
    for _, read_columns in lake.store.iterate_group_readers(stored_slices.row_groups):
        rows = read_columns(stored_slices.schema.names)
        if (slice_rows := rows.filter(pc.equal(rows["slice"], slice_end))).num_rows:
            yield from conform(slice_rows, stored_slices.schema).to_batches()


def _copy_by_spark(
    lake: Lake, target_lake: Lake, base: TableBase, slice_end: int, moment_lsn: int, history_path: str
) -> TableChanges:
    rows = lake.read_slices(base.history_path, [slice_end], must_exist=True)
    slice_copier, schema = (
        _SliceCopier(min(slice_end, moment_lsn), moment_lsn, base.definition.key),
        to_arrow_schema(rows.schema),
    )

    def copy_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from with_note(slice_copier.copy_batches(batches), schema, slice_copier.format_note)

    noted_rows = NotedRows(rows.mapInArrow(copy_batches, to_spark_schema(schema_with_note(schema))))
    notes = noted_rows.write(
        lambda frame: target_lake.write(frame, history_path, Commit(slice_copier.end_lsn))
    )
    return _make_table_changes(base, slice_copier.end_lsn, noted_rows.notes() if notes is None else notes)


def _make_table_changes(base: TableBase, slice_end: int, notes: Sequence[str]) -> TableChanges:
    """Make the record that a run would have made about a slice of a table. `notes` are the counts of its parts."""
    counts_of_parts = [json.loads(note) for note in notes]
    tally = sum_tallies(counts["tally"] for counts in counts_of_parts)
    truncates = [(lsn, ordinal) for counts in counts_of_parts for lsn, ordinal in counts["truncates"]]
    return TableChanges(
        slice_end=slice_end,
        schema=base.name[0],
        table=base.name[1],
        size=tally.get("bytes", 0),
        sent_counts={operation: tally.get(operation, 0) for operation in ROW_OPERATIONS},
        truncate_count=len(truncates),
        last_truncate=max(truncates, default=None),
        key_change_count=tally["key_changes"],
        unsent_columns=tuple(tally["unchanged"]),
    )
