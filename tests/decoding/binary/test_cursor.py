"""The bounded reader, and the writer that mirrors it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.binary.writer import Writer
from pgsieve.decoding.errors import ProtocolError

NUMBERS = {
    "u8": (1, False),
    "i8": (1, True),
    "u16": (2, False),
    "i16": (2, True),
    "u32": (4, False),
    "i32": (4, True),
    "u64": (8, False),
    "i64": (8, True),
}
WRITABLE = sorted(set(NUMBERS) & set(dir(Writer)))


@pytest.mark.parametrize("method", NUMBERS)
@given(data=st.binary(min_size=8, max_size=8))
def test_numbers_are_big_endian(method, data):
    size, signed = NUMBERS[method]
    cursor = Cursor(data, "Begin")
    assert getattr(cursor, method)("a field") == int.from_bytes(data[:size], "big", signed=signed)
    assert (cursor.offset, cursor.remaining) == (size, 8 - size)


@pytest.mark.parametrize("method", NUMBERS)
def test_a_number_past_the_end_names_message_offset_and_field(method):
    size, _ = NUMBERS[method]
    cursor = Cursor(bytes(3 + size - 1), "Begin", offset=3)
    expected = (
        f"malformed Begin message at offset 3: expected final LSN of {size} byte(s)?, but {size - 1} remain"
    )
    with pytest.raises(ProtocolError, match=expected) as caught:
        getattr(cursor, method)("final LSN")
    assert caught.value.sqlstate == "08P01"
    assert cursor.offset == 3


@pytest.mark.parametrize("method", WRITABLE)
def test_the_writer_mirrors_the_cursor_and_refuses_values_that_do_not_fit(method):
    size, signed = NUMBERS[method]
    low, high = (-(1 << 8 * size - 1), (1 << 8 * size - 1) - 1) if signed else (0, (1 << 8 * size) - 1)
    for value in (low, 0, high):
        out = Writer("Begin")
        getattr(out, method)(value, "a field")
        assert getattr(Cursor(out.getvalue(), "Begin"), method)("a field") == value
    for value in (low - 1, high + 1):
        with pytest.raises(
            ProtocolError, match=f"cannot encode Begin message: expected a field that fits {size} bytes"
        ):
            getattr(Writer("Begin"), method)(value, "a field")


def test_oids_are_unsigned():
    assert Cursor(b"\xff\xff\xff\xfe", "Type").u32("type oid") == 4294967294


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_reads_every_kind_of_bytes(wrap):
    cursor = Cursor(wrap(b"\x01ab\0cd"), "Origin")
    assert cursor.u8("a") == 1
    assert cursor.cstr("b") == "ab"
    content = cursor.byten(2, "c")
    assert content == b"cd"
    assert type(content) is bytes
    cursor.expect_end()


@pytest.mark.parametrize(("data", "text"), [(b"\0", ""), (b"a\0b\0", "a"), ("é名\0".encode(), "é名")])
def test_strings_end_with_a_zero_byte(data, text):
    assert Cursor(data, "Origin").cstr("origin name") == text


@pytest.mark.parametrize("data", [b"", b"abc"])
def test_a_string_without_its_zero_byte_is_refused(data):
    with pytest.raises(
        ProtocolError, match="offset 0: expected origin name, a string that ends with a zero byte"
    ):
        Cursor(data, "Origin").cstr("origin name")


def test_bytes_that_are_not_utf8_are_kept():
    name = Cursor(b"caf\xe9\0", "Relation").cstr("relation name")
    assert name == "caf\udce9"
    writer = Writer("Relation")
    writer.cstr(name, "relation name")
    assert writer.getvalue() == b"caf\xe9\0"
    for text in (
        "\ud800",
        "\udcc3\udca9",
    ):  # a code point without bytes, and one whose bytes would be read as another text
        with pytest.raises(ProtocolError, match="a string without"):
            Writer("Relation").cstr(text, "relation name")


@pytest.mark.parametrize("length", [-1, -(2**31), 4, 2**31 - 1])
def test_byten_stays_within_the_message(length):
    with pytest.raises(ProtocolError, match=f"expected content of {length} bytes, but 3 remain"):
        Cursor(b"abc", "LogicalMessage").byten(length, "content")


@pytest.mark.parametrize(
    ("data", "offset"),
    [(b"", 0), (b"\0\0\0", 0), (b"\0\0\0\x02a", 4), (b"\xff\xff\xff\xffa", 4), (b"\x7f\xff\xff\xffa", 4)],
)
def test_sized_bytes_stay_within_the_message(data, offset):
    with pytest.raises(ProtocolError, match=f"at offset {offset}: expected"):
        Cursor(data, "Insert").length_prefixed("value")


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_known_flags_pass(value):
    assert Cursor(bytes([value]), "Truncate").flags("options", allowed=3) == value


@pytest.mark.parametrize("value", [4, 0x80, 0xFF])
def test_unknown_flags_are_refused_at_their_own_offset(value):
    with pytest.raises(
        ProtocolError, match=f"at offset 1: expected options with no bit outside 0x03, not 0x{value:02x}"
    ):
        Cursor(bytes([0, value]), "Truncate", offset=1).flags("options", allowed=3)


def test_unset_lsn_and_xid_are_refused_at_their_own_offset():
    with pytest.raises(ProtocolError, match="at offset 1: expected final LSN, not zero"):
        Cursor(bytes(9), "Begin", offset=1).valid_lsn("final LSN")
    with pytest.raises(ProtocolError, match="at offset 1: expected xid, not zero"):
        Cursor(bytes(9), "StreamStart", offset=1).valid_xid("xid")
    for write in (Writer("Begin").valid_lsn, Writer("Begin").valid_xid):
        with pytest.raises(ProtocolError, match="expected it, not zero"):
            write(0, "it")


@pytest.mark.parametrize("count", [-1, 3, 2**31 - 1])
def test_a_count_beyond_the_message_is_refused(count):
    cursor = Cursor(bytes(8), "Truncate")
    assert cursor.check_count(2, "relations", item_size=4) == 2
    with pytest.raises(
        ProtocolError, match=re.escape(f"a number of relations that 8 bytes can hold, not {count}")
    ):
        cursor.check_count(count, "relations", item_size=4)


def test_end_refuses_bytes_left_over():
    cursor = Cursor(b"ab", "StreamStop", offset=1)
    with pytest.raises(
        ProtocolError, match="at offset 1: expected the end of the message, but 1 bytes remain"
    ):
        cursor.expect_end()


@pytest.mark.parametrize("text", ["a\0b", "\0", "\ud800"])
def test_the_writer_refuses_strings_that_the_wire_cannot_carry(text):
    with pytest.raises(ProtocolError, match="expected origin name"):
        Writer("Origin").cstr(text, "origin name")


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8")), st.binary(max_size=30))
def test_strings_and_sized_bytes_round_trip(text, content):
    out = Writer("LogicalMessage")
    out.cstr(text, "prefix")
    out.length_prefixed(content, "content")
    cursor = Cursor(out.getvalue(), "LogicalMessage")
    assert (cursor.cstr("prefix"), cursor.length_prefixed("content")) == (text, content)
    cursor.expect_end()
