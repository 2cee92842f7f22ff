"""Comments are read as COMMENT ON made them."""

from __future__ import annotations

import psycopg

from pgsieve.resources.postgres.comments import Comments, read_comments
from pgsieve.resources.postgres.embedded import EmbeddedServer


def test_comments_of_tables_and_columns_are_read(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        connection.execute('create schema "Said"')
        connection.execute('create table "Said"."T 1" (a int, b int, "C" int)')
        connection.execute('create table "Said".t2 (a int); comment on column "Said".t2.a is \'only\'')
        connection.execute('comment on table "Said"."T 1" is \'the table\'')
        connection.execute("comment on column \"Said\".\"T 1\".\"C\" is 'a ''column'''")
        tables = [("Said", "T 1"), ("Said", "t2"), ("Said", "none")]
        assert read_comments(connection, tables) == {
            ("Said", "T 1"): Comments("the table", {"C": "a 'column'"}),
            ("Said", "t2"): Comments(None, {"a": "only"}),
        }
        connection.rollback()
