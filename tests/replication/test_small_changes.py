"""Small changes need only this process: no Spark is available here, and the rows equal the built-in subscriber's.

One scenario has every kind of table and of change, in several slices, which are applied in one batch and one by one.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", ["driver alone"], indirect=True)]

_TABLES = """
    CREATE TABLE keyed (a int PRIMARY KEY, b int, c text, d numeric(8,2));
    CREATE TABLE by_two (t text, at timestamptz, n real, PRIMARY KEY (t, at));
    CREATE TABLE keyless (x int, f double precision, s text, l double precision[]);
    CREATE TABLE emptied (a int PRIMARY KEY, b text);
    CREATE TABLE computed (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c text);
    CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
    CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10);
    CREATE TABLE high (b text, a int PRIMARY KEY);
    ALTER TABLE root ATTACH PARTITION high FOR VALUES FROM (10) TO (20)
"""

_ROWS = """
    ALTER TABLE keyless REPLICA IDENTITY FULL;
    ALTER TABLE keyed ALTER c SET STORAGE EXTERNAL;
    INSERT INTO keyed SELECT i, i, repeat('x', 9000) || i, i / 4.0 FROM generate_series(1, 6) i;
    INSERT INTO by_two VALUES ('a', '9999-12-31', 0), ('a', '0001-01-02', '-0'), ('b', '2000-01-01', 'NaN');
    INSERT INTO keyless VALUES (1, 0, 'x', '{0}'), (1, '-0', 'x', '{-0}'), (1, 0, 'x', '{0}'), (NULL, 'NaN', NULL, NULL),
        (NULL, 'NaN', NULL, NULL), (2, 1, 'y', '{NaN,NULL}');
    INSERT INTO emptied VALUES (1, 'one'), (2, 'two');
    INSERT INTO computed VALUES (1, DEFAULT, 'one'), (2, DEFAULT, 'two');
    INSERT INTO root VALUES (1, 'one'), (2, 'two'), (11, 'eleven')
"""

_SLICES = (
    """
    UPDATE keyed SET b = b + 10 WHERE a < 4; UPDATE keyed SET a = 20 WHERE a = 2; DELETE FROM keyed WHERE a = 5;
    BEGIN; UPDATE keyed SET a = 30 WHERE a = 1; UPDATE keyed SET a = 1 WHERE a = 3; UPDATE keyed SET a = 3 WHERE a = 30;
        COMMIT;
    INSERT INTO keyed VALUES (7, 7, 'seven', 7), (8, 8, NULL, NULL); UPDATE keyed SET c = 'sent', d = 0 WHERE a = 8;
    UPDATE by_two SET n = 'Infinity' WHERE at = '9999-12-31'; DELETE FROM by_two WHERE at = '0001-01-02';
    UPDATE by_two SET t = 'c' WHERE t = 'b';
    DELETE FROM keyless WHERE ctid = '(0,1)'; UPDATE keyless SET s = 'was null' WHERE ctid = '(0,4)';
    UPDATE keyless SET l = '{-0,0}' WHERE x = 2; INSERT INTO keyless VALUES (3, 3, '', '{}'), (3, 3, '', '{}');
    UPDATE computed SET a = 3 WHERE a = 2; UPDATE computed SET c = 'uno' WHERE a = 1;
    UPDATE root SET a = 12 WHERE a = 2; UPDATE root SET b = 'once' WHERE a = 11; DELETE FROM root WHERE a = 1
    """,
    """
    BEGIN; INSERT INTO emptied VALUES (3, 'gone'); TRUNCATE emptied; INSERT INTO emptied VALUES (1, 'again'), (4, 'four');
        UPDATE emptied SET b = 'changed' WHERE a = 4; COMMIT;
    UPDATE keyed SET a = 40 WHERE a = 20; UPDATE keyed SET b = 0 WHERE a = 40; DELETE FROM keyed WHERE a = 7;
    INSERT INTO keyed VALUES (7, 70, 'again', 70); INSERT INTO by_two VALUES ('b', '2000-01-01', 1);
    DELETE FROM keyless WHERE x = 3 AND ctid = (SELECT min(ctid) FROM keyless WHERE x = 3);
    INSERT INTO root VALUES (5, 'five'); UPDATE root SET a = 15 WHERE a = 5; UPDATE root SET b = 'fifteen' WHERE a = 15
    """,
    """
    DELETE FROM keyed WHERE a IN (4, 40); UPDATE keyed SET a = 41 WHERE a = 6; UPDATE keyless SET x = 9;
    TRUNCATE keyless; INSERT INTO keyless VALUES (0, 0, '0', '{0}'); UPDATE keyless SET x = 1; DELETE FROM computed
    """,
)


@pytest.mark.drawn
def test_few_changes_of_every_kind_leave_the_rows_of_the_built_in_subscriber(scenario: Scenario) -> None:
    scenario.tables(_TABLES)
    scenario.publisher(_ROWS)
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    scenario.subscribe("pub")
    tables = ("keyed", "by_two", "keyless", "emptied", "computed", "root")
    scenario.publisher(_SLICES[0])
    scenario.check(*tables)
    for changes in _SLICES[1:]:
        scenario.receive()
        scenario.publisher(changes)
    rows = scenario.check(*tables, expect={"emptied": ["1|again", "4|changed"], "computed": []})
    assert len(rows["keyed"]) == 5


@pytest.mark.drawn
def test_changes_before_and_after_an_added_column_are_applied_together(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE TABLE f (a int, b text)")
    scenario.publisher("ALTER TABLE f REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE t, f")
    scenario.publisher("INSERT INTO t VALUES (1, 'x'), (2, 'y'); INSERT INTO f VALUES (1, 'x'), (2, 'y')")
    scenario.subscribe("pub")
    scenario.check("t", "f")
    scenario.publisher("UPDATE t SET b = 'before' WHERE a = 1; UPDATE f SET b = 'before' WHERE a = 1")
    for table in ("t", "f"):
        scenario.subscriber(f"ALTER TABLE {table} ADD COLUMN c int")
        scenario.publisher(f"ALTER TABLE {table} ADD COLUMN c int")
    scenario.publisher("UPDATE t SET c = 1, a = 3 WHERE a = 2; UPDATE f SET c = 1, a = 3 WHERE a = 2")
    scenario.check(expect={"t": ["1|before|", "3|y|1"], "f": ["1|before|", "3|y|1"]})
    scenario.publisher("UPDATE t SET c = 2 WHERE a = 1; DELETE FROM f WHERE a = 1")
    scenario.check(expect={"t": ["1|before|2", "3|y|1"], "f": ["3|y|1"]})
