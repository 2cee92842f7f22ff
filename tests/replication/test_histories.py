"""Histories that start with all rows, and versions of rows: at each commit and each cut they are the replica's rows of that time.

The same rows were in the built-in subscriber when it stopped there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from pgsieve.assets.steps.history_choices import HistoryChoice, HistoryChoices
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import TableStates
from pgsieve.resources.lake.delta.queries import query_table
from tests.fixtures.oracle import Rows, Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.schema_changes import alter, copies, replicas
from tests.fixtures.tries import drawn_seed
from tests.fixtures.workloads import keyed_statement

_LONG = [
    *(
        pytest.param(writer, marks=[pytest.mark.spark, pytest.mark.long])
        for writer in ("spark large", "spark large marking")
    ),
    pytest.param("driver large marking on_s3", marks=pytest.mark.long),
]
pytestmark = pytest.mark.slow

Row = Mapping[str, Any]

_ANOTHER_COLUMN = "ALTER TABLE t DROP COLUMN d; ALTER TABLE t ADD COLUMN d int"


@pytest.fixture(autouse=True)
def _with_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = HistoryChoices(HistoryChoice(initial=True, scd2=True))
    monkeypatch.setattr(PgsieveReplica, "histories", kept)


def _states(replica: PgsieveReplica, table: str, key: str) -> Iterator[tuple[int, list[Row]]]:
    """Replay the change history, and yield the rows after each commit. `key` names a unique column; '' compares whole rows."""
    state = TableStates(replica.lake, "sub").read_newest()["public", table]
    assert state.definition is not None
    generation = state.definition.history.generation
    changes = replica.stored(
        replica.lake.paths.change_history("sub", "public", table, generation)
    ).to_pylist()
    rows: list[Row] = []
    changes.sort(key=lambda change: (change["commit_lsn"], change["ordinal"]))
    for at, change in enumerate(changes):
        old, new, left_out = change["old"], change["new"], change["unchanged"] or ()
        if change["operation"] in {"snapshot", "truncate"}:
            rows = []
        if change["operation"] in {"update", "delete"}:
            gone = new if old is None else old
            is_found = [each for each in rows if (each[key] == gone[key] if key else each == gone)]
            if is_found:
                rows.remove(is_found[0])
                new = new and {**new, **{name: is_found[0][name] for name in left_out}}
            else:
                new = None
        if new is not None:
            rows.append(new)
        if at + 1 == len(changes) or changes[at + 1]["commit_lsn"] > change["commit_lsn"]:
            yield change["commit_lsn"], list(rows)


def _versions(replica: PgsieveReplica, table: str) -> list[Row]:
    """All versions of a table's rows, also those of histories that ended when a new one began."""
    state = TableStates(replica.lake, "sub").read_newest()["public", table]
    assert state.definition is not None
    generations = range(state.definition.history.generation + 1)
    paths = (
        replica.lake.paths.row_versions("sub", "public", table, generation) for generation in generations
    )
    return [row for path in paths for row in replica.stored(path).to_pylist()]


def _after(versions: list[Row], lsn: int, names: list[str]) -> list[Row]:
    """Some columns of the versions that are valid after the commit at `lsn`."""
    return [
        {name: row[name] for name in names}
        for row in versions
        if row["valid_from_lsn"] <= lsn and (row["is_current"] or lsn < row["valid_to_lsn"])
    ]


def _rows_at(replica: PgsieveReplica, path: str, version: int) -> pa.Table:
    assert replica.lake.delta_rs is not None
    return query_table(replica.lake.delta_rs.open_version(path, version), "select * from t")


def _sorted(rows: list[Row]) -> list[str]:
    return sorted(repr(dict(row)) for row in rows)


def _check(replica: PgsieveReplica, table: str, key: str) -> list[Row]:
    """Compare a table's histories with each other, and with its replica now and at each cut. Return the versions."""
    path = replica.lake.paths.replica("sub", "public", table)
    now = replica.stored(path)
    states = list(_states(replica, table, key))
    assert _sorted(states[-1][1]) == _sorted(now.to_pylist()), (
        "the change history does not lead to the replica"
    )
    versions = _versions(replica, table)
    for lsn, rows in states:
        assert _sorted(_after(versions, lsn, now.column_names)) == _sorted(
            [{name: row.get(name) for name in now.column_names} for row in rows]
        ), lsn
    for cut in Cuts(replica.lake, "sub").read_all():
        then = _rows_at(replica, path, cut.tables["public", table])
        rows = _after(versions, cut.lsn - 1, then.column_names)
        assert _sorted(rows) == _sorted(then.to_pylist()), f"other rows at the cut of {cut.lsn}"
        assert ("public", table) in cut.versioned
    for row in versions:
        assert row["is_current"] is (row["valid_to_lsn"] is None) is (row["valid_to"] is None)
        assert row["is_current"] or row["valid_from_lsn"] < row["valid_to_lsn"]
        assert row["is_current"] or row["valid_from"] <= row["valid_to"]
        assert row["valid_from"] is not None
    return versions


