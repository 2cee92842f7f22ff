"""Decodes many changes of one relation together.

In: Insert, Update and Delete messages of one relation. Out: typed Arrow columns.

One array has the position that the decoder has reached in each message. For the first column of the tuples, the decoder
moves all of these positions on. It does the same for the second column, and so on. Then it gathers the values of each
column, and converts them together. No Python code runs per row or per value.

A column may mix text and binary format: with the option binary, types without a send function are still sent as
text. Every byte is checked. Raises:

- ProtocolError if the bytes are not messages of one relation
- ValueNotRepresentableError if a column's Spark type cannot hold a value
- UnsupportedBinaryError if a value in binary format must become text that only the server can print

PostgreSQL documentation, Logical Replication Message Formats; logicalrep_write_tuple() in
src/backend/replication/logical/proto.c.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.octets import Mask, Octets, Positions, gather, pack_bitmap
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.values.types import ColumnType, convert_binary, convert_text

Marks: TypeAlias = npt.NDArray[np.uint8]

_INSERT, _UPDATE, _DELETE = b"IUD"
_OLD_KEY, _OLD_ROW, _NEW = b"KON"
_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"

_HEADER_BYTES = 8  # Type byte, relation, mark of the first tuple (K, O or N), number of columns.
_TUPLE_HEADER_BYTES = 3  # Mark, number of columns.
#: The number of messages whose positions move together. Their tuples fit in the processor's cache.
_ROWS_PER_WALK = 8192


@dataclass(frozen=True, slots=True)
class RelationColumns:
    """The columns of one version of a relation, in the order of the Relation message that describes this version."""

    names: tuple[str, ...]
    types: tuple[ColumnType, ...]


@dataclass(frozen=True, slots=True)
class DecodedChanges:
    """Decoded changes; each array has one element per message.

    - `operation` is 'I', 'U' or 'D'.
    - `old_kind` is 'K' for an old key, 'O' for an old row, or '' if the message has no old tuple.
    - `old` and `new` are structs of the columns that the caller chose, or null if the message has no such tuple.
      In an old key the columns outside the key are null.
    - `unchanged` lists the columns of `new` whose TOASTed value did not change and was not sent. Their values in
      `new` are null. Columns that `fill_unsent` has filled are not listed. A list without columns is null.
    """

    operation: pa.Array
    old_kind: pa.Array
    old: pa.StructArray
    new: pa.StructArray
    unchanged: pa.Array


@dataclass(frozen=True, slots=True)
class _Cells:
    """The positions and kinds of one column's values in all messages.

    - `bounds` has the start and the end of each value: start, end, start, end, … The numbers never decrease.
    - `marks` has the byte for the kind of each value: 't', 'b', 'n' or 'u'. It is one number if all values have the
      same kind.
    """

    bounds: npt.NDArray[np.int32]
    marks: Marks | int

    def has_kind(self, mark: int) -> Mask | bool:
        """Which values have this kind, as a mask; or one boolean if all values have the same kind."""
        return self.marks == mark


def decode_changes(
    data: pa.Array,
    columns: RelationColumns,
    *,
    old_columns: Collection[str] | None = None,
    new_columns: Collection[str] | None = None,
    fill_unsent: bool = False,
) -> DecodedChanges:
    """Decode Insert, Update and Delete messages (binary or large_binary) of one relation version, in order.

    `old_columns` and `new_columns` are the columns to decode into `old` and `new`; None means all columns.

    With `fill_unsent`, a value of `new` that was not sent is taken from `old`. A NULL in `old` is not taken: an unsent
    value is never NULL, so this NULL only says that the column is outside of the old key.
    """
    octets, count, column_count = Octets(data), len(data), len(columns.names)
    operations, marks = _read_headers(octets, column_count)
    has_old = (marks == _OLD_KEY) | (marks == _OLD_ROW)
    old_indexes, new_indexes = (
        _find_column_indexes(columns, old_columns),
        _find_column_indexes(columns, new_columns),
    )
    positions = octets.starts + _HEADER_BYTES
    old_cells: list[_Cells] = []
    if has_old.any():
        old_rows = np.flatnonzero(has_old)
        old_cells, end_positions = _walk_tuples(octets, positions, old_rows, column_count, old_indexes)
        positions[old_rows] = end_positions
        if any(np.any(cells.has_kind(_UNCHANGED)) for cells in old_cells):
            raise ProtocolError("an old tuple has an unchanged TOASTed value", sqlstate="08P01")
        updates = np.flatnonzero(has_old & (operations == _UPDATE))
        new_headers = octets.read_integers(positions[updates])
        _require((new_headers >> 56 == _NEW).all(), "has no new tuple")
        _require((new_headers >> 40 & 0xFFFF == column_count).all(), f"does not have {column_count} columns")
        positions[updates] += _TUPLE_HEADER_BYTES
    has_new = operations != _DELETE
    new_cells: list[_Cells] = []
    if has_new.any():
        new_rows = np.flatnonzero(has_new)
        new_cells, end_positions = _walk_tuples(octets, positions, new_rows, column_count, new_indexes)
        positions[new_rows] = end_positions
    if fill_unsent and old_cells and new_cells:
        old_cells_by_index = dict(zip(old_indexes, old_cells, strict=True))
        new_cells = [
            _fill_unchanged(cells, old_cells_by_index.get(index))
            for index, cells in zip(new_indexes, new_cells, strict=True)
        ]
    # Positions only increase. So if the last position in a message is the message's end, all values were inside.
    _require((positions == octets.ends).all(), "does not end where its last value ends")

    build_struct = partial(_build_struct, columns, octets.buffer)
    return DecodedChanges(
        operation=_build_letter_strings(operations, np.ones(count, np.bool_)),
        old_kind=_build_letter_strings(marks, has_old),
        old=build_struct(old_indexes, old_cells, has_old),
        new=build_struct(new_indexes, new_cells, has_new),
        unchanged=_list_unchanged_columns(count, [columns.names[index] for index in new_indexes], new_cells),
    )


def _read_headers(octets: Octets, column_count: int) -> tuple[Marks, Marks]:
    """Return the type byte of each message, and the mark of its first tuple ('K', 'O' or 'N').

    Raises ProtocolError if the messages do not all change the same relation with `column_count` columns.
    """
    first_integers = octets.read_integers(octets.starts)
    operations, marks = (first_integers >> 56).astype(np.uint8), (first_integers >> 16).astype(np.uint8)
    has_old = (marks == _OLD_KEY) | (marks == _OLD_ROW)
    _require(
        ((operations == _INSERT) | (operations == _UPDATE) | (operations == _DELETE)).all(), "is no change"
    )
    relation_ids = first_integers >> 24 & 0xFFFFFFFF
    _require((relation_ids == relation_ids[:1]).all(), "is of another relation than the first")
    _require(
        (has_old & (operations != _INSERT) | (marks == _NEW) & (operations != _DELETE)).all(),
        "does not begin with a tuple that its type allows",
    )
    _require((first_integers & 0xFFFF == column_count).all(), f"does not have {column_count} columns")
    # A value has at least one byte. Without this check, a short message that claims to have many columns could make
    # pgsieve allocate much memory.
    _require(
        (octets.ends - octets.starts >= _HEADER_BYTES + column_count).all(),
        f"is too short for {column_count} columns",
    )
    return operations, marks


def _require(condition: bool | np.bool_, failure: str) -> None:
    if not condition:
        raise ProtocolError(f"a message {failure}", sqlstate="08P01")


def _find_column_indexes(columns: RelationColumns, names: Collection[str] | None) -> list[int]:
    """Return the indexes of the columns with these names, or of all columns if `names` is None."""
    return [index for index, name in enumerate(columns.names) if names is None or name in names]


def _walk_tuples(
    octets: Octets, positions: Positions, rows: Positions, column_count: int, column_indexes: Sequence[int]
) -> tuple[list[_Cells], Positions]:
    """Walk over one tuple of each message whose index is in `rows`.

    `positions` has the position of the first column of the tuple in each message. Returns the cells of the columns
    in `column_indexes`, and the positions after the tuples. For a message that is not in `rows`, each cell is an
    empty value at the end of the message, with the mark of NULL.
    """
    message_count = len(positions)
    cell_index_by_column = {column: cell_index for cell_index, column in enumerate(column_indexes)}
    is_every_row = len(rows) == message_count
    bounds = np.empty((len(column_indexes), message_count, 2), np.int32)
    if not is_every_row:
        bounds[:] = octets.ends[:, np.newaxis]
    marks: list[Marks | int | None] = [
        None if is_every_row else np.full(message_count, _NULL, np.uint8) for _ in column_indexes
    ]
    ends = positions[rows]
    for first_row in range(0, len(rows), _ROWS_PER_WALK):
        batch: slice | Positions = slice(first_row, first_row + _ROWS_PER_WALK)
        positions_in_batch = ends[batch]
        if not is_every_row:
            batch = rows[batch]
        for column in range(column_count):
            start, end, mark = _locate_values(octets, positions_in_batch)
            cell_index = cell_index_by_column.get(column)
            if cell_index is not None:
                bounds[cell_index, batch, 0] = start
                bounds[cell_index, batch, 1] = end
                marks[cell_index] = _add_marks(marks[cell_index], mark, batch, message_count)
            positions_in_batch = end
        ends[first_row : first_row + _ROWS_PER_WALK] = positions_in_batch
    return [
        _Cells(bounds[cell_index].reshape(-1), _TEXT if mark is None else mark)
        for cell_index, mark in enumerate(marks)
    ], ends


def _add_marks(
    marks_so_far: Marks | int | None, batch_marks: Marks | int, batch: slice | Positions, message_count: int
) -> Marks | int:
    """Return the marks of all rows up to this batch; one mark if all are the same."""
    if marks_so_far is None and isinstance(batch_marks, int):
        return batch_marks
    if isinstance(marks_so_far, int) and isinstance(batch_marks, int) and marks_so_far == batch_marks:
        return marks_so_far
    if not isinstance(marks_so_far, np.ndarray):
        marks_so_far = np.full(message_count, _NULL if marks_so_far is None else marks_so_far, np.uint8)
    marks_so_far[batch] = batch_marks
    return marks_so_far


def _locate_values(octets: Octets, positions: Positions) -> tuple[Positions, Positions, Marks | int]:
    """Return the start, the end and the mark of the value at each position; one mark if all are the same."""
    # Each value begins with a byte for its kind. If the value was sent, four bytes with its length follow.
    first_integers = octets.read_integers(positions)
    first_mark = int(first_integers[0] >> 56) if len(first_integers) else _TEXT
    if first_mark in (_TEXT, _BINARY):
        remainder = first_integers - np.uint64(first_mark << 56)
        if not len(positions) or remainder.max() >> 56 == 0:
            start = positions + 5
            return start, start + (remainder >> 24).view(np.int64), first_mark
    marks = (first_integers >> 56).astype(np.uint8)
    is_sent = (marks == _TEXT) | (marks == _BINARY)
    if not (is_sent | (marks == _NULL) | (marks == _UNCHANGED)).all():
        raise ProtocolError("a value is of a kind that is none of 'n', 'u', 't' and 'b'", sqlstate="08P01")
    start = positions + np.where(is_sent, 5, 1)
    return start, start + np.where(is_sent, first_integers >> 24 & 0xFFFFFFFF, 0).view(np.int64), marks


def _fill_unchanged(new_cells: _Cells, old_cells: _Cells | None) -> _Cells:
    """Return the new values; a value that was not sent is replaced by the value in the same message's old tuple."""
    if old_cells is None:
        return new_cells
    is_filled = new_cells.has_kind(_UNCHANGED) & (old_cells.has_kind(_TEXT) | old_cells.has_kind(_BINARY))
    if not np.any(is_filled):
        return new_cells
    is_filled = np.broadcast_to(is_filled, len(new_cells.bounds) // 2)
    bounds = np.where(np.repeat(is_filled, 2), old_cells.bounds, new_cells.bounds)
    return _Cells(bounds, np.where(is_filled, old_cells.marks, new_cells.marks).astype(np.uint8))


def _build_struct(
    columns: RelationColumns,
    buffer: pa.Buffer,
    column_indexes: Sequence[int],
    cells: Sequence[_Cells],
    is_present: Mask,
) -> pa.StructArray:
    """Convert the cells of several columns to one array of structs, which are null where `is_present` is false."""
    struct_type = pa.struct(
        [pa.field(columns.names[index], columns.types[index].arrow_type) for index in column_indexes]
    )
    if not is_present.any():
        return pa.nulls(len(is_present), struct_type)
    children = [
        _convert_values(buffer, cell, columns.types[index], columns.names[index])
        for index, cell in zip(column_indexes, cells, strict=True)
    ]
    validity = None if is_present.all() else pack_bitmap(is_present)
    return pa.Array.from_buffers(struct_type, len(is_present), [validity], children=children)


def _convert_values(buffer: pa.Buffer, cells: _Cells, column_type: ColumnType, name: str) -> pa.Array:
    """Convert a column's values, in text and in binary format, to one array."""
    values = gather(buffer, cells.bounds)
    if isinstance(cells.marks, int) and cells.marks == _TEXT:
        return convert_text(values, column_type, name)
    is_text, is_binary = (np.broadcast_to(cells.has_kind(mark), len(values)) for mark in (_TEXT, _BINARY))
    if not is_binary.any():
        return convert_text(_null_unsent(values, is_text), column_type, name)
    if not is_text.any():
        return convert_binary(_null_unsent(values, is_binary), column_type, name)
    converted_values = pa.concat_arrays(
        [
            convert_text(values.filter(pa.array(is_text)), column_type, name),
            convert_binary(values.filter(pa.array(is_binary)), column_type, name),
        ]
    )
    value_indexes = np.where(
        is_text, np.cumsum(is_text) - 1, np.count_nonzero(is_text) + np.cumsum(is_binary) - 1
    )
    return converted_values.take(pa.array(value_indexes, mask=~(is_text | is_binary)))


def _null_unsent(values: pa.Array, is_sent: Mask) -> pa.Array:
    """Return the values, with NULL instead of each value that was not sent."""
    if is_sent.all():
        return values
    return pa.Array.from_buffers(pa.binary(), len(values), [pack_bitmap(is_sent), *values.buffers()[1:]])


def _build_letter_strings(letters: Marks, is_present: Mask) -> pa.Array:
    """Return an array of strings with one letter each, or empty strings where `is_present` is false."""
    offsets = np.zeros(len(letters) + 1, np.int32)
    np.cumsum(is_present, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(letters), [None, pa.py_buffer(offsets), pa.py_buffer(letters[is_present])], 0
    )


def _list_unchanged_columns(count: int, names: Sequence[str], cells: Sequence[_Cells]) -> pa.Array:
    """Return a list for each message: the columns whose value was not sent because it did not change."""
    list_type = pa.list_(pa.string())
    masks = {
        name: np.broadcast_to(cell.has_kind(_UNCHANGED), count)
        for name, cell in zip(names, cells, strict=bool(cells))
        if np.any(cell.has_kind(_UNCHANGED))
    }
    if not masks:
        return pa.nulls(count, list_type)
    is_unsent = np.stack(list(masks.values()), axis=1)
    sizes = is_unsent.sum(axis=1)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    unsent_names = pa.array(list(masks), pa.string()).take(pa.array(np.nonzero(is_unsent)[1]))
    return pa.Array.from_buffers(
        list_type, count, [pack_bitmap(sizes > 0), pa.py_buffer(offsets)], children=[unsent_names]
    )
