"""Reads slices of a change log, or of a change history, from as few files as the statistics of the files allow.

A change log has the raw messages of a slot. A change history has the decoded changes of one table. Both consist of
slices: a slice is the changes from one position of the slot to another. Each row has the LSN where its slice ends.

In: such a table, at one of its versions.
Out: its slices, and their files and rows. If only Spark can read the rows, it reads them by the Delta log.

Raises DamagedTableError if slices or files are missing, and errors of delta-rs and Arrow.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import StructType

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.lake.delta.requirements import is_plain
from pgsieve.resources.lake.delta.tables import make_arrow_schema
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path


@dataclass(frozen=True)
class Slices:
    """The slices of a table. A slice is identified by the LSN where it ends."""

    table: DeltaTable
    path: str
    store: Store

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return make_arrow_schema(self.table)

    def list_ends_after(self, after_lsn: int) -> Sequence[int]:
        """The ends (LSNs) of the slices that end after an LSN, in order. They are in the statistics of the files.

        Only files with several slices (compaction makes such files) and files without statistics are read.
        """
        ends: set[int] = set()
        for file, bounds in self._read_bounds_by_file().items():
            if bounds and (bounds[1] <= after_lsn or bounds[0] == bounds[1]):
                ends.add(bounds[1])
            else:
                rows = self.store.read_rows(file, columns=["slice"])
                ends.update(pc.unique(rows["slice"]).to_pylist())
        return sorted(end for end in ends if end > after_lsn)

    def read_messages(self, end: int) -> list[bytes]:
        """The raw messages of one slice of a change log, in their order."""
        rows = query_table(self.table, f"select data from t where slice = {end:d} order by number")
        messages: list[bytes] = rows["data"].to_pylist()
        return messages

    def find(self, slice_ends: Collection[int], *, must_exist: bool = False) -> "StoredSlices | SparkSlices":
        """Find the Parquet files that contain the rows of some slices, and perhaps of others.

        Only Spark can read the rows if the table is not plain (`requirements.is_plain`), for example because it has
        partitions, or if a file has no statistics. Raises DamagedTableError if a file is missing or empty; with
        `must_exist` also if a slice is in no file.
        """
        files_of_slices, missing_ends, ends = list[str](), set(slice_ends), frozenset(slice_ends)
        for file, bounds in self._read_bounds_by_file().items():
            if bounds is None:
                return SparkSlices(self.path, ends)
            if present_ends := {end for end in slice_ends if bounds[0] <= end <= bounds[1]}:
                # From an empty file Spark would read no rows, and would raise no error.
                if not (stamp := self.store.read_stamp(file)) or not stamp[1]:
                    problem = "empty" if stamp else "missing"
                    raise DamagedTableError(f'Delta table "{self.path}": its file "{file}" is {problem}')
                files_of_slices.append(file)
                missing_ends -= present_ends
        if must_exist and missing_ends:
            missing_lsns = ", ".join(map(format_lsn, sorted(missing_ends)))
            raise DamagedTableError(
                f'Delta table "{self.path}": it has lost the slices that end at {missing_lsns}'
            )
        return (
            StoredSlices(self, ends, files_of_slices)
            if is_plain(self.table)
            else SparkSlices(self.path, ends)
        )

    def _read_bounds_by_file(self) -> dict[str, tuple[int, int] | None]:
        """Maps each Parquet file to the ends of its first and its last slice.

        The value is None if the file has no statistics.
        """
        files: dict[str, tuple[int, int] | None] = {}
        actions = pa.table(self.table.get_add_actions(flatten=True))
        # Select only these columns. Other columns may have bounds that Python cannot represent, for example dates.
        column_names = [name for name in ("path", "min.slice", "max.slice") if name in actions.column_names]
        for row in actions.select(column_names).to_pylist():
            least, greatest = row.get("min.slice"), row.get("max.slice")
            has_bounds = least is not None and greatest is not None
            files[join_path(self.path, unquote(row["path"]))] = (least, greatest) if has_bounds else None
        return files


@dataclass(frozen=True)
class StoredSlices:
    """Some slices of a table, and the files that contain their rows, perhaps together with other rows.

    This process, executors and Spark can read these files, without Delta's log.
    """

    slices: Slices
    ends: frozenset[int]
    files: Sequence[str]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table."""
        return self.slices.schema

    @cached_property
    def row_groups(self) -> Sequence[RowGroup]:
        """The row groups in the files, in the order of the files."""
        return [group for file in self.files for group in self.slices.store.list_row_groups(file)]

    def read_rows(self) -> pa.Table:
        """The rows of the slices in the order of their changes."""
        schema, store = self.schema, self.slices.store
        is_in_slices = pc.field("slice").isin(sorted(self.ends))
        tables = [conform(store.read_rows(file, filters=is_in_slices), schema) for file in self.files]
        rows = pa.concat_tables([schema.empty_table(), *tables])
        return rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def read_frame(self, spark: SparkSession) -> DataFrame:
        """The rows of the slices as a DataFrame. Spark reads the files, and not the Delta log."""
        reader = spark.read.schema(StructType.fromJson(json.loads(self.slices.table.schema().to_json())))
        rows = reader.parquet(*self.files) if self.files else reader.parquet(self.slices.path).limit(0)
        return rows.where(F.col("slice").isin(sorted(self.ends)))


@dataclass(frozen=True)
class SparkSlices:
    """Some slices of a table whose rows only Spark can read."""

    path: str
    ends: frozenset[int]

    def read_frame(self, spark: SparkSession) -> DataFrame:
        """The rows of the slices as a DataFrame."""
        return spark.read.format("delta").load(self.path).where(F.col("slice").isin(sorted(self.ends)))
