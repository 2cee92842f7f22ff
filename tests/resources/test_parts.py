"""Into how many parts work is divided: each has a largest size, and parallel runners get equal numbers of parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.resources.parts import MIN_PART_BYTES, count_parts

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("size", "beside", "parts"),
    [
        (0, 2, 1),
        (3, 2, 1),
        (7, 2, 1),
        (8, 2, 2),
        (67, 1, 1),
        (67, 2, 2),
        (20, 8, 5),
        (300, 2, 4),
        (1000, 100, 100),
    ],
)
def test_parts_of_at_most_128_mib(size: int, beside: int, parts: int) -> None:
    assert count_parts(size * MIB, 128 * MIB, beside) == parts


@given(st.integers(0, 10_000 * MIB), st.integers(1, 200 * MIB), st.integers(1, 64))
def test_no_part_exceeds_its_limit_or_is_too_small_to_be_worthwhile(
    size: int, most: int, beside: int
) -> None:
    parts = count_parts(size, most, beside)
    assert size <= parts * most
    assert parts in {1, -(-size // most)} or size // parts >= min(MIN_PART_BYTES, most) // 2
