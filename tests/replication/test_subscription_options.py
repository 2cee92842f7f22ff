"""CREATE SUBSCRIPTION's options say how changes travel; two_phase also when, origin also which.

PostgreSQL documentation, CREATE SUBSCRIPTION; 47.10, Two-phase Commit Support for Logical Decoding.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

pytestmark = pytest.mark.spark


def test_a_prepared_transaction_is_seen_only_once_it_is_committed(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO t VALUES (1, 'before')")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (a < 10)")
    scenario.subscribe("pub", two_phase=True)
    scenario.check(expect={"t": ["1|before"]})
    gid = scenario.name  # of the whole server
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (2, 'x'), (12, 'x'); PREPARE TRANSACTION '{gid}'")
    scenario.publisher("INSERT INTO t VALUES (3, 'beside')")
    scenario.check(expect={"t": ["1|before", "3|beside"]})
    # Long after: the slot is confirmed past the PREPARE, and the table's description is of another session.
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
    # The gid is used again for another transaction before anybody reads what became of the first.
    scenario.publisher(f"ROLLBACK PREPARED '{gid}'")
    scenario.publisher(f"BEGIN; INSERT INTO t VALUES (2, 'y'); PREPARE TRANSACTION '{gid}'")
    scenario.check(expect={"t": []})
    scenario.publisher(f"COMMIT PREPARED '{gid}'")
    scenario.check(expect={"t": ["2|y"]})


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
def test_what_came_by_replication_is_sent_on_unless_origin_is_none(scenario: Scenario, origin: str) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
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
