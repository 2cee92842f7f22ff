"""Replica identities of every kind. Identity, key and column list change while changes are streamed.

Section 29.1.1 of PostgreSQL's manual; src/test/subscription/t/100_bugs.pl. test_basic_changes.py tests plain tables of each
identity, test_partitions.py the identities of partitions.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario, both_writers
from tests.fixtures.schema_changes import alter, copies

pytestmark = pytest.mark.spark


def two_keys(scenario: Scenario) -> None:
    """A copied table with a key, a unique index on another column, and two rows."""
    scenario.tables(
        "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL, c text); CREATE UNIQUE INDEX t_b ON t (b)"
    )
    scenario.publisher("INSERT INTO t VALUES (1, 10, 'x'), (2, 20, 'y'); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")


@pytest.mark.drawn
def test_a_new_replica_identity_copies_nothing_if_no_earlier_change_waits(
    scenario: Scenario,
) -> None:
    two_keys(scenario)
    for identity in ("USING INDEX t_b", "FULL", "DEFAULT"):
        alter(scenario, f"ALTER TABLE t REPLICA IDENTITY {identity}")
        scenario.publisher("UPDATE t SET c = c || '.', a = a + 2, b = b + 1; DELETE FROM t WHERE c = 'y..'")
        scenario.check("t")
    scenario.check(expect={"t": ["7|13|x..."]})
    assert copies(scenario, "t") == {1}


@both_writers
def test_changes_before_and_after_a_new_replica_identity_find_their_rows(scenario: Scenario) -> None:
    two_keys(scenario)
    scenario.publisher("UPDATE t SET b = 11 WHERE a = 1; INSERT INTO t VALUES (3, 30, 'z')")
    alter(scenario, "ALTER TABLE t REPLICA IDENTITY USING INDEX t_b")
    scenario.publisher("UPDATE t SET a = 9 WHERE b = 11; DELETE FROM t WHERE b = 20")
    scenario.check(expect={"t": ["9|11|x", "3|30|z"]})


def test_a_primary_key_on_other_columns_is_the_key_from_then_on(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int CONSTRAINT first PRIMARY KEY, b int NOT NULL)")
    scenario.publisher("INSERT INTO t VALUES (1, 10), (2, 20); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    alter(
        scenario, "ALTER TABLE t DROP CONSTRAINT first; ALTER TABLE t ADD CONSTRAINT second PRIMARY KEY (b)"
    )
    scenario.publisher(
        "INSERT INTO t VALUES (1, 30); UPDATE t SET a = 2 WHERE b = 10; UPDATE t SET b = 21 WHERE b = 20"
    )
    scenario.check(expect={"t": ["2|10", "2|21", "1|30"]})
    assert copies(scenario, "t") == {1}


@pytest.mark.drawn
def test_a_table_that_loses_its_key_takes_equal_rows(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int CONSTRAINT first PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO t VALUES (1, 'x'), (2, 'y'); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.publisher("UPDATE t SET b = 'z' WHERE a = 2")
    alter(
        scenario,
        "ALTER TABLE t DROP CONSTRAINT first; ALTER TABLE t ALTER a DROP NOT NULL; ALTER TABLE t REPLICA IDENTITY FULL",
    )
    scenario.publisher(
        "INSERT INTO t VALUES (1, 'x'), (1, 'x'), (NULL, NULL); UPDATE t SET b = 'w' WHERE a = 2"
    )
    scenario.publisher("DELETE FROM t WHERE ctid = (SELECT max(ctid) FROM t WHERE a = 1)")
    scenario.check(expect={"t": ["1|x", "1|x", "2|w", "|"]})


@pytest.mark.drawn
def test_under_identity_full_a_column_may_be_dropped(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int, b_drop int, c int); ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.publisher("INSERT INTO t VALUES (1, 1, 1), (1, 2, 1); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    alter(scenario, "ALTER TABLE t DROP COLUMN b_drop; ALTER TABLE t ADD COLUMN d date DEFAULT '2020-01-01'")
    scenario.publisher("UPDATE t SET a = 100 WHERE ctid = (SELECT min(ctid) FROM t)")
    scenario.check(expect={"t": ["1|1|2020-01-01", "100|1|2020-01-01"]})
    assert copies(scenario, "t") == {1}


def test_a_deferrable_key_is_no_replica_identity(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE t (a int PRIMARY KEY DEFERRABLE, b text); ALTER TABLE t REPLICA IDENTITY FULL"
    )
    scenario.publisher("INSERT INTO t VALUES (1, 'x'), (2, 'y'); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; SET CONSTRAINTS ALL DEFERRED; UPDATE t SET a = 3 - a; COMMIT; DELETE FROM t WHERE b = 'x'"
    )
    scenario.check(expect={"t": ["1|y"]})


@pytest.mark.drawn
def test_a_stored_generated_column_is_added_and_dropped_unpublished(scenario: Scenario) -> None:
    two_keys(scenario)
    alter(scenario, "ALTER TABLE t ADD COLUMN g int GENERATED ALWAYS AS (b * 2) STORED")
    scenario.publisher("INSERT INTO t VALUES (3, 30, 'z'); UPDATE t SET b = 11 WHERE a = 1")
    scenario.check(expect={"t": ["1|11|x", "2|20|y", "3|30|z"]})
    # The catalog was read after the slot was created, and the server wrote WAL in between. Until a later slice arrives, changes
    # from before the column may still arrive, so a second change of the table would be ambiguous.
    scenario.publisher("UPDATE t SET b = 12 WHERE a = 1")
    scenario.check(expect={"t": ["1|12|x", "2|20|y", "3|30|z"]})
    alter(scenario, "ALTER TABLE t DROP COLUMN g")
    scenario.publisher("DELETE FROM t WHERE a = 2")
    scenario.check(expect={"t": ["1|12|x", "3|30|z"]})
    assert copies(scenario, "t") == {1}


@pytest.mark.drawn
def test_a_column_that_leaves_the_column_list_is_dropped_and_one_that_joins_it_copied(
    scenario: Scenario,
) -> None:
    two_keys(scenario)
    scenario.subscriber("ALTER TABLE t ALTER COLUMN b DROP NOT NULL")
    scenario.publisher("INSERT INTO t VALUES (3, 30, 'z'); ALTER PUBLICATION pub SET TABLE t (a, c)")
    scenario.publisher("INSERT INTO t VALUES (4, 40, 'w'); UPDATE t SET c = 'v' WHERE a = 1")
    scenario.check(expect={"t": ["1|v", "2|y", "3|z", "4|w"]})
    assert copies(scenario, "t") == {1}
    scenario.subscriber(
        "UPDATE t SET b = 40 WHERE a = 4"
    )  # the column list kept b from PostgreSQL's subscriber
    scenario.publisher("ALTER PUBLICATION pub SET TABLE t (a, b, c); UPDATE t SET b = 21 WHERE a = 2")
    scenario.check(expect={"t": ["1|10|v", "2|21|y", "3|30|z", "4|40|w"]})
    assert copies(scenario, "t") == {2}
