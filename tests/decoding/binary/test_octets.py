"""Many values as one sequence of bytes, read at many positions at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.decoding.binary.octets import Octets, convert_valid, gather, read_fixed_width, to_big_endian
from pgsieve.decoding.errors import ProtocolError

MESSAGES = pa.array([b"Iab", b"", b"U", b"D12345678"], pa.binary())


def test_values_are_contiguous_whatever_slice_is_taken() -> None:
    octets = Octets(MESSAGES.slice(2))
    assert (octets.starts.tolist(), octets.ends.tolist()) == ([0, 1], [1, 10])
    assert octets.buffer.to_pybytes() == b"UD12345678"
    assert [chr(kind) for kind in octets.first_bytes()] == ["U", "D"]


def test_a_word_is_eight_bytes_from_any_position_on_with_zeros_beyond_the_end() -> None:
    octets = Octets(pa.array([b"\x01\x02\x03\x04\x05\x06\x07\x08\x09"], pa.binary()))
    words = octets.read_integers(np.array([0, 1, 2, 8, 9, 100]))
    assert [f"{word:016x}" for word in words.tolist()] == [
        "0102030405060708",
        "0203040506070809",
        "0304050607080900",
        "0900000000000000",
        "0000000000000000",
        "0000000000000000",
    ]


def test_a_message_that_is_null_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="a message is NULL"):
        Octets(pa.array([b"I", None], pa.binary()))


def test_numbers_of_one_width_round_trip() -> None:
    sent = pa.array([b"\x00\x00\x00\x07", None, b"\xff\xff\xff\xff"], pa.binary())
    numbers, valid = read_fixed_width(sent, ">i4")
    assert (numbers.tolist(), valid.tolist()) == ([7, 0, -1], [True, False, True])
    assert to_big_endian(numbers, valid).equals(sent)
    with pytest.raises(ProtocolError, match="does not have 4 bytes"):
        read_fixed_width(pa.array([b"\x00\x07"], pa.binary()), ">i4")


def test_values_between_others_are_gathered() -> None:
    bounds = np.array([0, 2, 3, 3, 4, 6], np.int32)
    assert gather(pa.py_buffer(b"ab,,cd"), bounds).to_pylist() == [b"ab", b"", b"cd"]


def test_nulls_keep_their_places_while_values_are_converted() -> None:
    def reversed_values(values: pa.Array) -> pa.Array:
        assert values.null_count == 0
        return pa.array([value[::-1] for value in values.to_pylist()], pa.binary())

    assert convert_valid(pa.array(["ab", None, "cd"]), reversed_values).to_pylist() == [b"ba", None, b"dc"]
