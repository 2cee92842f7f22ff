"""Random workloads with what readers may choose: versions of rows, metadata columns, and deleted rows that stay.

The living rows are those of PostgreSQL's own subscriber, as in `test_random_workloads`. The versions that are valid at each cut are
the replica's rows of that cut, and no two versions of a key overlap. Variables as in `test_random_workloads`.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import SyncState, TableState, TableStates
from pgsieve.decoding.changes.deleted_rows import DELETED_ROW_COLUMNS
from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND
from pgsieve.resources.lake.delta.queries import query_table
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.replicas import Writer
from tests.fixtures.tries import budget_seconds, try_workloads
from tests.fixtures.workloads import Workload, random_workload
from tests.properties.test_random_workloads import run_workload

#: The kinds of metadata columns, without and with those of deleted rows.
_OF_CHANGES = {kind: f"_{kind}" for kind in TYPE_OID_BY_KIND if kind not in DELETED_ROW_COLUMNS}
_OF_DELETES = {kind: f"_{kind}" for kind in TYPE_OID_BY_KIND}

Row = dict[str, Any]


def _is_keyed(workload: Workload) -> bool:
    """Whether all tables have a key by which a subscriber finds rows, whatever the workload alters."""
    tables = [made for made in workload.definitions if re.match(r"CREATE TABLE t\d", made)]
    return all("PRIMARY KEY" in made and "DEFERRABLE" not in made for made in tables)


def _workload(draw: random.Random, version: int, *, keyed: bool) -> Workload:
    made = (random_workload(draw, version) for _ in itertools.count())
    return next(workload for workload in made if not keyed or _is_keyed(workload))


def _counted(rows: Sequence[Row], names: Sequence[str]) -> Counter[str]:
    return Counter(repr([row[name] for name in names]) for row in rows)


def _versions(replica: PgsieveReplica, state: TableState) -> Iterator[Row]:
    """The versions of a table's rows, also those of earlier generations."""
    assert state.definition is not None
    for generation in range(state.definition.history.generation + 1):
        path = replica.lake.paths.row_versions("sub", *state.name, generation)
        if replica.lake.records.exists(path):
            yield from replica.stored(path).to_pylist()


def _verify_versions(replica: PgsieveReplica) -> int:
    """Compare the versions of all tables with the replicas at each cut. Return how many rows were compared."""
    lake, compared = replica.lake, 0
    assert lake.delta_rs is not None
    cuts = Cuts(lake, "sub").read_all()
    for name, state in TableStates(lake, "sub").read_newest().items():
        versions = list(_versions(replica, state))
        if state.state != SyncState.READY or not versions:
            continue
        path = lake.paths.replica("sub", *name)
        now = replica.stored(path)
        current = [row for row in versions if row["is_current"]]
        assert _counted(current, now.column_names) == _counted(now.to_pylist(), now.column_names), name
        for cut in cuts:
            if name not in cut.versioned:
                continue
            then = query_table(lake.delta_rs.open_version(path, cut.tables[name]), "select * from t")
            # From a schema change on, versions have the new columns.
            shared = [each for each in then.column_names if each in now.column_names]
            valid = [
                row
                for row in versions
                if row["valid_from_lsn"] < cut.lsn and (row["is_current"] or cut.lsn <= row["valid_to_lsn"])
            ]
            assert _counted(valid, shared) == _counted(then.to_pylist(), shared), (name, cut.lsn)
            compared += len(valid)
        key = state.definition.key if state.definition is not None else ()
        of_keys: dict[str, list[Row]] = {}
        for row in versions:
            of_keys.setdefault(repr([row.get(each) for each in key]), []).append(row)
        for rows in of_keys.values():
            rows.sort(key=lambda row: row["valid_from_lsn"])
            for earlier, later in itertools.pairwise(rows):
                assert earlier["valid_to_lsn"] is not None, (name, earlier, later)
                assert earlier["valid_to_lsn"] <= later["valid_from_lsn"], (name, earlier, later)
    return compared


@pytest.mark.long
@pytest.mark.parametrize("choice", ["versions", "metadata", "soft"])
def test_random_workloads_leave_the_same_rows_with_what_readers_choose(
    choice: str,
    publisher_server: EmbeddedServer,
    subscriber_server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes as long as its budget, as `test_random_workloads` does."""
    scd2 = choice != "soft"
    monkeypatch.setattr(PgsieveReplica, "histories", HistoryChoices(HistoryChoice(initial=True, scd2=scd2)))
    named = {"versions": {}, "metadata": _OF_CHANGES, "soft": _OF_DELETES}[choice]
    monkeypatch.setattr(PgsieveReplica, "metadata", named)
    monkeypatch.setattr(PgsieveReplica, "keeps_deleted", choice == "soft")

    def compared(seed: int) -> int:
        folder, draw = tmp_path / str(seed), random.Random(seed)
        writer = Writer("driver", "drawn", marking=draw.random() < 0.5)
        print(f"    {writer}")
        try:
            with Scenario(publisher_server, subscriber_server, folder, writer=writer) as scenario:
                workload = _workload(draw, publisher_server.version, keyed=bool(named))
                rows = run_workload(scenario, workload)
                if scd2:
                    for replica in scenario.replicas.values():
                        assert isinstance(replica, PgsieveReplica)
                        _verify_versions(replica)
                return rows
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    try_workloads(compared, budget_seconds(30), "rows")
