"""Files of a Delta table that this process writes: errors of the file system are reported unchanged."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgsieve.resources.lake.delta.parquet_files import write_files


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may exceed 64 KiB, as on a full file system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("rows", [1, 8], ids=["when it is closed", "amid the rows"])
@pytest.mark.usefixtures("small_files")
def test_an_incompletely_written_file_gives_the_reason(rows: int, tmp_path: Path) -> None:
    batch = pa.record_batch({"data": pa.array([os.urandom(1 << 16) for _ in range(2)], pa.binary())})
    with pytest.raises(OSError, match="File too large") as refused:
        list(write_files(str(tmp_path), batch.schema, [batch] * rows))
    assert refused.value.errno == errno.EFBIG


def test_a_batch_without_rows_removes_no_bounds(tmp_path: Path) -> None:
    rows = pa.record_batch({"slice": pa.array([5, 7], pa.int64())})
    none = rows.slice(0, 0)
    (written,) = list(write_files(str(tmp_path), rows.schema, [none, rows, none, rows, none]))
    (file,) = written.to_pylist()
    statistics = json.loads(file["stats"])
    assert (statistics["minValues"], statistics["maxValues"]) == ({"slice": 5}, {"slice": 7})
    assert statistics["numRecords"] == 4
    assert not list(write_files(str(tmp_path), rows.schema, [none, none]))


def test_only_texts_that_repeat_have_a_dictionary(tmp_path: Path) -> None:
    numbers = range(3000)
    rows = pa.record_batch(
        {
            "note": [f"note {number}" for number in numbers],
            "status": ["new" if number % 2 else "paid" for number in numbers],
            "empty": pa.nulls(len(numbers), pa.string()),
            "number": numbers,
            "tags": [[f"tag {number}"] for number in numbers],
        }
    )
    (written,) = write_files(str(tmp_path), rows.schema, [rows.slice(0, 1), rows.slice(1)])
    path = tmp_path / written.to_pylist()[0]["path"]
    columns = [pq.ParquetFile(path).metadata.row_group(0).column(number) for number in range(5)]
    assert {column.path_in_schema: column.has_dictionary_page for column in columns} == {
        "note": False,
        "status": True,
        "empty": True,
        "number": False,
        "tags.list.element": True,
    }
    assert pq.read_table(path).to_batches() == [rows]
