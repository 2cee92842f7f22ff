"""The lake as a resource: the tables of a cut, each at its version, without a JVM."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pgsieve.assets.lake import PgsieveLake
from pgsieve.assets.steps.records.cuts import Cut, Cuts
from pgsieve.pipelines.definitions import build_definitions
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.session import SparkEngine
from tests.fixtures.shop import Shop


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


@pytest.mark.parametrize("method", ["tables_at", pytest.param("read_at", marks=pytest.mark.spark)])
def test_an_asset_reads_the_replicas_between_two_cuts(shop: Shop, method: str) -> None:
    """By the name of the resource, in a run of Dagster. Both transactions are in one slice, so no cut has the moment."""
    shop.copy()
    shop.database.execute(
        "begin; insert into orders values (5, 5); update notes set n = 0 where id = 1; commit"
    )
    ((lsn,),) = shop.database.execute("select pg_current_wal_insert_lsn()::text").fetchall()
    shop.database.execute("begin; delete from orders where id = 5; delete from notes; commit")
    assert shop.cli("run", "one")[0] == 0
    rows_by_table = dict[str, list[tuple[Any, ...]]]()

    @dg.asset
    def earlier_rows(pgsieve_lake: PgsieveLake) -> None:
        for name, table in getattr(pgsieve_lake, method)("one", lsn).items():
            rows = table.toArrow() if method == "read_at" else table.to_pyarrow_table()
            rows_by_table[name] = sorted((row["id"], row["n"]) for row in rows.to_pylist())

    resources = build_definitions(shop.path).resources
    assert dg.materialize([earlier_rows], resources=resources).success
    assert rows_by_table == {
        "public.orders": [(2, 2), (3, 3), (4, 4), (5, 5)],
        "public.notes": [(1, 0), (2, 2), (3, 3), (4, 4)],
    }
