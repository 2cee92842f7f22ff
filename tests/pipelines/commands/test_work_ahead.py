"""Work that is done ahead of the steps that tell of it: in order, one at a time, and no more than somebody waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from pgsieve.assets.steps.log import Log
from pgsieve.pipelines.commands.work_ahead import done_ahead
from pgsieve.resources.lake.lake import Lake

T = TypeVar("T")


def no_session() -> None:
    raise AssertionError("no Spark is needed")


def of_lake(folder: Path, *works: Callable[[Log], T]) -> list[tuple[Lake, Callable[[Log], T]]]:
    lake = Lake(str(folder), no_session, threads=1)  # type: ignore[arg-type]
    return [(lake, work) for work in works]


def test_a_work_is_done_while_nobody_asks_for_it_and_tells_its_log_to_who_does(tmp_path: Path) -> None:
    second = threading.Event()

    def one(log: Log) -> int:
        log("one is done")
        return 1

    def two(log: Log) -> int:
        log("two is done")
        second.set()
        return 2

    lines: list[str] = []
    with done_ahead(of_lake(tmp_path, one, two)) as (first_work, second_work):
        assert second.wait(10)
        assert first_work(lines.append).result == 1
        assert lines == ["one is done"]
        assert second_work(lines.append).result == 2
    assert lines == ["one is done", "two is done"]


def test_one_alone_is_done_by_the_step_itself(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []
    with done_ahead(of_lake(tmp_path, lambda _: threads.append(threading.current_thread()))) as (work,):
        assert threads == []
        work(print)
    assert threads == [threading.current_thread()]


def test_no_two_works_are_done_at_once(tmp_path: Path) -> None:
    working, together = [0], [0]

    def work(_: Log) -> None:
        working[0] += 1
        together[0] = max(together[0], working[0])
        threading.Event().wait(0.01)
        working[0] -= 1

    with done_ahead(of_lake(tmp_path, *[work] * 5)) as works:
        for each in works:
            each(print)
    assert together == [1]


def test_a_work_that_fails_fails_its_own_step_after_its_log(tmp_path: Path) -> None:
    def fails(log: Log) -> int:
        log("it begins")
        raise ValueError("no such file")

    lines: list[str] = []
    with done_ahead(of_lake(tmp_path, fails, lambda _: 2)) as (first, second):
        with pytest.raises(ValueError, match="no such file"):
            first(lines.append)
        assert lines == ["it begins"]
        assert second(print).result == 2


def test_who_is_interrupted_leaves_no_work_behind(tmp_path: Path) -> None:
    begun: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def work(number: int) -> Callable[[Log], None]:
        def do(_: Log) -> None:
            begun.append(number)
            first.set()
            go_on.wait(10)

        return do

    def interrupted() -> None:
        with done_ahead(of_lake(tmp_path, *map(work, range(5)))):
            assert first.wait(10)
            threading.Timer(0.2, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert begun == [0]
    assert go_on.is_set(), "the work that had begun has ended"
