r"""Converts one-dimensional arrays to Arrow lists.

In: the texts of array_out, or the bytes of array_send. Out: Arrow lists. NULL elements stay NULL.

All arrays of a column are split together, by the positions of braces, quotes and backslashes. Then the element
type's converter converts all elements together. No Python code runs per array or per element.

Raises ValueError for an array that a list cannot represent: one with more than one dimension, or with a first subscript
other than 1. The error does not contain the value. Raises ProtocolError for bytes that are not an array of these
elements.

PostgreSQL documentation, Arrays; array_out() and array_send() in src/backend/utils/adt/arrayfuncs.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import Mask, Octets, Positions, gather, pack_bitmap, value_offsets
from pgsieve.decoding.errors import ProtocolError

Converter: TypeAlias = Callable[[pa.Array, pa.DataType], pa.Array]
TextBytes: TypeAlias = npt.NDArray[np.uint8]

_QUOTE, _BACKSLASH, _OPEN, _CLOSE = b'"\\{}'
_NULL = b"NULL"
_EMPTY = pa.scalar(b"{}", pa.binary())


@dataclass(frozen=True, slots=True)
class ArrayTextConverter:
    """Converts arrays in text format. `element_converter` converts the elements, and `delimiter` separates them."""

    element_converter: Converter
    delimiter: str = ","

    def __call__(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        """Convert arrays (binary or string) to lists."""
        is_valid = np.asarray(values.is_valid())
        text = values.cast(pa.binary()).fill_null(_EMPTY)
        offsets = value_offsets(text)
        first_offset, size = int(offsets[0]), int(offsets[-1]) - int(offsets[0])
        text_bytes = np.frombuffer(text.buffers()[2] or b"", np.uint8, size, first_offset)
        starts, ends = offsets[:-1] - first_offset, offsets[1:] - first_offset
        # If the first subscript of an array is not 1, the text begins with the bounds and not with a brace.
        if (
            (ends - starts < 2).any()
            or (text_bytes[starts] != _OPEN).any()
            or (text_bytes[ends - 1] != _CLOSE).any()
        ):
            raise ValueError("not an array that a list can represent")
        is_unquoted, is_value = _find_quote_masks(text_bytes, ends - 1)
        left_delimiters, right_delimiters = _find_element_delimiters(
            text_bytes, is_unquoted, len(starts), ord(self.delimiter)
        )
        elements = _unquote_elements(text_bytes, is_value, left_delimiters + 1, right_delimiters)
        element_offsets = np.searchsorted(left_delimiters, np.append(starts, size)).astype(np.int32)
        return _build_lists(
            target, is_valid, element_offsets, self.element_converter(elements, target.value_type)
        )


def _find_quote_masks(text_bytes: TextBytes, closing_positions: Positions) -> tuple[Mask | None, Mask | None]:
    """Return a mask of the bytes outside quotes, and a mask of the bytes that belong to a value.

    If a mask would contain all bytes, it is None. A backslash escapes the next byte. So in a run of backslashes the
    first, the third and so on are escapes. `closing_positions` has the positions of the closing braces of the arrays.
    If such a brace is inside quotes, the quotes do not end within the array. That raises ValueError.
    """
    is_quote, backslashes = text_bytes == _QUOTE, np.flatnonzero(text_bytes == _BACKSLASH)
    if not len(backslashes) and not is_quote.any():
        return None, None
    is_escape = np.zeros(len(text_bytes) + 1, np.bool_)
    if len(backslashes):
        is_run_start = np.append(True, np.diff(backslashes) != 1)
        run_starts = np.maximum.accumulate(np.where(is_run_start, backslashes, 0))
        is_escape[backslashes[(backslashes - run_starts) % 2 == 0]] = True
        is_quote[1:] &= ~is_escape[:-2]
    # The sum overflows from 255 to 0. That does not change whether it is odd.
    is_quoted = np.cumsum(is_quote, dtype=np.uint8) & 1 == 1
    if is_quoted[closing_positions].any():
        raise ValueError("not an array")
    return ~is_quoted & ~is_quote, ~is_quote & ~is_escape[:-1]


def _find_element_delimiters(
    text_bytes: TextBytes, is_unquoted: Mask | None, array_count: int, delimiter: int
) -> tuple[Positions, Positions]:
    """Return the positions of the brace or delimiter before and after each element of `array_count` arrays."""
    is_opening, is_closing = text_bytes == _OPEN, text_bytes == _CLOSE
    is_delimiter = is_opening | is_closing | (text_bytes == delimiter)
    if is_unquoted is not None:
        is_opening, is_delimiter = is_opening & is_unquoted, is_delimiter & is_unquoted
    delimiter_positions = np.flatnonzero(is_delimiter)
    if np.count_nonzero(is_opening) != array_count:
        raise ValueError("an array of more than one dimension")
    if not array_count:
        return delimiter_positions, delimiter_positions
    left_delimiters, right_delimiters = delimiter_positions[:-1], delimiter_positions[1:]
    is_between_arrays = text_bytes[left_delimiters] == _CLOSE
    if (is_between_arrays != (text_bytes[right_delimiters] == _OPEN)).any() or text_bytes[
        delimiter_positions[-1]
    ] != _CLOSE:
        raise ValueError("not an array")
    # Two adjacent braces have no element between them. An element that is an empty text would have quotes.
    has_element = ~is_between_arrays & ~(
        (right_delimiters == left_delimiters + 1)
        & (text_bytes[left_delimiters] == _OPEN)
        & (text_bytes[right_delimiters] == _CLOSE)
    )
    return left_delimiters[has_element], right_delimiters[has_element]


def _unquote_elements(
    text_bytes: TextBytes, is_value: Mask | None, starts: Positions, ends: Positions
) -> pa.Array:
    """Return the elements as binary values, without quotes and backslashes; an unquoted NULL becomes NULL."""
    is_null = (ends - starts == len(_NULL)) & (
        text_bytes[np.minimum(starts, len(text_bytes) - 1)] == _NULL[0]
    )
    for byte_index in range(1, len(_NULL)):
        candidates = np.flatnonzero(is_null)
        is_null[candidates] = text_bytes[starts[candidates] + byte_index] == _NULL[byte_index]
    if is_value is not None:
        value_byte_counts = np.zeros(len(text_bytes) + 1, np.int64)
        np.cumsum(is_value, out=value_byte_counts[1:])
        text_bytes, starts, ends = text_bytes[is_value], value_byte_counts[starts], value_byte_counts[ends]
    return _gather_elements(pa.py_buffer(text_bytes), starts, ends, is_null)


def _gather_elements(buffer: pa.Buffer, starts: Positions, ends: Positions, is_null: Mask) -> pa.Array:
    bounds = np.empty((len(starts), 2), np.int32)
    bounds[:, 0], bounds[:, 1] = starts, np.where(is_null, starts, ends)
    values = gather(buffer, bounds.reshape(-1))
    if not is_null.any():
        return values
    return pa.Array.from_buffers(pa.binary(), len(values), [pack_bitmap(~is_null), *values.buffers()[1:]])


def _build_lists(
    target: pa.DataType, is_valid: Mask, offsets: npt.NDArray[np.int32], elements: pa.Array
) -> pa.Array:
    validity = None if is_valid.all() else pack_bitmap(is_valid)
    return pa.Array.from_buffers(
        target, len(is_valid), [validity, pa.py_buffer(offsets)], children=[elements.cast(target.value_type)]
    )


def print_lists(lists: pa.Array, elements: pa.Array, delimiter: str) -> pa.Array:
    """Print lists as array_out does.

    `elements` has the texts of the elements of all lists, in the order of `lists.flatten()`.
    """
    special_pattern = rf'^$|["\\{{}}{delimiter} \t\n\v\f\r]|^(?i:null)$'
    escaped_elements = pc.replace_substring(pc.replace_substring(elements, "\\", "\\\\"), '"', '\\"')
    quoted_elements = pc.binary_join_element_wise('"', escaped_elements, '"', "")
    element_texts = pc.if_else(
        pc.match_substring_regex(elements, special_pattern), quoted_elements, elements
    ).fill_null("NULL")
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.asarray(lists.value_lengths().fill_null(0)), out=offsets[1:])
    list_contents = pc.binary_join(pa.ListArray.from_arrays(offsets, element_texts), delimiter)
    return pc.if_else(lists.is_valid(), pc.binary_join_element_wise("{", list_contents, "}", ""), None)


_HEADER_BYTES = 12  # The number of dimensions, the flags, and the type of the elements.
_DIMENSION_BYTES = 8  # The size and the lower bound of a dimension.
_LENGTH_BYTES = 4
_NULL_LENGTH = -1


@dataclass(frozen=True, slots=True)
class ArraySendConverter:
    """Converts arrays in binary format. `element_converter` converts the elements, which have the type `element_oid`."""

    element_oid: int
    element_converter: Converter

    def __call__(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        """Convert arrays (binary) to lists."""
        is_valid = np.asarray(values.is_valid())
        octets = Octets(values.cast(pa.binary()).drop_null())
        counts = self._count_elements(octets)
        positions = octets.starts + np.where(counts > 0, _HEADER_BYTES + _DIMENSION_BYTES, _HEADER_BYTES)
        elements = _read_elements(octets, positions, counts)
        offsets = np.zeros(len(values) + 1, np.int32)
        offsets[1:][is_valid] = counts
        np.cumsum(offsets, out=offsets)
        return _build_lists(target, is_valid, offsets, self.element_converter(elements, target.value_type))

    def _count_elements(self, octets: Octets) -> Positions:
        """Return the number of elements of each array."""
        sizes = octets.ends - octets.starts
        dimension_counts = octets.read_integers(octets.starts) >> 32
        is_empty = dimension_counts == 0
        min_sizes = np.where(is_empty, _HEADER_BYTES, _HEADER_BYTES + _DIMENSION_BYTES)
        element_oids = octets.read_integers(octets.starts + 8) >> 32
        if (sizes < min_sizes).any() or (element_oids != self.element_oid).any():
            raise ProtocolError("a value in binary format is not an array of its type", sqlstate="22P03")
        sizes_and_bounds = octets.read_integers(octets.starts + _HEADER_BYTES)
        if (dimension_counts > 1).any() or ((sizes_and_bounds & 0xFFFFFFFF != 1) & ~is_empty).any():
            raise ValueError("not an array that a list can represent")
        counts = np.where(is_empty, 0, sizes_and_bounds >> 32).astype(np.int64)
        if (counts * _LENGTH_BYTES > sizes - min_sizes).any():
            raise ProtocolError("a value in binary format has fewer elements than it says", sqlstate="22P03")
        return counts


def _read_elements(octets: Octets, positions: Positions, counts: Positions) -> pa.Array:
    """Return the elements as binary values; in the arrays each element follows its length."""
    first_indexes = np.cumsum(counts) - counts
    starts = np.repeat(positions, counts) + _LENGTH_BYTES
    lengths = np.full(len(starts), _NULL_LENGTH, np.int64)
    if not _fill_equal_lengths(octets, positions, counts, starts, lengths):
        current_positions, array_indexes = positions.copy(), np.flatnonzero(counts > 0)
        for index_in_array in range(int(counts.max(initial=0))):
            array_indexes = array_indexes[counts[array_indexes] > index_in_array]
            current_lengths = _read_lengths(octets, current_positions[array_indexes])
            (
                starts[first_indexes[array_indexes] + index_in_array],
                lengths[first_indexes[array_indexes] + index_in_array],
            ) = (
                current_positions[array_indexes] + _LENGTH_BYTES,
                current_lengths,
            )
            current_positions[array_indexes] += _LENGTH_BYTES + np.maximum(current_lengths, 0)
        if (current_positions != octets.ends).any() or (lengths < _NULL_LENGTH).any():
            raise ProtocolError(
                "a value in binary format does not end where its last element ends", sqlstate="22P03"
            )
    return _gather_elements(octets.buffer, starts, starts + np.maximum(lengths, 0), lengths == _NULL_LENGTH)


def _read_lengths(octets: Octets, positions: Positions) -> Positions:
    return (octets.read_integers(positions) >> 32).astype(np.uint32).view(np.int32).astype(np.int64)


def _fill_equal_lengths(
    octets: Octets, positions: Positions, counts: Positions, starts: Positions, lengths: Positions
) -> bool:
    """Fill in `starts` and `lengths` if all elements have the same length, for example if they are numbers.

    Returns whether all elements have the same length. The function has no loop over the elements.
    """
    if not len(starts):
        return bool((positions == octets.ends).all())
    length = int(_read_lengths(octets, starts[:1] - _LENGTH_BYTES)[0])
    element_size = _LENGTH_BYTES + length
    if length < 0 or (positions + counts * element_size != octets.ends).any():
        return False
    index_in_array = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
    equal_starts = starts + index_in_array * element_size
    if (_read_lengths(octets, equal_starts - _LENGTH_BYTES) != length).any():
        return False
    starts[:], lengths[:] = equal_starts, length
    return True
