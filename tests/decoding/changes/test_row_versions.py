"""Versions of rows made by changes: at each commit the valid versions are the rows after all changes up to it."""

from __future__ import annotations

import random

import numpy as np

from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges, insert_deletes
from pgsieve.decoding.changes.row_versions import RowVersions, compute_row_versions
from tests.fixtures.histories import COLUMNS, Change, Values, applied, history, insert, move, update

_CODES = {"insert": INSERT, "update": UPDATE, "delete": DELETE}
_KEYS = 5


def _columns(changes: list[Change]) -> KeyChanges:
    olds = [NONE if change.old is None else change.old for change in changes]
    news = [NONE if change.new is None else change.new for change in changes]
    return KeyChanges(
        np.array([_CODES[change.operation] for change in changes], np.int8),
        np.array(olds, np.int64),
        np.array(news, np.int64),
        # An INSERT sends all columns, with NULL for missing values.
        {
            name: np.array([c.operation == "insert" or name in c.values for c in changes], np.bool_)
            for name in COLUMNS
        },
    )


def _rows_at(
    commit: int, made: RowVersions, changes: list[Change], of_commit: np.ndarray, replica: dict[int, Values]
) -> dict[int, Values]:
    """The rows that are valid after a commit."""
    rows = {key: row for key, row in replica.items() if not NONE < made.former_end_commits[key] <= commit}
    for at in range(len(made.keys)):
        begun, until = of_commit[made.last_changes[at]], made.end_commits[at]
        if begun > commit or NONE < until <= commit:
            continue
        assert int(made.keys[at]) not in rows, "a key has two rows"
        sent = {name: int(places[at]) for name, places in made.changes_by_column.items()}
        rows[int(made.keys[at])] = {
            name: changes[place].values.get(name) if place != NONE else replica[int(made.base_keys[at])][name]
            for name, place in sent.items()
        }
    return rows


def test_versions_valid_at_each_commit_are_the_rows_of_that_time() -> None:
    for seed in range(300):
        drawn = random.Random(seed)
        changes, replica = history(drawn, drawn.randint(0, 14))
        of_commit = np.sort(np.array([drawn.randint(0, 6) for _ in changes], np.int64))
        present = np.array([key in replica for key in range(_KEYS)] + [False])
        made = compute_row_versions(_columns(changes), of_commit, present)
        for commit in range(-1, 7):
            upto = int(np.searchsorted(of_commit, commit, "right"))
            rows = _rows_at(commit, made, changes, of_commit, replica)
            assert rows == applied(changes[:upto], replica), f"seed {seed}, commit {commit}"
        in_order = (of_commit[made.last_changes] < made.end_commits) | (made.end_commits == NONE)
        assert all(in_order), f"seed {seed}"


def test_a_commit_makes_one_version_and_nothing_that_it_undoes() -> None:
    changes = [insert(0, b="1"), update(0, b="2"), move(0, 1), insert(0, b="3"), update(1, c="4")]
    made = compute_row_versions(_columns(changes), np.array([0, 0, 0, 1, 1]), np.zeros(_KEYS + 1, np.bool_))
    assert made.keys.tolist() == [0, 1, 1]
    assert made.end_commits.tolist() == [NONE, 1, NONE]
    assert made.changes_by_column["b"].tolist() == [3, 1, 1]


def test_a_truncate_deletes_every_key_that_may_have_a_row() -> None:
    changes = _columns([insert(0, b="1"), update(1, b="2"), insert(2, b="3")])
    changes, which = insert_deletes(changes, [0, 2], 3)
    assert which.tolist() == [3, 3, 3, 0, 1, 4, 4, 2]
    present = np.array([False, True, True, False])
    made = compute_row_versions(changes, np.array([0, 0, 0, 1, 2, 3, 3, 4]), present)
    assert made.former_end_commits.tolist()[:3] == [NONE, 0, 0]
    assert (made.keys.tolist(), made.end_commits.tolist()) == ([0, 2], [3, NONE])
