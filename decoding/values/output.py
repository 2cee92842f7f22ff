"""PostgreSQL's output functions for values in binary format.

In: the bytes that a type's send function returns. Out: the text that the type's output function prints in a session
with DateStyle ISO, IntervalStyle postgres, TimeZone UTC, extra_float_digits 3, bytea_output hex and client encoding
UTF8.

One table maps built-in types to functions. Arrays, ranges and users' types consist of these types. Text, integers,
booleans, numeric, JSON and uuid are printed a whole column at a time. Real and double precision are printed value by
value. For most other types, a function is called once for each distinct value.

Raises ProtocolError for bytes that are not a value of the type. Raises NoOutputError for a type whose bytes do not
determine the text:

- The text of money depends on the server's locale.
- The text of regclass and similar types depends on the server's catalog.
- Types of extensions have send functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, convert_valid, gather, read_fixed_width
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.values import numeric, output_containers, output_datetimes, output_values
from pgsieve.decoding.values.builtin_types import (
    BOX_ARRAY_OID,
    DERIVED_TYPES,
    NO_DEFINED_TYPES,
    DerivedType,
    DerivedTypesByOid,
)
from pgsieve.decoding.values.output_containers import Splitter
from pgsieve.decoding.values.output_numbers import print_float4, print_float8

ColumnPrinter: TypeAlias = Callable[[pa.Array], pa.Array]


#: For a server from version 19 on, a caller adds this entry to `defined_types`. The entry stands for no type: it only
#: says that the server pads pg_lsn with zeros.
PADDED_LSN: DerivedTypesByOid = MappingProxyType({3220: DerivedType("b", 0)})


class NoOutputError(Exception):
    """The binary format of a type's values does not determine their text."""


def print_binary(
    values: pa.Array, type_oid: int, defined_types: DerivedTypesByOid = NO_DEFINED_TYPES
) -> pa.Array:
    """Print binary values of a type as strings; NULL stays NULL.

    `defined_types` has the users' types that the type may consist of.
    """
    if type_oid in PADDED_LSN and type_oid in defined_types:
        return _make_distinct_printer(output_values.print_padded_lsn)(values)
    if type_oid in _PRINTER_BY_OID:
        return _PRINTER_BY_OID[type_oid](values)
    derived_type = DERIVED_TYPES.get(type_oid) or defined_types.get(type_oid)
    if derived_type is None:
        raise NoOutputError
    if derived_type.kind == "e":
        return _print_text(values)
    if derived_type.kind == "d":
        return print_binary(values, derived_type.underlying_oid, defined_types)
    return output_containers.print_values(
        values, _choose_splitter(type_oid, derived_type), partial(print_binary, defined_types=defined_types)
    )


def _choose_splitter(type_oid: int, derived_type: DerivedType) -> Splitter:
    match derived_type.kind:
        case "a":
            return partial(output_containers.split_array, delimiter=";" if type_oid == BOX_ARRAY_OID else ",")
        case "c":
            return output_containers.split_composite
        case "r":
            return partial(output_containers.split_range, subtype_oid=derived_type.underlying_oid)
        case _:
            return partial(output_containers.split_multirange, range_oid=derived_type.underlying_oid)


def has_output(type_oid: int) -> bool:
    """Whether the text of a built-in type can be printed from its binary format alone."""
    derived_type = DERIVED_TYPES.get(type_oid)
    return type_oid in _PRINTER_BY_OID or (
        derived_type is not None and (derived_type.kind != "a" or has_output(derived_type.underlying_oid))
    )


def _print_text(values: pa.Array) -> pa.Array:
    return values.cast(pa.binary()).cast(pa.string())


def _make_distinct_printer(print_value: Callable[[bytes], str]) -> ColumnPrinter:
    """Return an output function of columns that calls `print_value` once for each distinct value."""

    def print_column(values: pa.Array) -> pa.Array:
        dictionary = values.cast(pa.binary()).dictionary_encode()
        return pa.array(map(print_value, dictionary.dictionary.to_pylist()), pa.string()).take(
            dictionary.indices
        )

    return print_column


def _make_integer_printer(layout: str) -> ColumnPrinter:
    def print_column(values: pa.Array) -> pa.Array:
        numbers, is_valid = read_fixed_width(values.cast(pa.binary()), layout)
        return pa.array(numbers, mask=~is_valid).cast(pa.string())

    return print_column


def _make_float_printer(layout: str, print_number: Callable[[float], str]) -> ColumnPrinter:
    def print_column(values: pa.Array) -> pa.Array:
        numbers, valid = read_fixed_width(values.cast(pa.binary()), layout)
        pairs = zip(numbers.tolist(), valid.tolist(), strict=True)
        return pa.array([print_number(n) if is_valid else None for n, is_valid in pairs], pa.string())

    return print_column


