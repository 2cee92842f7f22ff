"""PostgreSQL's rules for TRUNCATE (sections 29.4 and 29.8; src/test/subscription/t/010).

Left out: RESTART IDENTITY, because a replica has no sequences, and two subscriptions that fill one table, because each
subscription has its own replica tables.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario, both_writers

pytestmark = [pytest.mark.spark, both_writers]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "how",
    [
        "CASCADE",
        *(pytest.param(how, marks=pytest.mark.long) for how in ("", "RESTART IDENTITY", "CONTINUE IDENTITY")),
    ],
)
def test_truncate_empties_the_table(scenario: Scenario, how: str) -> None:
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY, b serial)")
    scenario.publisher("INSERT INTO tab1 VALUES (1), (2), (3); CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")
    scenario.check(expect={"tab1": ["1|1", "2|2", "3|3"]})
    scenario.publisher(f"TRUNCATE tab1 {how}")
    scenario.check(expect={"tab1": []})
    scenario.publisher("INSERT INTO tab1 (a) VALUES (7)")
    scenario.check(expect={"tab1": "1|7|7"})


@pytest.mark.drawn
def test_truncate_is_ignored_where_it_is_not_published(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab2 (a int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO tab2 VALUES (1), (2), (3); CREATE PUBLICATION pub FOR TABLE tab2 WITH (publish = 'insert')"
    )
    scenario.subscribe("pub")
    scenario.publisher("TRUNCATE tab2")
    scenario.check(expect={"tab2": "3|1|3"})
    scenario.publisher("ALTER PUBLICATION pub SET (publish = 'insert, truncate')")
    scenario.check(expect={"tab2": "3|1|3"})
    scenario.publisher("TRUNCATE tab2")
    scenario.check(expect={"tab2": []})


def test_tables_truncated_together_are_all_emptied(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab3 (a int PRIMARY KEY); CREATE TABLE tab4 (x int PRIMARY KEY, y int REFERENCES tab3)"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab3, tab4")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab3 VALUES (1), (2); INSERT INTO tab4 VALUES (10, 1), (11, 2)")
    scenario.check(expect={"tab3": ["1", "2"], "tab4": ["10|1", "11|2"]})
    scenario.publisher("TRUNCATE tab3, tab4")
    scenario.check(expect={"tab3": [], "tab4": []})


def test_cascade_reaches_the_published_tables_that_it_truncates(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab3 (a int PRIMARY KEY); CREATE TABLE tab4 (x int PRIMARY KEY, y int REFERENCES tab3);"
        "CREATE TABLE tab5 (x int PRIMARY KEY)"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab3, tab4, tab5")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO tab3 VALUES (1); INSERT INTO tab4 VALUES (10, 1); INSERT INTO tab5 VALUES (5)"
    )
    scenario.publisher("TRUNCATE tab3 CASCADE")
    scenario.check(expect={"tab3": [], "tab4": [], "tab5": ["5"]})


def test_of_tables_truncated_together_only_the_published_ones_are_emptied(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY); CREATE TABLE tab2 (a int PRIMARY KEY)")
    scenario.publisher(
        "CREATE PUBLICATION pub1 FOR TABLE tab1; CREATE PUBLICATION pub2 FOR TABLE tab2 WITH (publish = 'insert, delete')"
    )
    scenario.subscribe("pub1", "pub2")
    scenario.publisher("INSERT INTO tab1 VALUES (1); INSERT INTO tab2 VALUES (1); TRUNCATE tab1, tab2")
    scenario.check(expect={"tab1": [], "tab2": ["1"]})


def test_rows_inserted_after_a_truncate_in_its_transaction_stay(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY)")
    scenario.publisher("INSERT INTO tab1 VALUES (0); CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; INSERT INTO tab1 VALUES (1); TRUNCATE tab1; INSERT INTO tab1 VALUES (2); COMMIT"
    )
    scenario.check(expect={"tab1": ["2"]})


def test_each_truncate_of_a_transaction_counts(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO tab1 VALUES (0, 'copied'); CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; TRUNCATE tab1; INSERT INTO tab1 VALUES (1, 'lost'); TRUNCATE tab1; INSERT INTO tab1 VALUES (1, 'kept');"
        "SAVEPOINT s; TRUNCATE tab1; ROLLBACK TO s; UPDATE tab1 SET b = 'kept and updated'; COMMIT"
    )
    scenario.check(expect={"tab1": ["1|kept and updated"]})


def test_truncate_ignores_row_filters(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO tab1 SELECT generate_series(1, 10); CREATE PUBLICATION pub FOR TABLE tab1 WHERE (a > 5)"
    )
    scenario.subscribe("pub")
    scenario.check(expect={"tab1": "5|6|10"})
    scenario.publisher("TRUNCATE tab1; INSERT INTO tab1 VALUES (1), (8)")
    scenario.check(expect={"tab1": ["8"]})


def test_truncate_of_a_table_without_a_key_empties_it(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab1 (a int)")
    scenario.publisher(
        "INSERT INTO tab1 VALUES (1), (1), (NULL);"
        "CREATE PUBLICATION pub FOR TABLE tab1 WITH (publish = 'insert, truncate')"
    )
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab1 VALUES (1); TRUNCATE tab1; INSERT INTO tab1 VALUES (NULL), (3), (3)")
    scenario.check(expect={"tab1": ["", "3", "3"]})
