"""Reads many messages or values in one operation of numpy.

In: an Arrow binary array, whose values are adjacent bytes of one buffer. Out: numpy arrays. No Python code runs per
value. Raises ProtocolError for a message that is NULL, and for a value that does not have the width of its type. Raises
ValueError for more than 2 GiB, because 32-bit offsets cannot address more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.errors import ProtocolError

Positions: TypeAlias = npt.NDArray[np.int64]
UnsignedIntegers: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_INTEGER_BYTES = 8
_MAX_BYTES = 2**31 - 1


class Octets:
    """The bytes of a binary array: all values in `buffer`, and their positions there in `starts` and `ends`."""

    __slots__ = ("_integers", "_last_integer_position", "buffer", "ends", "starts")

    def __init__(self, data: pa.Array) -> None:
        if data.null_count:
            raise ProtocolError("a message is NULL")
        is_large = pa.types.is_large_binary(data.type)
        offsets = value_offsets(data).astype(np.int64)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(data) else (0, 0)
        if last - first > _MAX_BYTES:
            kind = "large_binary" if is_large else "binary"
            raise ValueError(f"a {kind} array of messages holds more than 2 GiB: decode smaller batches")
        offsets -= first
        self.starts: Positions = offsets[:-1]
        self.ends: Positions = offsets[1:]
        values = data.buffers()[2]
        self.buffer: pa.Buffer = pa.py_buffer(b"") if values is None else values.slice(first, last - first)
        padded_buffer = self.buffer
        if padded_buffer.size < _INTEGER_BYTES:
            padded_buffer = pa.py_buffer(padded_buffer.to_pybytes().ljust(_INTEGER_BYTES, b"\0"))
        self._last_integer_position = padded_buffer.size - _INTEGER_BYTES
        # Element n of this view is the integer of eight bytes that begins at byte n. So one lookup in numpy reads the
        # integers at many positions.
        self._integers = np.ndarray(
            (self._last_integer_position + 1,), dtype="<u8", buffer=padded_buffer, strides=(1,)
        )

    def first_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the first byte of each value, such as the type byte of a message; any byte for an empty value."""
        return (self.read_integers(self.starts) >> 56).astype(np.uint8)

    def read_integers(self, positions: Positions) -> UnsignedIntegers:
        """Return the eight bytes from each position on, as a big-endian number; bytes beyond the end are zeros."""
        if not len(positions) or positions.max() <= self._last_integer_position:
            return self._integers[positions].byteswap()
        readable_positions = np.minimum(positions, self._last_integer_position)
        excess_bytes = positions - readable_positions
        integers: UnsignedIntegers = self._integers[readable_positions].byteswap() << (
            np.minimum(excess_bytes, _INTEGER_BYTES - 1) * 8
        ).astype(np.uint64)
        integers[excess_bytes >= _INTEGER_BYTES] = 0
        return integers


def value_offsets(values: pa.Array) -> npt.NDArray[Any]:
    """Return the n + 1 offsets of the n values of a binary or string array in its buffer; offsets may have 64 bits."""
    is_large = pa.types.is_large_binary(values.type) or pa.types.is_large_string(values.type)
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return np.zeros(len(values) + 1, np.int64 if is_large else np.int32)
    all_offsets: npt.NDArray[Any] = np.frombuffer(buffer, np.int64 if is_large else np.int32)
    return all_offsets[values.offset : values.offset + len(values) + 1]


def pack_bitmap(booleans: npt.NDArray[np.bool_]) -> pa.Buffer:
    """Convert booleans to Arrow's bitmap."""
    return pa.py_buffer(np.packbits(booleans, bitorder="little"))


def gather(buffer: pa.Buffer, bounds: npt.NDArray[np.int32]) -> pa.Array:
    """Return the values with these bounds (start, end, start, end …) as a binary array.

    Bounds never decrease. So they can be the offsets of another binary array: in this array the values alternate with
    the bytes between them.
    """
    count = len(bounds) // 2
    if not count:
        return pa.array([], pa.binary())
    interleaved = pa.Array.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(np.ascontiguousarray(bounds)), buffer], 0
    )
    return interleaved.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))


def read_fixed_width(values: pa.Array, layout: str) -> tuple[npt.NDArray[Any], Mask]:
    """Convert values of the same width to numbers; NULL becomes 0.

    Returns the numbers, and the mask of the values that are not NULL. `layout` is the type of the values in numpy's
    notation, such as `>i4`.
    """
    number_type = np.dtype(layout)
    is_valid = np.asarray(values.is_valid())
    offsets = value_offsets(values)
    if (np.diff(offsets) != np.where(is_valid, number_type.itemsize, 0)).any():
        raise ProtocolError(
            f"a value in binary format does not have {number_type.itemsize} bytes", sqlstate="22P03"
        )
    numbers = np.zeros(len(values), number_type.newbyteorder("="))
    if is_valid.any():
        numbers[is_valid] = np.frombuffer(
            values.buffers()[2], number_type, int(is_valid.sum()), int(offsets[0])
        )
    return numbers, is_valid


def to_big_endian(numbers: npt.NDArray[Any], is_valid: Mask) -> pa.Array:
    """Convert numbers to big-endian bytes; numbers that are not `is_valid` become NULL."""
    number_type, is_complete = numbers.dtype, bool(is_valid.all())
    big_endian = (numbers if is_complete else numbers[is_valid]).astype(number_type.newbyteorder(">"))
    offsets = np.zeros(len(is_valid) + 1, np.int32)
    np.cumsum(is_valid * np.int32(number_type.itemsize), out=offsets[1:])
    validity = None if is_complete else pack_bitmap(is_valid)
    return pa.Array.from_buffers(
        pa.binary(), len(is_valid), [validity, pa.py_buffer(offsets), pa.py_buffer(big_endian)]
    )


def convert_valid(values: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Cast values to binary, and apply `convert` to the values that are not NULL; NULL stays NULL."""
    values = values.cast(pa.binary())
    if not values.null_count:
        return convert(values)
    is_valid = np.asarray(values.is_valid())
    value_indexes = pa.array(np.cumsum(is_valid) - 1, mask=~is_valid)
    return convert(values.drop_null()).take(value_indexes)
