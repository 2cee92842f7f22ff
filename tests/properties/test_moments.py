"""At any moment the replicas have the rows that PostgreSQL's own subscriber had then.

After each step of a random workload a built-in subscription is stopped, and its rows are kept with the LSN. Later the same rows are
read from the lake as of that LSN: at cuts and between them, within slices and batches, after schema changes. Variables as in
`test_random_workloads`.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.moments.reading import TableVersion, find_tables
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Rows, Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.printed_rows import printed_rows
from tests.fixtures.replicas import Writer
from tests.fixtures.tries import budget_seconds, try_workloads
from tests.fixtures.workloads import Workload, random_workload
from tests.properties.test_random_workloads import STREAMED, STREAMED_SINCE_17, run_steps

pytestmark = pytest.mark.spark

#: How many moments of a workload are read.
MOMENTS = 8


@dataclass(frozen=True)
class Remembered:
    """The rows of the built-in subscriber at an LSN: by table, the columns, their types, and the rows."""

    lsn: int
    tables: dict[str, tuple[list[str], dict[str, str], Rows]]


def remembered(scenario: Scenario) -> Remembered:
    """Wait until the built-in subscriber has applied everything committed, and read its rows."""
    assert scenario.builtin is not None
    scenario.builtin.run()
    [(lsn,)] = scenario.publisher("SELECT pg_current_wal_flush_lsn()")
    assert lsn is not None
    tables = {}
    for name in scenario.subscribed():
        schema, _, table = name.partition(".")
        if (columns := scenario.published_columns(schema, table)) is not None:
            replica = next(iter(scenario.replicas.values()))
            assert isinstance(replica, PgsieveReplica)
            rows = Rows(scenario.builtin.columns(schema, table, columns))
            tables[name] = columns, replica.types(schema, table), rows
    return Remembered(parse_lsn(lsn), tables)


def subscriber_states(scenario: Scenario, workload: Workload, draw: random.Random) -> list[Remembered]:
    """Run a workload, with random runs of the replicas. Return the subscriber's rows after each step."""
    for definition in workload.definitions:
        scenario.tables(definition)
    run_steps(scenario, workload.before)
    for publication in workload.publications.values():
        scenario.publisher(publication)
    streamed = STREAMED.get(scenario.publisher_server.version, STREAMED_SINCE_17)
    scenario.publisher(f"ALTER DATABASE {scenario.name} SET {streamed}; SET lock_timeout = '50ms'")
    scenario.subscribe(*workload.publications, **workload.options)
    seen = [remembered(scenario)]
    for phase in workload.phases:
        for step in phase:
            run_steps(scenario, [step])
            seen.append(remembered(scenario))
            if (drawn := draw.random()) < 0.4:
                scenario.receive() if drawn < 0.2 else scenario.run()
        scenario.check(*scenario.subscribed())
    return seen


def rows_at(
    replica: PgsieveReplica, table: TableVersion, columns: list[str], types: dict[str, str]
) -> Rows | None:
    """The rows of a table as PostgreSQL prints them, or None if its columns differ from the subscriber's."""
    rows = query_table(table.open_table(), "select * from t")
    if set(rows.column_names) - set(replica.metadata.values()) != set(columns):
        return None
    return Rows(printed_rows(rows.select(columns), types))


def compare(replica: PgsieveReplica, seen: Remembered, *, altered: bool) -> int:
    """Compare the tables at a moment, and return their number. If the workload alters tables, copied ones may be refused."""
    position = TransformedSlices(replica.lake, "sub").read_position()
    complete = ReplicaProgress(replica.subscription, replica.lake).find_complete_lsn(position)
    # The log ends there: the last transactions changed none of these tables.
    lsn = min(seen.lsn, complete)
    try:
        tables = {".".join(t.name): t for t in find_tables(Moment(replica.lake, "sub", lsn, complete))}
    except MomentError as error:
        if not altered or "copied" not in str(error):
            raise
        return 0
    compared = 0
    for name, (columns, types, wanted) in seen.tables.items():
        rows = rows_at(replica, tables[name], columns, types) if name in tables else Rows([])
        assert rows is not None or altered, name
        if rows is not None:
            assert rows == wanted, (name, format_lsn(seen.lsn), tables.get(name))
            compared += 1
    return compared


@pytest.mark.long
def test_the_rows_as_of_any_moment_are_those_of_the_built_in_subscriber(
    publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path
) -> None:
    """It takes as long as its budget. Each moment needs the rows of the built-in subscriber and a clone of the replica."""

    def compared(seed: int) -> int:
        folder, draw, tables = tmp_path / str(seed), random.Random(seed), 0
        try:
            # Lakes that only Spark writes are not among the writers: they are read at cuts only.
            writer = Writer("driver", "drawn", marking=draw.random() < 0.5)
            with Scenario(publisher_server, subscriber_server, folder, writer=writer) as scenario:
                workload = random_workload(draw, publisher_server.version)
                altered = any(
                    "ALTER" in text for phase in workload.phases for step in phase for text in step.statements
                )
                seen = subscriber_states(scenario, workload, draw)
                for moment in draw.sample(seen, min(len(seen), MOMENTS)):
                    replica = draw.choice(list(scenario.replicas.values()))
                    assert isinstance(replica, PgsieveReplica)
                    tables += compare(replica, moment, altered=altered)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return tables

    # A workload may have no moment at which a table exists.
    try_workloads(compared, budget_seconds(30), "tables")
