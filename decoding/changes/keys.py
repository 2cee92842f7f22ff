"""Numbers keys: a table of the key's columns in, one integer per row out.

Keys are equal if all their values are equal in PostgreSQL (`equality`); NULL equals NULL. Raises Arrow's
errors.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.equality import to_comparable
from pgsieve.decoding.changes.net_change import Numbers


def key_numbers(keys: pa.Table) -> Numbers:
    """Return a number for each row, from 0 on; equal keys have the same number."""
    return reduce(_combine, (_encode(to_comparable(column)) for column in keys.columns))


def _combine(left: Numbers, right: Numbers) -> Numbers:
    return _encode(pa.chunked_array([pa.array(left * (int(right.max(initial=0)) + 1) + right)]))


def _encode(column: pa.ChunkedArray) -> Numbers:
    indices = column.combine_chunks().dictionary_encode(null_encoding="encode").indices
    return np.asarray(indices).astype(np.int64)
