"""Keys as numbers: rows of key columns -> the same number where PostgreSQL finds the keys equal.

In: an Arrow table of the key's columns. Out: one integer per row, from 0 on. Rows are equal where all their
values are, as in `equality`; NULL is a value like any other here, and is found in no table. Raises Arrow's
errors.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.equality import comparable
from pgsieve.decoding.changes.net_change import Numbers


def key_numbers(keys: pa.Table) -> Numbers:
    """A number for each row, from 0 on, the same where the keys are equal."""
    return reduce(_combined, (_encoded(comparable(column)) for column in keys.columns))


def _combined(left: Numbers, right: Numbers) -> Numbers:
    return _encoded(pa.chunked_array([pa.array(left * (int(right.max(initial=0)) + 1) + right)]))


def _encoded(column: pa.ChunkedArray) -> Numbers:
    indices = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)
