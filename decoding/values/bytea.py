r"""Converts the text of bytea, in hex or escape format, to Arrow binary.

Only the hex format can begin with `\x`, because the escape format doubles each backslash. Raises ValueError for text
in neither format. The error does not contain the value.

PostgreSQL documentation, Binary Data Types; byteaout() in src/backend/utils/adt/bytea.c.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import pack_bitmap, value_offsets

_NOT_HEX = 0xFF
_DIGIT_BY_LETTER = np.full(256, _NOT_HEX, np.uint8)
_DIGIT_BY_LETTER[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16, dtype=np.uint8)
_DIGIT_BY_LETTER[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16, dtype=np.uint8)

_EMPTY = pa.scalar(b"\\x", pa.binary())
_ESCAPE = re.compile(rb"\\(?:(\\)|([0-3][0-7]{2}))")


def decode_text(values: pa.Array) -> pa.Array:
    """Convert the text that byteaout prints, in hex or escape format."""
    text = values.cast(pa.binary())
    is_hex = pc.starts_with(text, b"\\x").fill_null(fill_value=True)
    if pc.all(is_hex, min_count=0).as_py():
        return _decode_hex(text)
    hex_values = _decode_hex(pc.if_else(is_hex, text, _EMPTY))
    escape_values = [_decode_escape(value) for value in text.filter(pc.invert(is_hex)).to_pylist()]
    return pc.replace_with_mask(hex_values, pc.invert(is_hex), pa.array(escape_values, pa.binary()))


def _decode_hex(text: pa.Array) -> pa.Array:
    r"""Convert the digits of all values of the column together.

    Each value is `\x` and pairs of digits. So all pairs begin at even positions of the joined values.
    """
    validity = pack_bitmap(np.asarray(text.is_valid())) if text.null_count else None
    text = text.fill_null(_EMPTY)  # A NULL has no `\x`, but the code below expects one before each value.
    offsets = value_offsets(text)
    first_offset, size = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
    if ((offsets - first_offset) % 2).any():
        raise ValueError("not bytea in hex format")
    digits = _DIGIT_BY_LETTER[np.frombuffer(text.buffers()[2] or b"", np.uint8, size, first_offset)]
    starts = offsets[:-1] - first_offset
    digits[starts] = digits[starts + 1] = (
        0  # Each `\x` becomes one byte here, and np.delete removes this byte.
    )
    if (digits == _NOT_HEX).any():
        raise ValueError("not bytea in hex format")
    octets = np.delete(digits[0::2] << 4 | digits[1::2], starts // 2)
    octet_offsets = ((offsets - first_offset) // 2 - np.arange(len(text) + 1)).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(text), [validity, pa.py_buffer(octet_offsets), pa.py_buffer(octets)]
    )


def _decode_escape(value: bytes) -> bytes:
    if b"\\" in _ESCAPE.sub(b"", value):
        raise ValueError("not bytea in escape format")
    return _ESCAPE.sub(lambda match: match[1] or bytes([int(match[2], 8)]), value)
