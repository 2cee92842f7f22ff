"""The work of steps is done while Dagster records other steps. It ends when the recording ends."""

import logging
import threading
from functools import partial
from pathlib import Path

import dagster as dg
import pytest

from pgsieve.assets.outcome import run_as_step
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.prefetched import PREFETCH_LOG, make_finished_work
from pgsieve.pipelines.commands.prefetched_work import prefetch_work
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.resource import LakeResource
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.work import Work
from tests.fixtures.dagster_in_memory import in_memory


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return LakeResource(uri=str(tmp_path), engine=SparkEngine(master="local[1]", spark_config={})).open()


def _work(name: str, log: Log) -> str:
    log(f"{name} begins")
    if name == "b":
        raise ValueError(name)
    log(f"{name} ends")
    return name.upper()


def test_each_step_gets_its_result_its_messages_and_its_error_in_any_order(lake: Lake) -> None:
    with prefetch_work(lake, {name: partial(_work, name) for name in "abc"}) as done:
        messages = list[str]()
        assert done["c"](messages.append)[0] == "C"
        with pytest.raises(ValueError, match="b"):
            done["b"](messages.append)
        assert done["a"](messages.append)[0] == "A"
    assert messages == ["c begins", "c ends", "b begins", "a begins", "a ends"]
    assert make_finished_work(7)(messages.append) == (7, Work())


def test_log_messages_are_in_the_log_of_their_own_step(lake: Lake) -> None:
    """This also holds while another step is running, and while none is."""
    running, logged = threading.Event(), threading.Event()

    def work(name: str, _: Log) -> str:
        if name == "b":
            running.wait(60)
        logging.getLogger("pgsieve.working").warning("%s waits", name)
        if name == "b":
            logged.set()
        return name

    with prefetch_work(lake, {name: partial(work, name) for name in "ab"}) as done:

        @dg.multi_asset(specs=[dg.AssetSpec("a")], name="a")
        def first(context: dg.AssetExecutionContext) -> None:
            with run_as_step(context):
                running.set()
                logged.wait(60)
                done["a"](context.log.info)

        @dg.multi_asset(specs=[dg.AssetSpec("b", deps=["a"])], name="b")
        def second(context: dg.AssetExecutionContext) -> None:
            with run_as_step(context):
                done["b"](context.log.info)

        with in_memory() as dagster:
            result = dg.materialize([first, second], instance=dagster)
            logs = dagster.all_logs(result.run_id)
    messages = [
        (entry.step_key, entry.level, entry.user_message) for entry in logs if "waits" in entry.user_message
    ]
    assert messages == [("a", logging.WARNING, "a waits"), ("b", logging.WARNING, "b waits")]
    assert PREFETCH_LOG.get() is None


def test_a_single_step_does_its_work_itself(lake: Lake) -> None:
    with prefetch_work(lake, {"b": partial(_work, "b")}) as done:
        assert not done


def test_an_interrupted_recording_ends_the_work(lake: Lake) -> None:
    began, enter, worked = threading.Event(), threading.Event(), list[str]()

    def work(name: str, _: Log) -> None:
        worked.append(name)
        began.set()
        enter.wait(60)

    def interrupted() -> None:
        with prefetch_work(lake, {name: partial(work, name) for name in "abc"}):
            began.wait(60)
            threading.Timer(0.2, enter.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert worked == ["a"], "work was started after the end"
    assert enter.is_set(), "work in progress was not waited for"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pgsieve-work")]
