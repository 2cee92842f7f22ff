"""Converts the bytes of numeric_send to Arrow decimals or to text, and Arrow decimals to text.

A value has digits of base 10000. Its bytes consist of integers of 16 bits: the number of digits, the power of 10000 of
the first digit, the sign (or a mark for NaN or an infinity), the number of decimal places to print, and the digits.

All values of a column are converted together: first their first digits, then their second digits, and so on. Raises
ValueError for a value that does not fit the decimal type; the error does not contain the value. Raises ProtocolError for
bytes that are not a numeric.

Source: numeric_send() and get_str_from_var() in src/backend/utils/adt/numeric.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import Octets, Positions, convert_valid
from pgsieve.decoding.errors import ProtocolError

_HEADER_BYTES = 8
_NEGATIVE, _NAN = 0x4000, 0xC000
_TEXT_BY_SPECIAL_SIGN = {_NAN: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_BASE = 10_000

_MAX_DECIMAL_DIGITS = 38  # The greatest precision of a decimal.
_WORD_DIGITS = 18  # Any number with this number of decimal digits fits in a signed 64-bit word.
_POWERS = _BASE ** np.arange(5, dtype=np.int64)  # The powers of 10000 that fit in a word.
#: A number whose first digit has the power n of 10000 has at most 18 decimal digits if this digit is below element n.
_FIRST_DIGIT_LIMITS = 10**_WORD_DIGITS // _POWERS

Digits: TypeAlias = npt.NDArray[np.uint8]
_QUADS: Digits = (
    np.arange(_BASE, dtype=np.int32)[:, np.newaxis] // np.array([1000, 100, 10, 1]) % 10 + ord("0")
).astype(np.uint8)
"""Maps each digit of base 10000 to its four decimal digits, as text."""


def decode_decimal(values: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert the bytes of numeric_send to decimals.

    Raises ValueError for a value that does not fit the decimal type. No value is rounded.
    """
    if target_type.precision + _count_excess_places(target_type) > _WORD_DIGITS:
        return parse_decimal(print_binary(values), target_type)
    return convert_valid(values, lambda sent_values: _decode_valid_decimals(sent_values, target_type))


