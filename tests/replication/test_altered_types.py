"""An altered type changes how existing rows print, although no row is rewritten. Replicas have to follow.

ALTER TYPE ... RENAME VALUE changes an enum's label in all rows. ADD ATTRIBUTE and DROP ATTRIBUTE change the fields of all
composite values (PostgreSQL documentation, Enumerated Types, ALTER TYPE). No message announces this. PostgreSQL's subscriber has the same types and alters them
itself. A replica holds the values' text, and finds rows by it.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

# No Spark is available here: copies and small changes need none.
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("scenario", ["driver alone"], indirect=True)]

_TYPES = """
    CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy'); CREATE TYPE pair AS (a int, b text);
    CREATE TYPE nested AS (p pair, m mood[]); CREATE DOMAIN feeling AS mood; CREATE TABLE kind (x int, y text)
"""
_TABLES = {
    "enums": "a int PRIMARY KEY, v mood",
    "arrays": "a int PRIMARY KEY, v mood[]",
    "domains": "a int PRIMARY KEY, v feeling",
    "keyed": "v mood PRIMARY KEY, a int",
    "bag": "v mood, a int",
    "pairs": "a int PRIMARY KEY, v pair",
    "pair_bag": "v pair[], a int",
    "nesting": "a int PRIMARY KEY, v nested",
    "row_types": "a int PRIMARY KEY, v kind",
    "others": "a int PRIMARY KEY, v text",
}
_FIRST = """
    INSERT INTO enums VALUES (1, 'sad'), (2, 'ok'), (3, NULL); INSERT INTO arrays VALUES (1, '{sad,NULL}'), (2, '{ok}');
    INSERT INTO domains VALUES (1, 'sad'), (2, 'ok'); INSERT INTO keyed VALUES ('sad', 1), ('ok', 2), ('happy', 3);
    INSERT INTO bag VALUES ('sad', 1), ('sad', 1), ('ok', 2), ('sad', 3);
    INSERT INTO pairs VALUES (1, '(1,x)'), (2, '(2,y)'); INSERT INTO pair_bag VALUES ('{"(1,x)"}', 1), ('{"(2,y)"}', 2);
    INSERT INTO nesting VALUES (1, '("(1,x)","{sad}")'), (2, NULL); INSERT INTO row_types VALUES (1, '(1,x)'), (2, '(2,y)');
    INSERT INTO others VALUES (1, 'x')
"""
_ALTER = """
    ALTER TYPE mood RENAME VALUE 'sad' TO 'unhappy'; ALTER TYPE pair ADD ATTRIBUTE c int; ALTER TABLE kind ADD z int
"""
_THEN = """
    INSERT INTO enums VALUES (4, 'unhappy'); UPDATE keyed SET a = 10 WHERE v = 'unhappy'; DELETE FROM keyed WHERE v = 'ok';
    DELETE FROM bag WHERE a = 1 AND ctid = (SELECT min(ctid) FROM bag); UPDATE bag SET a = 4 WHERE a = 3;
    DELETE FROM pair_bag WHERE a = 1; UPDATE pairs SET v.c = 7 WHERE a = 1; DELETE FROM row_types WHERE a = 2
"""


@pytest.mark.drawn
@pytest.mark.parametrize("binary", [pytest.param(False, marks=pytest.mark.long), True])
def test_rows_follow_altered_types(scenario: Scenario, binary: bool) -> None:
    """It may take long: two replicas follow each alteration of types that ten tables use."""
    scenario.tables(_TYPES)
    for table, columns in _TABLES.items():
        scenario.tables(f"CREATE TABLE {table} ({columns})")
        if "PRIMARY" not in columns:
            scenario.tables(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    scenario.publisher(_FIRST)
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE {', '.join(_TABLES)}")
    scenario.subscribe("pub", binary=binary)
    scenario.check(*_TABLES)
    scenario.tables(_ALTER)
    scenario.check(*_TABLES)
    scenario.publisher(_THEN)
    scenario.check(
        *_TABLES, expect={"keyed": ["happy|3", "unhappy|10"], "bag": ["ok|2", "unhappy|1", "unhappy|4"]}
    )
    scenario.tables("ALTER TYPE pair DROP ATTRIBUTE a; ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'")
    scenario.publisher("DELETE FROM bag WHERE v = 'fine'; DELETE FROM pair_bag; UPDATE others SET v = 'y'")
    scenario.check(*_TABLES, expect={"pair_bag": []})
    # A value of a composite type contains a type that is newer than the table.
    scenario.tables("CREATE TYPE weather AS ENUM ('wet'); ALTER TYPE pair ADD ATTRIBUTE w weather")
    scenario.check(*_TABLES)
    scenario.publisher("UPDATE pairs SET v.w = 'wet' WHERE a = 2")
    rows = scenario.check("pairs")
    assert "2|(y,,wet)" in rows["pairs"].shown
