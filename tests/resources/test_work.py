"""The description of work in Spark, and what it took: of the calling thread, and of its threads."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD, ThreadRunner
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance
from pgsieve.resources.lake.runners import SparkRunner
from pgsieve.resources.lake.spark_writes import add_commit_costs
from pgsieve.resources.work import DRIVER, add_costs, measure_work, name_jobs
from tests.fixtures.pgsieve_replica import engine


def _row(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"path": str(number), "size": 10 + number}], FILE_SCHEMA)


def test_each_runner_counts_its_parts_and_written_rows() -> None:
    with measure_work() as work:
        with measure_work() as few:
            CALLING_THREAD.run(lambda number, _: [_row(number)], 2)
        ThreadRunner(2).run(lambda number, _: [_row(number)], 3)
    assert (few.engine_text, few.task_count, few.written_bytes) == (DRIVER, 2, 21)
    assert (work.engine_text, work.task_count, work.written_bytes) == ("driver + threads", 5, 21 + 33)
    assert work.seconds >= few.seconds > 0


def test_the_work_of_parallel_threads_is_counted_too(tmp_path: Path) -> None:
    lake = Lake(str(tmp_path), lambda: pytest.fail("no session is needed"))
    with measure_work() as work:
        lake.map_in_parallel(lambda size: add_costs(DRIVER, 1, size), [1, 2, 3])
    add_costs(DRIVER, 1, 99)  # no caller counts it
    assert (work.task_count, work.written_bytes) == (3, 6)


@pytest.mark.drawn
@pytest.mark.spark
def test_jobs_of_spark_are_grouped_by_subscription_and_described() -> None:
    session = engine().session
    lake = Lake("/none", lambda: session)
    properties = session.sparkContext.getLocalProperty
    seen: dict[str, tuple[str | None, str | None]] = {}

    def written(table: str) -> None:
        with name_jobs("sales", f"UPDATE transformation of public.{table}, slice 0/1A2B"):
            SparkRunner(lambda: session).run(lambda number, _: [_row(number)], 2)
            seen[table] = properties("spark.jobGroup.id"), properties("spark.job.description")

    with measure_work() as work:
        threads = [Thread(target=copy_context().run, args=(written, table)) for table in ("orders", "items")]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        with name_jobs("sales", "initial sync of public.t"):
            assert lake.spark is session
            seen["t"] = properties("spark.jobGroup.id"), properties("spark.job.description")
    what = "sales: UPDATE transformation of public.{}, slice 0/1A2B"
    assert seen == {
        **{table: ("sales", what.format(table)) for table in ("orders", "items")},
        "t": ("sales", "sales: initial sync of public.t"),
    }
    assert (work.engine_text, work.task_count, work.written_bytes) == ("Spark, local", 4, 42)
    status = session.sparkContext.statusTracker()
    assert len(status.getJobIdsForGroup("sales")) == 2


@pytest.mark.drawn
@pytest.mark.spark
def test_the_files_that_spark_commits_itself_are_counted(tmp_path: Path) -> None:
    """It takes long: Delta in Spark commits four times."""
    session, path = engine().session, str(tmp_path / "t")
    lake = Lake(str(tmp_path), lambda: session)
    # Only Spark writes a table with partitions.
    rows = session.range(10).selectExpr("id", "id % 2 AS part")
    rows.write.format("delta").partitionBy("part").save(path)
    paths_before = set(tmp_path.rglob("*.parquet"))
    for change in ("write", "merge", "delete", "compact"):
        with measure_work() as work:
            if change == "write":
                lake.write(rows, path, Commit(1))
            elif change == "merge":
                rows.createOrReplaceTempView("source")
                session.sql(
                    f"MERGE INTO delta.`{path}` t USING (SELECT DISTINCT id + 9 AS id, part FROM source) s ON t.id = s.id"
                    " WHEN MATCHED THEN UPDATE SET part = 1 WHEN NOT MATCHED THEN INSERT *"
                )
                add_commit_costs(session, path)
            elif change == "delete":
                assert make_table_maintenance(lake, path).delete("id = 3") == 2
            else:
                make_table_maintenance(lake, path).compact()
        paths = set(tmp_path.rglob("*.parquet"))
        new_bytes = sum(file.stat().st_size for file in paths - paths_before)
        # A deletion vector marks the deleted row, so this commit has no new file of rows.
        file_count = 1 if change == "delete" else len(paths - paths_before)
        assert (work.engine_text, work.task_count) == ("Spark, local", file_count), change
        assert work.written_bytes == new_bytes, change
        assert change == "delete" or new_bytes, change
        paths_before = paths
    session.catalog.dropTempView("source")
