"""How rows are found: by the key, or by the whole row under REPLICA IDENTITY FULL.

PostgreSQL documentation, Replica Identity; t/032, t/034, t/100.

Each test has one table per kind of identity, and changes all of them in one run.
"""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.fixtures.oracle import Scenario, both_writers

pytestmark = pytest.mark.spark


@both_writers
def test_rows_without_a_key_are_found_as_a_whole(scenario: Scenario) -> None:
    scenario.tables("""
        CREATE TABLE equal (x int, y text); CREATE TABLE people (first text, last text);
        CREATE TABLE nulls (a int, b text); CREATE TABLE scaled (a numeric, b numeric(8,2), c char(4));
        CREATE TABLE deferred (a int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, b text)
    """)
    tables = ("equal", "people", "nulls", "scaled", "deferred")
    for table in tables:
        scenario.publisher(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
    scenario.subscriber(
        "CREATE INDEX ON equal (x); CREATE INDEX ON people (last)"
    )  # irrelevant for the replica
    scenario.publisher("""
        INSERT INTO equal SELECT i % 10, (i % 10)::text FROM generate_series(0, 10) i;
        INSERT INTO people SELECT 'first_name_' || i, 'last_name_' || i FROM generate_series(0, 200) i;
        INSERT INTO nulls VALUES (NULL, NULL), (NULL, NULL), (1, NULL), (NULL, 'x');
        INSERT INTO scaled VALUES (1.0, 1, 'a'), (1.00, 1, 'a'), ('NaN', NULL, ''), (NULL, 0, ' ');
        INSERT INTO deferred VALUES (1, 'one'), (2, 'two'), (3, 'three');
        CREATE PUBLICATION pub FOR ALL TABLES
    """)
    scenario.subscribe("pub")
    scenario.publisher("""
        DELETE FROM equal WHERE x IN (5, 6); UPDATE equal SET x = 100, y = '200' WHERE x IN (1, 2);
        UPDATE people SET first = 'no-name' WHERE first = 'first_name_10';
        UPDATE people SET last = 'no-name' WHERE first = 'first_name_30'; DELETE FROM people WHERE last = 'last_name_5';
        UPDATE people SET first = 'brief' WHERE last = 'last_name_18'; DELETE FROM people WHERE last = 'last_name_18';
        DELETE FROM nulls WHERE ctid = '(0,1)'; UPDATE nulls SET b = 'was null' WHERE a = 1;
        UPDATE scaled SET c = 'b' WHERE ctid = '(0,1)'; DELETE FROM scaled WHERE a = 'NaN';
        BEGIN; UPDATE deferred SET a = 2 WHERE b = 'one'; UPDATE deferred SET a = 1 WHERE b = 'two'; COMMIT;
        UPDATE deferred SET a = 7 - a - 2 WHERE a > 1
    """)
    rows = scenario.check(
        *tables, expect={"nulls": ["|", "1|was null", "|x"], "deferred": ["1|two", "3|one", "2|three"]}
    )
    assert rows["equal"].shown.count("100|200") == 2
    assert len(rows["people"]) == 199
    assert [row[2] for row in rows["scaled"] if row[0] is not None] in (["a   ", "b   "], ["b   ", "a   "])


@both_writers
def test_among_equal_rows_with_different_text_the_publishers_row_is_chosen(scenario: Scenario) -> None:
    """The subscriber takes the first equal row of its table, and so loses a row that the publisher has."""
    spelled = {
        "numbers": ("numeric", "1.0", "1.00"),
        "spans": ("interval", "'1 mon'", "'30 days'"),
        "documents": ("jsonb", """'{"a": 1.0}'""", """'{"a": 1.00}'"""),
        "lists": ("numeric[]", "'{1.0}'", "'{1.00}'"),
    }
    for table, (kind, one, other) in spelled.items():
        scenario.tables(f"CREATE TABLE {table} (a int, k {kind}); ALTER TABLE {table} REPLICA IDENTITY FULL")
        rows = ", ".join(f"({a}, {k})" for a in (1, 2) for k in (one, other))
        scenario.publisher(f"INSERT INTO {table} VALUES {rows}")
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    for table in spelled:
        scenario.publisher(
            f"DELETE FROM {table} WHERE ctid = '(0,2)'; UPDATE {table} SET a = 9 WHERE ctid = '(0,4)'"
        )
    scenario.run()
    assert scenario.builtin is not None
    for table in spelled:
        published_rows = sorted(scenario.publisher(f"SELECT * FROM {table}"))
        assert sorted(scenario.builtin.rows("public", table)) != published_rows
        for name, replica in scenario.replicas.items():
            assert sorted(replica.rows("public", table)) == published_rows, (table, name)


@both_writers
def test_a_key_of_the_subscriber_finds_rows_whatever_their_other_columns_hold(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int, c text); ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.publisher("INSERT INTO t VALUES (1, 1, 'x'), (2, 2, 'x'); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.subscriber("UPDATE t SET b = 77")
    scenario.publisher("UPDATE t SET b = 20 WHERE a = 1; UPDATE t SET b = 30, a = 3 WHERE a = 2")
    scenario.check(expect={"t": ["1|20|x", "3|30|x"]})


@both_writers
def test_an_update_that_finds_no_row_leaves_the_row_of_its_new_key_alone(scenario: Scenario) -> None:
    # Section 29.8, update_missing. The subscriber keeps rows whose DELETE is not published.
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("""
        INSERT INTO t SELECT i, 'old' FROM generate_series(1, 5) i;
        CREATE PUBLICATION pub FOR TABLE t WITH (publish = 'update')
    """)
    scenario.subscribe("pub")
    scenario.publisher("""
        DELETE FROM t WHERE a IN (2, 4); INSERT INTO t VALUES (10, 'unknown'), (11, 'unknown');
        UPDATE t SET a = 2 WHERE a = 10; UPDATE t SET b = 'new' WHERE a = 2; UPDATE t SET a = 20 WHERE a = 2;
        UPDATE t SET a = 12 WHERE a = 11; UPDATE t SET a = 4 WHERE a = 12; UPDATE t SET b = 'newer' WHERE a = 4;
        UPDATE t SET a = 30 WHERE a = 3; UPDATE t SET a = 3, b = 'back' WHERE a = 30
    """)
    scenario.check(expect={"t": ["1|old", "20|new", "3|back", "4|newer", "5|old"]})


@both_writers
def test_the_identity_may_change_while_changes_stream(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL UNIQUE, c text); "
        "CREATE TABLE u (a int NOT NULL UNIQUE, b int NOT NULL UNIQUE, c text)"
    )
    scenario.publisher("ALTER TABLE u REPLICA IDENTITY USING INDEX u_a_key")
    scenario.subscriber("ALTER TABLE u REPLICA IDENTITY USING INDEX u_b_key")
    for table in ("t", "u"):
        scenario.publisher(f"INSERT INTO {table} SELECT i, 10 * i, 'x' FROM generate_series(1, 6) i")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION later FOR TABLE u WITH (publish = 'insert')"
    )
    scenario.subscribe("pub", "later")
    scenario.publisher("""
        UPDATE t SET a = 11 WHERE a = 1; ALTER TABLE t REPLICA IDENTITY FULL; UPDATE t SET a = 12 WHERE a = 2;
        DELETE FROM t WHERE a = 3; ALTER TABLE t REPLICA IDENTITY DEFAULT; UPDATE t SET c = 'y' WHERE a > 3
    """)
    # From here on the publisher sends the columns by which the subscriber finds rows.
    scenario.publisher("ALTER TABLE u REPLICA IDENTITY USING INDEX u_b_key")
    scenario.publisher("ALTER PUBLICATION later SET (publish = 'insert, update, delete')")
    scenario.check(expect={"t": ["11|10|y", "12|20|y", "4|40|y", "5|50|y", "6|60|y"]})
    scenario.publisher(
        "UPDATE u SET a = -a WHERE a = 1; DELETE FROM u WHERE a = 2; UPDATE u SET b = 31 WHERE a = 3"
    )
    scenario.check(expect={"u": ["-1|10|x", "3|31|x", "4|40|x", "5|50|x", "6|60|x"]})


