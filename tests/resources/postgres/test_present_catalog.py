"""The present catalog equals the one of `read_catalog`, and is read once between two alterations. No JVM."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.resources.postgres import present_catalog as module
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from tests.fixtures.servers import new_server

pytestmark = pytest.mark.slow

TABLES = """
    CREATE SCHEMA s; CREATE TABLE s.x (a int PRIMARY KEY);
    CREATE TYPE mood AS ENUM ('good', 'bad'); CREATE TYPE pair AS (a int, b text); CREATE TABLE pairs (p pair);
    CREATE COLLATION c FROM "C";
    CREATE FUNCTION f(int) RETURNS int IMMUTABLE RETURN $1 + 1;
    CREATE TABLE t (a int PRIMARY KEY, b text COLLATE c, m mood, g int GENERATED ALWAYS AS (f(a)) STORED);
    CREATE TABLE r (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
    CREATE TABLE r0 PARTITION OF r FOR VALUES FROM (0) TO (10);
    CREATE TABLE parent (a int); CREATE TABLE child () INHERITS (parent);
    CREATE PUBLICATION p FOR TABLE t, TABLES IN SCHEMA s; CREATE PUBLICATION q FOR TABLE r
"""
ALTERATIONS = """
    ALTER PUBLICATION q SET (publish = 'insert')
    ALTER PUBLICATION q SET TABLE t WHERE (a > 1)
    ALTER PUBLICATION q SET TABLE t (a, b)
    ALTER PUBLICATION p DROP TABLES IN SCHEMA s
    ALTER PUBLICATION p RENAME TO other
    ALTER PUBLICATION other OWNER TO owner_of_p
    ALTER ROLE owner_of_p RENAME TO renamed
    DROP PUBLICATION q
    CREATE TABLE w (a int)
    DROP TABLE w
    ALTER COLLATION c RENAME TO d
    ALTER TABLE t ADD d int DEFAULT 3
    ALTER TABLE t ALTER b TYPE varchar(9)
    ALTER TABLE t DROP COLUMN d
    ALTER TABLE t ALTER m SET NOT NULL
    ALTER TABLE t REPLICA IDENTITY FULL
    ALTER TABLE t DROP CONSTRAINT t_pkey
    ALTER TABLE t RENAME TO u
    ALTER TYPE mood RENAME TO temper
    ALTER TYPE temper ADD VALUE 'fair'
    ALTER TYPE temper RENAME VALUE 'bad' TO 'foul'
    ALTER TYPE pair ADD ATTRIBUTE c date
    ALTER TYPE pair DROP ATTRIBUTE a
    ALTER FUNCTION f(int) RENAME TO g
    ALTER SCHEMA s RENAME TO z
    ALTER TABLE child NO INHERIT parent
    CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (10) TO (20)
    ALTER TABLE r DETACH PARTITION r0
    VACUUM FULL u
    TRUNCATE s2.x
"""
INDIFFERENT = """
    INSERT INTO s.x VALUES (1)
    CREATE TEMPORARY TABLE w (a int PRIMARY KEY)
    ANALYZE
    CREATE INDEX ON s.x (a)
"""


@pytest.fixture(scope="module")
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    with new_server(postgres_version, {"fsync": "off", "autovacuum": "off"}) as running:
        with psycopg.connect(running.conninfo(), autocommit=True) as admin:
            admin.execute("CREATE ROLE owner_of_p SUPERUSER")
        yield running


@pytest.fixture
def database(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    name = request.node.name
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f'CREATE DATABASE "{name}"')
    with psycopg.connect(server.conninfo(dbname=name), autocommit=True) as connection:
        yield connection


def _each(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def test_the_present_catalog_is_right_after_every_alteration(database: psycopg.Connection) -> None:
    database.execute(TABLES)
    catalog = read_present_catalog(database)
    assert catalog == read_catalog(database)
    for statement in _each(ALTERATIONS):
        database.execute(statement.replace("s2.", "z."))
        present = read_present_catalog(database)
        assert present == read_catalog(database), statement
        assert present != catalog, statement
        catalog = present


def test_the_present_catalog_is_read_once_while_nothing_is_altered(
    database: psycopg.Connection, monkeypatch
) -> None:
    database.execute(TABLES)
    read: list[str] = []

    def counted(connection: psycopg.Connection) -> object:
        read.append(connection.info.dbname)
        return read_catalog(connection)

    monkeypatch.setattr(module, "read_catalog", counted)
    catalog = read_present_catalog(database)
    for statement in _each(INDIFFERENT):
        database.execute(statement)
        assert read_present_catalog(database) is catalog, statement
    assert len(read) == 1


def test_each_database_has_its_own(server: EmbeddedServer, database: psycopg.Connection) -> None:
    database.execute("CREATE TABLE only_here (a int)")
    with psycopg.connect(server.conninfo(), autocommit=True) as other:
        assert (
            not read_present_catalog(other).table_by_name.keys()
            & read_present_catalog(database).table_by_name.keys()
        )


def test_a_catalog_altered_while_it_is_read_is_read_again(database: psycopg.Connection, monkeypatch) -> None:
    database.execute(TABLES)
    pending = iter(["ALTER TABLE t RENAME TO first", "ALTER TABLE first RENAME TO second"])

    def altered(connection: psycopg.Connection) -> object:
        catalog = read_catalog(connection)
        if statement := next(pending, None):
            database.execute(statement)
        return catalog

    monkeypatch.setattr(module, "read_catalog", altered)
    assert ("public", "second") in read_present_catalog(database).table_by_name
