"""Statements and types that are new in PostgreSQL 19, compared with a built-in subscription."""

from __future__ import annotations

import threading

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.slot_copy import has_spare_slots
from tests.fixtures.oracle import Scenario, Session, wait_until
from tests.fixtures.servers import own_database

#: Statements that were announced for 19 but are not in its release candidate. Once a server accepts one, it needs a scenario.
LACKING = (
    "ALTER TABLE r MERGE PARTITIONS (r0, r1) INTO r01",
    "ALTER TABLE r SPLIT PARTITION r0 INTO (PARTITION ra FOR VALUES FROM (0) TO (5), PARTITION rb FOR VALUES FROM (5) TO (10))",
    "UPDATE t FOR PORTION OF valid FROM '2026-03-01' TO '2026-06-01' SET price = 1",
    "DELETE FROM t FOR PORTION OF valid FROM '2026-03-01' TO '2026-06-01'",
)


def test_statements_without_a_scenario_are_refused_by_the_server(publisher_server: EmbeddedServer) -> None:
    with own_database(publisher_server, "lacking_statements") as database:
        for statement in LACKING:
            with pytest.raises(psycopg.errors.SyntaxError):
                database.execute(statement)


@pytest.mark.spark
def test_a_table_keeps_its_rows_and_values_while_it_is_repacked(scenario: Scenario) -> None:
    """REPACK rewrites the table, with CONCURRENTLY while sessions write, by a slot that max_replication_slots does not count.

    oid8 is new, and pg_lsn is now printed with all its digits: the text finds a row of a table without a key.
    """
    scenario.tables(
        "CREATE TABLE t (a int PRIMARY KEY, b text); CREATE TABLE u (a oid8, b oid8[], c pg_lsn, d pg_lsn[]); ALTER TABLE u REPLICA IDENTITY FULL"
    )
    scenario.publisher(
        """INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 2000) i;
        INSERT INTO u VALUES ('0', NULL, '0/7', NULL), ('18446744073709551615', '{1,9223372036854775808}', '1/ab', '{0/0}');
        CREATE PUBLICATION pub FOR TABLE t, u"""
    )
    scenario.subscribe("pub", binary=True)
    scenario.publisher(
        """REPACK t; DELETE FROM t WHERE a = 1;
        UPDATE u SET b = b || '5'::oid8 WHERE a > '0'; DELETE FROM u WHERE a = '0';
        REPACK u"""
    )
    of_repack = "SELECT slot_name FROM pg_replication_slots WHERE plugin = 'pgrepack'"
    with scenario.session() as writer, psycopg.connect(scenario.publisher_conninfo, autocommit=True) as other:
        writer("BEGIN; SELECT count(*) FROM t")
        repacking = threading.Thread(target=_repack, args=(scenario.publisher_conninfo,))
        repacking.start()
        wait_until(lambda: other.execute(of_repack).fetchone() is not None, lambda: "REPACK has no slot")
        others = "SELECT 64 - count(*) FROM pg_replication_slots WHERE plugin IS DISTINCT FROM 'pgrepack'"
        [(spare,)] = other.execute(others).fetchall()
        for number in range(1, spare):
            other.execute(f"SELECT pg_create_physical_replication_slot('spare_{number}', temporary => true)")
            assert has_spare_slots(other) is (spare - number >= 2)
        writer(
            "INSERT INTO t VALUES (3000, 'meanwhile'); UPDATE t SET b = 'y' WHERE a = 2; DELETE FROM t WHERE a = 3; COMMIT"
        )
        repacking.join()
    scenario.publisher("UPDATE t SET b = 'after' WHERE a = 3000")
    scenario.check(
        "t", expect={"u": ["18446744073709551615|{1,9223372036854775808,5}|1/000000AB|{0/00000000}"]}
    )


def _repack(conninfo: str) -> None:
    session = Session(conninfo)
    session("REPACK (CONCURRENTLY) t")
    session.close()
