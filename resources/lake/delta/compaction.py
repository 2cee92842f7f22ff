"""Compacts a table: joins small files, or clusters all rows (sorts them so that similar rows are in the same file).

In: a table that delta-rs can reach, without deletion vectors, partitions or column mapping.
Out: commits that do not change rows, and by how much the number of files has decreased.

Raises OvertakenError if another process has rewritten one of the files meanwhile.

With delta-rs's OPTIMIZE, two processes can replace the same files one after the other, and the table would then
have the rows twice. So this module writes the files itself. It commits them only to a version of the table that
still has the files to replace:

    version 7    a b c D         D is large enough. a, b and c are read, and E is written with their rows.
    version 8    a b c D f       Another process has appended f: E may still replace a, b and c.
    version 9    D f E           The commit must follow version 8. If another process has made a version 9, the commit
                                 fails, and the newest version is checked again.
    version 9'   a' c D f        Here b is gone, and a was rewritten: E is dropped, and a new plan is needed.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from pgsieve.resources.lake.delta.commits import is_removable, make_removal
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError, retry_commit
from pgsieve.resources.lake.delta.layout import find_target_file_bytes
from pgsieve.resources.lake.delta.parquet_files import ROW_GROUP_ROWS, write_files
from pgsieve.resources.lake.delta.records import make_unchanged_position_metadata
from pgsieve.resources.lake.delta.requirements import is_plain
from pgsieve.resources.lake.delta.z_order import sort_by_z_order
from pgsieve.resources.lake.stores.store import join_path
from pgsieve.resources.work import DRIVER, add_costs

#: Maps the paths of files, as the log has them, to the sizes of the files in bytes.
SizeByPath = Mapping[str, int]
#: The largest size of a row group in memory, in bytes.
_ROW_GROUP_BYTES = 64 * 1024 * 1024


def compact(delta_rs: DeltaRsRecords, path: str) -> int:
    """Join small files into files of about the table's target size. Return by how much the number of files has decreased.

    Each group of files has its own commit. So if the process is interrupted, only the work for one group is lost.
    The rows of only one row group are in memory at a time.
    """
    return sum(
        _replace_files(delta_rs, path, removed_files, _read_rows(delta_rs, path, removed_files))
        for removed_files in _group_files(
            _find_replaceable_files(delta_rs.open_table(path)),
            find_target_file_bytes(delta_rs.properties(path)),
        )
    )


def cluster_files(delta_rs: DeltaRsRecords, path: str, columns: Sequence[str]) -> int:
    """Write all files again, with the rows in Z-order of some columns, in one commit.

    Returns by how much the number of files has decreased. All rows are in memory, so the table must be small.
    """
    removed_files = _find_replaceable_files(delta_rs.open_table(path))
    if not removed_files:
        return 0
    rows = pa.Table.from_batches(_read_rows(delta_rs, path, removed_files), delta_rs.arrow_schema(path))
    return _replace_files(delta_rs, path, removed_files, sort_by_z_order(rows, columns).to_batches())


def _find_replaceable_files(table: DeltaTable) -> SizeByPath:
    """The files of a table that can be replaced, ordered by the time at which they were written."""
    files = pa.table(table.get_add_actions()).select(["modification_time", "path", "size_bytes"])
    rows = files.sort_by([("modification_time", "ascending"), ("path", "ascending")]).to_pylist()
    return {row["path"]: row["size_bytes"] for row in rows if is_removable(row["path"])}


def _group_files(files: SizeByPath, target_bytes: int) -> Iterator[SizeByPath]:
    """Divide small files into groups of at least two files and about the target size.

    Files that were written one after the other are put into one group, because they often have similar values.
    """
    group, group_bytes = dict[str, int](), 0
    for name, file_bytes in files.items():
        if file_bytes < target_bytes:
            group[name] = file_bytes
            group_bytes += file_bytes
        if group_bytes >= target_bytes:
            if len(group) > 1:
                yield group
            group, group_bytes = {}, 0
    if len(group) > 1:
        yield group


def _read_rows(delta_rs: DeltaRsRecords, path: str, files: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """The rows of some files of a table, with the present columns of the table."""
    schema = delta_rs.arrow_schema(path)
    for name in files:
        yield from delta_rs.store.read_batches(join_path(path, unquote(name)), schema)


def _make_row_groups(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, max_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Combine and divide batches, so that each result is a row group of at most about `max_bytes` bytes in memory."""
    waiting_batches, row_count, nbytes = list[pa.RecordBatch](), 0, 0
    for batch in chain(batches, [None]):
        if batch is not None:
            waiting_batches.append(batch)
            row_count, nbytes = row_count + batch.num_rows, nbytes + batch.nbytes
        if batch is None or row_count >= ROW_GROUP_ROWS or nbytes >= max_bytes:
            max_rows = min(ROW_GROUP_ROWS, row_count * max_bytes // max(nbytes, 1))
            yield from (
                pa.Table.from_batches(waiting_batches, schema).combine_chunks().to_batches(max(max_rows, 1))
            )
            waiting_batches, row_count, nbytes = [], 0, 0


def _replace_files(
    delta_rs: DeltaRsRecords, path: str, removed_files: SizeByPath, batches: Iterable[pa.RecordBatch]
) -> int:
    """Write files with these rows, and commit them in place of `removed_files`.

    Return by how much the number of files has decreased.
    """
    schema, target_bytes, now_ms = (
        delta_rs.arrow_schema(path),
        find_target_file_bytes(delta_rs.properties(path)),
        time.time_ns() // 1_000_000,
    )
    groups = _make_row_groups(batches, schema, min(target_bytes, _ROW_GROUP_BYTES))
    added_files = [
        file
        for row in write_files(path, schema, groups, store=delta_rs.store, target_bytes=target_bytes)
        for file in row.to_pylist()
    ]
    actions: list[AddAction | RemoveAction] = [
        AddAction(file["path"], file["size"], {}, now_ms, False, file["stats"]) for file in added_files
    ]
    actions += [
        make_removal(name, file_bytes, now_ms, changes=False) for name, file_bytes in removed_files.items()
    ]

    def commit() -> None:
        metadata = make_unchanged_position_metadata(delta_rs.position(path))
        # The commit must follow this version, because only this version is checked.
        table = delta_rs.open_table(path)
        # If another process has marked some rows of a file as deleted, the file still has the same name. So check also
        # that the table has no marked rows.
        if not (removed_files.keys() <= _find_replaceable_files(table).keys() and is_plain(table)):
            raise OvertakenError(path)
        table.create_write_transaction(
            actions,
            "append",
            table.schema(),
            commit_properties=CommitProperties(
                custom_metadata={"userMetadata": metadata}, max_commit_retries=0
            ),
        )

    retry_commit(commit)()
    add_costs(DRIVER, 1, sum(file["size"] for file in added_files))
    return len(removed_files) - len(added_files)
