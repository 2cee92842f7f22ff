"""Random workloads leave the same rows in every replica as in PostgreSQL's own subscriber.

PGSIEVE_BUDGET_SECONDS (30) is the time to try, PGSIEVE_SEED the first workload's seed (by default a new one). A failure shows the
workload's SQL and its seed; PGSIEVE_SEED=<seed> PGSIEVE_BUDGET_SECONDS=0 repeats it.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import errors

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.replicas import Writer
from tests.fixtures.tries import budget_seconds, try_workloads
from tests.fixtures.workloads import OnBoth, Step, Transaction, Workload, random_workload

pytestmark = pytest.mark.spark


#: Errors that a statement may meet because of another session, a key, or a missing partition.
IN_THE_WAY = (errors.UniqueViolation, errors.LockNotAvailable, errors.CheckViolation)
#: Settings that stream every transaction, however small. PostgreSQL 16 has another name for it.
STREAMED = {16: "logical_replication_mode = 'immediate'"}
STREAMED_SINCE_17 = "debug_logical_replication_streaming = 'immediate'"


def run_transaction(scenario: Scenario, statements: tuple[str, ...]) -> None:
    """Run one transaction. A statement that fails for an expected reason is rolled back, as an application would do."""
    scenario.publisher("BEGIN")
    for statement in statements:
        print(f"    {statement}")
        if statement.startswith(("SAVEPOINT", "ROLLBACK", "COMMIT", "PREPARE")):
            scenario.publisher(statement)
            continue
        if " ADD COLUMN " in statement:
            scenario.subscriber(statement)
        scenario.publisher("SAVEPOINT statement")
        try:
            scenario.publisher(statement)
        except IN_THE_WAY:
            scenario.publisher("ROLLBACK TO SAVEPOINT statement")
        scenario.publisher("RELEASE SAVEPOINT statement")


def run_steps(scenario: Scenario, steps: list[Step], *, sliced: bool = False) -> None:
    """Run the sessions' steps. DDL for both sides waits until the subscriber has applied everything before it.

    `sliced` makes each transaction a slice. The replicas then compare batches of slices with different ends.
    """
    for number, step in enumerate(steps):
        if sliced and number:
            scenario.receive()
        if isinstance(step, Transaction):
            run_transaction(scenario, step.statements)
            continue
        print(step.statement)
        if isinstance(step, OnBoth):
            assert scenario.builtin is not None
            scenario.builtin.run()
            scenario.subscriber(step.statement)
        scenario.publisher(step.statement)


def run_workload(scenario: Scenario, workload: Workload) -> int:
    """Run a workload, and check every table after each phase. Return how many rows were compared."""
    for definition in workload.definitions:
        print(definition)
        scenario.tables(definition)
    run_steps(scenario, workload.before)
    for publication in workload.publications.values():
        print(publication)
        scenario.publisher(publication)
    print(workload.options)
    streamed = STREAMED.get(scenario.publisher_server.version, STREAMED_SINCE_17)
    scenario.publisher(f"ALTER DATABASE {scenario.name} SET {streamed}; SET lock_timeout = '50ms'")
    scenario.subscribe(*workload.publications, **workload.options)
    compared = sum(map(len, scenario.check(*scenario.subscribed()).values()))
    for phase in workload.phases:
        print("-- phase")
        run_steps(scenario, phase, sliced=workload.sliced)
        compared += sum(map(len, scenario.check(*scenario.subscribed()).values()))
    return compared


def test_random_workloads_leave_the_rows_of_the_built_in_subscriber(
    publisher_server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
) -> None:
    """It may take long: the drawn writer may start Spark, or a cluster."""

    def compared(seed: int) -> int:
        folder = tmp_path / str(seed)
        named = os.environ.get("PGSIEVE_WRITER")
        writer = Writer.of(named) if named else Writer.drawn(random.Random(seed))
        print(f"    {writer}")
        try:
            with Scenario(publisher_server, subscriber_server, folder, writer=writer) as scenario:
                workload = random_workload(random.Random(seed), publisher_server.version)
                # one slice per phase instead of one per transaction
                sliced = workload.sliced and not writer.is_slow
                # A lake that only Spark reaches refuses a slot that sends prepared transactions.
                two_phase = bool(workload.options["two_phase"]) and writer.runner != "committing"
                options = {**workload.options, "two_phase": two_phase}
                return run_workload(scenario, replace(workload, sliced=sliced, options=options))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    try_workloads(compared, budget_seconds(30), "rows")
