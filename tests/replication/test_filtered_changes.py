"""Row filters are evaluated by the same functions in this process, in threads and in executors; the rows equal the subscriber's.

One table's filter is evaluated column by column, another's row by row.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

_OTHERS = ("driver alone", "spark large")
_WRITERS = ["driver large alone", *(pytest.param(writer, marks=pytest.mark.long) for writer in _OTHERS)]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", _WRITERS, indirect=True)]


@pytest.mark.drawn
def test_row_filters_decide_what_becomes_of_changes(scenario: Scenario) -> None:
    scenario.tables("""
        CREATE TABLE t1 (a int, b int, c text, PRIMARY KEY (a, c));
        CREATE TABLE wide (id int PRIMARY KEY, k numeric, at timestamptz, s text);
        CREATE TABLE parent (a int PRIMARY KEY) PARTITION BY RANGE (a);
        CREATE TABLE child PARTITION OF parent DEFAULT
    """)
    scenario.publisher("""
        ALTER TABLE wide REPLICA IDENTITY FULL; ALTER TABLE wide ALTER s SET STORAGE EXTERNAL;
        INSERT INTO t1 VALUES (1, 101, 'NSW'), (10, 110, 'NSW');
        INSERT INTO wide SELECT i, i / 3.0, '2000-01-01'::timestamptz + i * '1 day'::interval, repeat('s', 9000)
            FROM generate_series(1, 9) i;
        INSERT INTO parent VALUES (1), (8);
        CREATE PUBLICATION p1 FOR TABLE t1 WHERE (a > 5 AND c = 'NSW'),
            wide WHERE (k > 1.5 AND at < '2000-01-09' OR s LIKE 'x%');
        CREATE PUBLICATION p2 FOR TABLE parent WHERE (a < 5) WITH (publish_via_partition_root)
    """)
    scenario.subscribe("p1", "p2")
    scenario.check("t1", "wide", "parent")
    scenario.publisher("""
        INSERT INTO t1 SELECT i, 100 + i, CASE i % 2 WHEN 0 THEN 'NSW' ELSE 'VIC' END FROM generate_series(2, 9) i;
        UPDATE t1 SET b = 999 WHERE a = 6; UPDATE t1 SET a = 555 WHERE a = 2; UPDATE t1 SET c = 'VIC' WHERE a = 8;
        UPDATE wide SET k = k * 2; UPDATE wide SET s = 'xyz' WHERE id = 9; UPDATE wide SET at = 'infinity' WHERE id = 5;
        DELETE FROM wide WHERE id IN (1, 6); UPDATE parent SET a = a - 5 WHERE a > 5; INSERT INTO parent VALUES (4), (6)
    """)
    scenario.check(
        "wide", expect={"t1": ["10|110|NSW", "555|102|NSW", "6|999|NSW"], "parent": ["1", "3", "4"]}
    )
    scenario.publisher("""
        DELETE FROM t1 WHERE a = 555; UPDATE t1 SET b = 0 WHERE a = 6; UPDATE wide SET k = NULL WHERE id = 3;
        INSERT INTO wide VALUES (6, 'NaN', '-infinity', 'again'), (1, 1.5, '2000-01-01', NULL), (10, 2, NULL, 'x')
    """)
    scenario.receive()
    scenario.publisher(
        "DELETE FROM wide WHERE k = 'NaN'; UPDATE t1 SET b = 1, c = 'NSW' WHERE a = 8; DELETE FROM parent"
    )
    scenario.check("wide", expect={"t1": ["10|110|NSW", "6|0|NSW", "8|1|NSW"], "parent": []})