def _check_times(versions: list[Row], key: str) -> None:
    """At each time the versions have at most one row of a key; and none ends before it begins."""
    by_key: dict[object, list[Row]] = {}
    for row in versions:
        assert row["is_current"] or row["valid_from"] <= row["valid_to"], row
        by_key.setdefault(row[key], []).append(row)
    for rows in by_key.values():
        for time in {row["valid_from"] for row in rows}:
            valid = [r for r in rows if r["valid_from"] <= time and (r["is_current"] or time < r["valid_to"])]
            assert len(valid) <= 1, valid


def _check_without_versions(replica: PgsieveReplica, table: str, key: str) -> None:
    """Compare a change history with its replica, which has no versions of rows."""
    *_, (_, rows) = _states(replica, table, key)
    now = replica.stored(replica.lake.paths.replica("sub", "public", table))
    assert _sorted(rows) == _sorted(now.to_pylist())
    assert not replica.lake.records.exists(replica.lake.paths.row_versions("sub", "public", table))


@pytest.mark.drawn
@pytest.mark.parametrize("scenario", ["driver large alone", *_LONG], indirect=True)
def test_versions_valid_at_each_commit_are_the_rows_of_that_time(scenario: Scenario) -> None:
    """Some twenty random transactions, each a slice, in both modes."""
    seed = drawn_seed()
    print(f"again: PGSIEVE_SEED={seed}")
    random = Random(str(seed))
    scenario.tables("""
        CREATE TABLE t (id int PRIMARY KEY, v int, big text);
        CREATE TABLE u (id int PRIMARY KEY, v int, big text);
        ALTER TABLE u REPLICA IDENTITY FULL
    """)
    scenario.publisher("""
        ALTER TABLE t ALTER big SET STORAGE EXTERNAL; ALTER TABLE u ALTER big SET STORAGE EXTERNAL;
        INSERT INTO t SELECT i, i, repeat('b', 2100) FROM generate_series(1, 7) i;
        INSERT INTO u SELECT i, i, repeat('b', 2100) FROM generate_series(1, 7) i;
        CREATE PUBLICATION p FOR TABLE t WHERE (id % 3 <> 0), u WHERE (v > 0)
    """)
    scenario.subscribe("p")
    stopped: dict[str, list[tuple[int, Mapping[str, Rows]]]] = {name: [] for name in scenario.replicas}
    for _ in range(4):
        for _ in range(random.randint(1, 3)):
            for _ in range(random.randint(1, 4)):
                statements = [
                    keyed_statement(random, random.choice("tu")) for _ in range(random.randint(1, 6))
                ]
                scenario.publisher("; ".join(statements))
            scenario.receive()
        stopped_rows = scenario.check("t", "u")
        for name, replica in scenario.replicas.items():
            cut = Cuts(replica.lake, "sub").read_last()  # type: ignore[attr-defined]
            assert cut is not None
            stopped[name].append((cut.lsn, stopped_rows))
    for name, replica in scenario.replicas.items():
        assert isinstance(replica, PgsieveReplica)
        for table in "tu":
            versions = _check(replica, table, "id")
            for lsn, stopped_rows in stopped[name]:
                rows = pa.Table.from_pylist(_after(versions, lsn - 1, ["id", "v", "big"]))
                assert Rows(replica.printed("public", table, rows)) == stopped_rows[table], lsn


