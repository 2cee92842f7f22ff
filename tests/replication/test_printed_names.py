"""Text that depends on the catalog: values of regclass, aclitem and similar types print names, which can change.

A subscriber holds oids of its own objects, so the publisher is the oracle: a replica holds the text that the publisher's table prints.
"""

from __future__ import annotations

import pytest

from tests.fixtures.shop import Shop

OBJECTS = """
CREATE SCHEMA app; CREATE TABLE app.a (i int); CREATE VIEW app.v AS SELECT 1 AS one; CREATE TABLE app.gone (i int);
CREATE FUNCTION app.f(app.a) RETURNS int LANGUAGE sql AS 'select 1'; CREATE TYPE app.mood AS ENUM ('sad');
CREATE OPERATOR app.=== (FUNCTION = pg_catalog.int4eq, LEFTARG = int, RIGHTARG = int);
CREATE COLLATION app.c (LOCALE = 'C'); CREATE TEXT SEARCH CONFIGURATION app.cfg (COPY = pg_catalog.simple);
CREATE TEXT SEARCH DICTIONARY app.dict (TEMPLATE = pg_catalog.simple); CREATE ROLE {0}_role;
CREATE DOMAIN relations AS regclass[]; CREATE TYPE pair AS (n int, rel regclass)
"""
#: Types, and a value of each that prints a name.
VALUES = {
    "regclass": "app.a",
    "regclass[]": "{app.v,app.gone}",
    "relations": "{app.a}",
    "pair": "(1,app.a)",
    "pair[]": '{"(1,app.a)"}',
    "regproc": "app.f",
    "regprocedure": "app.f(app.a)",
    "regoper": "app.===",
    "regoperator": "app.===(integer,integer)",
    "regtype": "app.mood",
    "regtype[]": "{app.mood,integer}",
    "regrole": "{0}_role",
    "regnamespace": "app",
    "regcollation": "app.c",
    "regconfig": "app.cfg",
    "regdictionary": "app.dict",
    "aclitem": "{0}_role=r/postgres",
    "aclitem[]": "{{{0}_role=r/postgres}}",
}
#: Each changes the text of some values. The last one is temporary, while a row is written.
ALTERATIONS = (
    """ALTER TABLE app.a RENAME TO b; ALTER VIEW app.v RENAME TO w; ALTER FUNCTION app.f RENAME TO g;
    ALTER TYPE app.mood RENAME TO temper; ALTER ROLE {0}_role RENAME TO {0}_other; ALTER COLLATION app.c RENAME TO d;
    ALTER TEXT SEARCH CONFIGURATION app.cfg RENAME TO conf; ALTER TEXT SEARCH DICTIONARY app.dict RENAME TO words""",
    """ALTER SCHEMA app RENAME TO moved; DROP TABLE moved.gone; CREATE SCHEMA apart; ALTER TABLE moved.b SET SCHEMA apart;
    ALTER OPERATOR moved.===(int, int) SET SCHEMA apart""",
    "ALTER TABLE apart.b RENAME TO x; UPDATE bag SET n = 9; ALTER TABLE apart.x RENAME TO b; DELETE FROM bag WHERE id = 1",
)


@pytest.mark.drawn
def test_a_replica_has_the_names_that_the_publisher_prints(shop: Shop) -> None:
    """It takes long: runs with copies of many tables."""
    database, name = shop.database, shop.written["sources"]["shop"]["slot"]
    for statement in OBJECTS.format(name).split(";"):
        database.execute(statement)
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(VALUES))
    values = ", ".join(f"'{value.format(name) if '0' in value else value}'" for value in VALUES.values())
    for table, row in (("keyed", 1), ("bag", 2)):
        database.execute(f"CREATE TABLE {table} (id int, n int, {columns})")
        for number in range(row):
            database.execute(f"INSERT INTO {table} VALUES ({number}, 0, {values})")
    database.execute("ALTER TABLE keyed ADD PRIMARY KEY (c0); ALTER TABLE bag REPLICA IDENTITY FULL")
    database.execute(
        "CREATE TYPE size AS ENUM ('s', 'l'); CREATE TABLE sizes (id int PRIMARY KEY, size size)"
    )
    database.execute(
        "INSERT INTO sizes VALUES (1, 's'); CREATE PUBLICATION named FOR TABLE keyed, bag, sizes"
    )
    shop.configure(
        subscriptions={
            "pipe": {"source": "shop", "publications": ["named"]},
            "publ": {"source": "shop", "publications": ["named"], "row_filter": "publisher"},
        }
    )
    try:
        assert shop.cli("run")[0] == 0
        _compare(shop)
        for n, alterations in enumerate(ALTERATIONS, 1):
            for statement in alterations.format(name).split(";"):
                database.execute(statement)
            database.execute(f"UPDATE keyed SET n = {n}; UPDATE bag SET n = {n} WHERE id = 0")
            assert shop.cli("run")[0] == 0
            _compare(shop)
        # A label changes temporarily, while a row is written.
        database.execute("ALTER TYPE size RENAME VALUE 'l' TO 'xl'")
        database.execute("INSERT INTO sizes VALUES (2, 'xl')")
        database.execute("ALTER TYPE size RENAME VALUE 'xl' TO 'l'; ALTER TYPE size ADD VALUE 'm'")
        assert shop.cli("run")[0] == 0
        for subscription in ("pipe", "publ"):
            rows = shop.table(subscription, "sizes").to_pyarrow_table().to_pylist()
            assert sorted(row["size"] for row in rows) == ["l", "s"]
        # Without an altered name nothing is copied.
        versions = [shop.table(s, t).version() for s in ("pipe", "publ") for t in ("keyed", "bag")]
        assert shop.cli("check")[0] == 0
        assert versions == [shop.table(s, t).version() for s in ("pipe", "publ") for t in ("keyed", "bag")]
    finally:
        database.execute("DROP TABLE keyed, bag, sizes")
        for role in (f"{name}_role", f"{name}_other"):
            database.execute(f"DROP ROLE IF EXISTS {role}")


def _compare(shop: Shop) -> None:
    for table in ("keyed", "bag"):
        printed = ", ".join(f"c{i}::text" for i in range(len(VALUES)))
        expected = sorted(shop.database.execute(f"SELECT id, n, {printed} FROM {table}").fetchall())
        for subscription in ("pipe", "publ"):
            rows = shop.table(subscription, table).to_pyarrow_table().to_pylist()
            assert sorted(tuple(_text(value) for value in row.values()) for row in rows) == expected


def _text(value: object) -> object:
    """An array as PostgreSQL prints it (for names without quotes), or the value itself."""
    return "{" + ",".join(map(str, value)) + "}" if isinstance(value, list) else value
