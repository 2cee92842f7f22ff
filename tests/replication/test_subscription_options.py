"""Options of CREATE SUBSCRIPTION decide how changes travel; two_phase also decides when, and origin which.

PostgreSQL documentation, CREATE SUBSCRIPTION; 47.10, Two-phase Commit Support for Logical Decoding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import errors

from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario, wait_until
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.replicas import Subscription

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]


def test_a_prepared_transaction_is_seen_only_once_it_is_committed(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO t VALUES (1, 'before')")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (a < 10)")
    scenario.subscribe("pub", two_phase=True)
    scenario.check(expect={"t": ["1|before"]})
    gid = scenario.name  # a gid is unique on the whole server
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (2, 'x'), (12, 'x'); PREPARE TRANSACTION '{gid}'")
    scenario.publisher("INSERT INTO t VALUES (3, 'beside')")
    scenario.check(expect={"t": ["1|before", "3|beside"]})
    # Much later, the slot is confirmed past the PREPARE, and the table was described in another session.
    scenario.publisher("UPDATE t SET b = 'changed' WHERE a = 3")
    scenario.check(expect={"t": ["1|before", "3|changed"]})
    scenario.publisher(f"COMMIT PREPARED '{gid}'")
    scenario.publisher("UPDATE t SET b = 'y' WHERE a = 2")
    scenario.check(expect={"t": ["1|before", "2|y", "3|changed"]})


def test_a_prepared_transaction_that_is_rolled_back_leaves_nothing(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub", two_phase=True)
    gid = scenario.name
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION '{gid}'")
    scenario.check(expect={"t": []})
    # Another transaction uses the gid again before the end of the first one is read.
    scenario.publisher(f"ROLLBACK PREPARED '{gid}'")
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (2, 'y'); PREPARE TRANSACTION '{gid}'")
    scenario.check(expect={"t": []})
    scenario.publisher(f"COMMIT PREPARED '{gid}'")
    scenario.check(expect={"t": ["2|y"]})


def test_two_phase_is_enabled_once_all_tables_are_ready_and_applies_to_later_tables(
    scenario: Scenario,
) -> None:
    # src/backend/replication/logical/worker.c, on two-phase transactions: first pending, then enabled for good.
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u (a int PRIMARY KEY)")
    scenario.publisher("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub", two_phase=True)
    enabled = f"SELECT subtwophasestate FROM pg_subscription WHERE subname = '{scenario.name}'"
    wait_until(lambda: scenario.subscriber(enabled) == [("e",)], lambda: "two_phase is still pending")
    scenario.publisher("ALTER PUBLICATION pub ADD TABLE u")
    with pytest.raises(errors.SyntaxError, match="two_phase is enabled"):
        scenario.subscriber(f"ALTER SUBSCRIPTION {scenario.name} REFRESH PUBLICATION")
    scenario.refresh(copy_data=False)
    gid = scenario.name
    scenario.publisher(
        f"BEGIN; INSERT INTO t VALUES (2); INSERT INTO u VALUES (3); PREPARE TRANSACTION '{gid}'"
    )
    scenario.check(expect={"t": ["1"], "u": []})
    scenario.publisher(f"COMMIT PREPARED '{gid}'")
    scenario.check(expect={"t": ["1", "2"], "u": ["3"]})


def test_without_two_phase_a_prepared_transaction_arrives_at_its_commit(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub", two_phase=False)
    gid = scenario.name
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION '{gid}'")
    scenario.check(expect={"t": []})
    scenario.publisher(f"COMMIT PREPARED '{gid}'")
    scenario.check(expect={"t": ["1|x"]})


@pytest.mark.parametrize("origin", ["any", "none"])
def test_replicated_changes_are_sent_on_unless_origin_is_none(
    scenario: Scenario, origin: str, postgres_version: int
) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
    if postgres_version < 16:  # the parameter does not exist
        with pytest.raises(errors.SyntaxError):
            scenario.subscribe("pub", origin=origin)
        return
    scenario.subscribe("pub", origin=origin)
    scenario.check(expect={"t": []})
    scenario.publisher("INSERT INTO t VALUES (1, 'here')")
    with scenario.session() as replicating:
        replicating(f"SELECT pg_replication_origin_create('{scenario.name}')")
        replicating(f"SELECT pg_replication_origin_session_setup('{scenario.name}')")
        replicating("INSERT INTO t VALUES (2, 'elsewhere')")
        replicating("SELECT pg_replication_origin_session_reset()")
        replicating(f"SELECT pg_replication_origin_drop('{scenario.name}')")
    scenario.check(expect={"t": ["1|here"] if origin == "none" else ["1|here", "2|elsewhere"]})


@pytest.mark.parametrize("streaming", ["on", "parallel"])
def test_a_streamed_transaction_leaves_only_committed_changes(scenario: Scenario, streaming: str) -> None:
    scenario.publisher(f"ALTER DATABASE {scenario.name} SET logical_decoding_work_mem = '64kB'")
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (a % 2 = 0)")
    scenario.subscribe("pub", streaming=streaming)
    insert = "INSERT INTO t SELECT a, repeat('x', 100) FROM generate_series({}, {}) a"
    scenario.publisher("BEGIN")
    scenario.publisher(insert.format(1, 2000))
    with scenario.session() as other:
        other("INSERT INTO t VALUES (10002, 'beside')")
        scenario.check(expect={"t": ["10002|beside"]})
        other("BEGIN")
        other(insert.format(20001, 22000))
        scenario.publisher("SAVEPOINT s")
        scenario.publisher(insert.format(3001, 5000))
        scenario.publisher("ROLLBACK TO s")
        scenario.publisher("DELETE FROM t WHERE a BETWEEN 11 AND 2000")
        other("ROLLBACK")
    scenario.publisher("COMMIT")
    rows = [f"{a}|{'x' * 100}" for a in (2, 4, 6, 8, 10)]
    scenario.check(expect={"t": [*rows, "10002|beside"]})


def test_changes_that_a_subscriber_applied_are_published_again(
    scenario: Scenario, subscriber_server: EmbeddedServer, tmp_path: Path
) -> None:
    # src/test/subscription/t/100: a chain of nodes, of which pgsieve is the last.
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.subscriber("CREATE PUBLICATION onward FOR TABLE t WHERE (a <> 3)")
    middle = subscriber_server.conninfo(dbname=scenario.name)
    onward = Subscription(f"{scenario.name}_onward", middle, ("onward",), {})
    replicas = [
        PgsieveReplica(onward, tmp_path / f"onward_{filtered}", filtered=filtered, writer=scenario.writer)
        for filtered in (False, True)
    ]
    try:
        for replica in replicas:
            replica.run()
        scenario.publisher(
            "INSERT INTO t VALUES (2, 'added'), (3, 'filtered'); UPDATE t SET b = 'x' WHERE a = 1"
        )
        scenario.subscriber("INSERT INTO t VALUES (4, 'local')")
        scenario.run()
        for replica in replicas:
            replica.run()
            assert sorted(replica.rows("public", "t")) == [("1", "x"), ("2", "added"), ("4", "local")]
    finally:
        for replica in replicas:
            replica.close()


def test_a_copy_of_replicated_rows_gives_a_warning_if_origin_is_none(
    scenario: Scenario, subscriber_server: EmbeddedServer, tmp_path: Path, postgres_version: int
) -> None:
    # CREATE SUBSCRIPTION, notes; src/test/subscription/t/030: only a warning, and all rows are copied
    if postgres_version < 16:  # the parameter does not exist
        return
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE own (a int)")
    scenario.publisher("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.subscriber("INSERT INTO t VALUES (2); CREATE PUBLICATION onward FOR TABLE t, own")
    middle = subscriber_server.conninfo(dbname=scenario.name)
    onward = Subscription(f"{scenario.name}_onward", middle, ("onward",), {"origin": "none"})
    replica = PgsieveReplica(onward, tmp_path / "onward", filtered=False, writer=scenario.writer)
    try:
        replica.run()
        assert sorted(replica.rows("public", "t")) == [("1",), ("2",)]
        warned = [text for text in replica.messages if "might copy data that had a different origin" in text]
        assert [text.split(";")[0].split("write to ")[1] for text in warned] == ["public.t"]
        scenario.publisher("INSERT INTO t VALUES (3)")
        scenario.subscriber("INSERT INTO t VALUES (4)")
        scenario.run()
        replica.run()
        assert sorted(replica.rows("public", "t")) == [("1",), ("2",), ("4",)]
    finally:
        replica.close()


def test_logical_messages_and_materialized_views_change_no_table(scenario: Scenario) -> None:
    # src/test/subscription/t/020 and 009; section 49.6.4, pg_logical_emit_message
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub", streaming="on")
    scenario.publisher(
        "CREATE MATERIALIZED VIEW seen AS SELECT 7 AS a FROM t; REFRESH MATERIALIZED VIEW seen"
    )
    scenario.publisher("SELECT pg_logical_emit_message(true, 'pgoutput', 'alone')")
    scenario.publisher(
        "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(false, 'pgoutput', 'at once');"
        "SELECT pg_logical_emit_message(true, 'pgoutput', 'within'); INSERT INTO t VALUES (2); COMMIT;"
        "BEGIN; INSERT INTO t VALUES (3); SELECT pg_logical_emit_message(false, 'pgoutput', 'stays'); ROLLBACK"
    )
    scenario.check(expect={"t": ["1", "2"]})