@pytest.mark.drawn
@pytest.mark.parametrize("scenario", [pytest.param("spark", marks=pytest.mark.spark), *_LONG], indirect=True)
def test_histories_follow_their_tables(scenario: Scenario) -> None:
    """It takes long: each schema change needs two runs of two replicas, and Spark rewrites them."""
    scenario.tables("""
        CREATE TABLE t (id int PRIMARY KEY, a int, b text);
        CREATE TABLE log (a int); ALTER TABLE log REPLICA IDENTITY FULL;
        CREATE TABLE own (id int PRIMARY KEY, valid_to int);
        CREATE TABLE odd (id int PRIMARY KEY, "a b" int)
    """)
    scenario.publisher("""
        INSERT INTO t VALUES (1, 1, 'x'), (2, 2, 'y'); INSERT INTO log VALUES (1), (1), (2); INSERT INTO own VALUES (1, 1);
        INSERT INTO odd VALUES (1, 1), (2, 2); CREATE PUBLICATION p FOR TABLE t, log, own, odd
    """)
    scenario.subscribe("p")
    scenario.publisher(
        "UPDATE t SET a = 10 WHERE id = 1; DELETE FROM log WHERE a = 2; UPDATE own SET valid_to = 2"
    )
    scenario.publisher("TRUNCATE odd; INSERT INTO odd VALUES (3, 3)")
    scenario.check("t", "log", "own", "odd")
    for replica in replicas(scenario):
        for table, key in (("log", ""), ("own", "id")):
            _check_without_versions(replica, table, key)
        _check(replica, "odd", "id")
    # Add a column; add one with a default; rename one; drop one; add it again; drop it again; add it with another type, which begins
    # new histories; change the key; add another column under a dropped name, for which the table is copied again.
    copied = 1
    for ddl in (
        "ALTER TABLE t ADD COLUMN c int",
        "ALTER TABLE t ADD COLUMN d int DEFAULT 4",
        "ALTER TABLE t RENAME COLUMN a TO e",
        "ALTER TABLE t DROP COLUMN d",
        "ALTER TABLE t ADD COLUMN d int",
        "ALTER TABLE t DROP COLUMN d",
        "ALTER TABLE t ADD COLUMN d text",
        "ALTER TABLE t ALTER b SET NOT NULL; CREATE UNIQUE INDEX tb ON t (b); ALTER TABLE t REPLICA IDENTITY USING INDEX tb",
        _ANOTHER_COLUMN,
    ):
        scenario.publisher(
            "UPDATE t SET b = b || '1' WHERE id = 2; INSERT INTO t (id, b) SELECT max(id) + 1, max(id) FROM t"
        )
        scenario.check("t")
        alter(scenario, ddl)
        scenario.publisher("UPDATE t SET b = b || '2' WHERE id = 1")
        scenario.check("t")
        for replica in replicas(scenario):
            versions = _versions(replica, "t")
            _check_times(versions, "id")
            now = replica.stored(replica.lake.paths.replica("sub", "public", "t"))
            current = [row for row in versions if row["is_current"]]
            assert _sorted([{n: row[n] for n in now.column_names} for row in current]) == _sorted(
                now.to_pylist()
            )
            for cut in Cuts(replica.lake, "sub").read_all()[-2:]:
                path = replica.lake.paths.replica("sub", "public", "t")
                then = _rows_at(replica, path, cut.tables["public", "t"])
                # At the cut of the schema change, the versions already have the table's new columns.
                names = [name for name in now.column_names if name in then.column_names]
                rows = _after(versions, cut.lsn - 1, names)
                assert _sorted(rows) == _sorted(then.select(names).to_pylist()), (ddl, cut.lsn)
        copied += ddl == _ANOTHER_COLUMN
        assert copies(scenario, "t") == {copied}, ddl


@pytest.mark.parametrize("scenario", ["driver alone"], indirect=True)
def test_new_columns_of_small_tables_need_no_spark(scenario: Scenario) -> None:
    """The histories were written with the former columns before."""
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, v int)")
    scenario.publisher("INSERT INTO t VALUES (1, 1), (2, 2); CREATE PUBLICATION p FOR TABLE t")
    scenario.subscribe("p")
    alterations = (
        "ADD COLUMN c int",
        "ADD COLUMN d text DEFAULT 'filled'",
        "RENAME COLUMN c TO e",
        "DROP COLUMN v",
    )
    for number, alteration in enumerate(alterations, 3):
        scenario.publisher(f"INSERT INTO t (id) VALUES ({number})")
        scenario.run()
        alter(scenario, f"ALTER TABLE t {alteration}")
        scenario.publisher("UPDATE t SET id = -id WHERE id = 1; UPDATE t SET id = -id WHERE id = -1")
        scenario.check("t")
        for replica in replicas(scenario):
            _check_times(_versions(replica, "t"), "id")
    scenario.check(
        expect={"t": ["1||filled", "2||filled", "3||filled", "4||filled", "5||filled", "6||filled"]}
    )
    assert copies(scenario, "t") == {1}


@pytest.mark.long
@pytest.mark.parametrize("scenario", [pytest.param("committing", marks=pytest.mark.spark)], indirect=True)
def test_a_history_starts_with_all_rows_if_only_spark_writes(scenario: Scenario) -> None:
    """It takes long: every step is a job of Spark."""
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE none (id int PRIMARY KEY)")
    scenario.publisher("INSERT INTO t VALUES (1, 1), (2, 2); CREATE PUBLICATION p FOR TABLE t, none")
    scenario.subscribe("p")
    scenario.publisher("UPDATE t SET v = 3 WHERE id = 1; INSERT INTO none VALUES (1); TRUNCATE none")
    scenario.check("t", "none")
    for replica in replicas(scenario):
        for table in ("t", "none"):
            _check_without_versions(replica, table, "id")
