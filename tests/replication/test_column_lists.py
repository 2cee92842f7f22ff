"""PostgreSQL's rules for column lists.

PostgreSQL documentation, Column Lists; src/test/subscription/t/031.

`pgsieve validate` refuses two different lists of one table. test_partitions.py tests a partition's list beside its root's.
"""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.fixtures.oracle import Scenario

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]


def test_only_the_listed_columns_are_copied_and_changed(scenario: Scenario) -> None:
    scenario.tables("CREATE TYPE test_typ AS ENUM ('blue', 'red')")
    scenario.publisher("""
        CREATE TABLE tab1 (a int PRIMARY KEY, "B" int, c int);
        CREATE TABLE tab2 (a int PRIMARY KEY, b varchar, c int);
        CREATE TABLE tab3 ("a'" int PRIMARY KEY, "B" varchar, "c'" int);
        CREATE TABLE tab4 (a int PRIMARY KEY, b test_typ, c int, d text);
        CREATE TABLE tab5 (a int PRIMARY KEY, b int, c int, d int);
        CREATE TABLE test_part (a int PRIMARY KEY, b text, c timestamptz) PARTITION BY LIST (a);
        CREATE TABLE test_part_1_1 PARTITION OF test_part FOR VALUES IN (1, 2, 3, 4, 5, 6);
        CREATE TABLE test_part_2_1 PARTITION OF test_part FOR VALUES IN (7, 8, 9, 10, 11, 12) PARTITION BY LIST (a);
        CREATE TABLE test_part_2_2 PARTITION OF test_part_2_1 FOR VALUES IN (7, 8, 9, 10);
        INSERT INTO tab1 VALUES (1, 2, 3), (4, 5, 6);
        INSERT INTO tab3 VALUES (1, 2, 3), (4, 5, 6);
        INSERT INTO tab4 VALUES (1, 'red', 3, 'oh my'), (2, 'blue', 4, 'hello');
        INSERT INTO tab5 VALUES (1, 11, 111, 1111), (2, 22, 222, 2222);
        INSERT INTO test_part VALUES (1, 'abc', '2021-07-04 12:00:00'), (2, 'bcd', '2021-07-03 11:12:13');
        INSERT INTO test_part VALUES (7, 'abc', '2021-07-04 12:00:00'), (8, 'bcd', '2021-07-03 11:12:13');
        CREATE PUBLICATION pub1 FOR TABLE tab1 (a, "B"), tab3 ("a'", "c'"), tab4 (d, b, a), tab5 (a, b), tab2 (a, b),
            test_part (a, b) WITH (publish_via_partition_root = true);
        CREATE PUBLICATION pub2 FOR TABLE tab5 (b, a)
    """)
    scenario.subscriber("""
        CREATE TABLE tab1 (a int PRIMARY KEY, "B" int, c int); CREATE TABLE tab2 (a int PRIMARY KEY, b varchar);
        CREATE TABLE tab3 ("a'" int PRIMARY KEY, "c'" int); CREATE TABLE tab4 (a int PRIMARY KEY, b test_typ, d text);
        CREATE TABLE tab5 (a int PRIMARY KEY, b int, d int); CREATE TABLE test_part (a int PRIMARY KEY, b text)
    """)
    scenario.subscribe("pub1", "pub2")
    scenario.check(
        expect={
            "tab1": ["1|2", "4|5"],
            "tab3": ["1|3", "4|6"],
            "tab4": ["1|red|oh my", "2|blue|hello"],
            "tab5": ["1|11", "2|22"],
            "test_part": ["1|abc", "2|bcd", "7|abc", "8|bcd"],
        }
    )
    scenario.publisher("""
        INSERT INTO tab1 VALUES (2, 3, 4), (5, 6, 7); INSERT INTO tab3 VALUES (2, 3, 4), (5, 6, 7);
        INSERT INTO tab4 VALUES (3, 'red', 5, 'foo'), (4, 'blue', 6, 'bar');
        INSERT INTO tab5 VALUES (3, 33, 333, 3333), (4, 44, 444, 4444);
        INSERT INTO test_part VALUES (3, 'xxx', '2022-02-01 10:00:00'), (9, 'zzz', '2022-03-02 15:16:17');
        INSERT INTO tab2 VALUES (1, 'abc', 3); UPDATE tab2 SET c = 5 WHERE a = 1; INSERT INTO tab2 VALUES (2, 'def', 6)
    """)
    scenario.check(
        expect={
            "tab1": ["1|2", "2|3", "4|5", "5|6"],
            "tab3": ["1|3", "2|4", "4|6", "5|7"],
            "tab5": ["1|11", "2|22", "3|33", "4|44"],
            "test_part": ["1|abc", "2|bcd", "3|xxx", "7|abc", "8|bcd", "9|zzz"],
            "tab2": ["1|abc", "2|def"],
        }
    )
    scenario.publisher("""
        UPDATE tab1 SET "B" = 2 * "B" WHERE a = 1; UPDATE tab1 SET c = 2 * c WHERE a = 4;
        UPDATE tab3 SET "B" = "B" || ' updated' WHERE "a'" = 4; UPDATE tab3 SET "c'" = 2 * "c'" WHERE "a'" = 1;
        UPDATE tab4 SET b = 'blue', c = c * 2, d = d || ' updated' WHERE a = 1;
        UPDATE tab4 SET b = 'red', c = c * 2, d = d || ' updated' WHERE a = 2;
        UPDATE tab2 SET b = 'xyz' WHERE a = 2; UPDATE test_part SET a = 10, c = NULL WHERE a = 3; DELETE FROM tab5 WHERE c > 300
    """)
    scenario.check(
        expect={
            "tab1": ["1|4", "2|3", "4|5", "5|6"],
            "tab3": ["1|6", "2|4", "4|6", "5|7"],
            "tab4": ["1|blue|oh my updated", "2|red|hello updated", "3|red|foo", "4|blue|bar"],
            "tab2": ["1|abc", "2|xyz"],
            "test_part": ["1|abc", "10|xxx", "2|bcd", "7|abc", "8|bcd", "9|zzz"],
            "tab5": ["1|11", "2|22"],
        }
    )


