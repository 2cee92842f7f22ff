"""Reads and writes the files of a lake with pyarrow, in a folder of this machine or on an object store.

In: full paths, in the same form as for Delta and Spark.
Out: pyarrow's access to the files.

Requests to an object store use the options of delta-rs, so a user gives credentials only once. A `Store` is sent to
executors. For a lake on an object store, executors need the package `deltalake`. Raises OSError.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pgsieve.resources.lake.stores.column_names import ColumnNames
from pgsieve.resources.lake.stores.storage import Storage, hide_token, is_uri
from pgsieve.resources.parts import count_parts
from pgsieve.resources.prefetch import prefetch

if TYPE_CHECKING:
    from pgsieve.resources.lake.stores.objects import Objects

Item = TypeVar("Item")

#: The number of bytes of a file that are written by one call.
_WRITE_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Store:
    """The place of a lake's files. `options` are the options of delta-rs.

    `names` is set for a table whose columns have other names in the table's files. Files of this table are read and
    written by the names that the columns have in the table.
    """

    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    names: ColumnNames | None = None
    #: Returns the objects of the object store that contains a path (`objects.open_objects`). The result is None for a path
    #: on this machine, and if only delta-rs has credentials for the store. An executor does not get this function.
    open_objects: Callable[[str], "Objects | None"] | None = field(default=None, repr=False, compare=False)
    #: Maps the address of a bucket or container to its file system. Each file system has its own connections.
    _file_system_by_root: dict[str, pafs.FileSystem] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Keep the libraries from using a session token of the environment that belongs to other keys (`hide_token`).

        This cannot be done earlier, because the process may be an executor.
        """
        hide_token(dict(self.options))

    def __reduce__(self) -> tuple[type["Store"], tuple[tuple[tuple[str, str], ...], ColumnNames | None]]:
        """Pickle only the options and the names, because connections cannot be pickled."""
        return Store, (self.options, self.names)

    @classmethod
    def from_storage(cls, storage: Storage) -> "Store":
        """The store of a lake."""
        return cls(tuple(storage.make_delta_rs_options().items()))

    def find_file_system(self, path: str) -> tuple[pafs.FileSystem, str]:
        """The file system that contains a path, and the path within this file system."""
        if not is_uri(path):
            return pafs.LocalFileSystem(), path
        parts = urlsplit(path)
        if parts.scheme == "file":
            return pafs.LocalFileSystem(), unquote(parts.path)
        root = f"{parts.scheme}://{parts.netloc}"
        if root not in self._file_system_by_root:
            self._file_system_by_root[root] = pafs.PyFileSystem(self._make_handler(root))
        return self._file_system_by_root[root], parts.path.lstrip("/")

    def _make_handler(self, root: str) -> pafs.FileSystemHandler:
        from deltalake.fs import DeltaStorageHandler

        objects = self.open_objects(root) if self.open_objects is not None else None
        if objects is None:
            return DeltaStorageHandler(root, dict(self.options))
        from pgsieve.resources.lake.stores.object_files import ObjectFiles

        return ObjectFiles(root, dict(self.options), objects)

    def can_reach(self, path: str) -> bool:
        """True if pyarrow can read and write the files of a path. Otherwise only Spark can."""
        storage = Storage.from_address(path)
        return storage.scheme == "file" or storage.platform is not None

    def has_file(self, path: str) -> bool:
        """True if a file exists."""
        if not is_uri(path):
            return Path(path).exists()
        file_system, inner_path = self.find_file_system(path)
        return bool(file_system.get_file_info(inner_path).type == pafs.FileType.File)

    def modification_time_ns(self, path: str) -> int | None:
        """The time at which a file was written, in nanoseconds since 1970. None if it is unknown, or if there is no file."""
        file_system, inner_path = self.find_file_system(path)
        time_written: int | None = file_system.get_file_info(inner_path).mtime_ns
        return time_written

    def read_stamp(self, path: str) -> tuple[int | None, int] | None:
        """The time and the size of a file.

        They distinguish files that have had the same name. None if the file does not exist.
        """
        file_system, inner_path = self.find_file_system(path)
        file = file_system.get_file_info(inner_path)
        return (file.mtime_ns, file.size) if file.type == pafs.FileType.File else None

    def read_rows(
        self, path: str, columns: Sequence[str] | None = None, filters: pc.Expression | None = None
    ) -> pa.Table:
        """The rows of a Parquet file for which an expression is true, with all columns or with some of them.

        Files that a DELETE or MERGE of delta-rs has written may declare texts as string views, which Arrow cannot
        filter. So texts are read as plain strings.
        """
        fragment = self._open_fragment(path)
        dataset = ds.FileSystemDataset(
            [fragment], replace_views_in_schema(fragment.physical_schema), fragment.format
        )
        return dataset.to_table(columns=columns and list(columns), filter=filters)

    def list_row_groups(self, path: str) -> list["RowGroup"]:
        """The row groups of a Parquet file."""
        with self._open_parquet(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        return [
            RowGroup(path, number, group.num_rows, group.total_byte_size)
            for number, group in enumerate(groups)
        ]

    def read_row_group_bounds(
        self, path: str, columns: Mapping[str, pa.DataType]
    ) -> dict[str, list[tuple[pa.Scalar, pa.Scalar] | None]]:
        """The bounds of columns in the row groups of a Parquet file: the least and the greatest value in a row group.

        The result has a list for each column. Row groups without a value of the column are not in the list. None stands
        for bounds that are unknown. `columns` maps the columns to the types of their values, which must be orderable
        (`pgsieve.decoding.changes.keys.is_orderable`). A column may be a field of a struct ("new.id").
        """
        with self._open_parquet(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            bounds = dict[str, list[tuple[pa.Scalar, pa.Scalar] | None]]()
            for index, name in enumerate(file.schema.column(n).path for n in range(len(file.schema))):
                if (value_type := columns.get(name)) is not None:
                    group_statistics = [group.column(index).statistics for group in groups]
                    bounds[name] = [
                        (
                            _parse_stored_value(statistics.min_raw, value_type),
                            _parse_stored_value(statistics.max_raw, value_type),
                        )
                        if statistics is not None and statistics.has_min_max
                        else None
                        for statistics in group_statistics
                        if statistics is None or statistics.num_values
                    ]
            return bounds

    def iterate_group_readers(self, groups: Iterable["RowGroup"]) -> Iterator[tuple["RowGroup", "Reader"]]:
        """Yield row groups in their order, each with a function that reads columns of its rows.

        A column may be a field of a struct ("new.id"). In that case the other fields of the struct are not read;
        an Arrow dataset would read them, too.
        """
        for path, groups_of_file in groupby(groups, key=attrgetter("file")):
            with ExitStack() as stack:
                # The file is opened when the first of its row groups is read.
                open_file = cache(partial(stack.enter_context, self._open_parquet(path)))
                for group in groups_of_file:
                    yield group, partial(_read_group, open_file, group.number)

    @contextmanager
    def prefetch(self, groups: Sequence["RowGroup"], items: Iterable[Item]) -> Iterator[Iterator[Item]]:
        """Yield an iterator of the items. The items are results of reading row groups.

        On an object store the next item is made while the caller works with the present one.
        """
        if groups and not isinstance(self.find_file_system(groups[0].file)[0], pafs.LocalFileSystem):
            with prefetch(items, 1) as prefetched_items:
                yield prefetched_items
        else:
            yield iter(items)

    def read_columns(self, path: str, columns: Sequence[str]) -> pa.Table:
        """All rows of a Parquet file, with some of its columns. A column may be a field of a struct."""
        with self._open_parquet(path) as file:
            return _replace_views_in_rows(file.read(columns=list(columns)))

    def read_first_row(self, path: str, schema: pa.Schema) -> pa.Table:
        """The first row of a Parquet file. The file must have rows and these columns. Only little of the file is read."""
        with self._open_parquet(path) as file:
            row = next(file.iter_batches(1, row_groups=[0], columns=schema.names))
        return pa.Table.from_batches([row]).select(schema.names).cast(schema)

    @contextmanager
    def _open_parquet(self, path: str) -> Iterator[pq.ParquetFile]:
        """Open a Parquet file during a `with` block."""
        file_system, inner_path = self.find_file_system(path)
        # With pre_buffer, the columns of a row group are requested from an object store at the same time.
        with (
            file_system.open_input_file(inner_path) as stream,
            pq.ParquetFile(stream, pre_buffer=not isinstance(file_system, pafs.LocalFileSystem)) as file,
        ):
            yield file

    def read_batches(
        self, path: str, schema: pa.Schema, groups: Sequence[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a Parquet file as batches with the columns of `schema`.

        Columns that the file does not have are NULL. `groups` are the numbers of the row groups to read; None for all.
        """
        stored_schema = self.stored_schema(path, schema)
        if stored_schema is schema:
            yield from self._read_stored_batches(path, schema, groups)
        else:
            for batch in self._read_stored_batches(path, stored_schema, groups):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)

    def stored_schema(self, path: str, schema: pa.Schema) -> pa.Schema:
        """The schema with the names that a file has for the columns of `schema`.

        It is `schema` itself if they are the same.
        """
        return (
            self.names.stored_schema(schema) if self.names is not None and self.names.covers(path) else schema
        )

    def _read_stored_batches(
        self, path: str, schema: pa.Schema, groups: Sequence[int] | None
    ) -> Iterator[pa.RecordBatch]:
        """The same as `read_batches`, with the names of the file's columns."""
        if conflicts_with_dataset(schema.names):
            yield from self._read_batches_of_file(path, schema, groups)
            return
        fragment = self._open_fragment(path)
        if groups is not None:
            fragment = fragment.subset(row_group_ids=list(groups))
        dataset = ds.FileSystemDataset([fragment], schema, fragment.format)
        # By default Arrow would read up to gigabytes of rows in advance.
        yield from dataset.to_batches(batch_readahead=2, fragment_readahead=1)

    def _open_fragment(self, path: str) -> ds.ParquetFileFragment:
        if (content := self._read_small_file(path)) is not None:
            return ds.ParquetFileFormat().make_fragment(content)
        file_system, inner_path = self.find_file_system(path)
        return ds.ParquetFileFormat().make_fragment(inner_path, filesystem=file_system)

    def _read_small_file(self, path: str) -> pa.Buffer | None:
        """The bytes of a file on an object store, if the file is small. A dataset would open it more than once.

        None for other files, and if there is no `open_objects`, as on executors.
        """
        objects = self.open_objects(path) if self.open_objects is not None and is_uri(path) else None
        if objects is None:
            return None
        content, size = objects.read_beginning(self.find_file_system(path)[1])
        return pa.py_buffer(content) if len(content) == size else None

    def _read_batches_of_file(
        self, path: str, schema: pa.Schema, groups: Sequence[int] | None
    ) -> Iterator[pa.RecordBatch]:
        """The same as `read_batches`, but without an Arrow dataset. All columns of the file are decoded."""
        with self._open_parquet(path) as file:
            for batch in file.iter_batches(row_groups=None if groups is None else list(groups)):
                indices = [batch.schema.get_field_index(field.name) for field in schema]
                columns = [
                    pa.nulls(batch.num_rows, field.type)
                    if index < 0
                    else batch.column(index).cast(field.type)
                    for field, index in zip(schema, indices, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def list_file_names(self, folder: str) -> list[str]:
        """The names of all files in a folder and its subfolders. Empty if the folder does not exist."""
        return [file.base_name for file in self._list_files(folder)]

    def has_folder(self, folder: str, name: str) -> bool:
        """True if `folder`, at any depth, has a folder with this name that contains a file."""
        _, inner_path = self.find_file_system(folder)
        depth = len(inner_path.split("/"))
        return any(name in file.path.split("/")[depth:-1] for file in self._list_files(folder))

    def _list_files(self, folder: str) -> list[pafs.FileInfo]:
        file_system, inner_path = self.find_file_system(folder)
        entries = file_system.get_file_info(
            pafs.FileSelector(inner_path, allow_not_found=True, recursive=True)
        )
        # Some servers store an empty object for a folder. It stays even after the files of the folder were removed.
        folders = {entry.path for entry in entries if entry.type == pafs.FileType.Directory}
        return [entry for entry in entries if entry.type == pafs.FileType.File and entry.path not in folders]

    def probe(self, folder: str, name: str) -> None:
        """Create an empty file in a folder, and delete it."""
        self.touch(path := f"{folder}/{name}")
        file_system, inner_path = self.find_file_system(path)
        file_system.delete_file(inner_path)

    def touch(self, path: str) -> None:
        """Create an empty file."""
        self.write(path, b"")

    def write(self, path: str, content: bytes) -> None:
        """Write a file into a folder that exists."""
        with self.open_to_write(path) as stream:
            write_in_pieces(stream, content)

    def open_to_write(self, path: str) -> pa.NativeFile:
        """Open a new file in a folder that exists; `write_in_pieces` writes it."""
        file_system, inner_path = self.find_file_system(path)
        return file_system.open_output_stream(inner_path, buffer_size=2 * _WRITE_CHUNK_BYTES)

    def read_part(self, path: str, begin: int, size: int) -> bytes:
        """The bytes of a file from `begin` on, `size` of them."""
        file_system, inner_path = self.find_file_system(path)
        with file_system.open_input_file(inner_path) as stream:
            stream.seek(begin)
            content: bytes = stream.read(size)
        return content

    def remove(self, folder: str) -> bool:
        """Remove a folder with everything in it. Return False if the folder does not exist."""
        if not (self.list_file_names(folder) if is_uri(folder) else Path(folder).exists()):
            return False
        file_system, inner_path = self.find_file_system(folder)
        file_system.delete_dir(inner_path)
        return True


def write_in_pieces(stream: pa.NativeFile, content: bytes | pa.Buffer) -> None:
    """Write bytes to a stream that `Store.open_to_write` has opened.

    delta-rs's stream accepts only bytes objects. pyarrow passes bytes objects to it if pyarrow's buffer is larger than each
    piece that is written.
    """
    for begin in range(0, len(content), _WRITE_CHUNK_BYTES):
        stream.write(content[begin : begin + _WRITE_CHUNK_BYTES])


#: The number of bytes of row groups that an executor reads at a time.
PART_BYTES = 32 * 1024 * 1024

#: A function that reads columns of a row group.
Reader = Callable[[Sequence[str]], pa.Table]


@dataclass(frozen=True)
class RowGroup:
    """A row group of a Parquet file.

    `number` is its number in the file, `row_count` its number of rows, and `uncompressed_bytes` the bytes of the rows
    before compression.
    """

    file: str
    number: int
    row_count: int
    uncompressed_bytes: int


def divide_groups(groups: Sequence[RowGroup], parallelism: int = 1) -> list[Sequence[RowGroup]]:
    """Divide row groups, in their order, into parts of about `PART_BYTES`. Each part is for one executor.

    The number of parts is a multiple of `parallelism`, unless the parts would become too small.
    """
    total_bytes = sum(group.uncompressed_bytes for group in groups)
    part_count = count_parts(total_bytes, PART_BYTES, parallelism)
    parts = defaultdict[int, list[RowGroup]](list)
    preceding_bytes = 0
    for group in groups:
        # A row group belongs to the part that contains the middle of the group. So a large row group does not make the
        # parts before and after it larger.
        parts[
            (2 * preceding_bytes + group.uncompressed_bytes) * part_count // (2 * total_bytes)
            if total_bytes
            else 0
        ].append(group)
        preceding_bytes += group.uncompressed_bytes
    return [parts[part] for part in sorted(parts)]


def _parse_stored_value(stored_value: int | bytes, data_type: pa.DataType) -> pa.Scalar:
    """A value of a type, from the form in which a Parquet file stores it.

    It is not converted to a date or time of Python, which could not represent all values.
    """
    if isinstance(stored_value, bytes):
        return pa.scalar(stored_value, pa.binary()).cast(data_type)
    return pa.scalar(stored_value, pa.int32() if pa.types.is_date(data_type) else pa.int64()).cast(data_type)


def _read_group(open_file: Callable[[], pq.ParquetFile], number: int, columns: Sequence[str]) -> pa.Table:
    """Read columns of a row group with this number, without string views."""
    return _replace_views_in_rows(open_file().read_row_group(number, columns=list(columns)))


#: The columns that an Arrow dataset adds to the columns of its files. Columns of a table with the same names would
#: conflict with them.
_DATASET_COLUMNS = frozenset({"__batch_index", "__filename", "__fragment_index", "__last_in_fragment"})


def conflicts_with_dataset(names: Iterable[str]) -> bool:
    """True if one of these columns has the name of a column that an Arrow dataset adds."""
    return not _DATASET_COLUMNS.isdisjoint(names)


def join_path(folder: str, name: str) -> str:
    """The path of a file. `name` is relative to the folder."""
    return f"{folder}/{name}" if is_uri(folder) else str(Path(folder, name))


def replace_views_in_schema(schema: pa.Schema) -> pa.Schema:
    """The schema, in which plain strings and bytes replace string views and binary views."""
    return pa.schema([field.with_type(_replace_views_in_type(field.type)) for field in schema])


def _replace_views_in_rows(rows: pa.Table) -> pa.Table:
    """The rows, in which plain strings and bytes replace string views and binary views."""
    schema = replace_views_in_schema(rows.schema)
    return rows if rows.schema.equals(schema) else rows.cast(schema)


def _replace_views_in_type(data_type: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(data_type):
        return pa.string()
    if pa.types.is_binary_view(data_type):
        return pa.binary()
    if pa.types.is_struct(data_type):
        return pa.struct([field.with_type(_replace_views_in_type(field.type)) for field in data_type])
    if pa.types.is_list(data_type):
        return pa.list_(data_type.value_field.with_type(_replace_views_in_type(data_type.value_type)))
    if pa.types.is_map(data_type):
        return pa.map_(
            _replace_views_in_type(data_type.key_type), _replace_views_in_type(data_type.item_type)
        )
    return data_type
