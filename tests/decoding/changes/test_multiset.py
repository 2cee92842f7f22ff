"""Tables without a key: each change affects one of several equal rows, or none if there is none left."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges
from pgsieve.decoding.changes.multiset import (
    compute_multiset_change,
    count_needed_rows,
    mask_first_occurrences,
)

#: The rows of a replica, by number: A twice, B once, C not at all.
A, B, C = range(3)
BEFORE = [2, 1, 0]

#: A change, by the numbers of its rows before and after it.
Change = tuple[int | None, int | None]


def _changes(changes: Sequence[Change]) -> KeyChanges:
    """The changes in the form of `keyed_changes`: an UPDATE that changes nothing has no old row."""
    kinds = [INSERT if old is None else DELETE if new is None else UPDATE for old, new in changes]
    olds = [NONE if old is None or old == new else old for old, new in changes]
    news = [NONE if new is None else new for _, new in changes]
    return KeyChanges(np.array(kinds, np.int8), np.array(olds, np.int64), np.array(news, np.int64), {})


def _applied(changes: Sequence[Change], before: Sequence[int]) -> tuple[list[int], int]:
    """How often each row exists after the changes, and how many changes found no row."""
    became = compute_multiset_change(_changes(changes), np.array(before))
    after = np.array(before) - became.deletion_counts
    assert (after >= 0).all()
    for place in became.inserting_changes.tolist():
        after[changes[place][1]] += 1
    return after.tolist(), became.missing_count


def _one_by_one(changes: Sequence[Change], before: Sequence[int]) -> tuple[list[int], int]:
    """The same, by applying the changes one by one, as PostgreSQL's subscriber does."""
    counts, missing = list(before), 0
    for old, new in changes:
        if old is not None and not counts[old]:
            missing += 1
            continue
        if old is not None:
            counts[old] -= 1
        if new is not None:
            counts[new] += 1
    return counts, missing


@pytest.mark.parametrize(
    ("changes", "counts", "missing"),
    [
        pytest.param([(None, A)], [3, 1, 0], 0, id="an INSERT adds one of the equal rows"),
        pytest.param([(A, None)], [1, 1, 0], 0, id="a DELETE takes one of them"),
        pytest.param([(A, C)], [1, 1, 1], 0, id="an UPDATE replaces one of them"),
        pytest.param([(A, A), (C, C)], [2, 1, 0], 1, id="an UPDATE that changes nothing needs its row"),
        pytest.param([(C, None)], [2, 1, 0], 1, id="a DELETE of a missing row does nothing"),
        pytest.param([(C, B)], [2, 1, 0], 1, id="so does an UPDATE"),
        pytest.param([(B, None), (B, A), (None, B)], [2, 1, 0], 1, id="the order of changes counts"),
    ],
)
def test_changes_leave_the_rows_of_changes_applied_one_by_one(
    changes: list[Change], counts: list[int], missing: int
) -> None:
    assert _one_by_one(changes, BEFORE) == (counts, missing)
    assert _applied(changes, BEFORE) == (counts, missing)


def test_random_changes_leave_the_rows_of_changes_applied_one_by_one() -> None:
    lost = 0
    for seed in range(2_000):
        draw = random.Random(seed)
        before = [draw.randint(0, 3) for _ in range(draw.randint(1, 5))]
        rows = range(len(before))
        sides = [draw.choice([(0, 1), (1, 0), (1, 1)]) for _ in range(draw.randint(0, 20))]
        changes = [(draw.choice(rows) if o else None, draw.choice(rows) if n else None) for o, n in sides]
        expected = _one_by_one(changes, before)
        assert _applied(changes, before) == expected, f"seed {seed}"
        enough = count_needed_rows(_changes(changes), len(before)).tolist()
        assert _one_by_one(changes, enough)[1] == 0, f"seed {seed}"
        assert (expected[1] > 0) == any(b < e for b, e in zip(before, enough, strict=True)), f"seed {seed}"
        lost += expected[1] > 0
    assert 200 < lost < 1_800


def test_an_update_may_be_given_as_two_changes_if_those_that_find_no_row_get_no_insert() -> None:
    rounds_by_seed = list[int]()
    for seed in range(500):
        draw = random.Random(seed)
        before = np.array([draw.randint(0, 3) for _ in range(4)])
        sides = [draw.choice([(0, 1), (1, 0), (1, 1)]) for _ in range(draw.randint(0, 12))]
        changes = [(draw.randrange(4) if o else None, draw.randrange(4) if n else None) for o, n in sides]
        whole = compute_multiset_change(_changes(changes), before)
        lost, rounds = set[int](), 0
        while True:
            split, sources = list[Change](), list[int]()
            for number, (old, new) in enumerate(changes):
                is_move = old is not None and new is not None and old != new
                arrivals = [] if number in lost else [(None, new)]
                split += [(old, None), *arrivals] if is_move else [(old, new)]
                sources += [number] * (len(split) - len(sources))
            parts, rounds = compute_multiset_change(_changes(split), before), rounds + 1
            without_row = {sources[change] for change in parts.changes_without_row.tolist()}
            if without_row == lost:
                break
            assert without_row > lost, f"seed {seed}"
            lost = without_row
        assert sorted(lost) == whole.changes_without_row.tolist(), f"seed {seed}"
        assert parts.deletion_counts.tolist() == whole.deletion_counts.tolist(), f"seed {seed}"
        inserting = [sources[change] for change in parts.inserting_changes.tolist()]
        assert inserting == whole.inserting_changes.tolist(), f"seed {seed}"
        rounds_by_seed.append(rounds)
    assert {1, 2, 3} <= set(rounds_by_seed)


def test_the_first_of_equal_rows_are_chosen_batch_by_batch() -> None:
    left = np.array([2, 1, 0])
    batches = [[A, C, B], [A, A, B], [B]]
    chosen = [mask_first_occurrences(np.array(rows, np.int64), left).tolist() for rows in batches]
    assert chosen == [[True, False, True], [True, False, False], [False]]
    assert left.tolist() == [0, 0, 0]
