"""Which sequences are read, and the reasons for those that cannot be."""

from __future__ import annotations

import psycopg

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.sequences import PublishedSequences, read_sequences


def test_sequences_that_cannot_be_read_are_named_and_the_others_are_read(
    publisher_server: EmbeddedServer,
) -> None:
    name = "sequences_of_a_role"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'".encode())
        with psycopg.connect(
            publisher_server.conninfo(dbname=name), autocommit=True, client_encoding="SQL_ASCII"
        ) as database:
            database.execute(
                b"""CREATE ROLE reads_sequences; CREATE SCHEMA closed; CREATE SEQUENCE "caf\xe9"; CREATE SEQUENCE "caf\xc3\xa9";
                CREATE SEQUENCE hidden; CREATE SEQUENCE closed.one; CREATE TABLE t (a int GENERATED ALWAYS AS IDENTITY);
                CREATE UNLOGGED SEQUENCE unlogged; CREATE TEMPORARY SEQUENCE of_session;
                CREATE SEQUENCE below INCREMENT -1; SELECT nextval('below');
                GRANT SELECT ON ALL SEQUENCES IN SCHEMA public, closed TO reads_sequences;
                REVOKE SELECT ON hidden FROM reads_sequences"""
            )
        with psycopg.connect(
            publisher_server.conninfo(dbname=name), autocommit=True, client_encoding="UTF8"
        ) as database:
            database.execute("SET ROLE reads_sequences")
            named = frozenset({("public", "t"), ("public", "hidden")})
            read = read_sequences(database, PublishedSequences([], named, all_sequences=True))
            of_named = read_sequences(database, PublishedSequences(["none"], named))
            assert read_sequences(database, PublishedSequences(["none"])) == ()
            newest = database.info.server_version >= 190000
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
        admin.execute("DROP ROLE reads_sequences")
    values = {(v.schema, v.name): (v.last_value, v.is_called, v.ascending) for v in read if not v.problem}
    # pg_get_sequence_data() needs no privilege on the schema.
    closed = {("closed", "one"): (1, False, True)} if newest else {}
    assert values == {
        **closed,
        ("public", "café"): (1, False, True),
        ("public", "below"): (-1, True, False),
        ("public", "t_a_seq"): (1, False, True),
    }
    problems = {v.name: v.problem for v in read if v.problem}
    assert problems.keys() == {"caf\\xe9", "hidden", "t", *(() if newest else ("one",))}
    assert "22021" in str(problems["caf\\xe9"])
    assert "42501" in str(problems["hidden"])
    assert "42P01" in str(problems["t"])
    assert {v.name: v.problem for v in of_named} == {n: problems[n] for n in ("t", "hidden")}
    assert all((v.page_lsn is not None) is newest for v in read if not v.problem)
