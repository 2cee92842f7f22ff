"""Rows of files by their numbers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.stores.store import Store

_SCHEMA = pa.schema({"n": pa.int64(), "later": pa.string()})


@pytest.mark.parametrize("name", ["n", "__filename"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_found_in_any_row_group(tmp_path: Path, seed: int, name: str) -> None:
    """This also holds if a dataset has a column of the same name."""
    drawn, file = random.Random(seed), str(tmp_path / "rows.parquet")
    schema = pa.schema({name: pa.int64(), "later": pa.string()})
    pq.write_table(pa.table({name: pa.array(range(100))}), file, row_group_size=drawn.randint(1, 40))
    wanted = sorted(drawn.sample(range(100), drawn.randint(1, 100) if seed % 2 else 3))
    which, values = list[int](), list[object]()
    for at, rows in read_rows(Store(), file, schema, np.array(wanted)):
        assert rows.schema == schema
        which += range(at.start, at.stop)
        values += rows.column(0).to_pylist()
        assert rows.column(1).null_count == rows.num_rows
    assert (which, values) == (list(range(len(wanted))), wanted)


def test_a_file_of_which_no_row_is_wanted_is_not_read() -> None:
    assert not list(read_rows(Store(), "there is none", _SCHEMA, np.empty(0, np.int64)))
