"""The output functions of arrays, composites, ranges and multiranges, for values in binary format.

In: the bytes that a type's send function returns. Out: the text that its output function prints. This takes three
steps:

1. Each value is split into its parts, such as the elements of an array.
2. The parts of all values are converted to text together, one column for each type.
3. Each value is assembled from the texts of its parts.

Raises ProtocolError for bytes that are not a value of the type.

Source: array_out() in src/backend/utils/adt/arrayfuncs.c, record_out() in rowtypes.c, range_deparse() in
rangetypes.c, multirange_out() in multirangetypes.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from pgsieve.decoding.binary.cursor import Cursor

#: A function that prints binary values as strings. Its second argument is the oid of their type. NULL stays NULL.
PartPrinter: TypeAlias = Callable[[pa.Array, int], pa.Array]
#: A function that assembles a value from the texts of its parts. Each call takes the next texts. So each of these
#: functions must be called once, in the order in which the values were split.
Assembler: TypeAlias = Callable[[], str]

_MAX_DIMENSIONS = 6  # MAXDIM
_EMPTY_RANGE, _LOWER_CLOSED, _UPPER_CLOSED, _NO_LOWER, _NO_UPPER = 0x01, 0x02, 0x04, 0x08, 0x10


@dataclass(slots=True)
class Parts:
    """The parts of all values of a column, by the oid of their type. After `print` it also has the texts of the parts."""

    values: dict[int, list[bytes]] = field(default_factory=dict)
    texts: dict[int, Iterator[str]] = field(default_factory=dict)

    def add(self, type_oid: int, value: bytes) -> Assembler:
        """Add a part, and return a function that later returns its text."""
        self.values.setdefault(type_oid, []).append(value)
        return lambda: next(self.texts[type_oid])

    def print(self, printer: PartPrinter) -> None:
        """Print all parts."""
        for type_oid, values in self.values.items():
            self.texts[type_oid] = iter(printer(pa.array(values, pa.binary()), type_oid).to_pylist())


#: A function that splits a value into parts, and returns the function that assembles the value's text.
Splitter: TypeAlias = Callable[[bytes, Parts], Assembler]


def print_values(values: pa.Array, split: Splitter, printer: PartPrinter) -> pa.Array:
    """Print a column of binary values: `split` splits a value, and `printer` prints parts."""
    parts = Parts()
    assemblers = [None if v is None else split(v, parts) for v in values.to_pylist()]
    parts.print(printer)
    return pa.array([None if a is None else a() for a in assemblers], pa.string())


def _quote(text: str, special_pattern: re.Pattern[str], escape: str) -> str:
    r"""Put text between quotes if it is empty, or if `special_pattern` matches a part of it.

    `escape` is written before each `\` and `"` in the text. If it is '', these characters are doubled instead.
    """
    if text and not special_pattern.search(text):
        return text
    return '"' + re.sub(r'["\\]', lambda match: (escape or match[0]) + match[0], text) + '"'


# --- arrays ------------------------------------------------------------------------------


def split_array(value: bytes, parts: Parts, delimiter: str = ",") -> Assembler:
    """Split an array into its dimensions with their bounds, and its elements."""
    cursor = Cursor(value, "array")
    dimension_count = cursor.i32("a number of dimensions")
    if not 0 <= dimension_count <= _MAX_DIMENSIONS:
        cursor.fail("at most 6 dimensions", bytes_before=4)
    cursor.i32("flags")
    element_oid = cursor.u32("an element's type")
    dimensions = [(cursor.i32("a size"), cursor.i32("a lower bound")) for _ in range(dimension_count)]
    element_count = 1 if dimensions else 0
    for size, _ in dimensions:
        element_count = cursor.check_count(element_count * size, "elements", item_size=4)
    elements = [_take_length_prefixed(cursor, element_oid, parts) for _ in range(element_count)]
    cursor.expect_end()
    bounds_prefix = ""
    if any(lower_bound != 1 for _, lower_bound in dimensions):
        bounds_prefix = (
            "".join(f"[{lower_bound}:{lower_bound + size - 1}]" for size, lower_bound in dimensions) + "="
        )
    special_pattern = re.compile(rf'["\\{{}}{delimiter}\s]|^NULL$', re.IGNORECASE | re.ASCII)

    def assemble() -> str:
        texts = ["NULL" if e is None else _quote(e(), special_pattern, "\\") for e in elements]
        for size, _ in reversed(dimensions[1:]):
            texts = [
                "{" + delimiter.join(texts[index : index + size]) + "}"
                for index in range(0, len(texts), size)
            ]
        return bounds_prefix + "{" + delimiter.join(texts) + "}"

    return assemble


def _take_length_prefixed(cursor: Cursor, type_oid: int, parts: Parts) -> Assembler | None:
    """Read a length and a value, and add the value to the parts; return None for NULL, which has the length -1."""
    size = cursor.i32("a length")
    return None if size == -1 else parts.add(type_oid, cursor.byten(size, "a value"))


def split_vector(value: bytes, parts: Parts) -> Assembler:
    """Split an int2vector or oidvector; its send function sends it like an array."""
    assemble = split_array(value, parts)
    return lambda: assemble().partition("{")[2][:-1].replace(",", " ")


# --- composites --------------------------------------------------------------------------

_COMPOSITE_SPECIAL = re.compile(r'["\\(),\s]', re.ASCII)


def split_composite(value: bytes, parts: Parts) -> Assembler:
    """Split a row into its fields; the bytes have the oid of each field's type."""
    cursor = Cursor(value, "composite")
    count = cursor.check_count(cursor.i32("a number of columns"), "columns", item_size=8)
    fields = [_take_length_prefixed(cursor, cursor.u32("a column's type"), parts) for _ in range(count)]
    cursor.expect_end()
    return lambda: (
        "(" + ",".join("" if f is None else _quote(f(), _COMPOSITE_SPECIAL, "") for f in fields) + ")"
    )


# --- ranges ------------------------------------------------------------------------------

_RANGE_SPECIAL = re.compile(r'["\\()\[\],\s]', re.ASCII)


def split_range(value: bytes, parts: Parts, subtype_oid: int) -> Assembler:
    """Split a range into its flags and its bounds."""
    cursor = Cursor(value, "range")
    flags = cursor.u8("flags")
    if flags & _EMPTY_RANGE:
        return lambda: "empty"
    lower_assembler = None if flags & _NO_LOWER else _take_length_prefixed(cursor, subtype_oid, parts)
    upper_assembler = None if flags & _NO_UPPER else _take_length_prefixed(cursor, subtype_oid, parts)
    cursor.expect_end()

    def print_bound(assemble: Assembler | None) -> str:
        return "" if assemble is None else _quote(assemble(), _RANGE_SPECIAL, "")

    opening, closing = "[" if flags & _LOWER_CLOSED else "(", "]" if flags & _UPPER_CLOSED else ")"
    return lambda: f"{opening}{print_bound(lower_assembler)},{print_bound(upper_assembler)}{closing}"


def split_multirange(value: bytes, parts: Parts, range_oid: int) -> Assembler:
    """Split a multirange into its ranges; in the bytes each range follows its length."""
    cursor = Cursor(value, "multirange")
    count = cursor.check_count(cursor.i32("a number of ranges"), "ranges", item_size=5)
    ranges = [parts.add(range_oid, cursor.length_prefixed("a range")) for _ in range(count)]
    cursor.expect_end()
    return lambda: "{" + ",".join(assemble() for assemble in ranges) + "}"
