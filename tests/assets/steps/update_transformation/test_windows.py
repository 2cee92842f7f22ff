"""Which transactions of a slice are transformed together if one of them is to be skipped."""

from __future__ import annotations

import pytest

from pgsieve.assets.steps.update_transformation.windows import Window, next_window

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
