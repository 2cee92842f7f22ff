"""The changes that a batch applies, compared with a plain replay of its slices."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.decoding.changes.extent import Extent, compute_places

_SCHEMA = pa.schema(
    {
        "slice": pa.int64(),
        "number": pa.int64(),
        "commit_lsn": pa.int64(),
        "ordinal": pa.int64(),
        "operation": pa.string(),
    }
)


@st.composite
def _histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Inserts and TRUNCATEs in the order in which they happened, in slices that end at multiples of 10."""
    commits = draw(st.lists(st.integers(1, 39), unique=True, max_size=8).map(sorted))
    rows, counts = list[dict[str, Any]](), dict[int, int]()
    for commit_lsn in commits:
        end = commit_lsn // 10 * 10 + 10
        for ordinal, is_truncate in enumerate(draw(st.lists(st.booleans(), min_size=1, max_size=4))):
            number = None if is_truncate else counts.get(end, 0)
            counts[end] = counts.get(end, 0) + (not is_truncate)
            operation = "truncate" if is_truncate else "insert"
            rows.append(
                {
                    "slice": end,
                    "number": number,
                    "commit_lsn": commit_lsn,
                    "ordinal": ordinal,
                    "operation": operation,
                }
            )
    return rows


@given(_histories(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 40), st.randoms())
def test_the_effective_changes_are_those_that_a_replay_leaves(
    history: list[dict[str, Any]], first: int, count: int, since_lsn: int, draw: Any
) -> None:
    slices = [10, 20, 30, 40][first : first + count]
    applied = [
        number
        for number, change in enumerate(history)
        if change["slice"] in slices and change["commit_lsn"] >= since_lsn
    ]
    truncates, living = list[tuple[int, int]](), list[int]()
    for number in applied:
        if history[number]["operation"] == "truncate":
            truncates.append((history[number]["commit_lsn"], history[number]["ordinal"]))
            living.clear()
        else:
            living.append(number)
    # A file of a change history has the changes in any order.
    order = draw.sample(range(len(history)), len(history))
    changes = pa.Table.from_pylist([history[number] for number in order], _SCHEMA)
    extent = Extent(slices, since_lsn, truncates[-1] if truncates else None)
    is_applied, is_effective = extent.mask_changes(changes), extent.mask_effective_changes(changes)
    assert sorted(number for number, chosen in zip(order, is_applied, strict=True) if chosen) == applied
    places = compute_places(changes, slices)
    effective = sorted(
        (place, number)
        for place, number, chosen in zip(places.tolist(), order, is_effective, strict=True)
        if chosen
    )
    assert [number for _, number in effective] == living
    assert len({place for place, _ in effective}) == len(effective)
