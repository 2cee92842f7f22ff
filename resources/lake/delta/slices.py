"""Reads slices of a change log, or of a change history, from as few files as the statistics of the files allow.

A change log has the raw messages of a slot. A change history has the decoded changes of one table. Both consist of
slices: a slice is the changes from one position of the slot to another. Each row has the LSN where its slice ends.

In: such a table, at one of its versions.
Out: its slices, and their files and rows.

Raises DamagedTableError if slices or files are missing, and errors of delta-rs and Arrow.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.delta.errors import DamagedTableError
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.lake.delta.requirements import is_plain
from pgsieve.resources.lake.delta.tables import make_arrow_schema
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path


@dataclass(frozen=True)
class StoredSlices:
    """The row groups that contain the rows of some slices, perhaps together with other rows; and the columns of the table."""

    row_groups: Sequence[RowGroup]
    schema: pa.Schema


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

    def find_files(self, slice_ends: Collection[int], *, must_exist: bool = False) -> list[str] | None:
        """The Parquet files that contain the rows of some slices, and perhaps of others.

        They can be read without Delta's log.

        None if the table is not plain (`requirements.is_plain`), for example because it has partitions; also None if a
        file has no statistics. Raises DamagedTableError if a file is missing or empty; with `must_exist` also if a slice
        is in no file.
        """
        files_of_slices, missing_ends = [], set(slice_ends)
        for file, bounds in self._read_bounds_by_file().items():
            if bounds is None:
                return None
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
        return files_of_slices if is_plain(self.table) else None

    def find_row_groups(
        self, slice_ends: Collection[int], *, must_exist: bool = False
    ) -> list[RowGroup] | None:
        """The row groups in the files of some slices, in the order of the files.

        Returns None and raises DamagedTableError in the same cases as `find_files`.
        """
        files = self.find_files(slice_ends, must_exist=must_exist)
        return (
            None if files is None else [group for file in files for group in self.store.list_row_groups(file)]
        )

    def read_rows(
        self, slice_ends: Collection[int], *, columns: Sequence[str] | None = None, must_exist: bool = False
    ) -> pa.Table | None:
        """The rows of some slices in the order of their changes.

        Returns None and raises DamagedTableError in the same cases as `find_files`.
        """
        files = self.find_files(slice_ends, must_exist=must_exist)
        if files is None:
            return None
        schema = self.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        is_in_slices = pc.field("slice").isin(sorted(slice_ends))
        rows = pa.concat_tables(
            [
                schema.empty_table(),
                *(
                    conform(self.store.read_rows(file, columns=columns, filters=is_in_slices), schema)
                    for file in files
                ),
            ]
        )
        return rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

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
