"""The work of steps is done while others are recorded, and ends with what waits for it."""

import logging
import threading
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from pgsieve.assets.outcome import as_step
from pgsieve.assets.steps.done import PREFETCH_LOG, done_before
from pgsieve.assets.steps.log import Log
from pgsieve.pipelines.commands.prefetched_work import prefetched_work
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.resource import LakeResource
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.work import Work


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return LakeResource(uri=str(tmp_path), engine=SparkEngine(master="local[1]", spark_config={})).open()


def _work(name: str, log: Log) -> str:
    log(f"{name} begins")
    if name == "b":
        raise ValueError(name)
    log(f"{name} ends")
    return name.upper()


def test_each_step_gets_its_result_what_was_said_and_its_own_error_in_any_order(lake: Lake) -> None:
    with prefetched_work(lake, {name: partial(_work, name) for name in "abc"}) as done:
        said = list[str]()
        assert done["c"](said.append)[0] == "C"
        with pytest.raises(ValueError, match="b"):
            done["b"](said.append)
        assert done["a"](said.append)[0] == "A"
    assert said == ["c begins", "c ends", "b begins", "a begins", "a ends"]
    assert done_before(7)(said.append) == (7, Work())


def test_what_is_logged_is_in_the_log_of_its_own_step(lake: Lake) -> None:
    """Also while another step is running, and while none is."""
    running, logged = threading.Event(), threading.Event()

    def work(name: str, _: Log) -> str:
        if name == "b":
            running.wait(60)
        logging.getLogger("pgsieve.working").warning("%s waits", name)
        if name == "b":
            logged.set()
        return name

    with prefetched_work(lake, {name: partial(work, name) for name in "ab"}) as done:

        @dg.multi_asset(specs=[dg.AssetSpec("a")], name="a")
        def first(context: dg.AssetExecutionContext) -> None:
            with as_step(context):
                running.set()
                logged.wait(60)
                done["a"](context.log.info)

        @dg.multi_asset(specs=[dg.AssetSpec("b", deps=["a"])], name="b")
        def second(context: dg.AssetExecutionContext) -> None:
            with as_step(context):
                done["b"](context.log.info)

        with dg.DagsterInstance.ephemeral() as dagster:
            result = dg.materialize([first, second], instance=dagster)
            logs = dagster.all_logs(result.run_id)
    said = [
        (entry.step_key, entry.level, entry.user_message) for entry in logs if "waits" in entry.user_message
    ]
    assert said == [("a", logging.WARNING, "a waits"), ("b", logging.WARNING, "b waits")]
    assert PREFETCH_LOG.get() is None


def test_one_alone_works_in_its_step(lake: Lake) -> None:
    with prefetched_work(lake, {"b": partial(_work, "b")}) as done:
        assert not done


def test_what_ends_the_recording_ends_the_work(lake: Lake) -> None:
    began, going_on, worked = threading.Event(), threading.Event(), list[str]()

    def work(name: str, _: Log) -> None:
        worked.append(name)
        began.set()
        going_on.wait(60)

    def interrupted() -> None:
        with prefetched_work(lake, {name: partial(work, name) for name in "abc"}):
            began.wait(60)
            threading.Timer(0.2, going_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert worked == ["a"], "what was not begun is not done"
    assert going_on.is_set(), "and what was begun has ended"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pgsieve-work")]
