"""The output functions of the rarer built-in types, for values in binary format.

In: the bytes that a type's send function returns. Out: the text that the type's output function prints. Each function
prints one value, and raises ProtocolError for bytes that are not a value of the type.

Source: the send and output functions in src/backend/utils/adt: network.c (with src/port/inet_net_ntop.c),
mac.c, mac8.c, varbit.c, geo_ops.c, tsvector.c, tsquery.c, tid.c, pg_lsn.c, xid.c, xid8funcs.c, char.c,
bytea.c.
"""

from __future__ import annotations

import re
import struct
from functools import partial

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.values.output_numbers import print_float8

_IPV4, _IPV6 = 2, 3  # PGSQL_AF_INET, PGSQL_AF_INET6


def print_char(value: bytes) -> str:
    r"""Print a "char": the byte 0 as '', a byte outside ASCII as \ooo."""
    octet = Cursor(value, '"char"').u8("a byte")
    return f"\\{octet:03o}" if octet >= 0x80 else chr(octet) if octet else ""


def print_bytea(value: bytes) -> str:
    r"""Print a bytea with bytea_output hex."""
    return "\\x" + value.hex()


def print_lsn(value: bytes) -> str:
    """Print a pg_lsn."""
    number = Cursor(value, "pg_lsn").u64("an LSN")
    return f"{number >> 32:X}/{number & 0xFFFFFFFF:X}"


def print_padded_lsn(value: bytes) -> str:
    """Print a pg_lsn with eight digits after the slash, as servers from 19 on do."""
    high, _, low = print_lsn(value).partition("/")
    return f"{high}/{low:0>8}"


def print_tid(value: bytes) -> str:
    """Print a tid: the number of a tuple's block, and the number of the tuple in the block."""
    cursor = Cursor(value, "tid")
    return f"({cursor.u32('a block')},{cursor.u16('a place')})"


def print_snapshot(value: bytes) -> str:
    """Print a pg_snapshot or txid_snapshot."""
    cursor = Cursor(value, "snapshot")
    count = cursor.i32("a count")
    xmin, xmax = cursor.u64("xmin"), cursor.u64("xmax")
    xids = [str(cursor.u64("xid")) for _ in range(cursor.check_count(count, "transactions", item_size=8))]
    return f"{xmin}:{xmax}:{','.join(xids)}"


