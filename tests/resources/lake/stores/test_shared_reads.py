"""What is read once for several readers."""

from __future__ import annotations

import pickle
from functools import partial

import pyarrow as pa

from pgsieve.resources.lake.stores.shared_reads import SharedReads, reads_shared, shared_reads


def _batch(made: list[int], rows: int) -> pa.RecordBatch:
    made.append(rows)
    return pa.RecordBatch.from_pydict({"a": pa.array(range(rows), pa.int64())})


def test_what_has_room_is_made_once_and_the_first_stay() -> None:
    made: list[int] = []
    shared = SharedReads(8 * 150)
    for rows in (100, 100, 80, 50, 100, 80, 50):
        assert shared.get(rows, partial(_batch, made, rows)).num_rows == rows
    assert made == [100, 80, 50, 80]


def test_without_a_block_and_in_another_process_nothing_is_kept() -> None:
    made: list[int] = []
    with reads_shared():
        kept = shared_reads()
        assert shared_reads() is kept
        kept.get("a", partial(_batch, made, 3))
        travelled = pickle.loads(pickle.dumps(kept))
    for shared in (travelled, shared_reads()):
        for _ in range(2):
            shared.get("a", partial(_batch, made, 1))
    assert made == [3, 1, 1, 1, 1]
