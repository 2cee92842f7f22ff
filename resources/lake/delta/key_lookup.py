"""Finds rows of a Delta table by their keys, and reads as few files for this as possible.

The statistics of a file have the least and the greatest value of each column, the bounds. A file is read only if
its bounds allow one of the keys. If the keys are outside of the bounds of all files, as new values of a serial
column are, no file is read.

In: a table, and keys as Arrow columns.
Out: the rows that have these keys.

Raises errors of delta-rs and Arrow, and UnmarkableError.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder

from pgsieve.decoding.changes.equality import to_comparable
from pgsieve.decoding.changes.keys import SoughtKeys, find_equal_rows, is_orderable, is_text
from pgsieve.resources.lake.delta.deletion_vectors import find_deleted_rows, has_deleted_rows
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.queries import quote_column
from pgsieve.resources.lake.delta.requirements import has_plain_rows
from pgsieve.resources.lake.delta.tables import find_column_names
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store, conflicts_with_dataset, join_path

#: The least and the greatest value of a column.
Bounds = tuple[pa.Scalar, pa.Scalar]

#: The number of files that are searched at the same time. The keys of one file may take tens of megabytes.
_PARALLEL_FILES = 2
_TOO_MANY_BYTES = (
    "rows cannot be marked as deleted, and the files with their keys are too large to be rewritten"
)

#: Delta may truncate the times in statistics to milliseconds. So the greatest time in a file may be later than its
#: bound, by at most this (Delta protocol, Per-file Statistics).
_MAX_ROUNDING = pa.scalar(1_000, pa.duration("us"))


def find_key_bounds(keys: pa.Table) -> Mapping[str, Bounds]:
    """Maps the names of key columns to the bounds of the keys.

    Columns whose statistics in files cannot be compared are left out.
    """
    bounds = {}
    for name in keys.column_names:
        if is_orderable(keys[name].type):
            least_greatest = pc.min_max(keys[name])
            bounds[name] = least_greatest["min"], least_greatest["max"]
    return bounds


def find_rows(
    table: DeltaTable, path: str, store: Store, keys: pa.Table, schema: pa.Schema
) -> tuple[npt.NDArray[np.int64], pa.Table]:
    """Find the rows of a table that have one of these keys.

    Returns the indices of the keys that the table has, and the rows with these keys in the same order. The columns
    of `keys` and `schema` have the names of the table's columns. The rows have the columns of `schema`.
    """
    key_indices, row_parts = [np.empty(0, np.int64)], [schema.empty_table()]
    safe_names = _make_safe_names(keys)
    renamed_keys = keys.rename_columns(safe_names)
    for rows in _read_candidates(table, path, store, keys, schema):
        matched_rows, matched_keys = find_equal_rows(
            rows.select(keys.column_names).rename_columns(safe_names), renamed_keys
        )
        key_indices.append(matched_keys)
        row_parts.append(rows.take(pa.array(matched_rows)))
    return np.concatenate(key_indices), pa.concat_tables(row_parts)


def _make_safe_names(keys: pa.Table) -> list[str]:
    """New names for the columns of keys. `find_equal_rows` itself uses the names `left` and `right`, which a key may have."""
    return [f"k{number}" for number in range(keys.num_columns)]


@dataclass(frozen=True)
class FileMatches:
    """The rows of a file that match.

    `row_numbers` has their numbers, in ascending order, and `key_indices` has the index of each row's key.

    - `name`: the name of the file relative to the table's folder
    - `log_path`: the same name as the table's log writes it, with URL encoding
    - `size_bytes`: the bytes of the file
    - `deleted_row_numbers`: the numbers of the rows that a deletion vector marks; `row_numbers` contains none of them
    """

    name: str
    log_path: str
    size_bytes: int
    row_numbers: npt.NDArray[np.int64]
    key_indices: npt.NDArray[np.int64]
    deleted_row_numbers: npt.NDArray[np.int64]

    def select_keys(self, mask: npt.NDArray[np.bool_]) -> "FileMatches":
        """The matches of those keys that the mask selects."""
        is_selected = mask[self.key_indices]
        return replace(
            self, row_numbers=self.row_numbers[is_selected], key_indices=self.key_indices[is_selected]
        )


def find_key_matches(
    table: DeltaTable,
    path: str,
    store: Store,
    keys: pa.Table,
    key_masks: Iterable[npt.NDArray[np.bool_]],
    max_bytes: int | None,
    null_column: str | None = None,
) -> list[FileMatches]:
    """The rows of a table that have one of these keys, file by file.

    `key_masks` are masks that divide the keys into groups. A file is read if its bounds overlap the bounds of a group,
    and if it may have a NULL in the column `null_column` (None: NULLs do not matter).

    `max_bytes` is for rows that cannot be marked as deleted, so that their files have to be rewritten. With it,
    UnmarkableError is raised in three cases:

    - the files that contain matches have more bytes than `max_bytes`
    - the files that must be read have more bytes than twice `max_bytes`; in this case no file is read
    - a file must be read, and the table is not plain (`requirements.has_plain_rows`), for example because it has
      partitions

    If `max_bytes` is None, files may have deletion vectors.
    """
    groups = [keys.filter(pa.array(mask)) for mask in key_masks if mask.any()]
    names = {
        name for group in groups for name in find_files_within(table, find_key_bounds(group), null_column)
    }
    if not names:
        return []
    if max_bytes is None:
        return list(_find_matched_files(table, path, store, keys, names, find_deleted_rows(table)))
    files = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    needed_bytes = sum(file["size_bytes"] for file in files if unquote(file["path"]) in names)
    if not has_plain_rows(table) or needed_bytes > 2 * max_bytes:
        raise UnmarkableError(_TOO_MANY_BYTES)
    matches, needed_bytes = list[FileMatches](), 0
    for match in _find_matched_files(table, path, store, keys, names, {}):
        matches.append(match)
        needed_bytes += match.size_bytes
        if needed_bytes > max_bytes:
            raise UnmarkableError(_TOO_MANY_BYTES)
    return matches


def _find_matched_files(
    table: DeltaTable,
    path: str,
    store: Store,
    keys: pa.Table,
    names: Collection[str],
    deleted_rows: Mapping[str, npt.NDArray[np.int64]],
) -> Iterator[FileMatches]:
    """The matches in some files of a table. The keys must be distinct.

    - `names`: the names of the files, relative to the table's folder
    - `deleted_rows`: maps the name of a file to the numbers of its rows that are marked as deleted

    The columns of `keys` and of the files have the names of the table's columns.
    """
    safe_names = _make_safe_names(keys)
    sought_keys, no_rows = SoughtKeys.from_keys(keys.rename_columns(safe_names)), np.empty(0, np.int64)

    def find_matches(name: str, log_path: str, size: int) -> FileMatches:
        rows = pa.Table.from_batches(store.read_batches(join_path(path, name), keys.schema), keys.schema)
        row_numbers, key_indices = sought_keys.find_rows(rows.rename_columns(safe_names))
        if (np.diff(row_numbers) < 0).any():
            order = np.argsort(row_numbers)
            row_numbers, key_indices = row_numbers[order], key_indices[order]
        if len(deleted_row_numbers := deleted_rows.get(name, no_rows)):
            is_present = np.ones(rows.num_rows, np.bool_)
            is_present[deleted_row_numbers] = False
            is_match = is_present[row_numbers]
            row_numbers, key_indices = row_numbers[is_match], key_indices[is_match]
        return FileMatches(name, log_path, size, row_numbers, key_indices, deleted_row_numbers)

    actions = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    files = [(unquote(action["path"]), action["path"], action["size_bytes"]) for action in actions]
    files = [file for file in files if file[0] in names]
    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        # Arrow's own threads decode a local file, and finding integers takes less time than that. Then threads here would
        # save no time, and need more memory.
        needs_no_threads = sought_keys.number_by_key is not None and not is_uri(path)
        search = map if needs_no_threads else pool.map
        # Search only a few files at a time, because the caller may stop before the last one.
        for begin in range(0, len(files), _PARALLEL_FILES):
            matches = search(find_matches, *zip(*files[begin : begin + _PARALLEL_FILES], strict=True))
            yield from (match for match in matches if len(match.row_numbers))


@dataclass(frozen=True)
class Flag:
    """Selects rows by a boolean column.

    If `is_set`, it selects the rows in which the column is true; otherwise those in which it is false or NULL.

    If the caller knows a column that is NULL in exactly these rows, `null_column` is its name. Then a file is not read if
    its statistics say that this column has only NULLs.
    """

    column: str
    is_set: bool
    null_column: str | None = None


def find_flagged_rows(
    table: DeltaTable, path: str, store: Store, flag: Flag, candidates: Sequence[FileMatches] | None
) -> list[FileMatches]:
    """The rows that a flag selects, file by file, in order.

    `candidates` are the rows that are searched, which keep their `key_indices`. None means the whole table. In this case
    all `key_indices` are 0.
    """
    if candidates is not None and not candidates:
        return []
    schema, matches = pa.schema([(flag.column, pa.bool_())]), list[FileMatches]()
    row_counts = {} if flag.null_column is None else _count_rows_of_null_files(table, flag.null_column)

    def read_selection(name: str) -> npt.NDArray[np.bool_]:
        if name in row_counts:
            return np.ones(row_counts[name], np.bool_)
        flags = [batch.column(0) for batch in store.read_batches(join_path(path, name), schema)]
        is_set = np.concatenate([np.empty(0, np.bool_), *(np.asarray(f.fill_null(False)) for f in flags)])
        is_selected: npt.NDArray[np.bool_] = is_set == flag.is_set
        return is_selected

    for match in list_table_files(table, flag.null_column) if candidates is None else candidates:
        if candidates is None:
            row_numbers = np.setdiff1d(np.flatnonzero(read_selection(match.name)), match.deleted_row_numbers)
            key_indices = np.zeros(len(row_numbers), np.int64)
            matches.append(replace(match, row_numbers=row_numbers, key_indices=key_indices))
        elif match.name in row_counts:
            matches.append(match)
        else:
            is_selected = read_selection(match.name)[match.row_numbers]
            row_numbers, key_indices = match.row_numbers[is_selected], match.key_indices[is_selected]
            matches.append(replace(match, row_numbers=row_numbers, key_indices=key_indices))
    return [match for match in matches if len(match.row_numbers)]


def _count_rows_of_null_files(table: DeltaTable, column: str) -> dict[str, int]:
    """Find the files whose statistics say that a column has only NULLs. Map each to its number of rows."""
    files = pa.table(table.get_add_actions(flatten=True))
    nulls = f"null_count.{_make_name_translator(table)(column)}"
    if nulls not in files.column_names:
        return {}
    files_of_nulls = files.filter(pc.fill_null(pc.equal(files[nulls], files["num_records"]), False))
    return {
        unquote(path): rows
        for path, rows in zip(
            files_of_nulls["path"].to_pylist(), files_of_nulls["num_records"].to_pylist(), strict=True
        )
    }


def find_single_value_files(table: DeltaTable, column: str) -> set[str]:
    """The files in which all rows have the same integer in a column, by their statistics."""
    files = pa.table(table.get_add_actions(flatten=True))
    least, greatest, nulls = f"min.{column}", f"max.{column}", f"null_count.{column}"
    if not {least, greatest, nulls} <= set(files.column_names):
        return set()
    has_one_value = pc.and_kleene(pc.equal(files[least], files[greatest]), pc.equal(files[nulls], 0))
    return {unquote(path) for path in files["path"].filter(pc.fill_null(has_one_value, False)).to_pylist()}


def list_table_files(table: DeltaTable, null_column: str | None = None) -> list[FileMatches]:
    """The files of a table that may have a NULL in `null_column`, as matches without rows. None means all files."""
    deleted_rows, no_rows = find_deleted_rows(table), np.empty(0, np.int64)
    possible_names = None if null_column is None else set(find_files_within(table, {}, null_column))
    files = pa.table(table.get_add_actions()).select(["path", "size_bytes"]).to_pylist()
    file_entries = [(unquote(file["path"]), file["path"], file["size_bytes"]) for file in files]
    return [
        FileMatches(name, path, size, no_rows, no_rows, deleted_rows.get(name, no_rows))
        for name, path, size in file_entries
        if possible_names is None or name in possible_names
    ]


def _read_candidates(
    table: DeltaTable, path: str, store: Store, keys: pa.Table, schema: pa.Schema
) -> Iterator[pa.Table]:
    """All rows that have one of the keys, and perhaps other rows, with the columns of a schema."""
    bounds = find_key_bounds(keys)
    if not keys.num_rows or not (files := find_files_within(table, bounds)):
        return
    first_column = keys.column_names[0]
    for batch in _read_batches(table, store, [join_path(path, file) for file in files], schema, bounds):
        rows = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        yield rows.filter(pc.is_in(to_comparable(rows[first_column]), to_comparable(keys[first_column])))


def find_files_within(
    table: DeltaTable, bounds: Mapping[str, Bounds], null_column: str | None = None
) -> list[str]:
    """The files that may have a key within the bounds, and a NULL in `null_column`.

    Their names are relative to the table's folder.
    """
    files, stored_name = pa.table(table.get_add_actions(flatten=True)), _make_name_translator(table)
    null_column = null_column and stored_name(null_column)
    is_possible: pa.ChunkedArray = pc.is_valid(files["path"])
    if f"null_count.{null_column}" in files.column_names:
        is_possible = pc.and_kleene(is_possible, pc.greater(files[f"null_count.{null_column}"], 0))
    for column, (least, greatest) in bounds.items():
        name = stored_name(column)
        if {f"min.{name}", f"max.{name}"} <= set(files.column_names):
            file_least, file_greatest = files[f"min.{name}"], files[f"max.{name}"]
            if not (file_least.type.equals(file_greatest.type) and is_orderable(file_least.type)):
                continue
            file_least, file_greatest = file_least.cast(least.type), file_greatest.cast(least.type)
            if pa.types.is_timestamp(least.type):
                file_greatest = pc.add_checked(file_greatest, _MAX_ROUNDING)
            is_within = pc.and_kleene(
                pc.less_equal(file_least, greatest), pc.greater_equal(file_greatest, least)
            )
            is_possible = pc.and_kleene(is_possible, is_within)
    # A file without statistics may have any value, so it is possible.
    possible_paths = files["path"].filter(pc.fill_null(is_possible, True))
    return [unquote(path) for path in possible_paths.to_pylist()]


def _make_name_translator(table: DeltaTable) -> Callable[[str], str]:
    """A function that maps the name of a column to its name in the table's files and in Delta's statistics."""
    names = find_column_names(table, "")
    return str if names is None else names.stored_name


class StoredFile(NamedTuple):
    """A file of a table.

    - `name`: the name relative to the table's folder
    - `log_path`: the same name as the table's log writes it, with URL encoding
    - `size_bytes`: the bytes of the file
    - `row_count`: the number of rows; None if it is unknown
    """

    name: str
    log_path: str
    size_bytes: int
    row_count: int | None


def find_stored_files(
    table: DeltaTable, bounds: Iterable[Mapping[str, Bounds]], null_column: str | None = None
) -> list[StoredFile]:
    """The files of a table that may have a key within at least one of the bounds, and a NULL in `null_column`."""
    names = {name for file_bounds in bounds for name in find_files_within(table, file_bounds, null_column)}
    files = pa.table(table.get_add_actions()).select(["path", "size_bytes", "num_records"]).to_pylist()
    stored_files = (
        StoredFile(unquote(file["path"]), file["path"], file["size_bytes"], file["num_records"])
        for file in files
    )
    return [file for file in stored_files if file.name in names]


def _read_batches(
    table: DeltaTable, store: Store, files: Sequence[str], schema: pa.Schema, bounds: Mapping[str, Bounds]
) -> Iterator[pa.RecordBatch]:
    """The rows of these files within the bounds, and perhaps other rows, with the columns of the schema.

    All files of the table are read if rows are marked as deleted, if the table has partitions, or if one of the
    columns has a name that Arrow datasets use themselves.
    """
    if has_deleted_rows(table) or table.metadata().partition_columns or conflicts_with_dataset(schema.names):
        select_list = ", ".join(map(quote_column, schema.names))
        rows = QueryBuilder().register("t", table).execute(f"select {select_list} from t")
        yield from pa.RecordBatchReader.from_stream(rows)
        return
    # Files from a MERGE of delta-rs declare text as string views, which Arrow cannot compare with text.
    comparable_bounds = {
        name: column_bounds for name, column_bounds in bounds.items() if not is_text(column_bounds[0].type)
    }
    conditions = [ds.field(name) >= least for name, (least, _) in comparable_bounds.items()]
    conditions += [ds.field(name) <= greatest for name, (_, greatest) in comparable_bounds.items()]
    condition = conditions[0] if conditions else None
    for further_condition in conditions[1:]:
        condition = condition & further_condition
    file_systems, paths = zip(*map(store.find_file_system, files), strict=True)
    # With the schema, columns that an older file lacks are NULL.
    dataset = ds.dataset(list(paths), schema=schema, format="parquet", filesystem=file_systems[0])
    yield from dataset.to_batches(columns=schema.names, filter=condition)
