"""Sorts rows in Z-order, so that rows with similar values in several columns are close to each other.

In: rows, and the names of columns.
Out: the same rows in another order.

Raises nothing.

    a   b:  0  1  2  3      A row's rank in each column is written in binary, and the digits are taken from the
      0     0  1  4  5      columns in turn: a = 2 (10), b = 1 (01) gives 1001. A file of consecutive numbers
      1     2  3  6  7      is a square of this table, so its bounds are close both in `a` and in `b`, and a
      2     8  9 12 13      reader that filters by one of the two skips most files.
      3    10 11 14 15

https://en.wikipedia.org/wiki/Z-order_curve
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

#: The number of binary digits that the ranks of a row have together.
_DIGITS = 64


def sort_by_z_order(rows: pa.Table, column_names: Sequence[str]) -> pa.Table:
    """The rows in Z-order of some columns. None of these columns may be nested. NULL comes last in each column.

    The order is computed from the ranks of values, and not from the values. So it suits every type, and any
    distribution of values.
    """
    columns = column_names[:_DIGITS]
    digits_per_column = _DIGITS // len(columns)
    order = np.zeros(rows.num_rows, np.uint64)
    for column_number, name in enumerate(reversed(columns)):
        ranks = _scale_ranks(rows[name], digits_per_column)
        for digit in range(digits_per_column):
            bit = (ranks >> np.uint64(digit)) & np.uint64(1)
            order |= bit << np.uint64(digit * len(columns) + column_number)
    return rows.take(pa.array(np.argsort(order, kind="stable")))


def _scale_ranks(values: pa.ChunkedArray, digits: int) -> npt.NDArray[np.uint64]:
    """The ranks of values, shifted so that the greatest rank has exactly `digits` binary digits (unless it is 0)."""
    ranks: npt.NDArray[np.uint64] = pc.rank(values.combine_chunks(), tiebreaker="dense").to_numpy().astype(
        np.uint64
    ) - np.uint64(1)
    needed_digits = int(ranks.max(initial=0)).bit_length()
    scaled_ranks: npt.NDArray[np.uint64] = (
        ranks >> np.uint64(needed_digits - digits)
        if needed_digits > digits
        else ranks << np.uint64(digits - needed_digits)
    )
    return scaled_ranks
