"""At any moment the replicas have the rows that PostgreSQL's own subscriber had then.

After each step of a random workload a built-in subscription is stopped, and its rows are kept with the LSN. Later the same rows are
read from the lake as of that LSN: at cuts and between them, within slices and batches, after schema changes, copies and killed
runs. The versions of rows that are valid at that LSN must be the same rows. Variables as in `test_random_workloads`.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pgsieve.assets.steps.apply.progress import ReplicaProgress
from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.assets.steps.moments.moment import Moment, MomentError
from pgsieve.assets.steps.moments.reading import TableVersion, find_tables
from pgsieve.assets.steps.operations.initial_copy import copy_tables
from pgsieve.assets.steps.records.table_states import TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.decoding.changes.versions import VALID_FROM_LSN, VALID_TO_LSN
from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.resources import failpoints
from pgsieve.resources.failpoints import VARIABLE, Failpoint
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


class Killed(BaseException):
    """A run ends at a failpoint, as by SIGKILL. No code of pgsieve handles it."""


def run_killed(scenario: Scenario, draw: random.Random) -> None:
    """Run the replicas. One of them dies at a random failpoint, if it reaches this failpoint."""
    replicas = list(scenario.replicas.values())
    # Dagster would handle the error.
    if any(isinstance(replica, PgsieveReplica) and replica.dagster is not None for replica in replicas):
        return

    def die(*_: int) -> None:
        raise Killed

    failpoint = f"{draw.choice(list(Failpoint))}:{draw.randint(1, 3)}"
    print(f"-- killed at {failpoint}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoints, "os", SimpleNamespace(environ=os.environ, getpid=os.getpid, kill=die))
        patch.setattr(failpoints, "_reach_counts", Counter())
        patch.setenv(VARIABLE, failpoint)
        with suppress(Killed):
            scenario.run()
    for copy in scenario.folder.glob("*/lake_batched_*"):
        shutil.rmtree(copy)


def copy_again(scenario: Scenario, draw: random.Random) -> None:
    """Copy a random table of each replica again, as `pgsieve resync` does. A snapshot would wait for prepared transactions."""
    if scenario.publisher("SELECT 1 FROM pg_prepared_xacts WHERE database = current_database()"):
        return
    for replica in scenario.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        states = TableStates(replica.lake, "sub").read_newest()
        if applied := sorted(name for name, state in states.items() if state.is_applied):
            print(f"-- copied again: {(name := draw.choice(applied))}")
            copy_tables(replica.subscription, replica.lake, [name], replica.messages.append)


def has_published_all(scenario: Scenario) -> bool:
    """True if the publications have all tables of the built-in subscription.

    A run of pgsieve refreshes the publications: it drops a table that has left them, and copies it once it is back. The
    built-in subscription, which is not refreshed here, keeps such a table without a copy.
    """
    return all(scenario.published_columns(*name.split(".", 1)) for name in scenario.subscribed())


def subscriber_states(
    scenario: Scenario, workload: Workload, draw: random.Random, *, copies: bool
) -> list[Remembered]:
    """Run a workload, with random runs of the replicas. Return the subscriber's rows after each step.

    `copies` says whether tables are copied again in between.
    """
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
            drawn, can_run = draw.random(), has_published_all(scenario)
            if drawn < 0.2:
                scenario.receive()
            elif can_run and drawn < 0.4:
                scenario.run()
            elif can_run and drawn < 0.6:
                run_killed(scenario, draw)
            elif can_run and copies and drawn < 0.7:
                copy_again(scenario, draw)
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


def select_names(versions: pa.Table, is_valid: pa.ChunkedArray, lsn: int, names: list[str]) -> list[str]:
    """Those of the table's names at an LSN that the versions have that are valid then.

    If a slice drops or renames columns, all versions end and begin anew just before the slice. So at moments within the
    slice, before the ALTER TABLE, they lack values of the former names. Only such versions may lack these values.
    """
    begins, ends = versions[VALID_FROM_LSN], pc.fill_null(versions[VALID_TO_LSN], lsn)
    first_begin = pc.min(begins.filter(is_valid)).as_py() or 0
    has_begun_anew = any(
        end <= first_begin and not pc.any(pc.and_(pc.less(begins, end), pc.greater(ends, end))).as_py()
        for end in pc.unique(ends).to_pylist()
    )
    return [
        name
        for name in names
        if name in versions.column_names
        and not (
            has_begun_anew
            and all(
                value is None
                for value in itertools.compress(versions[name].to_pylist(), is_valid.to_pylist())
            )
        )
    ]


def compare_versions(
    replica: PgsieveReplica, state: TableState, lsn: int, seen: tuple[list[str], dict[str, str], Rows]
) -> int:
    """Compare the versions of rows that are valid at an LSN with the subscriber's rows; returns how many tables have versions.

    They are compared by the names that the columns had at that LSN (`select_names`).
    """
    assert state.definition is not None
    columns, types, rows = seen
    shared = [name for name in columns if name in state.definition.names]
    former = [name for name in columns if name not in state.definition.names]
    valid_rows, has_versions = list[tuple[str | None, ...]](), False
    for generation in range(state.definition.history.generation + 1):
        path = replica.lake.paths.row_versions("sub", *state.name, generation)
        if replica.lake.records.exists(path):
            versions, has_versions = replica.stored(path), True
            is_valid = pc.and_(
                pc.less(versions[VALID_FROM_LSN], lsn),
                pc.fill_null(pc.greater_equal(versions[VALID_TO_LSN], lsn), True),
            )
            if pc.any(is_valid).as_py():
                assert not valid_rows, "versions of two generations are valid"
                shared += select_names(versions, is_valid, lsn, former)
                # Arrow cannot filter the text views of the reader.
                valid_rows += itertools.compress(
                    printed_rows(versions.select(shared), types), is_valid.to_pylist()
                )
    places = [columns.index(name) for name in shared]
    wanted = [tuple(row[place] for place in places) for row in rows]
    assert not has_versions or Rows(valid_rows) == Rows(wanted), ("versions", state.name, format_lsn(lsn))
    return int(has_versions)


def compare(replica: PgsieveReplica, seen: Remembered, *, altered: bool) -> int:
    """Compare the tables at a moment, and return their number. If tables are altered or copied, moments may be refused."""
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
    compared, states = 0, TableStates(replica.lake, "sub").read_newest()
    for name, (columns, types, wanted) in seen.tables.items():
        rows = rows_at(replica, tables[name], columns, types) if name in tables else Rows([])
        assert rows is not None or altered, name
        if rows is not None:
            assert rows == wanted, (name, format_lsn(seen.lsn), tables.get(name))
            compared += 1
        if name in tables:
            schema, _, table = name.partition(".")
            compared += compare_versions(replica, states[schema, table], lsn, seen.tables[name])
    return compared


@pytest.mark.long
def test_the_rows_as_of_any_moment_are_those_of_the_built_in_subscriber(
    publisher_server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes as long as its budget. Each moment needs the rows of the built-in subscriber and a clone of the replica."""
    monkeypatch.setattr(PgsieveReplica, "histories", HistoryChoices(HistoryChoice(scd2=True)))

    def compared(seed: int) -> int:
        folder, draw, tables = tmp_path / str(seed), random.Random(seed), 0
        try:
            # Lakes that only Spark writes are not among the writers: they are read at cuts only.
            writer = Writer.drawn(draw, can_commit_by_spark=False)
            print(f"    {writer}")
            with Scenario(publisher_server, subscriber_server, folder, writer=writer) as scenario:
                workload = random_workload(draw, publisher_server.version)
                copies = draw.random() < 0.3
                altered = copies or any(
                    "ALTER" in text for phase in workload.phases for step in phase for text in step.statements
                )
                seen = subscriber_states(scenario, workload, draw, copies=copies)
                for moment in draw.sample(seen, min(len(seen), MOMENTS)):
                    replica = draw.choice(list(scenario.replicas.values()))
                    assert isinstance(replica, PgsieveReplica)
                    tables += compare(replica, moment, altered=altered)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return tables

    # A workload may have no moment at which a table exists.
    try_workloads(compared, budget_seconds(30), "tables")
