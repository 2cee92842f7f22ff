"""SIGTERM ends a follower within seconds, whatever its Spark does."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from pgsieve.pipelines.following import follow
from pgsieve.resources.lake.java import jvm
from tests.faults.killable import NOT_SMALL
from tests.fixtures import commands
from tests.fixtures.oracle import wait_until
from tests.fixtures.shop import Shop
from tests.fixtures.spark_servers import SMALL_DATA

_SECONDS = 2.0


def _impatient() -> None:
    follow.STOP_SECONDS, jvm._STOP_SECONDS = _SECONDS, _SECONDS


def _jvm(process: int) -> int:
    """The pid of the JVM of a process of pgsieve."""
    printed = subprocess.run(
        ["ps", "-eo", "pid=,pgid=,ppid=,comm="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in printed.stdout.splitlines()]
    (pid_of_jvm,) = [int(pid) for pid, _, parent, name in rows if int(parent) == process and name == "java"]
    return pid_of_jvm


@pytest.mark.drawn
@pytest.mark.spark
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_sigterm_ends_a_follower_whose_engine_hangs(shop: Shop, tmp_path: Path, busy: bool) -> None:
    """It takes long: a JVM starts and hangs, during an apply or between two. The next run continues where the follower ended."""
    shop.configure(spark={"conf": {**SMALL_DATA, **NOT_SMALL}})
    shop.copy()
    log, slices = tmp_path / "follower", shop.lake.paths.change_log("shop")
    follower = commands.start(["-c", str(shop.path), "run", "--follow"], log, prepare=_impatient)
    engine = None
    try:
        shop.database.execute("insert into stock values (5, 5)")
        wait_until(lambda: 5 in shop.ids("two", "stock"), log.read_text, 120)
        assert isinstance(follower.pid, int)
        os.kill(engine := _jvm(follower.pid), signal.SIGSTOP)
        if busy:
            before = shop.lake.records.head(slices).version
            shop.database.execute("insert into stock values (6, 6)")
            wait_until(lambda: shop.lake.records.head(slices).version > before, log.read_text)
        os.kill(follower.pid, signal.SIGTERM)
        follower.join(60)
        assert follower.exitcode == 0, log.read_text()
        assert ("in the middle of a slice" in log.read_text()) == busy
    finally:
        follower.kill()
        if engine is not None:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
    shop.configure(spark={"master": "threads[2]"})
    assert (ran := shop.cli("run"))[0] == 0, ran
    assert shop.ids("two", "stock") == [1, 2, 3, 4, 5, *([6] if busy else [])]
