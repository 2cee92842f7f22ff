"""Large transactions that are streamed while they are open: only committed changes remain.

PostgreSQL documentation, Architecture; t/015 to 018.

The publisher's logical_decoding_work_mem is 64 kB, so these transactions are sent before they end.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario, Session

pytestmark = pytest.mark.spark

FILL = "INSERT INTO {0} SELECT i, sha256(i::text::bytea) FROM generate_series({1}, {2}) i"


def streamed(scenario: Scenario, *tables: str, **options: object) -> None:
    """Tables with rows 1 and 2, subscribed with streaming."""
    scenario.publisher(f"ALTER DATABASE {scenario.name} SET logical_decoding_work_mem = '64kB'")
    for table in tables:
        scenario.publisher(f"CREATE TABLE {table} (a int PRIMARY KEY, b bytea)")
        scenario.subscriber(f"CREATE TABLE {table} (a int PRIMARY KEY, b bytea, c int DEFAULT 999)")
        scenario.publisher(FILL.format(table, 1, 2))
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub", **options)


def change(session: Session, table: str, first: int, last: int) -> None:
    """Insert rows, change the even rows of the whole table, and delete each third."""
    session(FILL.format(table, first, last))
    session(f"UPDATE {table} SET b = sha256(b) WHERE mod(a, 2) = 0; DELETE FROM {table} WHERE mod(a, 3) = 0")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"streaming": "on"}, marks=pytest.mark.long),
        {"streaming": "parallel", "binary": True},
    ],
    ids=["on", "parallel_binary"],
)
def test_interleaved_transactions_apply_as_they_commit(
    scenario: Scenario, options: dict[str, object]
) -> None:
    streamed(scenario, "test_tab", **options)
    with scenario.session() as other:
        scenario.publisher("BEGIN")
        change(scenario.publisher, "test_tab", 3, 5000)
        other("BEGIN")
        other(FILL.format("test_tab", 5001, 9999))
        other("DELETE FROM test_tab WHERE a > 5000; COMMIT")
        scenario.check(expect={"test_tab": "2|1|2"})
        scenario.publisher("COMMIT")
    rows = scenario.check("test_tab")["test_tab"]
    assert rows.summary() == "3334|1|5000"
    assert scenario.subscriber("SELECT count(*) FROM test_tab WHERE c = 999") == [("3334",)]
    scenario.subscriber("UPDATE test_tab SET c = 7")  # the subscriber's own column is irrelevant
    scenario.publisher("UPDATE test_tab SET b = sha256(a::text::bytea)")
    scenario.check("test_tab")
    assert scenario.subscriber("SELECT count(*) FROM test_tab WHERE c = 7") == [("3334",)]


@pytest.mark.drawn
def test_savepoints_of_streamed_transactions_count_as_they_end(scenario: Scenario) -> None:
    streamed(scenario, "kept", "undone", "spilled", "whole", streaming="parallel")
    # The savepoints add few and many rows to the transaction.
    scenario.publisher("BEGIN")
    for number in range(5):
        if number:
            scenario.publisher(f"SAVEPOINT s{number}")
        change(scenario.publisher, "kept", 3 * number + 3, 3 * number + 5)
    scenario.publisher("COMMIT")
    scenario.publisher("BEGIN")
    scenario.publisher(FILL.format("undone", 3, 2000) + "; SAVEPOINT s1; SAVEPOINT s2")
    change(scenario.publisher, "undone", 2001, 4000)
    scenario.publisher("ROLLBACK TO s2;" + FILL.format("undone", 4001, 4010))
    scenario.publisher("ROLLBACK TO s1; DELETE FROM undone WHERE a BETWEEN 8 AND 2000; COMMIT")
    # Only this subtransaction has changed a certain table.
    scenario.publisher("BEGIN; SAVEPOINT s")
    scenario.publisher(FILL.format("spilled", 3, 2000))
    scenario.publisher("ROLLBACK TO s; DELETE FROM spilled WHERE a = 1; COMMIT")
    # After a rollback, the relation is described again for a later subtransaction.
    scenario.publisher("BEGIN")
    change(scenario.publisher, "whole", 3, 3000)
    scenario.publisher("ROLLBACK")
    scenario.check(expect={"kept": "12|1|17", "undone": "7|1|7", "spilled": "1|2|2", "whole": "2|1|2"})


def test_a_schema_change_within_a_streamed_transaction_is_seen_from_its_place_on(scenario: Scenario) -> None:
    # src/test/subscription/t/017
    streamed(scenario, "test_tab", streaming="on")
    scenario.subscriber(
        "ALTER TABLE test_tab DROP COLUMN c, ADD COLUMN c int, ADD COLUMN d int, ADD COLUMN e int"
    )
    scenario.publisher(
        "BEGIN; INSERT INTO test_tab VALUES (3, sha256('3')); ALTER TABLE test_tab ADD COLUMN c int"
    )
    scenario.publisher("SAVEPOINT s1; INSERT INTO test_tab VALUES (4, sha256('4'), 4); SAVEPOINT s2")
    scenario.publisher(
        "INSERT INTO test_tab SELECT i, sha256(i::text::bytea), i FROM generate_series(5, 2000) i"
    )
    scenario.publisher("ROLLBACK TO s2; ALTER TABLE test_tab ADD COLUMN d int; COMMIT")
    scenario.publisher(
        "BEGIN; INSERT INTO test_tab VALUES (5, NULL, 5, 5); ALTER TABLE test_tab ADD COLUMN e int"
    )
    scenario.publisher(
        "INSERT INTO test_tab SELECT i, sha256(i::text::bytea), i, i, i FROM generate_series(6, 2000) i; COMMIT"
    )
    rows = scenario.check("test_tab")["test_tab"]
    assert rows.summary() == "2000|1|2000"
    assert [[*row[:1], *row[2:]] for row in rows if row[0] in ("1", "4", "5", "6")] == [
        ["1", None, None, None],
        ["4", "4", None, None],
        ["5", "5", "5", None],
        ["6", "6", "6", "6"],
    ]


@pytest.mark.drawn
def test_a_prepared_transaction_that_was_streamed_waits_for_its_second_phase(scenario: Scenario) -> None:
    # src/test/subscription/t/022 and 023
    streamed(scenario, "committed", "undone", streaming="on", two_phase=True)
    scenario.publisher("BEGIN")
    change(scenario.publisher, "committed", 3, 2000)
    scenario.publisher(f"SAVEPOINT s; {FILL.format('committed', 2001, 4000)}; ROLLBACK TO s")
    scenario.publisher(f"PREPARE TRANSACTION '{scenario.name}'; BEGIN")
    change(scenario.publisher, "undone", 3, 2000)
    scenario.publisher("PREPARE TRANSACTION ''")  # any text is a valid name, also the empty one
    scenario.publisher(FILL.format("undone", 4001, 4002))
    scenario.check(expect={"committed": "2|1|2", "undone": "4|1|4002"})
    scenario.publisher(f"COMMIT PREPARED '{scenario.name}'; ROLLBACK PREPARED ''")
    scenario.check(expect={"committed": "1334|1|2000", "undone": "4|1|4002"})
