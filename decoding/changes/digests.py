"""Rows without a key as digests: rows in, 20 bytes per row out, equal if all values are equal.

Values are equal if they are printed alike: NULL equals NULL, all NaN are equal, and 0.0 is not -0.0. So the
row that PostgreSQL deletes is the replica's row with the same text. A digest is a mark of 32 bits and 128
bits of BLAKE2b. The mark costs far less: in a large table only rows with a wanted mark are digested. Raises
Arrow's errors.

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

from pgsieve.decoding.changes.columns import SIDES, field_of
from pgsieve.decoding.changes.net_change import Mask, Numbers

#: A digest as a column.
DIGEST = pa.schema([("digest", pa.binary())])
_BYTES, _MARK_BYTES = 16, 4
#: The number of rows that are serialised and digested at once.
_ROWS = 16_384
_OCTETS = pa.large_binary()
#: The marks of columns are combined by Horner's method, modulo 2**64, with this odd factor.
_ODD = np.uint64(0x9E3779B97F4A7C15)


def row_digests(rows: pa.RecordBatch) -> pa.Table:
    """The digest of each row."""
    parts = [_digests(rows.slice(begin, _ROWS)) for begin in range(0, rows.num_rows, _ROWS)]
    digests = np.concatenate([np.empty((0, _BYTES), np.uint8), *parts])
    marked = np.hstack([row_marks(rows).view(np.uint8).reshape(-1, _MARK_BYTES), digests])
    offsets = np.arange(rows.num_rows + 1, dtype=np.int32) * marked.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(marked))]
    return pa.table([pa.Array.from_buffers(pa.binary(), rows.num_rows, buffers)], schema=DIGEST)


def row_marks(rows: pa.RecordBatch) -> npt.NDArray[np.uint32]:
    """The mark of each row: from the values of numbers and times, and the lengths of texts and lists."""
    marks = np.zeros(rows.num_rows, np.uint64)
    for column in rows.columns:
        marks = marks * _ODD + _words(column)
        marks = (marks ^ (marks >> np.uint64(29))) * _ODD
    return (marks >> np.uint64(32)).astype(np.uint32)


def digested(changes: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Changes with digests of the rows of these columns in place of both sides."""
    arrays = {name: changes.column(name) for name in changes.schema.names}
    for side in SIDES:
        arrays[side] = _of_side(arrays[side], columns)
    return pa.RecordBatch.from_pydict(arrays)


@dataclass(frozen=True)
class WantedDigests:
    """Distinct digests whose rows are wanted. It is sent to executors; each makes its own index."""

    digests: pa.Table
    # Not a cached_property: before Python 3.12 that has a lock, and a class that is sent by value cannot have
    # one.
    _made: list[_Index] = field(default_factory=list, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.digests.num_rows)

    def __reduce__(self) -> tuple[type[WantedDigests], tuple[pa.Table]]:
        return WantedDigests, (self.digests,)

    def within(self, rows: pa.RecordBatch) -> tuple[Numbers, Numbers]:
        """The indexes of rows that have one of the digests, in order, and the indexes of their digests."""
        if not self._made:
            self._made.append(_Index.of(self.digests))
        index = self._made[0]
        places = np.flatnonzero(index.is_sought[row_marks(rows) >> index.shift])
        if not len(places):
            return places, places
        candidates = _in_one(row_digests(rows.take(pa.array(places))))
        at = np.minimum(np.searchsorted(index.octets, candidates), len(index.octets) - 1)
        same = index.octets[at] == candidates
        return places[same], index.order[at[same]]


class _Index(NamedTuple):
    """Sorted digests, their indexes, and whether a digest has a mark, for each mark shifted right."""

    octets: npt.NDArray[np.bytes_]
    order: Numbers
    shift: np.uint32
    is_sought: Mask

    @classmethod
    def of(cls, digests: pa.Table) -> _Index:
        """The index of digests; at most one in sixteen of the shifted marks is wanted, if 32 bits suffice."""
        octets, number = _in_one(digests), digests.num_rows
        order = np.argsort(octets)
        shift = np.uint32(max(0, 28 - max(1, number).bit_length()))
        is_sought = np.zeros(2**32 >> int(shift), np.bool_)
        marks = octets.view(np.uint8).reshape(number, -1)[:, :_MARK_BYTES]
        is_sought[np.ascontiguousarray(marks).view(np.uint32)[:, 0] >> shift] = True
        return cls(octets[order], order, shift, is_sought)


