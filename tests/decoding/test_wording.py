"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from pgsieve.decoding.wording import quantity


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tables"), (1, "1 table"), (2, "2 tables"), (12345, "12,345 tables")]
)
def test_one_is_singular(number: int, text: str) -> None:
    assert quantity(number, "table") == text
