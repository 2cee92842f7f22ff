"""pg_lsn text, PostgreSQL documentation, pg_lsn Type."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import MAX_LSN, InvalidLsnError, format_lsn, parse_lsn

lsns = st.integers(0, MAX_LSN)


@pytest.mark.parametrize(
    ("text", "lsn"),
    [
        ("0/0", 0),
        ("0/1", 1),
        ("0/16B3748", 0x16B3748),
        ("16/B374D848", 0x16_B374D848),
        ("1/0", 2**32),
        ("FFFFFFFF/FFFFFFFF", MAX_LSN),
    ],
)
def test_reads_and_writes_what_the_server_prints(text, lsn):
    assert parse_lsn(text) == lsn
    assert format_lsn(lsn) == text


@pytest.mark.parametrize("text", ["0/016B3748", "00000000/016b3748", "0/16b3748"])
def test_reads_leading_zeros_and_small_letters(text):
    assert parse_lsn(text) == 0x16B3748


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "0",
        "0/",
        "/0",
        "0/0/0",
        " 0/0",
        "0/0 ",
        "0/0\n",
        "0x0/0",
        "-1/0",
        "+1/0",
        "g/0",
        "1_0/0",
        "٣/0",
        "123456789/0",
        "0/123456789",
        "0/" + "1" * 1000,
    ],
)
def test_refuses_everything_else_as_the_server_does(text):
    with pytest.raises(InvalidLsnError, match="invalid input syntax for type pg_lsn") as caught:
        parse_lsn(text)
    assert caught.value.sqlstate == "22P02"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", [-1, MAX_LSN + 1])
def test_refuses_numbers_beyond_64_bits(number):
    with pytest.raises(PgsieveError, match="64 bits"):
        format_lsn(number)


@given(lsns)
def test_round_trips(lsn):
    assert parse_lsn(format_lsn(lsn)) == lsn


@given(st.text(max_size=20))
def test_any_text_is_an_lsn_or_the_named_error(text):
    try:
        lsn = parse_lsn(text)
    except InvalidLsnError:
        return
    assert parse_lsn(format_lsn(lsn)) == lsn
