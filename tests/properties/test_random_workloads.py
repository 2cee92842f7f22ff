"""Random workloads leave the same rows in every replica as in PostgreSQL's own subscriber.

PGSIEVE_BUDGET_SECONDS (30) is how long to try, PGSIEVE_SEED the first workload's seed (a new one each time). A
failure names the seed of its workload: PGSIEVE_SEED=<it> PGSIEVE_BUDGET_SECONDS=0 runs that one again.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest
from psycopg import errors

from resources.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.replicas import Writer
from tests.fixtures.workloads import Workload, random_workload

pytestmark = pytest.mark.spark


def run_transaction(scenario: Scenario, statements: list[str]) -> None:
    """Run one transaction; a statement that meets an existing key is undone, as an application would."""
    scenario.publisher("BEGIN")
    for statement in statements:
        print(f"    {statement}")
        if statement.startswith(("SAVEPOINT", "ROLLBACK", "COMMIT")):
            scenario.publisher(statement)
            continue
        scenario.publisher("SAVEPOINT statement")
        try:
            scenario.publisher(statement)
        except errors.UniqueViolation:
            scenario.publisher("ROLLBACK TO SAVEPOINT statement")
        scenario.publisher("RELEASE SAVEPOINT statement")


def run_workload(scenario: Scenario, workload: Workload) -> int:
    """Run a workload with a check of every table after each phase; return how many rows were compared."""
    for definition in workload.definitions:
        print(definition)
        scenario.tables(definition)
    for transaction in workload.before:
        run_transaction(scenario, transaction)
    for publication in workload.publications.values():
        print(publication)
        scenario.publisher(publication)
    print(workload.options)
    # However small a transaction is, it is streamed.
    scenario.publisher(
        f"ALTER DATABASE {scenario.name} SET debug_logical_replication_streaming = 'immediate'"
    )
    scenario.subscribe(*workload.publications, **workload.options)
    compared = sum(map(len, scenario.check(*scenario.subscribed()).values()))
    for phase in workload.phases:
        print("-- phase")
        for transaction in phase:
            run_transaction(scenario, transaction)
        compared += sum(map(len, scenario.check(*scenario.subscribed()).values()))
    return compared


def test_random_workloads_leave_the_rows_of_the_built_in_subscriber(
    publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path
) -> None:
    deadline = time.monotonic() + float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "30"))
    first = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(2**32))
    compared = 0
    for seed in itertools.count(first):
        print(f"-- seed {seed}")
        try:
            folder = tmp_path / str(seed)
            writer: Writer = "executors" if seed % 2 else "process"
            with Scenario(publisher_server, subscriber_server, folder, writer=writer) as scenario:
                compared += run_workload(scenario, random_workload(random.Random(seed)))
        except Exception as error:
            error.add_note(f"reproduce: PGSIEVE_SEED={seed} PGSIEVE_BUDGET_SECONDS=0")
            raise
        if time.monotonic() > deadline:
            break
    print(f"{seed - first + 1} workloads, {compared} rows compared")
    assert compared or seed == first  # many workloads that compare nothing would prove nothing
