"""Data that is read once for several readers."""

from __future__ import annotations

import pickle
from functools import partial

import pyarrow as pa

from pgsieve.resources.lake.stores.batch_cache import BatchCache, get_batch_cache, share_batch_cache


def _batch(made: list[int], rows: int) -> pa.RecordBatch:
    made.append(rows)
    return pa.RecordBatch.from_pydict({"a": pa.array(range(rows), pa.int64())})


def test_values_that_fit_are_made_once_and_the_first_ones_stay() -> None:
    made: list[int] = []
    shared = BatchCache(8 * 150)
    for rows in (100, 100, 80, 50, 100, 80, 50):
        assert shared.get(rows, partial(_batch, made, rows)).num_rows == rows
    assert made == [100, 80, 50, 80]


def test_another_process_keeps_its_own_reads_until_the_next_run() -> None:
    made: list[int] = []
    with share_batch_cache():
        kept = get_batch_cache()
        assert get_batch_cache() is kept
        kept.get("a", partial(_batch, made, 3))
        tasks = [pickle.loads(pickle.dumps(kept)) for _ in range(2)]
    for shared in (*tasks, *tasks):
        assert shared.get("a", partial(_batch, made, 2)).num_rows == 2
    with share_batch_cache():
        pickle.loads(pickle.dumps(get_batch_cache())).get("a", partial(_batch, made, 1))
    pickle.loads(pickle.dumps(kept)).get("a", partial(_batch, made, 4))
    assert made == [3, 2, 1, 4]


def test_a_worker_frees_memory_for_another_part_if_less_than_half_is_left() -> None:
    made: list[int] = []
    shared = BatchCache(8 * 150)
    for rows, kept in ((70, True), (30, False), (20, True), (40, False)):
        shared.get(rows, partial(_batch, made, rows))
        shared.make_room()
        made.clear()
        shared.get(rows, partial(_batch, made, rows))
        assert (not made) == kept, rows


def test_without_a_block_nothing_is_kept_here_or_in_another_process() -> None:
    made: list[int] = []
    for shared in (get_batch_cache(), pickle.loads(pickle.dumps(get_batch_cache()))):
        for _ in range(2):
            shared.get("a", partial(_batch, made, 1))
    assert made == [1, 1, 1, 1]
