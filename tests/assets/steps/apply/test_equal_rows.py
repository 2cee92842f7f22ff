"""Tables without a key: each change touches one of several equal rows, or none where none is left."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.apply.equal_rows import replayed

#: The rows of a replica, by number: A twice, B once, C not at all.
A, B, C = range(3)
BEFORE = [2, 1, 0]


@pytest.mark.parametrize(
    ("changes", "counts", "missing"),
    [
        pytest.param([(None, A)], [3, 1, 0], 0, id="an INSERT adds one of the equal rows"),
        pytest.param([(A, None)], [1, 1, 0], 0, id="a DELETE takes one of them"),
        pytest.param([(A, C)], [1, 1, 1], 0, id="an UPDATE replaces one of them"),
        pytest.param([(C, None)], [2, 1, 0], 1, id="a DELETE of a missing row does nothing"),
        pytest.param([(C, B)], [2, 1, 0], 1, id="so does an UPDATE"),
        pytest.param([(B, None), (B, A), (None, B)], [2, 1, 0], 1, id="the order of changes counts"),
    ],
)
def test_changes_are_replayed_one_after_the_other(
    changes: list[tuple[int | None, int | None]], counts: list[int], missing: int
) -> None:
    assert replayed(changes, BEFORE) == (counts, missing)
    assert BEFORE == [2, 1, 0]