def _in_one(digests: pa.Table) -> npt.NDArray[np.bytes_]:
    octets = digests["digest"].combine_chunks().cast(pa.binary(_MARK_BYTES + _BYTES))
    width = octets.type.byte_width
    return np.frombuffer(octets.buffers()[1] or b"", f"S{width}")[octets.offset :][: len(octets)]


def _of_side(rows: pa.StructArray, columns: Sequence[str]) -> pa.StructArray:
    present = np.flatnonzero(rows.is_valid())
    chosen = rows if len(present) == len(rows) else rows.take(pa.array(present))
    values = pa.RecordBatch.from_arrays([field_of(chosen, name) for name in columns], names=list(columns))
    digests = row_digests(values).combine_chunks()
    place = np.full(len(rows), -1, np.int64)
    place[present] = np.arange(len(present))
    children = [column.combine_chunks() for column in digests.columns]
    packed = pa.StructArray.from_arrays(children, fields=list(DIGEST))
    return packed if len(present) == len(rows) else packed.take(pa.array(place, mask=place < 0))


def _digests(rows: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    octets = [_octets(column) for column in rows.columns]
    every = pc.binary_join_element_wise(*octets, pa.scalar(b"", _OCTETS)).to_pylist()
    made = b"".join([blake2b(each, digest_size=_BYTES).digest() for each in every])
    return np.frombuffer(made, np.uint8).reshape(-1, _BYTES)


def _octets(column: pa.Array) -> pa.Array:
    """Each value as bytes, also NULL; the bytes of no value are a prefix of another's."""
    presence = pc.if_else(column.is_valid(), pa.scalar(b"\1", _OCTETS), pa.scalar(b"\0", _OCTETS))
    parts = [_fixed(pc.fill_null(lengths, 0))] if (lengths := _lengths(column)) is not None else []
    parts.append(_joined(column, lengths) if pa.types.is_list(column.type) else _plain(column))
    empty = pa.scalar(b"", _OCTETS)
    return pc.binary_join_element_wise(presence, *(pc.fill_null(part, empty) for part in parts), empty)


def _joined(lists: pa.Array, lengths: pa.Array) -> pa.Array:
    """The concatenated bytes of each list's elements."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(pc.fill_null(lengths, 0), out=offsets[1:])
    elements = pa.LargeListArray.from_arrays(pa.array(offsets), _octets(lists.flatten()))
    return pc.binary_join(elements, pa.scalar(b"", _OCTETS))


def _plain(column: pa.Array) -> pa.Array:
    return column.cast(_OCTETS) if _is_octets(column.type) else _fixed(_one_nan(column))


def _fixed(column: pa.Array) -> pa.Array:
    """The bytes of values with a fixed width."""
    column = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
    return column.view(pa.binary(column.type.bit_width // 8)).cast(_OCTETS)


def _one_nan(column: pa.Array) -> pa.Array:
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), column)


def _is_octets(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _lengths(column: pa.Array) -> pa.Array | None:
    """The lengths of values; None for a fixed width."""
    if pa.types.is_list(column.type):
        return pc.list_value_length(column).cast(pa.int64())
    return pc.binary_length(column).cast(pa.int64()) if _is_octets(column.type) else None


def _words(column: pa.Array) -> npt.NDArray[np.uint64]:
    """A number for each value, the same for equal values; NULL is a value like any other."""
    lengths = _lengths(column)
    values = _one_nan(column) if lengths is None else lengths
    values = values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values
    width = values.type.bit_width // 8
    words = values.view(pa.binary(width))
    present = np.asarray(words.is_valid())
    octets = np.frombuffer(words.buffers()[1] or b"", np.uint8)[words.offset * width :][: len(words) * width]
    least = np.zeros((len(words), 8), np.uint8)
    least[:, : min(width, 8)] = octets.reshape(-1, width)[:, :8]
    return np.where(present, least.view(np.uint64)[:, 0] + np.uint64(1), np.uint64(0))
