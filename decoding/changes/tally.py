"""Counts of changes: Arrow batches of changes in, numbers out. Raises nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import SIDES, field_of
from pgsieve.decoding.changes.equality import comparable

#: Counts by name: a JSON object.
Tally = dict[str, Any]


def empty_tally() -> Tally:
    """A tally for `count_changes`."""
    return {"key_changes": 0, "unchanged": []}


def count_changes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    """Add to a tally the changes by operation, the `key_changes`, and the columns that changes left out.

    These columns are in `unchanged`. The batch needs only the key's columns of the tuples, and none without a
    key.
    """

    def add(name: str, count: int) -> None:
        tally[name] = tally.get(name, 0) + count

    for counted in pc.value_counts(batch.column("operation")).to_pylist():
        add(counted["values"], counted["counts"])
    add("key_changes", pc.sum(key_changes(batch, key)).as_py() or 0)
    left_out = pc.unique(pc.list_flatten(batch.column("unchanged"))).to_pylist()
    tally["unchanged"] = sorted({*tally.get("unchanged", ()), *left_out})


def count_whole_changes(batch: pa.RecordBatch, key: Sequence[str], tally: Tally) -> None:
    """Count like `count_changes` for a batch with all columns, and add its size in memory (`bytes`)."""
    count_changes(batch, key, tally)
    tally["bytes"] = tally.get("bytes", 0) + batch.nbytes


def key_changes(batch: pa.RecordBatch, key: Sequence[str]) -> pa.BooleanArray:
    """The mask of UPDATEs that move their row to another key; without a key there are none."""
    if not key:
        return pa.repeat(pa.scalar(False), batch.num_rows)
    differs = pa.repeat(pa.scalar(False), batch.num_rows)
    for name in key:
        sides = comparable(pa.chunked_array([field_of(batch.column(s), name) for s in SIDES]))
        old, new = sides.slice(0, batch.num_rows), sides.slice(batch.num_rows)
        # An old tuple of another replica identity has NULL in a key column. It finds no row, so the UPDATE
        # must not change the row of the new key.
        only_one = pc.xor(pc.is_null(old), pc.is_null(new))
        differs = pc.or_(differs, pc.or_(only_one, pc.fill_null(pc.not_equal(old, new), False)))
    moves = pc.and_(pc.equal(batch.column("operation"), "update"), pc.is_valid(batch.column("old")))
    return pc.and_(moves, differs)
