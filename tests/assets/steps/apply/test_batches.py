"""Batches end so that the changes of a table in memory are bounded, however large the backlog is. Threads apply their tables."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pgsieve.assets.steps.apply import replica_tables
from pgsieve.assets.steps.apply.batch import AppliedChanges, AppliedChangesByTable
from pgsieve.assets.steps.records.transformed_slices import TableChanges


def test_a_batch_ends_before_a_table_has_too_many_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_tables, "BATCH_CHANGES", 10)
    sent = {1: (5, 4), 2: (5, 4), 3: (1, 1), 4: (25, 0), 5: (0, 0), 6: (1, 9)}
    slices = {
        end: [
            TableChanges(
                end, "public", table, sent_counts={"insert": count - count // 2, "delete": count // 2}
            )
            for table, count in zip("ab", counts, strict=True)
        ]
        for end, counts in sent.items()
    }
    assert replica_tables.divide_batch([*slices], slices) == [[1, 2], [3], [4, 5], [6]]
    assert replica_tables.divide_batch([4], slices) == [[4]]


def test_threads_share_decided_changes_of_many_tables() -> None:
    decided, rows = AppliedChangesByTable(), pa.RecordBatch.from_pydict({"k": [1]})
    keyed: Any = rows  # Only its size counts.

    def apply(table: str) -> None:
        room = decided.make_row_store(["k"])
        room.begin_part(rows.schema).add(np.arange(1), rows)
        decided.add(("public", table), AppliedChanges([1], 0, (), keyed, room))

    names, interval = [f"t{number}" for number in range(300)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(apply, names))
    finally:
        sys.setswitchinterval(interval)
    assert all(decided.get(("public", name)) is not None for name in names)
    assert decided.get(("public", "other")) is None
