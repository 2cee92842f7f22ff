"""Where Delta in Spark commits, each rule of PostgreSQL's is the same as elsewhere: the functions on Arrow batches decide.

It takes long: every step is a job of Spark.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = [
    pytest.mark.long,
    pytest.mark.spark,
    pytest.mark.parametrize("scenario", ["committing"], indirect=True),
]

_BIG = "(SELECT string_agg(md5(i::text || '{}'), '') FROM generate_series(1, 200) i)"


def test_keys_that_are_equal_in_postgresql_are_one_key(scenario: Scenario) -> None:
    """-0.0 and 0.0, NaN, arrays, padded characters, numbers of another scale."""
    scenario.tables("""
        CREATE TABLE f (k float8 PRIMARY KEY, v text);
        CREATE TABLE r (k float4, l int, v text, PRIMARY KEY (k, l));
        CREATE TABLE c (k char(5) PRIMARY KEY, v char(3));
        CREATE TABLE n (k numeric PRIMARY KEY, v numeric(10, 2));
        CREATE TABLE arr (k float8[] PRIMARY KEY, v int);
        CREATE TABLE "by name" ("Line No" int, "a.b" text, v float4, PRIMARY KEY ("Line No", "a.b"))
    """)
    tables = ["f", "r", "c", "n", "arr", "by name"]
    scenario.publisher("""
        INSERT INTO f VALUES ('-0', 'a'), ('NaN', 'b'), ('Infinity', 'c'), (1e300, 'd'), (7, 'e');
        INSERT INTO r VALUES ('-0', 1, 'a'), ('-0', 2, 'b'), ('NaN', 1, 'c');
        INSERT INTO c VALUES ('a', 'x'), ('b ', 'y'), ('', 'z');
        INSERT INTO n VALUES (1.0, 1.5), (2.00, 2), ('NaN', 3);
        INSERT INTO arr VALUES ('{-0,NaN,NULL}', 1), ('{}', 2), ('{1,2}', 3);
        INSERT INTO "by name" VALUES (1, 'x', '-0'), (1, 'X', 'NaN'), (2, 'x', 0);
        CREATE PUBLICATION pub FOR TABLE f, r, c, n, arr, "by name" WHERE ("a.b" <> 'X')
    """)
    scenario.subscribe("pub")
    scenario.publisher("""
        UPDATE f SET v = 'after' WHERE k = 0; UPDATE f SET k = 0 WHERE k = 0; UPDATE f SET k = 5 WHERE k = 'NaN';
        UPDATE f SET k = 'NaN' WHERE k = 'Infinity'; DELETE FROM f WHERE k = 1e300; INSERT INTO f VALUES (1e300, 'again');
        UPDATE r SET v = v || k; UPDATE r SET k = 0 WHERE l = 2; UPDATE r SET k = 1 WHERE k = 'NaN';
        UPDATE c SET v = 'yy' WHERE k = 'b'; UPDATE c SET k = 'a    ' WHERE k = 'a'; UPDATE c SET k = 'q' WHERE k = '';
        UPDATE n SET v = v + 1; UPDATE n SET k = 1.00 WHERE k = 1; UPDATE n SET k = 3 WHERE k = 'NaN';
        UPDATE arr SET v = v + 10; UPDATE arr SET k = '{0,NaN,NULL}' WHERE v = 11; DELETE FROM arr WHERE k = '{}';
        UPDATE "by name" SET v = 1 WHERE "a.b" = 'x'; UPDATE "by name" SET "a.b" = 'y' WHERE "Line No" = 2; UPDATE "by name" SET v = 200 WHERE "a.b" = 'X'
    """)
    scenario.check(*tables)
    scenario.publisher("""
        UPDATE f SET v = 'last' WHERE k = 0; DELETE FROM f WHERE k = 'NaN';
        DELETE FROM r WHERE k = 0 AND l = 1; UPDATE r SET k = '-0', l = 9 WHERE l = 2;
        DELETE FROM n WHERE k = 1;
        UPDATE arr SET v = 0 WHERE k = '{-0,NaN,NULL}'; UPDATE "by name" SET "a.b" = 'Z', v = '-0' WHERE "a.b" = 'X'; DELETE FROM "by name" WHERE "a.b" = 'y'
    """)
    scenario.check(*tables)


def test_rows_without_a_key_are_changed_one_for_one(scenario: Scenario) -> None:
    """No two rows differ only in the sign of a zero: PostgreSQL's subscriber may take either."""
    scenario.tables("""
        CREATE TABLE u (f float8, a float4[], t text, c char(4), n numeric);
        CREATE TABLE "u u" (f float8, "n n" text)
    """)
    scenario.publisher("""
        ALTER TABLE u REPLICA IDENTITY FULL; ALTER TABLE "u u" REPLICA IDENTITY FULL;
        INSERT INTO u SELECT f, a, t, 'c', 1.0 FROM unnest(ARRAY['-0', '7', 'NaN', NULL]::float8[]) f,
            (VALUES ('{0}'::float4[]), ('{-0}'), ('{NaN,NULL}'), (NULL)) a (a), unnest(ARRAY['x', NULL, '']) t;
        INSERT INTO u SELECT * FROM u;
        INSERT INTO "u u" SELECT * FROM (VALUES ('-0'::float8, 'a'), ('0', 'b'), ('0', 'b'), ('NaN', NULL)) v;
        CREATE PUBLICATION pub FOR TABLE u, "u u"
    """)
    scenario.subscribe("pub")
    scenario.publisher("""
        DELETE FROM u WHERE ctid IN (SELECT min(ctid) FROM u GROUP BY f::text, a::text, t);
        UPDATE u SET n = 1.00 WHERE f = 0 AND t = 'x'; UPDATE u SET f = '0' WHERE f = 0 AND t = '';
        INSERT INTO u VALUES ('-0', '{-0}', NULL, 'c', 1.0); DELETE FROM u WHERE f = 'NaN' AND t IS NULL;
        DELETE FROM "u u" WHERE ctid = (SELECT min(ctid) FROM "u u" WHERE f::text = '0'); UPDATE "u u" SET "n n" = 'b' WHERE f = 'NaN'
    """)
    scenario.check("u", "u u")
    scenario.publisher("""
        BEGIN; INSERT INTO u VALUES (1); TRUNCATE u; INSERT INTO u VALUES (2), (2); DELETE FROM u WHERE ctid = (SELECT min(ctid) FROM u); COMMIT;
        TRUNCATE "u u"; INSERT INTO "u u" VALUES (3, 'after')
    """)
    scenario.check("u", "u u", expect={"u": ["2||||"], "u u": ["3|after"]})


