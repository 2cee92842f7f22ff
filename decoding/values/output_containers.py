"""The output functions of arrays, composites, ranges and multiranges: bytes in, text out.

These values are taken apart and assembled one at a time. The values inside are printed together, one column
per type, by the printer for the type's oid. Raises ProtocolError for bytes that are no value of the type.
Source: array_out in src/backend/utils/adt/arrayfuncs.c, record_out in rowtypes.c, range_deparse in
rangetypes.c, multirange_out in multirangetypes.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from pgsieve.decoding.binary.cursor import Cursor

#: Prints binary values of the type with this oid as strings; NULL stays NULL.
Print: TypeAlias = Callable[[pa.Array, int], pa.Array]
#: Assembles a value from the texts of its parts. Call each once, in the order in which the values were taken
#: apart.
Assemble: TypeAlias = Callable[[], str]

_MOST_DIMENSIONS = 6  # MAXDIM
_EMPTY, _LOWER_CLOSED, _UPPER_CLOSED, _NO_LOWER, _NO_UPPER = 0x01, 0x02, 0x04, 0x08, 0x10


@dataclass(slots=True)
class Parts:
    """The parts of a column's values by the oid of their type, and their texts once they are printed."""

    values: dict[int, list[bytes]] = field(default_factory=dict)
    texts: dict[int, Iterator[str]] = field(default_factory=dict)

    def take(self, type_oid: int, value: bytes) -> Assemble:
        """Keep a part to be printed; return a function that gives its text."""
        self.values.setdefault(type_oid, []).append(value)
        return lambda: next(self.texts[type_oid])

    def print(self, printer: Print) -> None:
        """Print the kept parts."""
        for type_oid, values in self.values.items():
            self.texts[type_oid] = iter(printer(pa.array(values, pa.binary()), type_oid).to_pylist())


#: Takes a value apart, and returns the function that assembles its text.
TakeApart: TypeAlias = Callable[[bytes, Parts], Assemble]


def printed(values: pa.Array, take_apart: TakeApart, printer: Print) -> pa.Array:
    """Print a column of binary values."""
    parts = Parts()
    assemble = [None if v is None else take_apart(v, parts) for v in values.to_pylist()]
    parts.print(printer)
    return pa.array([None if a is None else a() for a in assemble], pa.string())


def _quoted(text: str, special: re.Pattern[str], escape: str) -> str:
    r"""Put text between quotes if necessary.

    In quotes, `escape` precedes each `\` and `"`, or they are doubled.
    """
    if text and not special.search(text):
        return text
    return '"' + re.sub(r'["\\]', lambda match: (escape or match[0]) + match[0], text) + '"'


# --- arrays ------------------------------------------------------------------------------


def array(value: bytes, parts: Parts, delimiter: str = ",") -> Assemble:
    """Take an array apart: its dimensions with their bounds, and its elements."""
    cursor = Cursor(value, "array")
    count = cursor.i32("a number of dimensions")
    if not 0 <= count <= _MOST_DIMENSIONS:
        cursor.fail("at most 6 dimensions", back=4)
    cursor.i32("flags")
    element = cursor.u32("an element's type")
    bounds = [(cursor.i32("a size"), cursor.i32("a lower bound")) for _ in range(count)]
    total = 1 if bounds else 0
    for size, _ in bounds:
        total = cursor.fits(total * size, "elements", item_size=4)
    elements = [_sized(cursor, element, parts) for _ in range(total)]
    cursor.end()
    shown = ""
    if any(low != 1 for _, low in bounds):
        shown = "".join(f"[{low}:{low + size - 1}]" for size, low in bounds) + "="
    special = re.compile(rf'["\\{{}}{delimiter}\s]|^NULL$', re.IGNORECASE | re.ASCII)

    def assemble() -> str:
        texts = ["NULL" if e is None else _quoted(e(), special, "\\") for e in elements]
        for size, _ in reversed(bounds[1:]):
            texts = ["{" + delimiter.join(texts[at : at + size]) + "}" for at in range(0, len(texts), size)]
        return shown + "{" + delimiter.join(texts) + "}"

    return assemble


def _sized(cursor: Cursor, type_oid: int, parts: Parts) -> Assemble | None:
    """Read a value with its length, -1 for NULL."""
    size = cursor.i32("a length")
    return None if size == -1 else parts.take(type_oid, cursor.byten(size, "a value"))


def vector(value: bytes, parts: Parts) -> Assemble:
    """Take an int2vector or oidvector apart; it is sent as an array."""
    assemble = array(value, parts)
    return lambda: assemble().partition("{")[2][:-1].replace(",", " ")


# --- composites --------------------------------------------------------------------------

_COMPOSITE_SPECIAL = re.compile(r'["\\(),\s]', re.ASCII)


def composite(value: bytes, parts: Parts) -> Assemble:
    """Take a row apart; each field comes with the oid of its type."""
    cursor = Cursor(value, "composite")
    count = cursor.fits(cursor.i32("a number of columns"), "columns", item_size=8)
    fields = [_sized(cursor, cursor.u32("a column's type"), parts) for _ in range(count)]
    cursor.end()
    return lambda: (
        "(" + ",".join("" if f is None else _quoted(f(), _COMPOSITE_SPECIAL, "") for f in fields) + ")"
    )


# --- ranges ------------------------------------------------------------------------------

_RANGE_SPECIAL = re.compile(r'["\\()\[\],\s]', re.ASCII)


def bounds(value: bytes, parts: Parts, subtype: int) -> Assemble:
    """Take a range apart: its flags and its bounds."""
    cursor = Cursor(value, "range")
    flags = cursor.u8("flags")
    if flags & _EMPTY:
        return lambda: "empty"
    lower = None if flags & _NO_LOWER else _sized(cursor, subtype, parts)
    upper = None if flags & _NO_UPPER else _sized(cursor, subtype, parts)
    cursor.end()

    def bound(assemble: Assemble | None) -> str:
        return "" if assemble is None else _quoted(assemble(), _RANGE_SPECIAL, "")

    opening, closing = "[" if flags & _LOWER_CLOSED else "(", "]" if flags & _UPPER_CLOSED else ")"
    return lambda: f"{opening}{bound(lower)},{bound(upper)}{closing}"


def ranges(value: bytes, parts: Parts, range_type: int) -> Assemble:
    """Take a multirange apart: its ranges, each after its length."""
    cursor = Cursor(value, "multirange")
    count = cursor.fits(cursor.i32("a number of ranges"), "ranges", item_size=5)
    inside = [parts.take(range_type, cursor.sized("a range")) for _ in range(count)]
    cursor.end()
    return lambda: "{" + ",".join(assemble() for assemble in inside) + "}"
