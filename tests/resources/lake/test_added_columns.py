"""A table gets the columns that it lacks, without a JVM."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from pgsieve.resources.lake.added_columns import add_missing_columns
from pgsieve.resources.lake.committers import FileCommitter, SparkCommitter
from pgsieve.resources.lake.lake import Lake
from tests.fixtures.lakes import no_session


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema({"slice": pa.int64(), "new": pa.struct(list(columns.items()))})


def test_a_table_gets_missing_columns_and_fields_and_keeps_its_position(tmp_path: Path) -> None:
    lake, path = Lake(str(tmp_path), no_session), str(tmp_path / "t")
    former_schema = _schema(id=pa.int64(), n=pa.int32())
    assert not add_missing_columns(lake, path, former_schema)
    assert lake.delta_rs is not None
    lake.delta_rs.append(
        path, pa.Table.from_pylist([{"slice": 5, "new": {"id": 1, "n": 2}}], former_schema), 5
    )
    present_schema = _schema(id=pa.int64(), c=pa.string()).append(pa.field("d", pa.bool_()))
    assert isinstance(lake.policy.choose_large_committer(path, present_schema), SparkCommitter)
    assert add_missing_columns(lake, path, present_schema)
    assert isinstance(lake.policy.choose_large_committer(path, present_schema), FileCommitter)
    assert lake.delta_rs.position(path) == 5
    assert lake.delta_rs.read_all_rows(path).to_pylist() == [
        {"slice": 5, "new": {"id": 1, "n": 2, "c": None}, "d": None}
    ]
    version = lake.delta_rs.version(path)
    for other in (present_schema, former_schema, _schema(id=pa.string(), e=pa.int64())):
        assert not add_missing_columns(lake, path, other)
    assert lake.delta_rs.version(path) == version
