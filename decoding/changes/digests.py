"""Digests of rows without a key: rows in, 20 bytes per row out, which are equal if all values are equal.

Values are equal if they have the same text: NULL equals NULL, all NaN are equal, and 0.0 does not equal -0.0.
So a DELETE removes a row of the replica with the same text as PostgreSQL's row. A digest is a mark of 32
bits, followed by 128 bits of BLAKE2b. As marks cost much less, only rows with the mark of a wanted digest are
digested. Raises Arrow's errors.

https://www.rfc-editor.org/rfc/rfc7693
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import SIDES, struct_field
from pgsieve.decoding.changes.net_change import Mask, Numbers

#: The schema of digests.
DIGEST_SCHEMA = pa.schema([("digest", pa.binary())])
_DIGEST_BYTES, _MARK_BYTES = 16, 4
#: The number of rows that are digested together.
_ROWS_PER_STEP = 16_384
_OCTETS = pa.large_binary()
#: The odd factor of Horner's method, which combines the columns' words modulo 2**64.
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def row_digests(rows: pa.RecordBatch) -> pa.Table:
    """The digest of each row."""
    parts = [
        _digest_rows(rows.slice(begin, _ROWS_PER_STEP)) for begin in range(0, rows.num_rows, _ROWS_PER_STEP)
    ]
    digests = np.concatenate([np.empty((0, _DIGEST_BYTES), np.uint8), *parts])
    marked = np.hstack([row_marks(rows).view(np.uint8).reshape(-1, _MARK_BYTES), digests])
    offsets = np.arange(rows.num_rows + 1, dtype=np.int32) * marked.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(marked))]
    return pa.table([pa.Array.from_buffers(pa.binary(), rows.num_rows, buffers)], schema=DIGEST_SCHEMA)


def encoded_rows(rows: pa.RecordBatch, *, one_zero: bool = False) -> pa.Array:
    """Each row as bytes, which are the same if all values are equal as in digests.

    With `one_zero`, 0.0 equals -0.0, as in PostgreSQL.
    """
    return pc.binary_join_element_wise(
        *(_value_octets(column, one_zero=one_zero) for column in rows.columns), pa.scalar(b"", _OCTETS)
    )


def row_marks(rows: pa.RecordBatch) -> npt.NDArray[np.uint32]:
    """The mark of each row, which depends on numbers and times, and on the lengths of texts and lists."""
    marks = np.zeros(rows.num_rows, np.uint64)
    for column in rows.columns:
        marks = marks * HASH_FACTOR + value_words(column)
        marks = (marks ^ (marks >> np.uint64(29))) * HASH_FACTOR
    return (marks >> np.uint64(32)).astype(np.uint32)


def digest_sides(changes: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Replace both sides of changes by the digests of these columns."""
    arrays = {name: changes.column(name) for name in changes.schema.names}
    for side in SIDES:
        arrays[side] = _digest_side(arrays[side], columns)
    return pa.RecordBatch.from_pydict(arrays)


@dataclass(frozen=True)
class WantedDigests:
    """Distinct digests whose rows are wanted. Spark sends it to executors, and each makes an index."""

    digests: pa.Table
    # Not a cached_property: before Python 3.12 that has a lock, which cannot be sent with the class.
    _index: list[_Index] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.digests.num_rows)

    def __reduce__(self) -> tuple[type[WantedDigests], tuple[pa.Table]]:
        return WantedDigests, (self.digests,)

    def within(self, rows: pa.RecordBatch) -> tuple[Numbers, Numbers]:
        """The indexes of the rows with one of the digests, in order, and the indexes of their digests."""
        if not self._index:
            self._index.append(_Index.of(self.digests))
        index = self._index[0]
        places = np.flatnonzero(index.has_mark[row_marks(rows) >> index.shift])
        if not len(places):
            return places, places
        candidates = _as_numpy(row_digests(rows.take(pa.array(places))))
        at = np.minimum(np.searchsorted(index.octets, candidates), len(index.octets) - 1)
        same = index.octets[at] == candidates
        return places[same], index.order[at[same]]


class _Index(NamedTuple):
    """Sorted digests, their indexes, and for each mark shifted by `shift` whether a digest has it."""

    octets: npt.NDArray[np.bytes_]
    order: Numbers
    shift: np.uint32
    has_mark: Mask

    @classmethod
    def of(cls, digests: pa.Table) -> _Index:
        """Make the index; at most one in sixteen shifted marks is wanted, as far as 32 bits allow."""
        octets, number = _as_numpy(digests), digests.num_rows
        order = np.argsort(octets)
        shift = np.uint32(max(0, 28 - max(1, number).bit_length()))
        has_mark = np.zeros(2**32 >> int(shift), np.bool_)
        marks = octets.view(np.uint8).reshape(number, -1)[:, :_MARK_BYTES]
        has_mark[np.ascontiguousarray(marks).view(np.uint32)[:, 0] >> shift] = True
        return cls(octets[order], order, shift, has_mark)


