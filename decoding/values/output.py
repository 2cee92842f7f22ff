"""PostgreSQL's output functions over values in binary format: bytes of a send function in, text out.

One table maps types to functions; other types consist of these, or are users' types. The text is that of a
session with DateStyle ISO, IntervalStyle postgres, TimeZone UTC, extra_float_digits 3, bytea_output hex and
client encoding UTF8. Common types are printed by columns; of rarer types, each distinct value is printed
once.

Raises NoOutputError for a type whose text cannot be made from its bytes alone: money depends on the server's
locale, regclass and similar types on its catalog, and types of extensions have send functions of their own.
Raises ProtocolError for bytes that are no value of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, fixed_width, gathered, without_nulls
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.values import numeric, output_containers, output_datetimes, output_values
from pgsieve.decoding.values.builtin_types import BOX_ARRAY, MADE, NONE_DEFINED, DefinedTypes, MadeOf
from pgsieve.decoding.values.output_containers import TakeApart
from pgsieve.decoding.values.output_numbers import float4_text, float8_text

Output: TypeAlias = Callable[[pa.Array], pa.Array]


#: pg_lsn as servers from 19 on print it; the `defined` types of such a server contain this entry.
PADDED: DefinedTypes = MappingProxyType({3220: MadeOf("b", 0)})


class NoOutputError(Exception):
    """The text of a type's values cannot be made from their binary format."""


def text_of(values: pa.Array, type_oid: int, defined: DefinedTypes = NONE_DEFINED) -> pa.Array:
    """Print binary values of a type as strings; `defined` are users' types. NULL stays NULL."""
    if type_oid in PADDED and type_oid in defined:
        return _each(output_values.padded_lsn)(values)
    if type_oid in _OUTPUTS:
        return _OUTPUTS[type_oid](values)
    made = MADE.get(type_oid) or defined.get(type_oid)
    if made is None:
        raise NoOutputError
    if made.kind == "e":
        return _text(values)
    if made.kind == "d":
        return text_of(values, made.of, defined)
    return output_containers.printed(values, _take_apart(type_oid, made), partial(text_of, defined=defined))


def _take_apart(type_oid: int, made: MadeOf) -> TakeApart:
    match made.kind:
        case "a":
            return partial(output_containers.array, delimiter=";" if type_oid == BOX_ARRAY else ",")
        case "c":
            return output_containers.composite
        case "r":
            return partial(output_containers.bounds, subtype=made.of)
        case _:
            return partial(output_containers.ranges, range_type=made.of)


def has_output(type_oid: int) -> bool:
    """Whether the text of a built-in type can be made from its binary format."""
    made = MADE.get(type_oid)
    return type_oid in _OUTPUTS or (made is not None and (made.kind != "a" or has_output(made.of)))


def _text(values: pa.Array) -> pa.Array:
    return values.cast(pa.binary()).cast(pa.string())


def _each(function: Callable[[bytes], str]) -> Output:
    """Print each distinct value once."""

    def output(values: pa.Array) -> pa.Array:
        encoded = values.cast(pa.binary()).dictionary_encode()
        return pa.array(map(function, encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)

    return output


def _integers(layout: str) -> Output:
    def output(values: pa.Array) -> pa.Array:
        numbers, valid = fixed_width(values.cast(pa.binary()), layout)
        return pa.array(numbers, mask=~valid).cast(pa.string())

    return output


def _floats(layout: str, function: Callable[[float], str]) -> Output:
    def output(values: pa.Array) -> pa.Array:
        numbers, valid = fixed_width(values.cast(pa.binary()), layout)
        pairs = zip(numbers.tolist(), valid.tolist(), strict=True)
        return pa.array([function(n) if is_valid else None for n, is_valid in pairs], pa.string())

    return output


def _booleans(values: pa.Array) -> pa.Array:
    numbers, valid = fixed_width(values.cast(pa.binary()), "u1")
    return pa.array(["f", "t"]).take(pa.array(np.minimum(numbers, 1), mask=~valid))


def _versioned(values: pa.Array) -> pa.Array:
    return without_nulls(values, _after_version)


def _after_version(sent: pa.Array) -> pa.Array:
    """Print jsonb or jsonpath: the text after a byte for the version, which is 1."""
    octets = Octets(sent)
    if (octets.words(octets.starts) >> 56 != 1).any() or (octets.starts == octets.ends).any():
        raise ProtocolError("a value in binary format is of another version than 1", sqlstate="22P03")
    bounds = np.stack([octets.starts + 1, octets.ends], axis=1).astype(np.int32)
    return gathered(octets.buffer, bounds.reshape(-1)).cast(pa.string())


_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_DASHES = (8, 13, 18, 23)
_UUID_BYTES, _UUID_LETTERS = 16, 36


def _uuids(values: pa.Array) -> pa.Array:
    return without_nulls(values, _uuid_letters)


def _uuid_letters(sent: pa.Array) -> pa.Array:
    octets = Octets(sent)
    count = len(sent)
    if (octets.ends - octets.starts != _UUID_BYTES).any():
        raise ProtocolError(f"a value in binary format does not have {_UUID_BYTES} bytes", sqlstate="22P03")
    read = np.frombuffer(octets.buffer, np.uint8).reshape(count, _UUID_BYTES)
    letters = np.full((count, _UUID_LETTERS), ord("-"), np.uint8)
    digits = np.stack([_HEX[read >> 4], _HEX[read & 15]], axis=2).reshape(count, -1)
    letters[:, [place for place in range(_UUID_LETTERS) if place not in _DASHES]] = digits
    offsets = np.arange(0, _UUID_LETTERS * (count + 1), _UUID_LETTERS, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(letters)])


def _vectors(values: pa.Array) -> pa.Array:
    return output_containers.printed(values, output_containers.vector, text_of)


_TEXTS = (19, 25, 114, 142, 1042, 1043, 1790)  # name, text, json, xml, char(n), varchar, refcursor

_OUTPUTS: Mapping[int, Output] = MappingProxyType(
    {
        **dict.fromkeys(_TEXTS, _text),
        16: _booleans,
        17: _each(output_values.hexadecimal),
        18: _each(output_values.char),
        20: _integers(">i8"),
        21: _integers(">i2"),
        22: _vectors,
        23: _integers(">i4"),
        26: _integers(">u4"),
        27: _each(output_values.tid),
        28: _integers(">u4"),
        29: _integers(">u4"),
        30: _vectors,
        600: _each(output_values.point),
        601: _each(output_values.lseg),
        602: _each(output_values.path),
        603: _each(output_values.box),
        604: _each(output_values.polygon),
        628: _each(output_values.line),
        650: _each(output_values.inet),
        700: _floats(">f4", float4_text),
        701: _floats(">f8", float8_text),
        718: _each(output_values.circle),
        774: _each(output_values.macaddr),
        829: _each(output_values.macaddr),
        869: _each(output_values.inet),
        1082: _each(output_datetimes.date),
        1083: _each(output_datetimes.time),
        1114: _each(output_datetimes.timestamp),
        1184: _each(output_datetimes.timestamptz),
        1186: _each(output_datetimes.interval),
        1266: _each(output_datetimes.timetz),
        1560: _each(output_values.bit),
        1562: _each(output_values.bit),
        1700: numeric.text_from_send,
        2950: _uuids,
        2970: _each(output_values.snapshot),
        3220: _each(output_values.lsn),
        3614: _each(output_values.tsvector),
        3615: _each(output_values.tsquery),
        3802: _versioned,
        4072: _versioned,
        5038: _each(output_values.snapshot),
        5069: _integers(">u8"),
        6437: _integers(">u8"),
    }
)
