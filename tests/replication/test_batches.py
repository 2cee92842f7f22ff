"""The rows are the same wherever a batch of slices ends, and equal the subscriber's.

Each test makes the same changes in two tables. In the second table, the same batch also has an UPDATE that changes a key.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = [
    pytest.mark.spark,
    pytest.mark.parametrize(
        "scenario", ["spark", pytest.param("spark large", marks=pytest.mark.long)], indirect=True
    ),
]


def test_a_value_that_an_insert_lacks_is_null_whatever_the_earlier_row_had(scenario: Scenario) -> None:
    """An UPDATE that makes a row match is sent as an INSERT, without unchanged TOASTed values (PostgreSQL documentation, 29.4.3).

    It takes long: eight slices are applied together, one by one, and in batches with random ends.
    """
    for table in ("plain", "moved"):
        scenario.tables(f"""
            CREATE TABLE {table} (a int NOT NULL, b int NOT NULL, c text, UNIQUE (a, b));
            ALTER TABLE {table} ALTER c SET STORAGE EXTERNAL, REPLICA IDENTITY USING INDEX {table}_a_b_key;
        """)
        scenario.publisher(f"INSERT INTO {table} SELECT i, 1, repeat('x', 3000) FROM generate_series(1, 3) i")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE plain WHERE (b = 1), moved WHERE (b = 1)")
    scenario.subscribe("pub")
    scenario.check("plain", "moved")
    for table in ("plain", "moved"):
        # Three rows leave the filter and return without their text: a copied, an inserted and an updated row.
        for change in (
            "INSERT INTO {0} VALUES (4, 1, repeat('y', 3000)), (5, 1, repeat('z', 3000))",
            "UPDATE {0} SET c = repeat('y', 3000) WHERE a = 2",
            "UPDATE {0} SET b = 0 WHERE a IN (1, 2, 4)",
            "UPDATE {0} SET b = 1 WHERE a IN (1, 2, 4)",
        ):
            scenario.publisher(change.format(table))
            scenario.receive()
    scenario.publisher("UPDATE moved SET a = 30 WHERE a = 3; UPDATE moved SET a = 20 WHERE a = 2")
    rows = scenario.check("plain", "moved")
    assert {row[0]: row[2] for row in rows["plain"] if row[2] is None} == {"1": None, "2": None, "4": None}
    assert {row[0] for row in rows["moved"] if row[2] is None} == {"1", "20", "4"}
