"""Decodes many changes of one relation at once.

In: Insert, Update and Delete messages of one relation. Out: typed Arrow columns.

An array has the current position in each message. The decoder moves all of these positions over the first column
of the tuples, then over the second column, and so on. Then it gathers the values of each column, and converts them
together. No Python code runs per row or per value.

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

_HEADER_BYTES = 8  # Type byte, relation, mark of the first tuple, number of columns.
_TUPLE_HEADER_BYTES = 3  # Mark, number of columns.
_ROWS_PER_WALK = 8192  # The tuples of this number of rows fit in the processor's cache.


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
      `new` are null. The list is null if all values were sent.
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
    complete: bool = False,
) -> DecodedChanges:
    """Decode Insert, Update and Delete messages (binary or large_binary) of one relation version, in order.

    `old_columns` and `new_columns` are the columns to decode into `old` and `new`; None means all columns.

    With `complete`, a value of `new` that was not sent is taken from `old`. A NULL in `old` is not taken. An
    unsent value is never NULL, so such a column is outside of the old key.
    """
    octets, count, width = Octets(data), len(data), len(columns.names)
    operation, mark = _headers(octets, width)
    is_old = (mark == _OLD_KEY) | (mark == _OLD_ROW)
    old_indexes, new_indexes = _column_indexes(columns, old_columns), _column_indexes(columns, new_columns)
    positions = octets.starts + _HEADER_BYTES
    old_cells: list[_Cells] = []
    if is_old.any():
        with_old = np.flatnonzero(is_old)
        old_cells, after = _walk(octets, positions, with_old, width, old_indexes)
        positions[with_old] = after
        if any(np.any(cells.has_kind(_UNCHANGED)) for cells in old_cells):
            raise ProtocolError("an old tuple has an unchanged TOASTed value", sqlstate="08P01")
        updates = np.flatnonzero(is_old & (operation == _UPDATE))
        second_headers = octets.words(positions[updates])
        _require((second_headers >> 56 == _NEW).all(), "has no new tuple")
        _require((second_headers >> 40 & 0xFFFF == width).all(), f"does not have {width} columns")
        positions[updates] += _TUPLE_HEADER_BYTES
    is_new = operation != _DELETE
    new_cells: list[_Cells] = []
    if is_new.any():
        with_new = np.flatnonzero(is_new)
        new_cells, after = _walk(octets, positions, with_new, width, new_indexes)
        positions[with_new] = after
    if complete and old_cells and new_cells:
        old_cells_by_index = dict(zip(old_indexes, old_cells, strict=True))
        new_cells = [
            _fill_unchanged(cells, old_cells_by_index.get(index))
            for index, cells in zip(new_indexes, new_cells, strict=True)
        ]
    # Positions only increase. So if the last position in a message is the message's end, all values were inside.
    _require((positions == octets.ends).all(), "does not end where its last value ends")

    struct = partial(_struct, columns, octets.buffer)
    return DecodedChanges(
        operation=_letters(operation, np.ones(count, np.bool_)),
        old_kind=_letters(mark, is_old),
        old=struct(old_indexes, old_cells, is_old),
        new=struct(new_indexes, new_cells, is_new),
        unchanged=_unchanged_columns(count, [columns.names[index] for index in new_indexes], new_cells),
    )


def _headers(octets: Octets, width: int) -> tuple[Marks, Marks]:
    """Return the type byte of each message, and the mark of its first tuple ('K', 'O' or 'N').

    Raises ProtocolError if the messages do not all change the same relation with `width` columns.
    """
    head = octets.words(octets.starts)
    operation, mark = (head >> 56).astype(np.uint8), (head >> 16).astype(np.uint8)
    is_old = (mark == _OLD_KEY) | (mark == _OLD_ROW)
    _require(((operation == _INSERT) | (operation == _UPDATE) | (operation == _DELETE)).all(), "is no change")
    relation = head >> 24 & 0xFFFFFFFF
    _require((relation == relation[:1]).all(), "is of another relation than the first")
    _require(
        (is_old & (operation != _INSERT) | (mark == _NEW) & (operation != _DELETE)).all(),
        "has no tuple that its type allows",
    )
    _require((head & 0xFFFF == width).all(), f"does not have {width} columns")
    # A value has at least one byte. Without this check, a short message that claims to have many columns could make
    # pgsieve allocate much memory.
    _require(
        (octets.ends - octets.starts >= _HEADER_BYTES + width).all(), f"is too short for {width} columns"
    )
    return operation, mark


def _require(condition: bool | np.bool_, failure: str) -> None:
    if not condition:
        raise ProtocolError(f"a message {failure}", sqlstate="08P01")


def _column_indexes(columns: RelationColumns, names: Collection[str] | None) -> list[int]:
    """Return the indexes of the columns with these names, or of all columns if `names` is None."""
    return [index for index, name in enumerate(columns.names) if names is None or name in names]


def _walk(
    octets: Octets, positions: Positions, rows: Positions, width: int, column_indexes: Sequence[int]
) -> tuple[list[_Cells], Positions]:
    """Move over one tuple in each of the messages with the indexes `rows`.

    `positions` has the position of the first column of the tuple in each message. Returns the cells of the columns
    in `column_indexes`, and the positions after the tuples. In the cells, the other messages have empty values at
    their end, with the mark of NULL.
    """
    count = len(positions)
    places = {column: place for place, column in enumerate(column_indexes)}
    is_every_row = len(rows) == count
    bounds = np.empty((len(column_indexes), count, 2), np.int32)
    if not is_every_row:
        bounds[:] = octets.ends[:, np.newaxis]
    marks: list[Marks | int | None] = [
        None if is_every_row else np.full(count, _NULL, np.uint8) for _ in column_indexes
    ]
    ends = positions[rows]
    for first in range(0, len(rows), _ROWS_PER_WALK):
        batch: slice | Positions = slice(first, first + _ROWS_PER_WALK)
        positions_in_batch = ends[batch]
        if not is_every_row:
            batch = rows[batch]
        for column in range(width):
            start, end, mark = _step(octets, positions_in_batch)
            place = places.get(column)
            if place is not None:
                bounds[place, batch, 0] = start
                bounds[place, batch, 1] = end
                marks[place] = _add_marks(marks[place], mark, batch, count)
            positions_in_batch = end
        ends[first : first + _ROWS_PER_WALK] = positions_in_batch
    return [
        _Cells(bounds[place].reshape(-1), _TEXT if mark is None else mark) for place, mark in enumerate(marks)
    ], ends


def _add_marks(
    marks_so_far: Marks | int | None, mark: Marks | int, batch: slice | Positions, count: int
) -> Marks | int:
    """Return the marks of all rows up to this batch; one mark if all are the same."""
    if marks_so_far is None and isinstance(mark, int):
        return mark
    if isinstance(marks_so_far, int) and isinstance(mark, int) and marks_so_far == mark:
        return marks_so_far
    if not isinstance(marks_so_far, np.ndarray):
        marks_so_far = np.full(count, _NULL if marks_so_far is None else marks_so_far, np.uint8)
    marks_so_far[batch] = mark
    return marks_so_far


def _step(octets: Octets, positions: Positions) -> tuple[Positions, Positions, Marks | int]:
    """Return the start, the end and the mark of the value at each position; one mark if all are the same."""
    # Each value begins with a byte for its kind. If the value was sent, four bytes with its length follow.
    words = octets.words(positions)
    mark = int(words[0] >> 56) if len(words) else _TEXT
    if mark in (_TEXT, _BINARY):
        remainder = words - np.uint64(mark << 56)
        if not len(positions) or remainder.max() >> 56 == 0:
            start = positions + 5
            return start, start + (remainder >> 24).view(np.int64), mark
    marks = (words >> 56).astype(np.uint8)
    is_sent = (marks == _TEXT) | (marks == _BINARY)
    if not (is_sent | (marks == _NULL) | (marks == _UNCHANGED)).all():
        raise ProtocolError("a value is of a kind that is none of 'n', 'u', 't' and 'b'", sqlstate="08P01")
    start = positions + np.where(is_sent, 5, 1)
    return start, start + np.where(is_sent, words >> 24 & 0xFFFFFFFF, 0).view(np.int64), marks


def _fill_unchanged(new: _Cells, old: _Cells | None) -> _Cells:
    """Return the new values; a value that was not sent is replaced by the value in the same message's old tuple."""
    if old is None:
        return new
    is_filled = new.has_kind(_UNCHANGED) & (old.has_kind(_TEXT) | old.has_kind(_BINARY))
    if not np.any(is_filled):
        return new
    is_filled = np.broadcast_to(is_filled, len(new.bounds) // 2)
    bounds = np.where(np.repeat(is_filled, 2), old.bounds, new.bounds)
    return _Cells(bounds, np.where(is_filled, old.marks, new.marks).astype(np.uint8))


def _struct(
    columns: RelationColumns,
    buffer: pa.Buffer,
    column_indexes: Sequence[int],
    cells: Sequence[_Cells],
    is_present: Mask,
) -> pa.StructArray:
    """Convert the cells of several columns to one array of structs, which are null where `is_present` is false."""
    kind = pa.struct(
        [pa.field(columns.names[index], columns.types[index].arrow_type) for index in column_indexes]
    )
    if not is_present.any():
        return pa.nulls(len(is_present), kind)
    children = [
        _values(buffer, cell, columns.types[index], columns.names[index])
        for index, cell in zip(column_indexes, cells, strict=True)
    ]
    validity = None if is_present.all() else pack_bitmap(is_present)
    return pa.Array.from_buffers(kind, len(is_present), [validity], children=children)


def _values(buffer: pa.Buffer, cells: _Cells, kind: ColumnType, name: str) -> pa.Array:
    """Convert a column's values, in text and in binary format, to one array."""
    values = gather(buffer, cells.bounds)
    if isinstance(cells.marks, int) and cells.marks == _TEXT:
        return convert_text(values, kind, name)
    text, binary = (np.broadcast_to(cells.has_kind(mark), len(values)) for mark in (_TEXT, _BINARY))
    if not binary.any():
        return convert_text(_null_unsent(values, text), kind, name)
    if not text.any():
        return convert_binary(_null_unsent(values, binary), kind, name)
    both = pa.concat_arrays(
        [
            convert_text(values.filter(pa.array(text)), kind, name),
            convert_binary(values.filter(pa.array(binary)), kind, name),
        ]
    )
    places = np.where(text, np.cumsum(text) - 1, np.count_nonzero(text) + np.cumsum(binary) - 1)
    return both.take(pa.array(places, mask=~(text | binary)))


def _null_unsent(values: pa.Array, is_sent: Mask) -> pa.Array:
    """Return the values, with NULL instead of each value that was not sent."""
    if is_sent.all():
        return values
    return pa.Array.from_buffers(pa.binary(), len(values), [pack_bitmap(is_sent), *values.buffers()[1:]])


def _letters(letters: Marks, is_present: Mask) -> pa.Array:
    """Return an array of strings with one letter each, or empty strings where `is_present` is false."""
    offsets = np.zeros(len(letters) + 1, np.int32)
    np.cumsum(is_present, out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(letters), [None, pa.py_buffer(offsets), pa.py_buffer(letters[is_present])], 0
    )


def _unchanged_columns(count: int, names: Sequence[str], cells: Sequence[_Cells]) -> pa.Array:
    """Return a list for each message: the columns whose value was not sent because it did not change."""
    kind = pa.list_(pa.string())
    masks = {
        name: np.broadcast_to(cell.has_kind(_UNCHANGED), count)
        for name, cell in zip(names, cells, strict=bool(cells))
        if np.any(cell.has_kind(_UNCHANGED))
    }
    if not masks:
        return pa.nulls(count, kind)
    unsent = np.stack(list(masks.values()), axis=1)
    sizes = unsent.sum(axis=1)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    unsent_names = pa.array(list(masks), pa.string()).take(pa.array(np.nonzero(unsent)[1]))
    return pa.Array.from_buffers(
        kind, count, [pack_bitmap(sizes > 0), pa.py_buffer(offsets)], children=[unsent_names]
    )
