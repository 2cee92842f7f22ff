"""Generated columns are published only from PostgreSQL 18 on, and only where asked for (section 29.6; t/011)."""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.fixtures.oracle import Scenario

pytestmark = pytest.mark.spark

GENERATED = "CREATE TABLE {} (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c text)"


def test_a_generated_column_that_is_not_published_is_the_subscribers_own(scenario: Scenario) -> None:
    for table in ("tab1", "plain"):
        scenario.publisher(GENERATED.format(table))
    scenario.subscriber(
        "CREATE TABLE tab1 (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 22) STORED, c text)"
    )
    scenario.subscriber("CREATE TABLE plain (a int PRIMARY KEY, b int, c text)")
    for table in ("tab1", "plain"):
        scenario.publisher(f"INSERT INTO {table} (a) VALUES (1), (2), (3)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab1, plain")
    scenario.subscribe("pub")
    scenario.check(expect={"tab1": ["1|", "2|", "3|"], "plain": ["1|", "2|", "3|"]})
    for table in ("tab1", "plain"):
        scenario.publisher(
            f"INSERT INTO {table} (a) VALUES (4), (5); UPDATE {table} SET a = 6, c = 'x' WHERE a = 5"
        )
    rows = ["1|", "2|", "3|", "4|", "6|x"]
    scenario.check(expect={"tab1": rows, "plain": rows})
    assert ("6", "132", "x") in scenario.subscriber("SELECT * FROM tab1")
    assert ("6", None, "x") in scenario.subscriber("SELECT * FROM plain")


def test_stored_generated_columns_are_published_where_asked_for_or_named(
    scenario: Scenario, postgres_version: int
) -> None:
    tables = ("asked", "listed", "left_out")
    for table in tables:
        scenario.publisher(GENERATED.format(table))
        scenario.subscriber(f"CREATE TABLE {table} (a int PRIMARY KEY, b int, c text)")
        scenario.publisher(f"INSERT INTO {table} (a) VALUES (1), (2), (3)")
    statement = "CREATE PUBLICATION asked FOR TABLE asked WITH (publish_generated_columns = stored)"
    if postgres_version < 18:  # there is no such parameter
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(statement)
        return
    scenario.publisher(statement)
    scenario.publisher("CREATE PUBLICATION listed FOR TABLE listed (a, b), left_out")
    scenario.subscribe("asked", "listed")
    for table in tables:
        scenario.publisher(
            f"INSERT INTO {table} (a, c) VALUES (4, 'x'), (5, 'x'); UPDATE {table} SET a = 6 WHERE a = 5"
        )
    scenario.check(
        expect={
            "asked": ["1|2|", "2|4|", "3|6|", "4|8|x", "6|12|x"],
            "listed": ["1|2", "2|4", "3|6", "4|8", "6|12"],
            "left_out": ["1|", "2|", "3|", "4|x", "6|x"],
        }
    )


def test_virtual_generated_columns_are_never_published(scenario: Scenario, postgres_version: int) -> None:
    definition = "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) VIRTUAL, c int)"
    if postgres_version < 18:  # there are none
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(definition)
        return
    scenario.publisher(definition)
    scenario.subscriber("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    scenario.publisher("INSERT INTO t (a) VALUES (1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WITH (publish_generated_columns = stored)")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO t (a) VALUES (2); UPDATE t SET c = 3 WHERE a = 1")
    scenario.check(expect={"t": ["1|3", "2|"]})
