"""The lake as a resource: the tables of a cut, each at its version, without a JVM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgsieve.assets.lake import PgsieveLake
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.session import SparkEngine


def test_tables_are_read_as_of_the_newest_cut_or_an_earlier_one(tmp_path: Path) -> None:
    resource = PgsieveLake(uri=str(tmp_path), engine=SparkEngine(master="local[1]", spark_config={}))
    with pytest.raises(LakeError, match='subscription "sales" has no cut'):
        resource.tables_at_cut("sales")
    lake = resource.open()
    for version in range(3):
        write_deltalake(
            lake.paths.replica("sales", "public", "User"), pa.table({"id": [version]}), mode="overwrite"
        )
    for lsn, version in ((0x10, 0), (0x20, 1)):
        Cuts(lake, "sales").append(Cut(lsn, {("public", "User"): version}, datetime.now(UTC), 0))
    for lsn, expected in ((None, 1), ("0/20", 1), ("0/1F", 0)):
        tables = resource.tables_at_cut("sales", lsn)
        assert {name: t.to_pyarrow_table()["id"].to_pylist() for name, t in tables.items()} == {
            'public."User"': [expected]
        }
    with pytest.raises(LakeError, match="no cut at or before 0/1"):
        resource.tables_at_cut("sales", "0/1")


def test_a_lake_that_only_spark_reaches_is_refused(tmp_path: Path) -> None:
    resource = PgsieveLake(uri="hdfs://nowhere/lake", engine=SparkEngine(master="local[1]", spark_config={}))
    lake = resource.open()
    assert lake.delta_rs is None
    with pytest.raises(LakeError, match="only Spark reaches") as refused:
        Cuts(lake, "sales").open_tables(Cut(1, {}, datetime.now(UTC)))
    assert refused.value.hint == "read it with `read_at_cut`"
