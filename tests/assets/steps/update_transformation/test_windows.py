"""Which transactions of a slice are transformed together, and which tables."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.update_transformation.windows import Window, divide_into_groups, next_window

#: A slice that ends at 100, with transactions that finish at these LSNs.
END, COMMITS = 100, (10, 30, 50)


def windows(skip: int | None) -> list[tuple[int, ...]]:
    """The transactions of each window, in order."""
    begin, transactions = 0, []
    while begin < END:
        window = next_window(skip, begin, END)
        transactions.append(tuple(lsn for lsn in COMMITS if window.contains(lsn)))
        begin, skip = window.end, None if window.skipped_lsn == skip else skip
    return transactions


@pytest.mark.parametrize(
    ("skip", "transactions"),
    [
        pytest.param(None, [(10, 30, 50)], id="nothing to skip: the slice as a whole"),
        pytest.param(30, [(10,), (50,)], id="what comes before is applied first"),
        pytest.param(10, [(), (30, 50)], id="the first one"),
        pytest.param(0, [(10, 30, 50)], id="an LSN at which nothing finished"),
        pytest.param(100, [(10, 30, 50)], id="a transaction of a later slice"),
    ],
)
def test_a_slice_is_split_at_a_skipped_transaction(
    skip: int | None, transactions: list[tuple[int, ...]]
) -> None:
    assert windows(skip) == transactions


def test_a_window_is_open_at_its_end() -> None:
    window = Window(slice_end=100, begin=10, end=50, skipped_lsn=30)
    assert [lsn for lsn in (9, 10, 29, 30, 31, 49, 50) if window.contains(lsn)] == [10, 29, 31, 49]


def test_each_table_with_few_changes_is_in_a_group_however_many_there_are() -> None:
    size_by_table = {("public", f"t{number}"): 30_000 for number in range(500)}
    size_by_table |= {("public", "large"): 12_000_000, ("public", "empty"): 0}
    limit = 8_000_000
    groups = divide_into_groups(size_by_table, lambda size: size <= limit)
    assert [name for group in groups for name in group] == [
        name for name in size_by_table if name != ("public", "large")
    ]
    assert len(groups) == 2
    assert all(sum(size_by_table[name] for name in group) <= limit for group in groups)