def test_moves_unsent_values_truncates_and_partition_roots(scenario: Scenario) -> None:
    scenario.tables("""
        CREATE TABLE big (id int PRIMARY KEY, v int, big text, other text);
        CREATE TABLE gone (id int PRIMARY KEY, v int);
        CREATE TABLE tree (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
        CREATE TABLE one PARTITION OF tree FOR VALUES IN (1);
        CREATE TABLE two (v text, part int NOT NULL, id int NOT NULL, PRIMARY KEY (id, part));
        ALTER TABLE tree ATTACH PARTITION two FOR VALUES IN (2)
    """)
    scenario.publisher(f"""
        ALTER TABLE big ALTER big SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL;
        INSERT INTO big SELECT n, 0, {_BIG.format("n")} || n, {_BIG.format("o")} || n FROM generate_series(1, 9) n;
        INSERT INTO gone SELECT n, n FROM generate_series(1, 5) n;
        INSERT INTO tree SELECT n, n % 2 + 1, n FROM generate_series(1, 6) n;
        CREATE PUBLICATION pub FOR TABLE big WHERE (id <> 6), gone, tree WITH (publish_via_partition_root)
    """)
    scenario.subscribe("pub")
    scenario.publisher(f"""
        UPDATE big SET v = v + 1; UPDATE big SET id = id + 100 WHERE id < 4; UPDATE big SET id = id - 100 WHERE id = 103;
        UPDATE big SET other = {_BIG.format("new")} WHERE id IN (101, 5); UPDATE big SET id = 1, v = 7 WHERE id = 101;
        UPDATE big SET id = 10 WHERE id = 6; UPDATE big SET id = 6 WHERE id = 9; DELETE FROM big WHERE id = 7; UPDATE big SET id = 7 WHERE id = 8;
        BEGIN; UPDATE gone SET v = 0; TRUNCATE gone; INSERT INTO gone VALUES (1, 1), (2, 2); UPDATE gone SET id = 3 WHERE id = 1; COMMIT;
        UPDATE tree SET part = 3 - part WHERE id < 3; UPDATE tree SET v = v || '!' WHERE id > 4; DELETE FROM tree WHERE id = 3
    """)
    scenario.check("big", "gone", "tree")
    scenario.publisher("""
        UPDATE big SET id = 11 WHERE id = 6; UPDATE big SET v = v + 1 WHERE id = 1; TRUNCATE gone; TRUNCATE one; INSERT INTO tree VALUES (9, 1, 'last')
    """)
    scenario.check("big", "gone", "tree")