def print_bit(value: bytes) -> str:
    """Print a bit string."""
    cursor = Cursor(value, "bit")
    size = cursor.i32("a length")
    octets = cursor.byten(-(-size // 8), "bits")
    return "".join(f"{octet:08b}" for octet in octets)[:size]


def print_macaddr(value: bytes) -> str:
    """Print a macaddr or macaddr8."""
    return value.hex(":")


def print_inet(value: bytes) -> str:
    """Print an inet or cidr with its number of bits, which is left out for an inet of a single host."""
    cursor = Cursor(value, "inet")
    family, bits, is_cidr = cursor.u8("a family"), cursor.u8("bits"), cursor.u8("cidr or not")
    address = cursor.byten(cursor.u8("a size"), "an address")
    cursor.expect_end()
    if (family, len(address)) not in ((_IPV4, 4), (_IPV6, 16)):
        cursor.fail("an address of IPv4 or IPv6")
    text = ".".join(map(str, address)) if family == _IPV4 else _print_ipv6(address)
    return f"{text}/{bits}" if is_cidr or bits < 8 * len(address) else text


def _print_ipv6(address: bytes) -> str:
    """Print an IPv6 address.

    The longest run of zeros becomes `::`, the first run if several are longest. An embedded IPv4 address is printed
    with dots.
    """
    words = struct.unpack(">8H", address)
    runs = [(len(match[0]), -match.start()) for match in re.finditer("0{2,}", _make_zero_pattern(words))]
    size, start = max(runs, default=(0, 0))
    start = -start
    groups = [f"{word:x}" for word in words]
    if size and start == 0 and (size == 6 or (size == 5 and words[5] == 0xFFFF)):
        groups[6:] = [".".join(map(str, address[12:]))]
    if not size:
        return ":".join(groups)
    return f"{':'.join(groups[:start])}::{':'.join(groups[start + size :])}"


def _make_zero_pattern(words: tuple[int, ...]) -> str:
    return "".join("1" if word else "0" for word in words)


# --- geometric types --------------------------------------------------------------------


def _print_numbers(cursor: Cursor, count: int) -> list[str]:
    return [print_float8(struct.unpack(">d", cursor.byten(8, "a number"))[0]) for _ in range(count)]


def _print_points(cursor: Cursor, count: int) -> str:
    return ",".join(f"({','.join(_print_numbers(cursor, 2))})" for _ in range(count))


def print_geometric(value: bytes, count: int, template: str = "{}") -> str:
    """Print a point, lseg or box."""
    return template.format(_print_points(Cursor(value, "geometric"), count))


def print_line(value: bytes) -> str:
    """Print a line's A, B and C."""
    return "{" + ",".join(_print_numbers(Cursor(value, "line"), 3)) + "}"


def print_circle(value: bytes) -> str:
    """Print a circle."""
    cursor = Cursor(value, "circle")
    return f"<{_print_points(cursor, 1)},{_print_numbers(cursor, 1)[0]}>"


def print_polygon(value: bytes) -> str:
    """Print a polygon."""
    return _print_path(Cursor(value, "polygon"), "()")


def print_path(value: bytes) -> str:
    """Print a path: a closed path in round brackets, an open path in square brackets."""
    cursor = Cursor(value, "path")
    return _print_path(cursor, "()" if cursor.u8("closed or not") else "[]")


def _print_path(cursor: Cursor, brackets: str) -> str:
    count = cursor.check_count(cursor.i32("a count"), "points", item_size=16)
    return brackets[0] + _print_points(cursor, count) + brackets[1]


# --- text search -------------------------------------------------------------------------


def _print_lexeme(cursor: Cursor) -> str:
    return "'" + cursor.cstr("a lexeme").replace("'", "''").replace("\\", "\\\\") + "'"


def print_tsvector(value: bytes) -> str:
    """Print a tsvector: lexemes with their positions and weights."""
    cursor = Cursor(value, "tsvector")
    lexemes = []
    for _ in range(cursor.check_count(cursor.i32("a count"), "lexemes", item_size=3)):
        lexeme = _print_lexeme(cursor)
        entries = [cursor.u16("a place") for _ in range(cursor.u16("a count"))]
        positions = ",".join(f"{entry & 0x3FFF}{'DCBA'[entry >> 14]}".rstrip("D") for entry in entries)
        lexemes.append(f"{lexeme}:{positions}" if positions else lexeme)
    return " ".join(lexemes)


_QUERY_VALUE, _QUERY_OPERATOR = 1, 2
_NOT, _AND, _OR, _PHRASE = 1, 2, 3, 4
_PRIORITY = {_OR: 1, _AND: 2, _PHRASE: 3, _NOT: 4}


def print_tsquery(value: bytes) -> str:
    """Print a tsquery. Its bytes have the operator first, then the right operand, then the left operand."""
    cursor = Cursor(value, "tsquery")
    return _print_query(cursor, 0, is_in_phrase=False) if cursor.i32("a count") else ""


def _print_query(cursor: Cursor, outer_priority: int, *, is_in_phrase: bool) -> str:
    kind = cursor.u8("an item")
    if kind == _QUERY_VALUE:
        weights, prefix = cursor.u8("weights"), cursor.u8("prefix or not")
        lexeme = _print_lexeme(cursor)
        marks = "*" * bool(prefix) + "".join(letter for i, letter in enumerate("ABCD") if weights & 8 >> i)
        return f"{lexeme}:{marks}" if marks else lexeme
    if kind != _QUERY_OPERATOR:
        cursor.fail("an item", bytes_before=1)
    operator = cursor.u8("an operator")
    priority = _PRIORITY.get(operator) or cursor.fail("an operator", bytes_before=1)
    if operator == _NOT:
        text = "!" + _print_query(cursor, priority, is_in_phrase=False)
    else:
        sign = {_AND: "&", _OR: "|"}.get(operator, "<->")
        if operator == _PHRASE and (distance := cursor.u16("a distance")) != 1:
            sign = f"<{distance}>"
        right = _print_query(cursor, priority, is_in_phrase=operator == _PHRASE)
        text = f"{_print_query(cursor, priority, is_in_phrase=False)} {sign} {right}"
    return f"( {text} )" if priority < outer_priority or (operator == _PHRASE and is_in_phrase) else text


print_point = partial(print_geometric, count=1)
print_lseg = partial(print_geometric, count=2, template="[{}]")
print_box = partial(print_geometric, count=2)
