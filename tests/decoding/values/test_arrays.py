"""Arrays in text and in binary format give lists of their elements, or a specific error, whatever they contain."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pgsieve.decoding.errors import PgsieveError, ProtocolError, ValueNotRepresentableError
from pgsieve.decoding.values.types import column_type, convert_binary, convert_text

INT4, TEXT, INT4_ARRAY, TEXT_ARRAY, BOX_ARRAY = 23, 25, 1007, 1009, 1020

STRINGS = st.text(
    st.sampled_from('aN\\"{},; é\n') | st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)
ARRAYS = st.lists(st.none() | st.lists(st.none() | st.just("NULL") | STRINGS, max_size=5), max_size=6)


def printed(elements: list[str | None], delimiter: str = ",") -> bytes:
    """The output of array_out for one dimension."""

    def element(text: str | None) -> str:
        if text is None:
            return "NULL"
        if text and text.upper() != "NULL" and not set(text) & {*'"\\{} \t\n\r\v\f', delimiter}:
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ("{" + delimiter.join(map(element, elements)) + "}").encode()


def sent(elements: list[bytes | None], type_oid: int, *, low: int = 1) -> bytes:
    """The result of array_send for one dimension."""
    if not elements:
        return struct.pack(">iiI", 0, 0, type_oid)
    items = [struct.pack(">i", -1) if e is None else struct.pack(">i", len(e)) + e for e in elements]
    return struct.pack(">iiIii", 1, None in elements, type_oid, len(elements), low) + b"".join(items)


def converted(convert, values, oid):
    array = convert(pa.array(values, pa.binary()), column_type(oid, -1), "c")
    array.validate(full=True)
    return array.to_pylist()


@given(ARRAYS)
@example([None, ["\\", '\\"', None], [], ["NULL", "null", "", "\\\\"], None])
def test_strings(arrays):
    texts = [None if a is None else printed(a) for a in arrays]
    assert converted(convert_text, texts, TEXT_ARRAY) == arrays
    values = [
        None if a is None else sent([e and e.encode() if e else e if e is None else b"" for e in a], TEXT)
        for a in arrays
    ]
    assert converted(convert_binary, values, TEXT_ARRAY) == arrays
    semicolons = [None if a is None else printed(a, ";") for a in arrays]
    assert converted(convert_text, semicolons, BOX_ARRAY) == arrays


@given(st.lists(st.none() | st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=6))
def test_numbers(arrays):
    texts = [None if a is None else printed([None if e is None else str(e) for e in a]) for a in arrays]
    assert converted(convert_text, texts, INT4_ARRAY) == arrays
    values = [
        None if a is None else sent([None if e is None else struct.pack(">i", e) for e in a], INT4)
        for a in arrays
    ]
    assert converted(convert_binary, values, INT4_ARRAY) == arrays
    # A slice of a longer array: its bytes do not begin at the begin of its buffer.
    one_less = pa.array(values, pa.binary()).slice(1)
    assert convert_binary(one_less, column_type(INT4_ARRAY, -1), "c").to_pylist() == arrays[1:]


@pytest.mark.parametrize(
    "value", ["{{1}}", "{{1,2},{3,4}}", "[0:0]={1}", "[2:3]={1,2}", "{1}2", "{1", "1}", "{1}}", '{"1}', ""]
)
def test_an_array_that_no_list_can_hold_names_the_override(value):
    with pytest.raises(ValueNotRepresentableError, match=r""""c".*\n.*c': string""") as caught:
        converted(convert_text, [b"{1}", value.encode()], INT4_ARRAY)
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    "value", [struct.pack(">iiIiiii", 2, 0, INT4, 0, 1, 0, 1), sent([b"\0\0\0\1"], INT4, low=0)]
)
def test_a_binary_array_that_no_list_can_hold_is_refused(value):
    with pytest.raises(ValueNotRepresentableError):
        converted(convert_binary, [sent([], INT4), value], INT4_ARRAY)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        sent([b"\0\0\0\1"], TEXT),
        sent([b"\0\0\1"], INT4),
        sent([b"\0\0\0\1"], INT4)[:-1],
        sent([b"\0\0\0\1"], INT4) + b"\0",
        sent([], INT4) + b"\0",
        struct.pack(">iiIii", 1, 0, INT4, 2**31 - 1, 1),
        struct.pack(">iiIiii", 1, 0, INT4, 1, 1, -2),
    ],
)
def test_bytes_that_are_no_array(value):
    with pytest.raises(ProtocolError):
        converted(convert_binary, [value], INT4_ARRAY)


@settings(max_examples=300)
@given(st.lists(st.text(st.sampled_from('{},"\\aNUL ')), max_size=4))
def test_a_text_that_is_not_an_array_is_pgsieves_own_error(values):
    """Texts that are accepted as arrays give as many lists."""
    texts = [value.encode() for value in values]
    try:
        array = converted(convert_text, texts, TEXT_ARRAY)
    except PgsieveError as error:
        assert isinstance(error, ValueNotRepresentableError)  # noqa: PT017 - either outcome will do
    else:
        assert len(array) == len(values)