@both_writers
def test_a_key_without_overlaps_is_a_key_like_any_other(scenario: Scenario, postgres_version: int) -> None:
    definition = (
        "CREATE TABLE temporal_{0} (id int4range, valid_at daterange, a text,"
        " CONSTRAINT temporal_{0}_key {1} (id, valid_at WITHOUT OVERLAPS))"
    )
    if postgres_version < 18:  # they do not exist
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(definition.format("pk", "PRIMARY KEY"))
        return
    for kind, key in (
        ("pk", "PRIMARY KEY"),
        ("full", "PRIMARY KEY"),
        ("index", "UNIQUE"),
        ("nothing", "UNIQUE"),
    ):
        scenario.tables(definition.format(kind, key))
        scenario.publisher(f"INSERT INTO temporal_{kind} VALUES ('[1,2)', '[2000-01-01,2010-01-01)', 'a')")
    scenario.tables("""
        ALTER TABLE temporal_full REPLICA IDENTITY FULL;
        ALTER TABLE temporal_index ALTER id SET NOT NULL, ALTER valid_at SET NOT NULL,
            REPLICA IDENTITY USING INDEX temporal_index_key;
        ALTER TABLE temporal_nothing REPLICA IDENTITY NOTHING
    """)
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    for kind in ("pk", "full", "index", "nothing"):
        scenario.publisher(
            f"INSERT INTO temporal_{kind} VALUES ('[2,3)', '[2000-01-01,2010-01-01)', 'a'),"
            " ('[3,4)', '[2000-01-01,2010-01-01)', 'a'), ('[4,5)', '[2000-01-01,2010-01-01)', 'a')"
        )
    for kind in ("pk", "full", "index"):
        scenario.publisher(
            f"UPDATE temporal_{kind} SET a = 'b' WHERE id = '[2,3)'; DELETE FROM temporal_{kind} WHERE id = '[3,4)';"
            f"UPDATE temporal_{kind} SET valid_at = '[2001-01-01,2002-01-01)' WHERE id = '[4,5)'"
        )
    with pytest.raises(errors.ObjectNotInPrerequisiteState):
        scenario.publisher("UPDATE temporal_nothing SET a = 'b' WHERE id = '[2,3)'")
    span = "[2000-01-01,2010-01-01)"
    rows = [f"[1,2)|{span}|a", f"[2,3)|{span}|b", "[4,5)|[2001-01-01,2002-01-01)|a"]
    scenario.check(
        expect={
            "temporal_pk": rows,
            "temporal_full": rows,
            "temporal_index": rows,
            "temporal_nothing": [f"[{i},{i + 1})|{span}|a" for i in (1, 2, 3, 4)],
        }
    )
