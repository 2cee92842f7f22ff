"""numeric: what numeric_send returns in, Arrow decimals or the text of numeric_out out.

A value is base-10000 digits: their number, the power of 10000 of the first one, a sign that also tells NaN and the
infinities, the decimal places to print, and the digits, 16 bits each. Digits are added up or printed for a whole
column at once. Raises ValueError, without the value, for a value that the decimal cannot hold, ProtocolError for
bytes that are no numeric. numeric_send and get_str_from_var in src/backend/utils/adt/numeric.c.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from decoding.errors import ProtocolError
from decoding.octets import Octets, Positions, without_nulls

_HEADER = 8
_NEGATIVE, _NAN = 0x4000, 0xC000
_SPECIAL = {_NAN: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_BASE = 10_000

_WORD_DIGITS = 18  # decimal digits that a signed word always holds
_POWERS = 10 ** np.arange(_WORD_DIGITS + 1, dtype=np.int64)

Digits: TypeAlias = npt.NDArray[np.uint8]
_QUADS: Digits = (
    np.arange(_BASE, dtype=np.int32)[:, np.newaxis] // np.array([1000, 100, 10, 1]) % 10 + ord("0")
).astype(np.uint8)
"""The four decimal digits of each base-10000 digit, as text."""


def decimal_from_send(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert to a decimal; a value that it has no room for is refused, never rounded."""
    if target.precision > _WORD_DIGITS:
        return text_from_send(values).cast(target)
    return without_nulls(values, lambda sent: _decimals(sent, target))


def _decimals(sent: pa.Array, target: pa.DataType) -> pa.Array:
    octets, head = _read(sent)
    sign = head >> 16 & 0xFFFF
    if ((sign != 0) & (sign != _NEGATIVE)).any():
        raise ValueError("no decimal is NaN or infinite")
    count = (head >> 48).astype(np.int64)
    # The power of ten that a digit counts, once the decimal point is moved behind the last place.
    power = 4 * (head >> 32).astype(np.uint16).view(np.int16).astype(np.int64) + target.scale
    total = np.zeros(len(sent), np.int64)
    for place in range(int(count.max(initial=0))):
        rows = np.flatnonzero(count > place)
        digit = (octets.words(octets.starts[rows] + _HEADER + 2 * place) >> 48).astype(np.int64)
        exponent = power[rows] - 4 * place
        room = _POWERS[np.clip(target.precision - exponent, 0, _WORD_DIGITS)]
        cut = _POWERS[np.clip(-exponent, 0, 4)]
        if ((digit >= _BASE) | (digit >= room) & (digit > 0) | (digit % cut > 0)).any():
            raise ValueError("a decimal has not the digits")
        total[rows] += digit // cut * _POWERS[np.clip(exponent, 0, _WORD_DIGITS)]
    if (total >= 10**target.precision).any():
        raise ValueError("a decimal has not the digits")
    total[sign == _NEGATIVE] *= -1
    words = np.stack([total, total >> 63], axis=1)
    return pa.Array.from_buffers(target, len(sent), [None, pa.py_buffer(words)])


def text_from_send(values: pa.Array) -> pa.Array:
    """Convert to the text of numeric_out."""
    return without_nulls(values, _texts)


def _texts(sent: pa.Array) -> pa.Array:
    """Print the values of one layout, that is of one header, together."""
    if not len(sent):
        return pa.array([], pa.string())
    octets, head = _read(sent)
    heads, layout = np.unique(head, return_inverse=True)
    order = np.argsort(layout, kind="stable")
    members = np.split(octets.starts[order], np.cumsum(np.bincount(layout))[:-1])
    printed = [_printed(octets, int(h), m) for h, m in zip(heads, members, strict=True)]
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return pa.concat_arrays(printed).take(pa.array(back))


def _read(sent: pa.Array) -> tuple[Octets, npt.NDArray[np.uint64]]:
    """Return the bytes and the headers of values."""
    octets = Octets(sent)
    head = octets.words(octets.starts)
    if (octets.ends - octets.starts != _HEADER + 2 * (head >> 48).astype(np.int64)).any():
        raise ProtocolError("a value in binary format is no numeric", sqlstate="22P03")
    return octets, head


def _printed(octets: Octets, head: int, starts: Positions) -> pa.Array:
    """Print values that differ in nothing but their digits."""
    count, sign, places = head >> 48, head >> 16 & 0xFFFF, head & 0xFFFF
    first = ((head >> 32 & 0xFFFF) ^ 0x8000) - 0x8000
    if sign in _SPECIAL:
        return pa.repeat(_SPECIAL[sign], len(starts))
    # Groups of four from the first that is printed before the point to the last one behind it.
    before, behind = max(first, 0) + 1, -(-places // 4)
    quads = np.full((len(starts), before + behind, 4), ord("0"), np.uint8)
    for place in range(count):
        digit = octets.words(starts + _HEADER + 2 * place) >> 48
        at = before - 1 - first + place
        if (digit >= _BASE).any() or sign not in (0, _NEGATIVE):
            raise ProtocolError("a value in binary format is no numeric", sqlstate="22P03")
        if at < before + behind:
            quads[:, at] = _QUADS[digit]
    digits = quads.reshape(len(starts), -1)
    whole, fraction = digits[:, : 4 * before], digits[:, 4 * before : 4 * before + places]
    kept = np.maximum.accumulate(whole != ord("0"), axis=1)
    kept[:, -1] = True
    minus, point = (
        np.full((len(starts), int(there)), ord(letter), np.uint8)
        for there, letter in ((sign == _NEGATIVE, "-"), (places > 0, "."))
    )
    letters = np.concatenate([minus, whole, point, fraction], axis=1)
    keep = np.ones(letters.shape, np.bool_)
    keep[:, minus.shape[1] : minus.shape[1] + whole.shape[1]] = kept
    offsets = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(keep.sum(axis=1), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(letters[keep])]
    )
