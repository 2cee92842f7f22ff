"""Spark runs as many parts in parallel as its session has cores, also if the master does not name their number."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile
from zipimport import zipimporter

import pyarrow as pa
import pytest

from pgsieve.resources.lake import runners
from pgsieve.resources.lake.delta.errors import JobCancelledError, find_spark_failure
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.runners import SparkRunner, prepare_worker
from pgsieve.resources.parts import Guard
from tests.fixtures.oracle import wait_until
from tests.fixtures.pgsieve_replica import engine


@pytest.mark.spark
def test_a_session_says_how_many_parts_it_runs_at_a_time() -> None:
    session = engine().session
    cores = session.sparkContext.defaultParallelism
    executors = SparkRunner(lambda: session)
    assert (executors.parallelism, executors.parallelism, SparkRunner(lambda: session, 7).parallelism) == (
        cores,
        cores,
        7,
    )


@pytest.mark.spark
def test_a_session_that_has_run_a_job_is_prepared_by_no_other() -> None:
    """A process opens a lake for each of its projects, and all of these use its one session."""
    session = engine().session
    run_counts = []
    for _ in range(2):
        executors = SparkRunner(lambda: session)
        executors.prepare()
        wait_until(
            lambda: "pgsieve-spark" not in {thread.name for thread in threading.enumerate()},
            lambda: "the session is still being prepared",
        )
        run_counts.append(len(session.sparkContext.statusTracker().getJobIdsForGroup(None)))
    assert run_counts[0] == run_counts[1]


@pytest.mark.spark
def test_an_interruption_cancels_a_job_and_an_error_does_not(tmp_path: Path) -> None:
    session = engine().session
    executors, begun, may_end = SparkRunner(lambda: session), tmp_path / "begun", tmp_path / "may_end"

    def part(_: int, __: Guard) -> Iterator[pa.RecordBatch]:
        begun.touch()
        deadline = time.monotonic() + 120
        while not may_end.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield pa.RecordBatch.from_pylist([], FILE_SCHEMA)

    with ThreadPoolExecutor(1) as pool:
        for cancels_jobs in (False, True):
            job = pool.submit(executors.run, part, 1)
            wait_until(begun.exists, lambda: "the job has not begun")
            executors.stop(cancels_jobs=cancels_jobs)
            if not cancels_jobs:
                may_end.touch()
                assert job.result(60).num_rows == 0
                begun.unlink()
                may_end.unlink()
            else:
                error = job.exception(60)
                assert error is not None
                assert isinstance(find_spark_failure(error), JobCancelledError)


def test_modules_of_a_removed_archive_are_still_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "archive.zip"
    with ZipFile(archive, "w") as file:
        for name in ("__init__", "before", "after"):
            file.writestr(f"package_of_an_archive/{name}.py", "")
    monkeypatch.syspath_prepend(archive)
    assert importlib.import_module("package_of_an_archive.before")
    assert any(isinstance(each, zipimporter) for each in sys.path_importer_cache.values())
    monkeypatch.setattr("gc.freeze", lambda: None)  # This process is no worker.
    prepare_worker()
    assert not any(isinstance(each, zipimporter) for each in sys.path_importer_cache.values())
    assert importlib.import_module("package_of_an_archive.after")


@pytest.mark.spark
def test_workers_import_installed_packages_and_read_no_archive_again() -> None:
    def part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        import pyspark

        archives = sum(isinstance(each, zipimporter) for each in sys.path_importer_cache.values())
        yield pa.RecordBatch.from_pylist([{"path": pyspark.__file__, "size": archives}], FILE_SCHEMA)

    session = engine().session
    rows = SparkRunner(lambda: session).run(part, 3)
    assert not [path for path in rows["path"].to_pylist() if ".zip" in path]
    assert rows["size"].to_pylist() == [0, 0, 0]


@pytest.mark.spark
def test_workers_keep_freed_memory_and_visit_no_imported_modules_for_garbage() -> None:
    def part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        delay = os.environ["MIMALLOC_PURGE_DELAY"]
        yield pa.RecordBatch.from_pylist([{"path": delay, "size": gc.get_freeze_count()}], FILE_SCHEMA)

    session = engine().session
    rows = SparkRunner(lambda: session).run(part, 3)
    assert rows["path"].to_pylist() == ["-1"] * 3
    assert min(rows["size"].to_pylist()) > 10_000


@pytest.mark.spark
def test_the_number_of_cores_is_read_again_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, session = "spark.sql.leafNodeDefaultParallelism", engine().session
    executors = SparkRunner(lambda: session)
    cores = executors.parallelism
    session.conf.set(setting, cores + 3)  # As if a cluster had given the session more executors.
    try:
        assert executors.parallelism == cores
        monkeypatch.setattr(runners, "_PARALLELISM_SECONDS", 0)
        assert executors.parallelism == cores + 3
    finally:
        session.conf.unset(setting)


@pytest.mark.spark
def test_rows_of_parts_keep_their_types_and_their_order_within_a_part() -> None:
    schema = pa.schema(
        {"number": pa.int64(), "side": pa.struct({"a b": pa.binary(), "c.d": pa.list_(pa.int32())})}
    )
    sides = [None, {"a b": b"\0", "c.d": [1, None]}, {"a b": None, "c.d": None}]

    def part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        for _ in range(number):
            yield pa.RecordBatch.from_pylist([{"number": number, "side": side} for side in sides], schema)

    session = engine().session
    rows = SparkRunner(lambda: session).run(part, 3, schema=schema)
    assert rows.schema == schema
    assert rows.sort_by("number")["number"].to_pylist() == [1, 1, 1, *[2] * 6]
    assert rows["side"].to_pylist() == sides * 3
    assert SparkRunner(lambda: session).run(part, 1, schema=schema) == schema.empty_table()
