"""Threads write many changes as files. No Spark is available here, and the rows equal the built-in subscriber's.

Tables with and without a key, in several slices, which are applied in one batch and one by one.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", ["driver large alone"], indirect=True)]

_TABLES = """
    CREATE TABLE keyed (a int PRIMARY KEY, b int, c text, d numeric(8,2));
    CREATE TABLE by_two (t text, at timestamptz, n real, PRIMARY KEY (t, at));
    CREATE TABLE whole (a int PRIMARY KEY, f double precision, l double precision[]);
    CREATE TABLE keyless (x int, f double precision, s text, l double precision[]);
    CREATE TABLE spelled (a int, n numeric, j jsonb, t text);
    ALTER TABLE spelled ALTER t SET STORAGE EXTERNAL; ALTER TABLE spelled REPLICA IDENTITY FULL;
    CREATE TABLE computed (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c text);
    CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
    CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10);
    CREATE TABLE high (b text, a int PRIMARY KEY);
    ALTER TABLE root ATTACH PARTITION high FOR VALUES FROM (10) TO (20)
"""

_ROWS = """
    ALTER TABLE whole REPLICA IDENTITY FULL; ALTER TABLE keyless REPLICA IDENTITY FULL;
    INSERT INTO keyed SELECT i, i, 'row ' || i, i / 4.0 FROM generate_series(1, 6) i;
    INSERT INTO by_two VALUES ('a', '9999-12-31', 0), ('a', '0001-01-02', '-0'), ('b', '2000-01-01', 'NaN');
    INSERT INTO whole VALUES (1, 'NaN', '{0}'), (2, '-0', NULL), (3, 0, '{NaN,NULL}');
    INSERT INTO keyless VALUES (1, 0, 'x', '{0}'), (1, 0, 'x', '{0}');
    INSERT INTO spelled SELECT 1, n, j, repeat('unsent ', 400)
        FROM (VALUES (1.0, '{"a": 1}'::jsonb), (1.00, '{"a": 1}'), (1, '{"a": 1.0}'), ('NaN', NULL)) v (n, j), generate_series(1, 2);
    INSERT INTO computed VALUES (1, DEFAULT, 'one'), (2, DEFAULT, 'two');
    INSERT INTO root VALUES (1, 'one'), (2, 'two'), (11, 'eleven')
"""

_SLICES = (
    """
    UPDATE keyed SET b = b + 10 WHERE a < 4; DELETE FROM keyed WHERE a = 5;
    INSERT INTO keyed VALUES (7, 7, 'seven', 7), (8, 8, NULL, NULL); UPDATE keyed SET c = 'sent', d = 0 WHERE a = 8;
    BEGIN; DELETE FROM keyed WHERE a = 1; INSERT INTO keyed VALUES (1, NULL, 'again', 1); COMMIT;
    INSERT INTO keyed VALUES (9, 9, 'goes', 9); DELETE FROM keyed WHERE a = 9;
    UPDATE by_two SET n = 'Infinity' WHERE at = '9999-12-31'; DELETE FROM by_two WHERE at = '0001-01-02';
    UPDATE whole SET l = '{-0,0}' WHERE a = 1; DELETE FROM whole WHERE a = 2;
    INSERT INTO keyless VALUES (1, 0, 'x', '{0}'), (NULL, 'NaN', NULL, NULL), (NULL, 'NaN', NULL, NULL);
    UPDATE spelled SET a = 2 WHERE n = 1; UPDATE spelled SET a = a; INSERT INTO spelled VALUES (3, 0, '[]', ''), (3, 0, '[]', '');
    DELETE FROM spelled WHERE ctid = (SELECT min(ctid) FROM spelled WHERE a = 3);
    UPDATE computed SET c = 'uno' WHERE a = 1; INSERT INTO computed VALUES (3, DEFAULT, 'three');
    UPDATE root SET b = 'once' WHERE a = 11; DELETE FROM root WHERE a = 1; INSERT INTO root VALUES (12, 'twelve')
    """,
    """
    DELETE FROM keyed WHERE a = 7; INSERT INTO keyed VALUES (7, 70, 'again', 70); UPDATE keyed SET b = 0 WHERE a = 2;
    INSERT INTO keyed SELECT i, i, 'more', 0 FROM generate_series(100, 300) i; DELETE FROM keyed WHERE a BETWEEN 150 AND 250;
    UPDATE by_two SET n = NULL; INSERT INTO keyless VALUES (0, 0, '0', '{}'); UPDATE whole SET f = '-0';
    DELETE FROM spelled WHERE a = 3; TRUNCATE spelled; UPDATE keyless SET s = 'all' WHERE s = 'x'; DELETE FROM keyless WHERE x IS NULL;
    INSERT INTO spelled SELECT i % 3, i % 2, NULL, repeat('again ', 500) FROM generate_series(1, 60) i;
    INSERT INTO root VALUES (5, 'five'); UPDATE root SET b = 'cinq' WHERE a = 5
    """,
    (
        "DELETE FROM keyed WHERE a IN (4, 8); UPDATE keyed SET c = 'all'; DELETE FROM computed; DELETE FROM by_two;"
        "UPDATE spelled SET j = '{}' WHERE a = 1; DELETE FROM spelled WHERE a = 2; UPDATE spelled SET a = 5 WHERE a = 0 AND n = 1"
    ),
)


@pytest.mark.drawn
def test_many_changes_leave_the_rows_of_the_built_in_subscriber(scenario: Scenario) -> None:
    scenario.tables(_TABLES)
    scenario.publisher(_ROWS)
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    scenario.subscribe("pub")
    tables = ("keyed", "by_two", "whole", "keyless", "spelled", "computed", "root")
    scenario.publisher(_SLICES[0])
    scenario.check(*tables)
    for changes in _SLICES[1:]:
        scenario.receive()
        scenario.publisher(changes)
    rows = scenario.check(*tables, expect={"computed": [], "by_two": []})
    assert (len(rows["keyed"]), len(rows["spelled"])) == (105, 40)
