"""Keys as numbers: rows of key columns in, the same number for keys that are equal in PostgreSQL out.

In: an Arrow table of the key's columns. Out: one integer per row, from 0 on. Rows are equal if all their
values are equal (`equality`). NULL counts as a value here, although no table has NULL in a key. Raises
Arrow's errors.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.equality import comparable
from pgsieve.decoding.changes.net_change import Numbers


def key_numbers(keys: pa.Table) -> Numbers:
    """A number for each row, from 0 on; equal keys have the same number."""
    return reduce(_combined, (_encoded(comparable(column)) for column in keys.columns))


def _combined(left: Numbers, right: Numbers) -> Numbers:
    return _encoded(pa.chunked_array([pa.array(left * (int(right.max(initial=0)) + 1) + right)]))


def _encoded(column: pa.ChunkedArray) -> Numbers:
    indices = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)