def test_a_list_of_all_columns_agrees_with_publications_without_a_list(
    scenario: Scenario, postgres_version: int
) -> None:
    scenario.tables("CREATE SCHEMA s; CREATE TABLE s.named (a int PRIMARY KEY, b int, c int)")
    tables = ["s.named"]
    if postgres_version >= 16:  # before 16 a dropped column makes the two lists differ
        scenario.tables(
            "CREATE TABLE dropped (a int, gone int, b int, c int); ALTER TABLE dropped DROP COLUMN gone"
        )
        tables.append("dropped")
    entries = ", ".join(f"{table} (c, b, a)" for table in tables)
    scenario.publisher(f"CREATE PUBLICATION listed FOR TABLE {entries}")
    scenario.publisher("CREATE PUBLICATION schema FOR TABLES IN SCHEMA s")
    scenario.publisher("CREATE PUBLICATION everything FOR ALL TABLES WITH (publish = 'insert')")
    for table in tables:
        scenario.publisher(f"INSERT INTO {table} VALUES (1, 2, 3)")
    scenario.subscribe("listed", "schema", "everything")
    for table in tables:
        scenario.publisher(f"INSERT INTO {table} VALUES (4, 5, 6)")
    scenario.check(expect=dict.fromkeys(tables, ("1|2|3", "4|5|6")))


def test_partitions_with_keys_of_their_own_are_listed_as_their_root(scenario: Scenario) -> None:
    # The partitions have another column order and a key each; the root has no key.
    scenario.publisher("""
        CREATE TABLE parted (a int NOT NULL, b int NOT NULL, c int) PARTITION BY LIST (a);
        CREATE TABLE parted_1 (c int, b int NOT NULL, a int NOT NULL);
        ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES IN (1, 2, 3);
        ALTER TABLE parted_1 ADD PRIMARY KEY (a); ALTER TABLE parted_1 REPLICA IDENTITY USING INDEX parted_1_pkey;
        CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (4, 5, 6);
        ALTER TABLE parted_2 ADD PRIMARY KEY (b); ALTER TABLE parted_2 REPLICA IDENTITY USING INDEX parted_2_pkey;
        INSERT INTO parted VALUES (1, 3, 7), (6, 4, 8);
        CREATE PUBLICATION pub FOR TABLE parted (b, a) WITH (publish_via_partition_root = true, publish = 'insert')
    """)
    scenario.subscriber("CREATE TABLE parted (b int, a int)")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO parted VALUES (2, 5, 8), (5, 7, 9)")
    scenario.check(expect={"parted": ["1|3", "6|4", "2|5", "5|7"]})


def test_an_update_needs_the_identity_among_the_listed_columns(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    scenario.publisher("INSERT INTO t VALUES (1, 1, 1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t (b, c) WITH (publish = 'insert, truncate')")
    scenario.subscriber("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ALTER a DROP NOT NULL")
    scenario.subscribe("pub")
    scenario.publisher("UPDATE t SET b = 5; INSERT INTO t VALUES (2, 2, 2); DELETE FROM t WHERE a = 1")
    scenario.check(expect={"t": ["1|1", "2|2"]})
    scenario.publisher("ALTER PUBLICATION pub SET (publish = 'insert, update')")
    with pytest.raises(
        errors.InvalidColumnReference, match="Column list used by the publication does not cover"
    ):
        scenario.publisher("UPDATE t SET b = 6")
