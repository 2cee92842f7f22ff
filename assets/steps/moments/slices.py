"""Copies the changes of a slice that committed before an LSN into a change history of another lake.

A table's change history is the Delta table with its changes. A slice has the changes between two positions of the slot.

In: a slice of a table's change history in one lake, and the LSN
Out: these rows in the other lake, and the record about them that a run would have written

This process writes the files, one row group at a time. If it cannot read the history or commit to the copy, Spark does.
Raises LakeError, for example if files of the slice are lost.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.moments.bases import TableBase
from pgsieve.assets.steps.observations import NOTE, NotedRows, with_note
from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.assets.steps.records.transformed_slices import TableChanges
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.changes.tally import Tally, count_changes_and_bytes, empty_tally, sum_tallies
from pgsieve.resources.lake.committers import FileCommitter, SparkCommitter
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.table_rows import open_slices


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
    rows = open_slices(lake, base.history_path, [slice_end], must_exist=True)
    schema, end_lsn = lake.schema(base.history_path), min(slice_end, moment_lsn)
    assert schema.names[0] == "slice"
    make_copier = partial(_SliceCopier, end_lsn, moment_lsn, base.definition.key)
    match target_lake.policy.choose_large_committer(history_path, schema):
        case FileCommitter() as committer:
            notes = _copy_files(rows, make_copier, committer, target_lake.store, history_path, schema)
        case SparkCommitter():
            spark_schema = lake.read_table(base.history_path).schema.add(NOTE, "string")

            def copy_part(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                copier = make_copier()
                yield from with_note(copier.copy_batches(batches), schema, copier.format_note)

            noted_rows = NotedRows(rows.make_frame(lake.spark, copy_part, spark_schema))
            reported_notes = noted_rows.write(
                lambda frame: target_lake.write(frame, history_path, Commit(end_lsn))
            )
            notes = noted_rows.notes() if reported_notes is None else reported_notes
    return _make_table_changes(base, end_lsn, notes)


def _copy_files(
    rows: RowSource[pa.RecordBatch],
    make_copier: Callable[[], _SliceCopier],
    committer: FileCommitter,
    store: Store,
    history_path: str,
    schema: pa.Schema,
) -> list[str]:
    """Copy rows into files of a history, and commit the files. Returns the counts of the parts."""
    results = list[pa.Table]()

    def copy_part(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        copier = make_copier()
        yield from write_files(history_path, schema, copier.copy_batches(batches), store)
        yield pa.RecordBatch.from_pylist([{"size": 0, "tally": copier.format_note()}], FILE_SCHEMA)

    def write_changes() -> pa.Table:
        results.append(rows.compute(copy_part, FILE_SCHEMA))
        return results[0].filter(results[0]["path"].is_valid())

    committer.commit(write_changes, history_path, schema, Commit(make_copier().end_lsn))
    return [str(note) for note in results[0]["tally"].drop_null().to_pylist()]


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