def _as_numpy(digests: pa.Table) -> npt.NDArray[np.bytes_]:
    octets = digests["digest"].combine_chunks().cast(pa.binary(_MARK_BYTES + _DIGEST_BYTES))
    width = octets.type.byte_width
    return np.frombuffer(octets.buffers()[1] or b"", f"S{width}")[octets.offset :][: len(octets)]


def _digest_side(rows: pa.StructArray, columns: Sequence[str]) -> pa.StructArray:
    present = np.flatnonzero(rows.is_valid())
    chosen = rows if len(present) == len(rows) else rows.take(pa.array(present))
    values = pa.RecordBatch.from_arrays([struct_field(chosen, name) for name in columns], names=list(columns))
    digests = row_digests(values).combine_chunks()
    place = np.full(len(rows), -1, np.int64)
    place[present] = np.arange(len(present))
    children = [column.combine_chunks() for column in digests.columns]
    packed = pa.StructArray.from_arrays(children, fields=list(DIGEST_SCHEMA))
    return packed if len(present) == len(rows) else packed.take(pa.array(place, mask=place < 0))


def _digest_rows(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    every = encoded_rows(rows).to_pylist()
    made = b"".join([blake2b(each, digest_size=_DIGEST_BYTES).digest() for each in every])
    return np.frombuffer(made, np.uint8).reshape(-1, _DIGEST_BYTES)


def _value_octets(column: pa.Array, *, one_zero: bool) -> pa.Array:
    """Each value as bytes, also NULL; the bytes of no value are a prefix of another's."""
    presence = pc.if_else(column.is_valid(), pa.scalar(b"\1", _OCTETS), pa.scalar(b"\0", _OCTETS))
    parts = (
        [_fixed_width_octets(pc.fill_null(lengths, 0))] if (lengths := _lengths(column)) is not None else []
    )
    is_list = pa.types.is_list(column.type)
    parts.append(_join_elements(column, lengths, one_zero) if is_list else _content_octets(column, one_zero))
    empty = pa.scalar(b"", _OCTETS)
    return pc.binary_join_element_wise(presence, *(pc.fill_null(part, empty) for part in parts), empty)


def _join_elements(lists: pa.Array, lengths: pa.Array, one_zero: bool) -> pa.Array:
    """The concatenated bytes of each list's elements."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(pc.fill_null(lengths, 0), out=offsets[1:])
    elements = pa.LargeListArray.from_arrays(
        pa.array(offsets), _value_octets(lists.flatten(), one_zero=one_zero)
    )
    return pc.binary_join(elements, pa.scalar(b"", _OCTETS))


def _content_octets(column: pa.Array, one_zero: bool) -> pa.Array:
    if is_octets(column.type):
        return column.cast(_OCTETS)
    if one_zero and pa.types.is_floating(column.type):
        column = pc.add(column, pa.scalar(0.0, column.type))
    return _fixed_width_octets(_unify_nan(column))


def _fixed_width_octets(column: pa.Array) -> pa.Array:
    """The bytes of values with a fixed width."""
    column = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
    return column.view(pa.binary(column.type.bit_width // 8)).cast(_OCTETS)


def _unify_nan(column: pa.Array) -> pa.Array:
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def is_octets(kind: pa.DataType) -> bool:
    """Whether values of a type are texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _lengths(column: pa.Array) -> pa.Array | None:
    """The lengths of values; None for a type of fixed width."""
    if pa.types.is_list(column.type):
        return pc.list_value_length(column).cast(pa.int64())
    return pc.binary_length(column).cast(pa.int64()) if is_octets(column.type) else None


def value_words(column: pa.Array) -> npt.NDArray[np.uint64]:
    """A number for each value, also NULL, the same for equal values."""
    lengths = _lengths(column)
    values = _unify_nan(column) if lengths is None else lengths
    values = values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values
    width = values.type.bit_width // 8
    words = values.view(pa.binary(width))
    present = np.asarray(words.is_valid())
    octets = np.frombuffer(words.buffers()[1] or b"", np.uint8)[words.offset * width :][: len(words) * width]
    least = np.zeros((len(words), 8), np.uint8)
    least[:, : min(width, 8)] = octets.reshape(-1, width)[:, :8]
    return np.where(present, least.view(np.uint64)[:, 0] + np.uint64(1), np.uint64(0))
