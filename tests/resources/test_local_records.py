"""Small writes of a local lake beside other writers: nothing twice, and nothing that an overwrite was to replace."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from resources.lake_errors import missing_file
from resources.local_records import LocalRecords
from resources.parquet_files import write_files

Write = Callable[[str, pa.Table, int, bool], None]


def rows(*values: int) -> pa.Table:
    return pa.table({"slice": pa.array(values, pa.int64())})


def write(path: str, table: pa.Table, position: int, overwrite: bool) -> None:
    LocalRecords().write(path, table, position, overwrite=overwrite)


def commit(path: str, table: pa.Table, position: int, overwrite: bool) -> None:
    files = [f for batch in write_files(path, table.schema, table.to_batches()) for f in batch.to_pylist()]
    LocalRecords().commit(path, table.schema, files, position, overwrite=overwrite)


def compact(path: str) -> None:
    DeltaTable(path).optimize.compact()


@contextlib.contextmanager
def again_and_again(work: Callable[[], object]) -> Iterator[None]:
    """Within the block another writer works all the time; it may be refused."""
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            with contextlib.suppress(DeltaError):
                work()

    worker = threading.Thread(target=repeat)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()


@pytest.mark.parametrize("by", [write, commit])
def test_of_two_writers_of_a_position_one_writes(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(0), 1, False)
    with ThreadPoolExecutor(4) as pool:
        for position in range(2, 8):
            list(pool.map(lambda number, at=position: by(path, rows(at), at, False), range(4)))
    assert sorted(row["slice"] for row in LocalRecords().rows(path)) == [0, *range(2, 8)]


@pytest.mark.parametrize("by", [write, commit])
def test_an_overwrite_beside_a_compaction_leaves_none_of_the_former_rows(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(0), 1, False)
    with again_and_again(partial(compact, path)):
        for position in range(2, 17, 3):
            by(path, rows(position), position, False)
            by(path, rows(position + 1), position + 1, False)
            by(path, rows(position + 2), position + 2, True)
            assert LocalRecords().rows(path) == [{"slice": position + 2}]


@pytest.mark.parametrize("by", [write, commit])
def test_an_append_beside_deletes_is_not_refused(tmp_path: Path, by: Write) -> None:
    path = str(tmp_path / "t")
    by(path, rows(-1), 1, False)
    with again_and_again(lambda: DeltaTable(path).delete("slice < 0")):
        for position in range(2, 8):
            by(path, rows(position, -position), position, False)
    kept = [row["slice"] for row in LocalRecords().rows(path) if row["slice"] > 0]
    assert sorted(kept) == list(range(2, 8))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    write(path, rows(1), 1, False)
    (file,) = Path(path).glob("*.parquet")
    file.unlink()
    with pytest.raises(DeltaError) as raised:
        LocalRecords().rows(path)
    assert missing_file(raised.value) == str(file)


def test_a_table_that_was_put_back_is_told_from_one_that_others_wrote_to(tmp_path: Path) -> None:
    path, records = str(tmp_path / "t"), LocalRecords()
    for position in (1, 2, 3):
        write(path, rows(position), position, False)
    assert not records.is_restored(path, 2)
    DeltaTable(path).delete("slice = 1")
    DeltaTable(path).optimize.compact()
    assert not records.is_restored(path, 2)
    DeltaTable(path).restore(1)
    assert records.is_restored(path, 2)
