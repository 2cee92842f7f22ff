"""Several processes at once, some killed, some stopped for a while, some without their locks: no change is lost or applied twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.faults.killable import MARKING, NOT_SMALL, Site, site
from tests.fixtures.replicas import Writer
from tests.fixtures.tries import budget_seconds, drawn_seed

pytestmark = pytest.mark.spark

#: Commands of the processes; most are runs.
COMMANDS = (
    ("run",),
    ("run",),
    ("run",),
    ("run", "accounts"),
    ("check",),
    ("check", "--repair"),
    ("resync", "accounts", "public.journal"),
    ("resync", "filtered", "public.orders"),
)
#: Ends the sessions that hold pgsieve's locks, as a firewall ends idle sessions.
ROB = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"


#: Writers: the processes themselves (few rows); their threads (many rows, no JVM); both with a lake on S3.
WRITERS = [
    "spark",
    *(
        pytest.param(writer, marks=pytest.mark.long)
        for writer in (
            "driver large",
            "driver large marking",
            "driver on_s3",
            "driver large on_s3",
            "driver large marking on_s3",
        )
    ),
]


@pytest.mark.drawn
@pytest.mark.parametrize("named", WRITERS)
def test_processes_that_overlap_at_random_lose_and_repeat_nothing(
    request: pytest.FixtureRequest, publisher_server: EmbeddedServer, tmp_path: Path, named: str
) -> None:
    """It takes as long as its budget, and starts a Spark Connect server."""
    budget = budget_seconds(20)
    seed = drawn_seed()
    print(f"reproduce: PGSIEVE_SEED={seed} PGSIEVE_BUDGET_SECONDS={budget:g}")
    chosen, rounds, end = random.Random(seed), 0, time.monotonic() + budget
    writer = Writer.of(named)
    conf = MARKING if writer.marking else NOT_SMALL if writer.batches == "large" else None
    master = request.getfixturevalue("master") if writer.runner == "spark" else "threads[2]"
    store = request.getfixturevalue("s3_server") if writer.on_s3 else None
    name = f"overlapping_{named.replace(' ', '_')}"
    with site(name, publisher_server, tmp_path, master, store=store, conf=conf) as (pgsieve, database):
        assert pgsieve.run() == 0, pgsieve.log
        while not rounds or time.monotonic() < end:
            rounds += 1
            with pgsieve.writing():
                _overlap(pgsieve, database, chosen)
            assert pgsieve.run() == 0, pgsieve.log
            pgsieve.verify(database)
    print(f"drawn: seed {seed}, {rounds} rounds, {pgsieve.transfers} transactions")


def _overlap(pgsieve: Site, database: psycopg.Connection, chosen: random.Random) -> None:
    """Start two to four processes at about the same moment, and wait until all have ended.

    A stopped process continues later, after others took its locks and did its work, as on a machine that slept.
    """
    processes = []
    for _ in range(chosen.randint(2, 4)):
        processes.append(pgsieve.start(*chosen.choice(COMMANDS)))
        time.sleep(chosen.uniform(0, 1))
    mortal = [process for process in processes if chosen.random() < 0.3]
    last, stopped = time.monotonic() + 120, dict[BaseProcess, float]()
    while alive := [process for process in processes if process.is_alive()]:
        assert time.monotonic() < last, f"the processes wait for each other:\n{pgsieve.log}"
        time.sleep(chosen.uniform(0, 1))
        if chosen.random() < (0.8 if stopped else 0.4):
            database.execute(ROB)
        if mortal and chosen.random() < 0.3:
            mortal.pop().kill()
        for process in [each for each, until in stopped.items() if until <= time.monotonic()]:
            _signal(process, signal.SIGCONT)
            del stopped[process]
        if chosen.random() < 0.3 and (process := chosen.choice(alive)) not in stopped:
            _signal(process, signal.SIGSTOP)
            stopped[process] = time.monotonic() + chosen.uniform(0, 6)


def _signal(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
