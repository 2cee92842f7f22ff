"""In a lake that only Spark reaches, a question about a table needs jobs once per version. A new version is seen at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.delta.spark import SparkRecords
from tests.fixtures.pgsieve_replica import engine


def rows(*values: int) -> pa.Table:
    return pa.table({"slice": pa.array(values, pa.int64())})


@pytest.mark.spark
@pytest.mark.drawn
def test_spark_is_asked_once_about_a_version(tmp_path: Path) -> None:
    """More than 20 s where it is the first test of its process that starts Spark."""
    session = engine().session
    records, others, folder = SparkRecords(lambda: session), DeltaRsRecords(), str(tmp_path / "a table")
    path = f"file://{folder}"

    def jobs() -> int:
        return int(session.sparkContext._jsc.sc().dagScheduler().numTotalJobs())

    def answers() -> tuple[object, ...]:
        return (
            records.exists(path),
            records.rows(path),
            records.rows(path, "slice > 10"),
            records.newest_rows(path, "slice"),
            records.head(path),
            records.version(path),
            records.count_rows(path),
            list(records.slices(path, 10)),
            records.version_of_position(path, 10),
            records.is_restored(path, 0),
        )

    assert (records.stamp(path), records.exists(path), records.rows(path)) == (None, False, [])
    others.append(folder, rows(10), 10)
    first = answers()
    assert first == (True, [{"slice": 10}], [], [{"slice": 10}], TableHead(0, 10), 0, 1, [], 0, False)
    records.rows(path).clear()
    records.rows(path)[0]["slice"] = 0
    before = jobs()
    assert (answers(), jobs()) == (first, before)
    records = SparkRecords(lambda: session)  # as the next step has it
    assert (answers(), jobs()) == (first, before)

    stamp = records.stamp(path)
    others.append(folder, rows(20), 20)
    assert records.stamp(path) != stamp
    before = jobs()
    assert not records.is_restored(path, 0)
    assert records.head(path) == TableHead(1, 20)
    assert (records.version_of_position(path, 10), records.is_repaired(path, 0), jobs()) == (0, False, before)
    assert sorted(row["slice"] for row in records.rows(path)) == [10, 20]

    records.append(path, rows(30), 30)
    assert (records.position(path), records.count_rows(path), records.slices(path, 10)) == (30, 3, (20, 30))
    before = jobs()
    assert (list(records.slices(path, 30)), records.is_restored(path, 2), jobs()) == ([], False, before)
    session.sql(f"restore table delta.`{path}` to version as of 1")
    assert (records.is_restored(path, 2), records.is_restored(path, 3)) == (True, False)

    shutil.rmtree(folder)
    assert (records.exists(path), records.rows(path), records.head(path)) == (False, [], TableHead())
    others.append(folder, rows(7), 7)
    assert (records.rows(path), records.head(path)) == ([{"slice": 7}], TableHead(0, 7))
