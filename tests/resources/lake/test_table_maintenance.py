"""Spark maintains a table as delta-rs does, if only Spark can: at a URI, and with deletion vectors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from tests.fixtures.lakes import no_session
from tests.fixtures.pgsieve_replica import engine

SCHEMA = pa.schema({"slice": pa.int64(), "commit_time": pa.timestamp("us", "UTC")})
NOW = datetime.now(UTC)


@pytest.mark.spark
@pytest.mark.long
def test_spark_leaves_the_same_table_as_delta_rs(tmp_path: Path) -> None:
    """It takes long because Spark starts."""
    paths = {}
    for way, uri in (("delta-rs", str(tmp_path / "local")), ("spark", (tmp_path / "uri").as_uri())):
        lake, path = Lake(uri, lambda: engine().session), f"{uri}/t"
        folder = paths[way] = path.removeprefix("file://")
        for end, days in ((10, 3), (20, 2), (30, 0), (40, 1)):
            row = {"slice": end, "commit_time": NOW - timedelta(days=days)}
            DeltaRsRecords().write(folder, pa.Table.from_pylist([row], SCHEMA), Commit(end))
        assert make_table_maintenance(lake, path).find_last_slice_before(NOW - timedelta(hours=36)) == 20
        assert make_table_maintenance(lake, path).find_last_slice_before(NOW - timedelta(days=9)) == 0
        assert make_table_maintenance(lake, path).delete("slice <= 10") == 1
        assert (
            make_table_maintenance(lake, path).delete("commit_time < {since}", NOW - timedelta(hours=36)) == 1
        )
        assert make_table_maintenance(lake, path).compact() == 1
        make_table_maintenance(lake, path).vacuum(1000)
        assert lake.records.position(path) == 40
        assert list(lake.records.slices(path, 0)) == [30, 40]
        assert sorted(row["slice"] for row in DeltaRsRecords().rows(folder)) == [30, 40]
        assert len(list(Path(folder).glob("*.parquet"))) > 1, "old versions are deleted too early"
        make_table_maintenance(lake, path).vacuum(0)
        assert len(list(Path(folder).glob("*.parquet"))) == 1
    properties = [DeltaTable(folder).metadata().configuration for folder in paths.values()]
    assert properties[0] == {name: properties[1][name] for name in properties[0]}


@pytest.mark.drawn
@pytest.mark.spark
def test_a_table_with_deletion_vectors_keeps_those_that_a_version_needs(tmp_path: Path) -> None:
    spark = engine().session
    lake, path = Lake(str(tmp_path), lambda: spark), str(tmp_path / "t")
    spark.range(100).coalesce(1).write.format("delta").option("delta.enableDeletionVectors", "true").save(
        path
    )
    spark.sql(f"delete from delta.`{path}` where id % 10 = 3")
    marked = DeltaTable(path).version()
    make_table_maintenance(lake, path).compact()
    make_table_maintenance(lake, path).vacuum(1)
    assert list(tmp_path.rglob("deletion_vector_*.bin"))
    assert spark.read.format("delta").option("versionAsOf", marked).load(path).count() == 90
    assert spark.read.format("delta").load(path).count() == 90


def test_a_table_with_timestamps_demands_no_more_of_its_readers(tmp_path: Path) -> None:
    lake, path = Lake(str(tmp_path), no_session), str(tmp_path / "t")
    DeltaRsRecords().write(path, pa.table({"at": pa.array([0, 1], pa.timestamp("us"))}), Commit(10))
    make_table_maintenance(lake, path).vacuum(24)
    assert DeltaTable(path).protocol().reader_features == ["timestampNtz"]


def test_rows_are_clustered_into_files_that_do_not_overlap(tmp_path: Path) -> None:
    lake, path = Lake(str(tmp_path), lambda: engine().session), str(tmp_path / "t")
    rows = [f"{number * 7919 % 4000:04d}{number:028d}" for number in range(4000)]
    DeltaRsRecords().write(
        path, pa.table({"t": rows}), Commit(10, properties={"delta.targetFileSize": "8192"})
    )
    files = make_table_maintenance(lake, path).list_file_times_and_sizes()
    assert sum(size for _, size in files) == lake.records.size_bytes(path)
    make_table_maintenance(lake, path).compact(["t"])
    bounds = pa.table(DeltaTable(path).get_add_actions(flatten=True)).sort_by("min.t")
    least, greatest = bounds["min.t"].to_pylist(), bounds["max.t"].to_pylist()
    assert len(least) > 1
    assert all(high < low for high, low in zip(greatest, least[1:], strict=False))
    assert lake.records.position(path) == 10
