"""Opens the rows of a table, or of some of its slices, for functions of batches (`row_sources`).

The functions decide whether files are read, or Spark reads. Files are read if delta-rs reaches the lake, and if the table has no
feature that delta-rs or Arrow lacks (`Policy.choose_reader`, `Slices.find`).

In: the lake, and the path of a table.
Out: a source of rows.

Raises LakeError. The sources raise errors of delta-rs, Arrow and Spark.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.delta.slices import SparkSlices, StoredSlices
from pgsieve.resources.lake.delta.spark import SparkRecords
from pgsieve.resources.lake.file_rows import FileRows, list_file_rows
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource, SparkRows, SparkSource, StoredSource
from pgsieve.resources.lake.stores.store import RowGroup, Store
from pgsieve.resources.parts import Guard

#: A function that returns a batch of rows that it has made from another batch.
BatchChange = Callable[[pa.RecordBatch], pa.RecordBatch]

#: Spark reads a table in at most this many tasks per core.
_TASKS_PER_CORE = 4


def open_rows(
    lake: Lake,
    path: str,
    schema: pa.Schema,
    change_batch: BatchChange,
    version: int | None = None,
    *,
    has_few_parts: bool = False,
) -> RowSource[pa.RecordBatch]:
    """The rows of a table, changed by a function of batches. Without `version`, of its newest version.

    `schema` has the columns to read. Spark chooses the types of the rows that it reads. A part has the rows of a file, or of one
    of Spark's partitions. `has_few_parts` is for functions whose results are large for a part: a core then has few parts.
    """
    with lake.access.translate_errors(path):
        if isinstance(reader := lake.policy.choose_reader(path), SparkRecords):
            table = lake.read_table(path) if version is None else lake.read_version(path, version)
            frame = table.select(*map(quote_name, schema.names))
            if has_few_parts:
                frame = frame.coalesce(_TASKS_PER_CORE * lake.policy.runner.parallelism)
            return SparkSource([SparkRows(frame, partial(map, change_batch))])
        files = list_file_rows(reader, path, schema, change_batch, version)
        runner = lake.policy.choose_runner(lake.records.size_bytes(path))
    part_count = min(runner.parallelism, len(files)) if has_few_parts else len(files)
    parts = [partial(_read_files, files[number::part_count]) for number in range(part_count)]
    return StoredSource(parts, runner)


def open_all_rows(lake: Lake, path: str, version: int) -> RowSource[pa.RecordBatch]:
    """The rows of a version of a table, with all columns, as one part."""
    with lake.access.translate_errors(path):
        if isinstance(reader := lake.policy.choose_reader(path), SparkRecords):
            return SparkSource([SparkRows(lake.read_version(path, version), iter)])
        read_batches = partial(reader.read_version_batches, path, version)
    return StoredSource([lambda guard: guard(read_batches())], CALLING_THREAD)


def open_slices(
    lake: Lake,
    path: str,
    slice_ends: Collection[int],
    columns: Sequence[str] | None = None,
    *,
    must_exist: bool = False,
) -> RowSource[pa.RecordBatch]:
    """Some columns of the rows of slices, as one part if files are read. For `must_exist` see `Lake.find_slices`."""
    with lake.access.translate_errors(path):
        match lake.find_slices(path, slice_ends, must_exist=must_exist):
            case SparkSlices() as slices:
                frame = slices.read_frame(lake.spark)
                return SparkSource([SparkRows(frame if columns is None else frame.select(*columns), iter)])
            case StoredSlices() as slices:
                schema = slices.schema
                rows = _SliceRows(lake.store, slices.row_groups, schema, slices.ends, columns or schema.names)
                return StoredSource([rows], CALLING_THREAD)


def _read_files(files: Sequence[FileRows], guard: Guard) -> Iterable[pa.RecordBatch]:
    return guard(chain.from_iterable(read_rows() for read_rows in files))


@dataclass(frozen=True)
class _SliceRows:
    """Reads some columns of the rows of slices from row groups."""

    store: Store
    row_groups: Sequence[RowGroup]
    schema: pa.Schema
    slice_ends: frozenset[int]
    columns: Sequence[str]

    def __call__(self, guard: Guard) -> Iterable[pa.RecordBatch]:
        return guard(self._read_row_groups())

    def _read_row_groups(self) -> Iterator[pa.RecordBatch]:
        ends = pa.array(sorted(self.slice_ends), pa.int64())
        read_schema = pa.schema([self.schema.field(name) for name in dict.fromkeys((*self.columns, "slice"))])
        for _, read in self.store.iterate_group_readers(self.row_groups):
            rows = read(read_schema.names)
            if (slice_rows := rows.filter(pc.is_in(rows["slice"], ends))).num_rows:
                yield from conform(slice_rows, read_schema).select(self.columns).to_batches()
