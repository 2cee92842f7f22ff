"""Metadata columns: they name the change that each row comes from. The other columns equal the built-in subscriber's.

They are the same for every writer, and wherever batches end (`PgsieveReplica._compare`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from pgsieve.decoding.changes.deleted_rows import DELETED_ROW_COLUMNS
from pgsieve.decoding.changes.metadata_columns import TYPE_OID_BY_KIND
from pgsieve.decoding.lsn import parse_lsn
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.tries import drawn_seed
from tests.fixtures.workloads import keyed_statement

_WRITERS = [
    "driver large alone",
    pytest.param("driver large marking on_s3", marks=pytest.mark.long),
    *(
        pytest.param(writer, marks=[pytest.mark.spark, pytest.mark.long])
        for writer in ("spark", "spark large", "spark large marking", "committing")
    ),
]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", _WRITERS, indirect=True)]
_NAMES = {kind: f"_{kind}" for kind in TYPE_OID_BY_KIND if kind not in DELETED_ROW_COLUMNS}
_COPIED, _COMMITTED = ("copy_lsn", "copy_time"), ("commit_lsn", "commit_time", "ordinal")


@pytest.fixture(autouse=True)
def _with_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PgsieveReplica, "metadata", _NAMES)


def _metadata(replica: Any, table: str, key: str = "id") -> dict[Any, dict[str, Any]]:
    """The metadata of a table's rows, by key."""
    return {row[key]: {kind: row[name] for kind, name in _NAMES.items()} for row in replica.whole_rows(table)}


def _now(scenario: Scenario) -> tuple[int, datetime]:
    [(lsn, seconds)] = scenario.publisher(
        "SELECT pg_current_wal_insert_lsn(), extract(epoch FROM clock_timestamp())"
    )
    return parse_lsn(str(lsn)), datetime.fromtimestamp(float(seconds), UTC)


def test_metadata_columns_name_the_change_of_each_row(scenario: Scenario) -> None:
    scenario.tables("""
        CREATE TABLE t (id int PRIMARY KEY, v int, big text);
        CREATE TABLE tree (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF tree FOR VALUES FROM (0) TO (10);
        CREATE TABLE "High" PARTITION OF tree DEFAULT;
        CREATE TABLE log (id int)
    """)
    scenario.publisher("""
        ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
        INSERT INTO t SELECT i, i, repeat('b', 9000) FROM generate_series(-3, 7) i;
        INSERT INTO tree VALUES (1), (11); INSERT INTO log VALUES (1), (2);
        CREATE PUBLICATION p FOR TABLE t WHERE (id > 0); CREATE PUBLICATION leaves FOR TABLE low, "High";
        CREATE PUBLICATION inserts FOR TABLE log WITH (publish = 'insert, truncate')
    """)
    begun = _now(scenario)
    scenario.subscribe("p", "leaves", "inserts")
    copied = _now(scenario)
    scenario.check("t", "log", "low", "High")
    for replica in scenario.replicas.values():
        for table, source in (("t", "public.t"), ("log", "public.log"), ("High", 'public."High"')):
            for says in _metadata(replica, table).values():
                assert (says["operation"], says["source_table"]) == ("copy", source)
                assert begun[0] <= says["copy_lsn"] <= copied[0]
                assert begun[1] <= says["copy_time"] <= copied[1]
                assert says["applied_at"] is not None
                assert [says[kind] for kind in _COMMITTED] == [None] * 3

    scenario.publisher("DELETE FROM t WHERE id = -2")
    first = _now(scenario)
    scenario.publisher("BEGIN")
    scenario.publisher("""
        INSERT INTO t VALUES (9, 9, 'new'); UPDATE t SET v = 10 WHERE id = 1; UPDATE t SET id = -2 WHERE id = 2;
        UPDATE t SET id = 33 WHERE id = -3; UPDATE t SET id = 44 WHERE id = 4; UPDATE t SET v = 60 WHERE id = 6;
        UPDATE t SET v = 61 WHERE id = 6; DELETE FROM t WHERE id = 7; INSERT INTO t VALUES (7, 7, 'again')
    """)
    scenario.publisher("COMMIT")
    second = _now(scenario)
    scenario.receive()
    scenario.publisher(
        "UPDATE t SET v = 100 WHERE id = 9; TRUNCATE log; INSERT INTO log VALUES (3); INSERT INTO tree VALUES (2)"
    )
    scenario.check("t", "log", "low", "High")
    for replica in scenario.replicas.values():
        says = _metadata(replica, "t")
        changed = {1: "update", 33: "insert", 44: "update", 6: "update", 7: "insert"}
        assert {k: says[k]["operation"] for k in says} == changed | {9: "update", 3: "copy", 5: "copy"}
        for key in changed:
            assert first[0] <= says[key]["commit_lsn"] <= second[0]
            assert first[1] <= says[key]["commit_time"] <= second[1] <= says[key]["applied_at"]
            assert [says[key][kind] for kind in _COPIED] == [None, None]
        assert len({says[key]["commit_lsn"] for key in changed}) == 1
        assert sorted(changed, key=lambda key: says[key]["ordinal"]) == [1, 33, 44, 6, 7]
        assert second[0] <= says[9]["commit_lsn"]
        assert {row["operation"] for row in _metadata(replica, "log").values()} == {"insert"}
        assert {
            k: (row["operation"], row["source_table"]) for k, row in _metadata(replica, "low").items()
        } == {
            1: ("copy", "public.low"),
            2: ("insert", "public.low"),
        }


