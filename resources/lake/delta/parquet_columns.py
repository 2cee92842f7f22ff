"""Writes rows of Parquet files into new files with more columns, and copies the encoded columns that the files have.

To encode and compress a column takes most of the time in which rows are written. In a Parquet file the encoded values
of a column of a row group, a column chunk, are consecutive bytes. Only the footer says where they are. So a file can have
chunks of other files.

In: files, the rows' other columns, and the folder of a table, whose columns have their own names in its files.
Out: files, and a row for each file that describes it (`FILE_SCHEMA`). Raises OSError.

Source: the format of the footer is the struct FileMetaData in parquet.thrift of Apache Parquet.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from pgsieve.resources.lake.delta.layout import DEFAULT_FILE_BYTES
from pgsieve.resources.lake.delta.parquet_files import describe_file, make_file_name, open_writer
from pgsieve.resources.lake.delta.thrift import Struct, format_struct, parse_struct
from pgsieve.resources.lake.stores.store import Store, join_path, write_in_pieces

#: A Parquet file begins and ends with these bytes. Before the last ones are the footer, and its length in four bytes.
_MAGIC = b"PAR1"
_LENGTH_BYTES = 4
#: This many bytes at the end of a file are read at once. Mostly they have the whole footer.
_TAIL_BYTES = 64 * 1024

#: Types of Thrift's compact protocol.
_INT16, _INT64, _LIST, _STRUCT = 4, 6, 9, 12
#: Fields of FileMetaData.
_FILE_ROW_COUNT, _ROW_GROUPS = 3, 4
#: Fields of RowGroup.
_CHUNKS, _GROUP_BYTES, _ROW_COUNT, _GROUP_OFFSET, _GROUP_STORED_BYTES, _ORDINAL = 1, 2, 3, 5, 6, 7
#: Fields of ColumnChunk. An offset of 0 stands for a chunk without metadata of its own before the footer.
_CHUNK_OFFSET, _METADATA = 2, 3
#: Fields of ColumnMetaData.
_PATH, _BYTES, _STORED_BYTES, _DATA_OFFSET, _DICTIONARY_OFFSET = 3, 6, 7, 9, 11
#: Fields of ColumnMetaData that point to other places of the file, which are not copied: indexes and Bloom filters.
_OTHER_PLACES = (10, 14, 15)


@dataclass(frozen=True)
class ExtendedRows:
    """The rows of some Parquet files with other columns.

    `columns` has batches of all rows of the files, in their order. Its columns are used in place of the files' columns with
    the same names.
    """

    files: Sequence[str]
    columns: Iterable[pa.RecordBatch]


class _RowTaker:
    """Takes rows from batches, as many as are wanted at a time. Only the batches with these rows are in memory."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches, self._rest = iter(batches), list[pa.RecordBatch]()

    def take(self, count: int) -> pa.Table:
        """Take the next rows; raises ValueError if there are fewer."""
        while (missing_count := count - sum(batch.num_rows for batch in self._rest)) > 0:
            if (batch := next(self._batches, None)) is None:
                raise ValueError(f"a file has {missing_count} more rows than its other columns")
            self._rest.append(batch)
        rows = pa.Table.from_batches(self._rest)
        self._rest = rows.slice(count).to_batches()
        return rows.slice(0, count)


@dataclass(frozen=True)
class _Chunk:
    """A column chunk: the struct ColumnMetaData that describes it, and its bytes."""

    metadata: Struct
    octets: pa.Buffer

    def move_to(self, offset: int) -> Struct:
        """Return the struct ColumnChunk for the same chunk at another offset of a file."""
        step = offset - _find_begin(self.metadata)
        metadata = {number: value for number, value in self.metadata.items() if number not in _OTHER_PLACES}
        for number in {_DATA_OFFSET, _DICTIONARY_OFFSET} & metadata.keys():
            metadata[number] = _INT64, metadata[number][1] + step
        return {_CHUNK_OFFSET: (_INT64, 0), _METADATA: (_STRUCT, metadata)}


