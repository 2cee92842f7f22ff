"""Schema changes in place: values of rows that no message changed, according to the catalog, with the server as the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.decoding.publications.evolution import (
    ColumnSource,
    Layout,
    SchemaChangedError,
    find_column_sources,
    find_present_names,
)
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.servers import own_database

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[Connection]:
    """A database for all tests: to create one takes longer than a test."""
    with own_database(publisher_server, "evolution") as made:
        yield made


@pytest.fixture
def connection(database: Connection) -> Connection:
    """A database with the table t and two rows, and nothing else."""
    database.execute(
        "DROP SCHEMA public CASCADE; CREATE SCHEMA public;"
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int); INSERT INTO t VALUES (1), (2)"
    )
    return database


def layout(connection: Connection, table: str = "t") -> Layout:
    """The present layout of a table."""
    catalog = read_catalog(connection)
    return Layout.from_table(catalog.table_by_name["public", table], catalog)


def columns(made: Layout) -> dict[str, str]:
    """All columns, each with a type."""
    return {c.name: f"{c.type_oid}" for c in made.columns}


def followed(
    connection: Connection, *definitions: str, table: str = "t", has_column_list: bool = False
) -> list[ColumnSource]:
    """After DDL, the source of each column's values."""
    before = layout(connection, table)
    for definition in definitions:
        connection.execute(definition)
    after = layout(connection, table)
    return list(
        find_column_sources(before, after, columns(before), columns(after), has_column_list=has_column_list)
    )


KEPT = [ColumnSource("id", "id"), ColumnSource("a", "a"), ColumnSource("b", "b")]


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        ("c int", None),
        ("c int DEFAULT 7", "7"),
        ("c int NOT NULL DEFAULT 3 + 4", "7"),
        ("c text DEFAULT 'a,b {\"'''", "a,b {\"'"),
        ("c text DEFAULT 'NULL'", "NULL"),
        ("c text DEFAULT ''", ""),
        ("c int[] DEFAULT '{1,NULL}'", "{1,NULL}"),
        ("c box DEFAULT '(1,1),(0,0)'", "(1,1),(0,0)"),
        ("c bytea DEFAULT '\\x00ff'", "\\x00ff"),
        ("c int GENERATED ALWAYS AS (b) STORED", None),
        ("c int DEFAULT random() * 10", None),
        ("c serial", None),
        ("c int GENERATED ALWAYS AS IDENTITY", None),
    ],
)
def test_an_added_column_has_its_missing_value_unless_the_table_was_rewritten(
    connection: Connection, definition: str, value: str | None
) -> None:
    before = layout(connection)
    connection.execute(f"ALTER TABLE t ADD COLUMN {definition}")
    after = layout(connection)
    filled = connection.execute("SELECT count(c) FROM t").fetchone()
    assert filled is not None
    if value is None and (filled[0] or "GENERATED" in definition):
        with pytest.raises(SchemaChangedError, match="rewritten"):
            find_column_sources(before, after, columns(before), columns(after), has_column_list=False)
        return
    values = find_column_sources(before, after, columns(before), columns(after), has_column_list=False)
    assert list(values) == [*KEPT, ColumnSource("c", None, value)]
    assert connection.execute(
        "SELECT count(*) FROM t WHERE c::text IS DISTINCT FROM %s", [value]
    ).fetchone() == (0,)


def test_renamed_and_dropped_columns_are_recognised_by_their_numbers(connection: Connection) -> None:
    assert followed(connection, "ALTER TABLE t RENAME a TO x", "ALTER TABLE t DROP b") == [
        ColumnSource("id", "id"),
        ColumnSource("x", "a"),
    ]


@pytest.mark.parametrize(
    "definition",
    [
        "ALTER TABLE t ALTER a TYPE varchar",
        "ALTER TABLE t ALTER a SET NOT NULL, ALTER b SET DEFAULT 1",
        "VACUUM FULL t",
        "TRUNCATE t",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    ],
)
def test_ddl_that_changes_no_value_keeps_every_column(connection: Connection, definition: str) -> None:
    connection.execute("UPDATE t SET a = 'x'")
    before = layout(connection)
    connection.execute(definition)
    after = layout(connection)
    assert (
        list(find_column_sources(before, after, columns(before), columns(before), has_column_list=False))
        == KEPT
    )


