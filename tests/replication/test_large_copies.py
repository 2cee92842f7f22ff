"""Copies of large tables: by threads of this process in mode `pipeline`, by Spark's executors in mode `publisher`.

PostgreSQL documentation, Initial Data Synchronization.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario
from tests.replication.test_types import COLUMNS, VALUES

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parametrize(
        "scenario", ["spark large", pytest.param("spark large on_s3", marks=pytest.mark.long)], indirect=True
    ),
]


@pytest.mark.drawn
def test_large_tables_are_copied_as_the_built_in_subscription_copies_them(scenario: Scenario) -> None:
    scenario.tables(f"CREATE TABLE kinds (id int PRIMARY KEY, {COLUMNS})")
    scenario.tables(
        "CREATE TABLE parted (id int, region text, note text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);"
        "CREATE TABLE north PARTITION OF parted FOR VALUES IN ('north');"
        "CREATE TABLE south PARTITION OF parted FOR VALUES IN ('south');"
        "CREATE TABLE filtered (id int PRIMARY KEY, note text);"
        "CREATE TABLE plain (a int, b text);"
        "CREATE TABLE nothing (id int PRIMARY KEY)"
    )
    scenario.publisher(f"INSERT INTO kinds VALUES {VALUES}")
    scenario.publisher(
        "INSERT INTO parted SELECT i, CASE i % 3 WHEN 0 THEN 'north' ELSE 'south' END, md5(i::text)"
        " FROM generate_series(1, 5000) i;"
        "INSERT INTO filtered SELECT i, nullif(i % 4, 0) FROM generate_series(1, 5000) i;"
        "INSERT INTO plain SELECT i % 7, i % 5 FROM generate_series(1, 5000) i"
    )
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE kinds, parted, filtered WHERE (note IN ('1', '3') OR id < 10), plain, nothing"
        " WITH (publish_via_partition_root = true)"
    )
    scenario.subscribe("pub")
    scenario.check("kinds", "parted", "filtered", "plain", "nothing")