def test_rows_of_a_tree_published_as_its_root_name_their_leaf_if_the_publisher_sends_it(
    scenario: Scenario,
) -> None:
    scenario.tables("""
        CREATE TABLE tree (id int PRIMARY KEY, v int) PARTITION BY RANGE (id);
        CREATE TABLE low PARTITION OF tree FOR VALUES FROM (0) TO (10);
        CREATE TABLE rest PARTITION OF tree DEFAULT
    """)
    scenario.publisher(
        "INSERT INTO tree VALUES (1, 1), (11, 11); CREATE PUBLICATION p FOR TABLE tree WITH (publish_via_partition_root)"
    )
    scenario.subscribe("p")
    scenario.publisher("UPDATE tree SET id = 12 WHERE id = 1; INSERT INTO tree VALUES (2, 2)")
    scenario.check("tree", expect={"tree": ["2|2", "11|11", "12|1"]})
    for replica in scenario.replicas.values():
        assert {key: says["source_table"] for key, says in _metadata(replica, "tree").items()} == {
            2: None,
            11: "public.rest",
            12: None,
        }


def _as_of_history(replica: Any) -> dict[int, tuple[Any, ...]]:
    """By key, the last change of each living row, from a replay of the change history."""
    rows: dict[int, tuple[Any, ...]] = {}
    for change in sorted(replica.changes("t"), key=lambda each: (each["commit_lsn"], each["ordinal"])):
        old, new = change["old"], change["new"]
        if change["operation"] == "truncate":
            rows.clear()
        if old is not None:
            rows.pop(old["id"], None)
        if new is not None:
            rows[new["id"]] = tuple(change[kind] for kind in (*_COMMITTED, "operation"))
    return rows


@pytest.mark.drawn
def test_metadata_columns_name_the_last_change_of_the_history_after_random_changes(
    scenario: Scenario,
) -> None:
    seed = drawn_seed()
    print(f"again: PGSIEVE_SEED={seed}")
    random = Random(str(seed))
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, v int, big text)")
    scenario.publisher("""
        ALTER TABLE t ALTER big SET STORAGE EXTERNAL; CREATE PUBLICATION p FOR TABLE t WHERE (id % 3 <> 0)
    """)
    scenario.subscribe("p")
    for _ in range(4):
        for _ in range(random.randint(1, 4)):
            for _ in range(random.randint(1, 4)):
                scenario.publisher(
                    "; ".join(keyed_statement(random, "t") for _ in range(random.randint(1, 6)))
                )
            scenario.receive()
        scenario.check("t")
        for replica in scenario.replicas.values():
            says = _metadata(replica, "t")
            named = {k: tuple(row[kind] for kind in (*_COMMITTED, "operation")) for k, row in says.items()}
            assert named == _as_of_history(replica)
