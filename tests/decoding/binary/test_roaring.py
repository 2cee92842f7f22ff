"""Roaring bitmaps are read as they were written, and have the bytes that CRoaring writes and reads."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap64

from pgsieve.decoding.binary.roaring import deserialize, serialize

_RANDOM = np.random.default_rng(1)
CASES = {
    "none": [],
    "zero": [0],
    "the edges of a container": [0, 1, 65_535, 65_536, 65_537],
    "a list at its limit": list(range(0, 2 * 4096, 2)),
    "bits from the limit on": list(range(0, 2 * 4097, 2)),
    "a whole container": list(range(65_536)),
    "several containers": sorted(_RANDOM.choice(1_000_000, 300_000, replace=False).tolist()),
    "more than 32 bits": [5, 2**32 - 1, 2**32, 2**32 + 70_000, 2**40],
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_read_by_croaring_and_from_it(name: str) -> None:
    numbers = CASES[name]
    octets = serialize(np.array(numbers, np.int64))
    assert list(BitMap64.deserialize(octets)) == numbers
    assert deserialize(octets).tolist() == numbers
    assert deserialize(BitMap64(numbers).serialize()).tolist() == numbers


def test_containers_of_runs_are_read() -> None:
    for numbers in (
        range(10, 50_000),
        [*range(5), *range(10, 70_000), *range(200_000, 270_000), 900_000],
    ):
        bitmap = BitMap64(numbers)
        bitmap.run_optimize()
        assert deserialize(bitmap.serialize()).tolist() == list(numbers)


@pytest.mark.parametrize("octets", [b"", b"\x01", b"\x01" + bytes(11) + b"\x07\x00\x00\x00"])
def test_other_bytes_are_refused(octets: bytes) -> None:
    with pytest.raises(ValueError, match=r"buffer|Roaring"):
        deserialize(octets)
