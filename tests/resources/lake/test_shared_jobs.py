"""Callers share jobs: the next job does what was requested during a job. An error belongs to its caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD, ThreadRunner
from pgsieve.resources.lake.runners import SparkRunner
from pgsieve.resources.lake.shared_jobs import (
    Request,
    SharedJobs,
    SharedParts,
    divide_into_tasks,
    get_shared_jobs,
    share_jobs,
)
from pgsieve.resources.parts import Guard, Part
from pgsieve.resources.work import Work, measure_work, name_jobs
from tests.fixtures.oracle import wait_until
from tests.fixtures.pgsieve_replica import engine


def _rows(name: str, parts: int = 1) -> pa.Table:
    return pa.Table.from_pylist([{"path": f"{name} {n}", "size": 10 + n} for n in range(parts)], FILE_SCHEMA)


def _asked(name: str, parts: int = 1) -> Request:
    def part(number: int, _: Guard) -> Iterator[pa.RecordBatch]:
        if name.startswith("bad") and number == parts - 1:
            raise ValueError(name)
        yield from _rows(name, parts).slice(number, 1).to_batches()

    return Request(part, parts, None)


def _waiting(jobs: SharedJobs, number: int) -> None:
    wait_until(lambda: len(jobs._waiting_requests) == number, lambda: f"{len(jobs._waiting_requests)} wait")


class _Slow:
    """Runs each job once it is released."""

    def __init__(self) -> None:
        self.jobs, self.running, self.let_go = list[Sequence[Request]](), Event(), Event()

    def __call__(self, job: Sequence[Request]) -> Sequence[pa.Table | None]:
        self.jobs.append(job)
        self.running.set()
        assert self.let_go.wait(60)
        return [pa.Table.from_batches(asked.run_part(0, iter)) for asked in job]


def test_requests_during_a_job_are_done_by_the_next_one() -> None:
    jobs, run = SharedJobs(), _Slow()
    asked = [_asked(name) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        rows = [pool.submit(jobs.run_request, asked[0], run)]
        run.running.wait(60)
        rows += [pool.submit(jobs.run_request, each, run) for each in asked[1:]]
        _waiting(jobs, 3)
        run.let_go.set()
        assert [each.result(60) for each in rows] == [_rows(name) for name in "abcd"]
    assert [len(job) for job in run.jobs] == [1, 3]
    assert {id(each) for job in run.jobs for each in job} == {id(each) for each in asked}


def test_a_failing_job_gives_no_rows_and_the_next_one_begins() -> None:
    def run(job: Sequence[Request]) -> Sequence[pa.Table | None]:
        if job[0] is failing:
            raise ValueError("failed")
        return [_rows("a")]

    jobs, failing, next_one = SharedJobs(), _asked("bad"), _asked("a")
    slow, parallel = _Slow(), _asked("b")
    with ThreadPoolExecutor(3) as pool:
        pool.submit(jobs.run_request, next_one, slow)
        slow.running.wait(60)
        first = pool.submit(jobs.run_request, failing, run)
        _waiting(jobs, 1)
        second = pool.submit(jobs.run_request, parallel, run)
        _waiting(jobs, 2)
        slow.let_go.set()
        # One of the two threads ran the job, and gets its error.
        errors = [each.exception(60) for each in (first, second)]
    assert sorted(map(str, errors)) == ["None", "failed"]
    assert [failing.rows_future.result(0), parallel.rows_future.result(0)] == [None, None]
    assert jobs.run_request(_asked("a"), run) == _rows("a")


def test_no_job_begins_after_the_end_was_requested() -> None:
    jobs, run = SharedJobs(), _Slow()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(jobs.run_request, _asked("a"), run)
        run.running.wait(60)
        waiting = pool.submit(jobs.run_request, _asked("b"), run)
        _waiting(jobs, 1)
        jobs.stop()
        with pytest.raises(CancelledError):
            waiting.result(60)
        run.let_go.set()
        assert running.result(60) == _rows("a")
    with pytest.raises(CancelledError):
        jobs.run_request(_asked("c"), run)
    assert len(run.jobs) == 1


@pytest.mark.parametrize(
    ("parts", "parallelism", "tasks"),
    [
        ([1] * 16, 2, 2),
        ([1] * 3, 8, 3),
        ([4] * 16, 2, 4),
        ([4, 1, 2], 2, 4),
        ([1, 1], 1, 1),
        ([100, 1, 1], 64, 100),
        ([2] * 40, 64, 64),
    ],
)
def test_each_part_is_in_one_task_and_tasks_have_equal_shares(
    parts: list[int], parallelism: int, tasks: int
) -> None:
    job = [_asked(str(caller), number) for caller, number in enumerate(parts)]
    shares = divide_into_tasks(job, parallelism)
    assert len(shares) == tasks
    assert sorted(each for share in shares for each in share) == [
        (caller, number) for caller, of_caller in enumerate(parts) for number in range(of_caller)
    ]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    if len(set(parts)) == 1 and tasks == parts[0]:
        assert [{number for _, number in share} for share in shares] == [{n} for n in range(tasks)]


def test_a_failing_part_fails_only_its_caller() -> None:
    job = [_asked("a", 3), _asked("bad", 2), _asked("b", 1), _asked("bad too")]
    together = SharedParts([each.run_part for each in job], divide_into_tasks(job, 2), FILE_SCHEMA)
    rows = CALLING_THREAD.run(together, len(together.tasks), schema=together.row_schema)
    a, bad, b, bad_too = together.divide_rows_by_caller(rows)
    assert a is not None
    assert b is not None
    assert a.sort_by("path") == _rows("a", 3)
    assert b == _rows("b")
    assert (bad, bad_too) == (None, None)
    nothing = together.divide_rows_by_caller(together.row_schema.empty_table())
    assert nothing == [FILE_SCHEMA.empty_table()] * len(job)


def test_jobs_are_shared_only_within_their_block() -> None:
    assert get_shared_jobs() is None
    with share_jobs():
        assert copy_context().run(get_shared_jobs) is get_shared_jobs() is not None
    assert get_shared_jobs() is None
    assert (CALLING_THREAD.max_callers, ThreadRunner(3).max_callers) == (1, 1)


def _sent_part(name: str, until: str | None) -> Part:
    """A part that writes nothing, and is pickled by value. If a file is named, the part waits for it."""

    def part(number: int, _: Guard) -> Iterator[pa.RecordBatch]:
        import os
        import time

        while until is not None and not os.path.exists(until):  # noqa: PTH110
            time.sleep(0.01)
        if name == "bad":
            raise ValueError("bad fails")
        yield pa.RecordBatch.from_pylist([{"path": f"{name} {number}", "size": 10}], schema)

    schema = FILE_SCHEMA
    return part


@pytest.mark.spark
def test_spark_runs_shared_requests_under_the_names_of_all(tmp_path: Path) -> None:
    session = engine().session
    executors, status = SparkRunner(lambda: session, 2), session.sparkContext.statusTracker()
    groups = ["one", "sales, stock, bad"]
    before = [len(status.getJobIdsForGroup(group)) for group in groups]
    until = tmp_path / "asked"

    def written(name: str, parts: int) -> tuple[list[str], Work]:
        part = _sent_part(name, str(until) if name == "one" else None)
        with measure_work() as work, name_jobs(name, f"UPDATE transformation of public.{name}, slice 0/1A2B"):
            rows = executors.run(part, parts)
        return rows["path"].to_pylist(), work

    with ThreadPoolExecutor(4) as pool, share_jobs():
        jobs = get_shared_jobs()
        assert jobs is not None

        def ask(name: str, parts: int) -> Future[Any]:
            return pool.submit(copy_context().run, written, name, parts)

        one = ask("one", 1)
        wait_until(lambda: jobs._is_running, lambda: "no job runs")
        others = []
        for number, name in enumerate(("sales", "stock", "bad"), 1):
            others.append(ask(name, number))
            _waiting(jobs, number)
        until.touch()
        assert one.result(60)[0] == ["one 0"]
        sales, stock = (each.result(60) for each in others[:2])
        with pytest.raises(Exception, match="bad fails"):
            others[2].result(60)
    assert (sales[0], sorted(stock[0])) == (["sales 0"], ["stock 0", "stock 1"])
    assert [(w.engine_text, w.task_count, w.written_bytes) for _, w in (sales, stock)] == [
        ("Spark, local", 1, 10),
        ("Spark, local", 2, 20),
    ]
    assert [len(status.getJobIdsForGroup(group)) for group in groups] == [1 + number for number in before]