def write_extended_files(
    folder: str,
    schema: pa.Schema,
    sources: Iterable[ExtendedRows],
    store: Store,
    target_bytes: int = DEFAULT_FILE_BYTES,
    encodings: Mapping[str, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write the rows of some files into new files in the folder of a table, which exists. Yield one row (`FILE_SCHEMA`) per new file.

    `schema` has all columns of the new files. Those that `sources` does not give must have the same types in the files.
    The other parameters are those of `write_files`.
    """
    empty_footer = _make_empty_footer(schema)
    remaining_groups = chain.from_iterable(
        _read_row_groups(store, source, schema, encodings) for source in sources
    )
    group = next(remaining_groups, None)
    while group is not None:
        name, groups = make_file_name(), list[Struct]()
        with store.open_to_write(join_path(folder, name)) as stream:
            stream.write(_MAGIC)
            while group is not None:
                groups.append(_write_row_group(stream, *group, len(groups)))
                group = next(remaining_groups, None)
                if stream.tell() >= target_bytes:
                    break
            row_count = sum(struct[_ROW_COUNT][1] for struct in groups)
            footer = format_struct(
                empty_footer | {_FILE_ROW_COUNT: (_INT64, row_count), _ROW_GROUPS: (_LIST, (_STRUCT, groups))}
            )
            ending = footer + len(footer).to_bytes(_LENGTH_BYTES, "little") + _MAGIC
            write_in_pieces(stream, ending)
            file_bytes = stream.tell()
        yield describe_file(name, file_bytes, pq.read_metadata(pa.BufferReader(_MAGIC + ending)))


def _write_row_group(stream: pa.NativeFile, row_count: int, chunks: Sequence[_Chunk], ordinal: int) -> Struct:
    """Write a row group, and return the struct RowGroup."""
    begin, structs = stream.tell(), list[Struct]()
    for chunk in chunks:
        structs.append(chunk.move_to(stream.tell()))
        write_in_pieces(stream, chunk.octets)
    return {
        _CHUNKS: (_LIST, (_STRUCT, structs)),
        _GROUP_BYTES: (_INT64, sum(chunk.metadata[_BYTES][1] for chunk in chunks)),
        _ROW_COUNT: (_INT64, row_count),
        _GROUP_OFFSET: (_INT64, begin),
        _GROUP_STORED_BYTES: (_INT64, stream.tell() - begin),
        _ORDINAL: (_INT16, ordinal),
    }


def _read_row_groups(
    store: Store, source: ExtendedRows, schema: pa.Schema, encodings: Mapping[str, str] | None
) -> Iterator[tuple[int, Sequence[_Chunk]]]:
    """Yield the number of rows and the chunks of each row group, in the order of the columns of `schema`."""
    columns = _RowTaker(source.columns)
    for file in source.files:
        file_system, path = store.find_file_system(file)
        with file_system.open_input_file(path) as stream:
            groups = _list_row_groups(stream)
            row_counts = [group[_ROW_COUNT][1] for group in groups]
            given_columns = pa.BufferReader(_encode(columns, schema, row_counts, encodings))
            given_groups = _list_row_groups(given_columns)
            for row_count, group, given_group in zip(row_counts, groups, given_groups, strict=True):
                chunks = _read_chunks(given_columns, given_group, schema.names)
                chunks |= _read_chunks(stream, group, [name for name in schema.names if name not in chunks])
                yield row_count, [chunk for name in schema.names for chunk in chunks[name]]


def _encode(
    columns: _RowTaker, schema: pa.Schema, row_counts: Sequence[int], encodings: Mapping[str, str] | None
) -> pa.Buffer:
    """Return a Parquet file with the next rows of some columns, in row groups of these numbers of rows."""
    stream = pa.BufferOutputStream()
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for row_count in row_counts:
            rows = columns.take(row_count)
            if writer is None:
                given_schema = pa.schema([schema.field(name) for name in rows.column_names])
                given_encodings = {
                    name: encoding
                    for name, encoding in (encodings or {}).items()
                    if name in rows.column_names
                }
                writer = stack.enter_context(
                    open_writer(stream, given_schema, rows.to_batches(), given_encodings)
                )
            writer.write_table(rows.cast(writer.schema), row_group_size=row_count)
    return stream.getvalue()


def _read_chunks(stream: pa.NativeFile, group: Struct, names: Sequence[str]) -> dict[str, list[_Chunk]]:
    """Read the chunks of some columns of a row group, by the names of the columns. A nested column has several chunks."""
    wanted_names, metadata_by_name = set(names), dict[str, list[Struct]]()
    for struct in group[_CHUNKS][1][1]:
        metadata = struct[_METADATA][1]
        name = metadata[_PATH][1][1][0].decode()
        if name in wanted_names:
            metadata_by_name.setdefault(name, []).append(metadata)
    all_metadata = list(chain.from_iterable(metadata_by_name.values()))
    if not all_metadata:
        return {}
    # One read for all chunks: on an object store each read is a request.
    begin = min(map(_find_begin, all_metadata))
    stream.seek(begin)
    octets = stream.read_buffer(
        max(_find_begin(each) + each[_STORED_BYTES][1] for each in all_metadata) - begin
    )
    return {
        name: [
            _Chunk(each, octets.slice(_find_begin(each) - begin, each[_STORED_BYTES][1])) for each in column
        ]
        for name, column in metadata_by_name.items()
    }


def _find_begin(metadata: Struct) -> int:
    """Find the offset at which a chunk begins: its dictionary, or its first page."""
    offset: int = metadata[_DATA_OFFSET][1]
    return min(offset, metadata[_DICTIONARY_OFFSET][1]) if _DICTIONARY_OFFSET in metadata else offset


def _list_row_groups(stream: pa.NativeFile) -> Sequence[Struct]:
    """List the structs RowGroup of a Parquet file."""
    groups: Sequence[Struct] = _read_footer(stream)[_ROW_GROUPS][1][1]
    return groups


def _read_footer(stream: pa.NativeFile) -> Struct:
    """Read the struct FileMetaData of a Parquet file."""
    size = stream.size()
    tail = stream.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    end = _LENGTH_BYTES + len(_MAGIC)
    length = int.from_bytes(tail[-end : -len(_MAGIC)], "little")
    if length + end > len(tail):
        return parse_struct(stream.read_at(length, size - end - length))
    return parse_struct(tail[-end - length : -end])


def _make_empty_footer(schema: pa.Schema) -> Struct:
    """Make the struct FileMetaData of a file with these columns that has no rows."""
    stream = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), stream)
    return _read_footer(pa.BufferReader(stream.getvalue()))