def _print_booleans(values: pa.Array) -> pa.Array:
    numbers, is_valid = read_fixed_width(values.cast(pa.binary()), "u1")
    return pa.array(["f", "t"]).take(pa.array(np.minimum(numbers, 1), mask=~is_valid))


def _print_json(values: pa.Array) -> pa.Array:
    return convert_valid(values, _print_versioned_text)


def _print_versioned_text(binary: pa.Array) -> pa.Array:
    """Print jsonb or jsonpath: a version byte, which must be 1, and the text."""
    octets = Octets(binary)
    if (octets.read_integers(octets.starts) >> 56 != 1).any() or (octets.starts == octets.ends).any():
        raise ProtocolError("a value in binary format does not have version 1", sqlstate="22P03")
    bounds = np.stack([octets.starts + 1, octets.ends], axis=1).astype(np.int32)
    return gather(octets.buffer, bounds.reshape(-1)).cast(pa.string())


_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_DASH_POSITIONS = (8, 13, 18, 23)
_UUID_BYTES, _UUID_LETTERS = 16, 36


def _print_uuids(values: pa.Array) -> pa.Array:
    return convert_valid(values, _print_valid_uuids)


def _print_valid_uuids(binary: pa.Array) -> pa.Array:
    octets = Octets(binary)
    count = len(binary)
    if (octets.ends - octets.starts != _UUID_BYTES).any():
        raise ProtocolError(f"a value in binary format does not have {_UUID_BYTES} bytes", sqlstate="22P03")
    octet_values = np.frombuffer(octets.buffer, np.uint8).reshape(count, _UUID_BYTES)
    letters = np.full((count, _UUID_LETTERS), ord("-"), np.uint8)
    digits = np.stack([_HEX[octet_values >> 4], _HEX[octet_values & 15]], axis=2).reshape(count, -1)
    letters[:, [index for index in range(_UUID_LETTERS) if index not in _DASH_POSITIONS]] = digits
    offsets = np.arange(0, _UUID_LETTERS * (count + 1), _UUID_LETTERS, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(letters)])


def _print_vectors(values: pa.Array) -> pa.Array:
    return output_containers.print_values(values, output_containers.split_vector, print_binary)


_TEXT_OIDS = (19, 25, 114, 142, 1042, 1043, 1790)  # name, text, json, xml, char(n), varchar, refcursor

_PRINTER_BY_OID: Mapping[int, ColumnPrinter] = MappingProxyType(
    {
        **dict.fromkeys(_TEXT_OIDS, _print_text),
        16: _print_booleans,
        17: _make_distinct_printer(output_values.print_bytea),
        18: _make_distinct_printer(output_values.print_char),
        20: _make_integer_printer(">i8"),
        21: _make_integer_printer(">i2"),
        22: _print_vectors,
        23: _make_integer_printer(">i4"),
        26: _make_integer_printer(">u4"),
        27: _make_distinct_printer(output_values.print_tid),
        28: _make_integer_printer(">u4"),
        29: _make_integer_printer(">u4"),
        30: _print_vectors,
        600: _make_distinct_printer(output_values.print_point),
        601: _make_distinct_printer(output_values.print_lseg),
        602: _make_distinct_printer(output_values.print_path),
        603: _make_distinct_printer(output_values.print_box),
        604: _make_distinct_printer(output_values.print_polygon),
        628: _make_distinct_printer(output_values.print_line),
        650: _make_distinct_printer(output_values.print_inet),
        700: _make_float_printer(">f4", print_float4),
        701: _make_float_printer(">f8", print_float8),
        718: _make_distinct_printer(output_values.print_circle),
        774: _make_distinct_printer(output_values.print_macaddr),
        829: _make_distinct_printer(output_values.print_macaddr),
        869: _make_distinct_printer(output_values.print_inet),
        1082: _make_distinct_printer(output_datetimes.print_date),
        1083: _make_distinct_printer(output_datetimes.print_time),
        1114: _make_distinct_printer(output_datetimes.print_timestamp),
        1184: _make_distinct_printer(output_datetimes.print_timestamptz),
        1186: _make_distinct_printer(output_datetimes.print_interval),
        1266: _make_distinct_printer(output_datetimes.print_timetz),
        1560: _make_distinct_printer(output_values.print_bit),
        1562: _make_distinct_printer(output_values.print_bit),
        1700: numeric.print_binary,
        2950: _print_uuids,
        2970: _make_distinct_printer(output_values.print_snapshot),
        3220: _make_distinct_printer(output_values.print_lsn),
        3614: _make_distinct_printer(output_values.print_tsvector),
        3615: _make_distinct_printer(output_values.print_tsquery),
        3802: _print_json,
        4072: _print_json,
        5038: _make_distinct_printer(output_values.print_snapshot),
        5069: _make_integer_printer(">u8"),
        6437: _make_integer_printer(">u8"),
    }
)