def parse_decimal(text: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert the text of numeric_out to decimals; raises ValueError for a value that does not fit the type."""
    if pc.any(pc.greater(pc.binary_length(text), _MAX_DECIMAL_DIGITS)).as_py():
        # Arrow 26 computes the number modulo 2**128 before it checks whether the number fits. So pgsieve checks the
        # number of digits itself.
        digits = pc.ascii_ltrim(pc.replace_substring(pc.ascii_ltrim(text, "-"), ".", ""), "0")
        if pc.max(pc.binary_length(digits)).as_py() > _MAX_DECIMAL_DIGITS:
            raise ValueError("the decimal type has too few digits")
    return text.cast(target_type)


def _count_excess_places(target_type: pa.DataType) -> int:
    """Return how many decimal places (0 to 3) of the last base-10000 digit are beyond the decimal's scale."""
    return int(-target_type.scale % 4)


def _decode_valid_decimals(binary: pa.Array, target_type: pa.DataType) -> pa.Array:
    octets, headers = _read_headers(binary)
    signs = headers >> 16 & 0xFFFF
    if ((signs != 0) & (signs != _NEGATIVE)).any():
        raise ValueError("no decimal is NaN or infinite")
    digit_counts = (headers >> 48).astype(np.int64)
    # The power of 10000 of each value's first digit, counted from the last digit that the decimal's scale reaches.
    # numeric_send counts it from the last digit before the decimal point.
    first_powers = (headers >> 32).astype(np.uint16).view(np.int16).astype(np.int64) + -(
        -target_type.scale // 4
    )
    totals = np.zeros(len(binary), np.int64)
    for digit_index, digits in enumerate(
        _iterate_digits(octets, octets.starts, int(digit_counts.max(initial=0)))
    ):
        present_digits = np.where(digit_counts > digit_index, digits, 0)
        powers = np.clip(first_powers - digit_index, 0, len(_POWERS) - 1)
        # Later digits are less than 10000. So the sum fits in a word if the first digit is below its limit.
        is_out_of_range = (first_powers - digit_index != powers) & (present_digits > 0)
        if (
            is_out_of_range | (present_digits >= (_FIRST_DIGIT_LIMITS[powers] if digit_index == 0 else _BASE))
        ).any():
            raise ValueError("the decimal type has too few digits")
        totals += present_digits * _POWERS[powers]
    unscaled_values, remainder = np.divmod(totals, 10 ** _count_excess_places(target_type))
    if (unscaled_values >= 10**target_type.precision).any() or remainder.any():
        raise ValueError("the decimal type has too few digits")
    unscaled_values[signs == _NEGATIVE] *= -1
    words = np.stack([unscaled_values, unscaled_values >> 63], axis=1)
    return pa.Array.from_buffers(target_type, len(binary), [None, pa.py_buffer(words)])


def print_binary(values: pa.Array) -> pa.Array:
    """Convert the bytes of numeric_send to the text that numeric_out prints."""
    return convert_valid(values, _print_by_header)


def print_decimals(values: pa.Array) -> pa.Array:
    """Print decimals with all places of their scale, as numeric_out does."""
    scale = values.type.scale
    # The digits are printed without the point at first, because Arrow prints small decimals with an exponent.
    unscaled_texts = pa.Array.from_buffers(
        pa.decimal128(values.type.precision, 0), len(values), values.buffers(), offset=values.offset
    ).cast(pa.string())
    if not scale:
        return unscaled_texts
    digits = pc.ascii_lpad(pc.ascii_ltrim(unscaled_texts, "-"), scale + 1, "0")
    sign = pc.if_else(pc.starts_with(unscaled_texts, "-"), "-", "")
    point = pa.scalar(".")
    integer_digits = pc.utf8_slice_codeunits(digits, 0, -scale)
    return pc.binary_join_element_wise(
        sign, integer_digits, point, pc.utf8_slice_codeunits(digits, -scale), ""
    )


def _print_by_header(binary: pa.Array) -> pa.Array:
    """Print values. Those that have the same header (the bytes before the digits) are printed together."""
    if not len(binary):
        return pa.array([], pa.string())
    octets, headers = _read_headers(binary)
    distinct_headers, group_indexes = np.unique(headers, return_inverse=True)
    order = np.argsort(group_indexes, kind="stable")
    starts_by_group = np.split(octets.starts[order], np.cumsum(np.bincount(group_indexes))[:-1])
    groups = [
        _print_group(octets, int(header), starts)
        for header, starts in zip(distinct_headers, starts_by_group, strict=True)
    ]
    inverse_order = np.empty(len(order), np.int64)
    inverse_order[order] = np.arange(len(order))
    return pa.concat_arrays(groups).take(pa.array(inverse_order))


def _read_headers(binary: pa.Array) -> tuple[Octets, npt.NDArray[np.uint64]]:
    """Return the bytes and the headers of values."""
    octets = Octets(binary)
    headers = octets.read_integers(octets.starts)
    if (octets.ends - octets.starts != _HEADER_BYTES + 2 * (headers >> 48).astype(np.int64)).any():
        raise ProtocolError("a value in binary format is not a numeric", sqlstate="22P03")
    return octets, headers


def _iterate_digits(octets: Octets, starts: Positions, count: int) -> Iterator[Positions]:
    """Yield the first digits of all values, then the second digits, and so on.

    If a value has no such digit, its element in the array has no meaning.
    """
    for digit_index in range(count):
        if digit_index % 4 == 0:
            four_digits = octets.read_integers(starts + _HEADER_BYTES + 2 * digit_index)
        yield (four_digits >> (48 - 16 * (digit_index % 4)) & 0xFFFF).view(np.int64)


def _print_group(octets: Octets, header: int, starts: Positions) -> pa.Array:
    """Print values that have the same header."""
    digit_count, sign, decimal_places = header >> 48, header >> 16 & 0xFFFF, header & 0xFFFF
    first_power = ((header >> 32 & 0xFFFF) ^ 0x8000) - 0x8000
    if sign in _TEXT_BY_SPECIAL_SIGN:
        return pa.repeat(_TEXT_BY_SPECIAL_SIGN[sign], len(starts))
    # How many quads (groups of four decimal digits) are printed before the decimal point, and after it.
    quads_before_point, quads_after_point = max(first_power, 0) + 1, -(-decimal_places // 4)
    quads = np.full((len(starts), quads_before_point + quads_after_point, 4), ord("0"), np.uint8)
    for digit_index, digit in enumerate(_iterate_digits(octets, starts, digit_count)):
        index = quads_before_point - 1 - first_power + digit_index
        if (digit >= _BASE).any() or sign not in (0, _NEGATIVE):
            raise ProtocolError("a value in binary format is not a numeric", sqlstate="22P03")
        if index < quads_before_point + quads_after_point:
            quads[:, index] = _QUADS[digit]
    digits = quads.reshape(len(starts), -1)
    integral_digits, fraction_digits = (
        digits[:, : 4 * quads_before_point],
        digits[:, 4 * quads_before_point : 4 * quads_before_point + decimal_places],
    )
    is_significant = np.maximum.accumulate(integral_digits != ord("0"), axis=1)
    is_significant[:, -1] = True
    minus, point = (
        np.full((len(starts), int(is_printed)), ord(letter), np.uint8)
        for is_printed, letter in ((sign == _NEGATIVE, "-"), (decimal_places > 0, "."))
    )
    letters = np.concatenate([minus, integral_digits, point, fraction_digits], axis=1)
    is_printed_letter = np.ones(letters.shape, np.bool_)
    is_printed_letter[:, minus.shape[1] : minus.shape[1] + integral_digits.shape[1]] = is_significant
    offsets = np.zeros(len(starts) + 1, np.int32)
    np.cumsum(is_printed_letter.sum(axis=1), out=offsets[1:])
    return pa.Array.from_buffers(
        pa.string(), len(starts), [None, pa.py_buffer(offsets), pa.py_buffer(letters[is_printed_letter])]
    )
