"""A lake at a URI that only Spark reaches, and a lake on S3, hold the same rows as a lake in a folder."""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario
from tests.fixtures.schema_changes import alter, copies

at_a_uri = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("committing", marks=[pytest.mark.spark, pytest.mark.long]),
        pytest.param("spark large on_s3", marks=[pytest.mark.spark, pytest.mark.long]),
        pytest.param("spark on_s3", marks=pytest.mark.spark),
    ],
    indirect=True,
)


@at_a_uri
def test_a_lake_at_a_uri_is_written_and_read(scenario: Scenario) -> None:
    """It takes long because an S3 server starts, and a Spark session that reaches it."""
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY, b text)")
    scenario.publisher(
        "INSERT INTO tab1 SELECT i, 'x' FROM generate_series(1, 5) i;"
        "CREATE PUBLICATION pub FOR TABLE tab1 WHERE (a > 1)"
    )
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO tab1 VALUES (6, 'y'); UPDATE tab1 SET a = 20 WHERE a = 2; UPDATE tab1 SET a = 10 WHERE a = 1;"
        "UPDATE tab1 SET b = NULL WHERE a = 3; DELETE FROM tab1 WHERE a = 4"
    )
    scenario.check(expect={"tab1": ["3|", "5|x", "6|y", "10|x", "20|x"]})


@pytest.mark.long
@at_a_uri
def test_a_table_of_a_lake_at_a_uri_is_emptied(scenario: Scenario) -> None:
    """It takes long: every step is a job of Spark."""
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'x'); CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")
    scenario.publisher("TRUNCATE tab1; INSERT INTO tab1 VALUES (7, 'z')")
    scenario.check(expect={"tab1": ["7|z"]})


@pytest.mark.long
@at_a_uri
def test_a_lake_at_a_uri_follows_schema_changes(scenario: Scenario) -> None:
    """It takes long: every step is a job of Spark."""
    scenario.tables("CREATE TABLE tab1 (a int PRIMARY KEY, b text, c int)")
    scenario.publisher(
        "INSERT INTO tab1 VALUES (1, 'x', 10), (2, 'y', 20); CREATE PUBLICATION pub FOR TABLE tab1"
    )
    scenario.subscribe("pub")
    scenario.publisher("UPDATE tab1 SET b = 'before' WHERE a = 1")
    alter(
        scenario,
        "ALTER TABLE tab1 DROP COLUMN c, ADD COLUMN d date, ADD COLUMN e text DEFAULT 'e'; ALTER TABLE tab1 RENAME b TO f",
    )
    scenario.publisher("INSERT INTO tab1 VALUES (3, 'after', '2020-01-01', NULL)")
    scenario.check(expect={"tab1": ["1|before||e", "2|y||e", "3|after|2020-01-01|"]})
    assert copies(scenario, "tab1") == {1}