@pytest.mark.parametrize(
    ("definitions", "reason"),
    [
        (["ALTER TABLE t ALTER a TYPE text USING upper(a)"], "altered and the table rewritten"),
        (["ALTER TABLE t ALTER b TYPE bigint"], "another type"),
        (["ALTER TABLE t DROP b", "ALTER TABLE t ADD b int"], "another one than before"),
        (["ALTER TABLE t DROP b", "ALTER TABLE t ADD c int"], "one of the same type added"),
        (["ALTER TABLE t ADD c int", "ALTER TABLE t DROP c"], "added and dropped again"),
        (
            ["ALTER TABLE t RENAME a TO c", "ALTER TABLE t RENAME b TO a", "ALTER TABLE t RENAME c TO b"],
            "another one than before",
        ),
        (["DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, a text, b int)"], "dropped and created again"),
        (["ALTER TABLE t ADD c int", "VACUUM FULL t"], "rewritten"),
    ],
)
def test_ambiguous_changes_cause_a_copy(connection: Connection, definitions: list[str], reason: str) -> None:
    with pytest.raises(SchemaChangedError, match=reason):
        followed(connection, *definitions)


TYPES = """
    CREATE TYPE mood AS ENUM ('sad', 'ok'); CREATE DOMAIN feeling AS mood[]; CREATE TABLE kind (x int);
    CREATE TYPE pair AS (a int, f feeling); CREATE TYPE spans AS RANGE (subtype = pair); CREATE TYPE other AS ENUM ('x');
    CREATE TABLE typed (id int PRIMARY KEY, p spans, k kind[])
"""


@pytest.mark.parametrize(
    "definition",
    [
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'unhappy'",
        "ALTER TYPE pair ADD ATTRIBUTE b int",
        "ALTER TYPE pair DROP ATTRIBUTE a, ADD ATTRIBUTE b int",
        "ALTER TABLE kind ADD y int",
    ],
)
def test_a_type_that_changes_how_rows_print_causes_a_copy(connection: Connection, definition: str) -> None:
    connection.execute(TYPES)
    with pytest.raises(SchemaChangedError, match="the type of column"):
        followed(connection, definition, table="typed")


@pytest.mark.parametrize(
    "definition",
    [
        "ALTER TYPE mood ADD VALUE 'happy'",
        "ALTER TYPE mood ADD VALUE 'happy' BEFORE 'sad'",
        "ALTER TYPE pair RENAME ATTRIBUTE a TO b",
        "ALTER TYPE mood RENAME TO temper",
        "ALTER TYPE other RENAME VALUE 'x' TO 'y'",
        "ALTER TABLE kind RENAME x TO z",
    ],
)
def test_a_type_that_does_not_change_how_rows_print_copies_nothing(
    connection: Connection, definition: str
) -> None:
    connection.execute(TYPES)
    kept = followed(connection, definition, table="typed")
    assert kept == [ColumnSource(name, name) for name in ("id", "p", "k")]


def test_a_column_added_outside_of_a_column_list_may_have_unsent_values(
    connection: Connection,
) -> None:
    with pytest.raises(SchemaChangedError, match="column list"):
        followed(connection, "ALTER TABLE t ADD c int", has_column_list=True)


def test_a_partitioned_table_has_the_missing_values_of_its_leaves(connection: Connection) -> None:
    connection.execute(
        "CREATE TABLE p (id int, a int) PARTITION BY LIST (id); CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);"
        "CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2); INSERT INTO p VALUES (1), (2)"
    )
    kept = [ColumnSource("id", "id"), ColumnSource("a", "a")]
    assert followed(connection, "ALTER TABLE p ADD c int DEFAULT 5", table="p") == [
        *kept,
        ColumnSource("c", None, "5"),
    ]
    with pytest.raises(SchemaChangedError, match="rewritten"):
        followed(connection, "ALTER TABLE p ADD d int DEFAULT random() * 10", table="p")
    with pytest.raises(SchemaChangedError, match="altered and the table rewritten"):
        followed(connection, "ALTER TABLE p ALTER a TYPE int USING a + 1", table="p")


def test_messages_before_the_change_are_read_under_the_present_names(connection: Connection) -> None:
    before = layout(connection)
    connection.execute("ALTER TABLE t RENAME a TO x; ALTER TABLE t DROP b; ALTER TABLE t ADD c date")
    after = layout(connection)
    types = {"id": 23, "a": 25, "x": 25, "b": 23, "c": 1082}

    def names(*sent: str) -> tuple[str, ...]:
        return find_present_names([(name, types[name]) for name in sent], before.oid, before, after)

    assert names("id", "a", "b") == ("id", "x", "b")
    assert names("id", "x", "b", "c") == ("id", "x", "b", "c")
    assert names("id", "x", "c") == ("id", "x", "c")
    for unexplained, reason in [
        ([("id", 23), ("y", 25)], "had this name"),
        ([("id", 20), ("a", 25)], "had this type"),
        ([("x", 25), ("id", 23)], "exchanged"),
    ]:
        with pytest.raises(SchemaChangedError, match=reason):
            find_present_names(unexplained, before.oid, before, after)
    with pytest.raises(SchemaChangedError, match="was altered"):
        find_present_names([("a", 25), ("id", 23)], before.oid + 1, before, after)
