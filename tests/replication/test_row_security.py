"""Privileges and policies of the source's role count as for a built-in subscription.

PostgreSQL documentation, Logical Replication: Security.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgsieve.assets.steps.checks.consistency import HIDDEN_PROBLEM, check_consistency
from pgsieve.assets.steps.checks.repair import repair
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = pytest.mark.spark

_TABLES = """
    CREATE TABLE policed (id int PRIMARY KEY, who text);
    CREATE TABLE open (id int PRIMARY KEY, who text);
    CREATE TABLE root (id int PRIMARY KEY, who text) PARTITION BY RANGE (id);
    CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10);
    CREATE TABLE high PARTITION OF root FOR VALUES FROM (10) TO (100);
    CREATE TABLE granted (id int PRIMARY KEY, who text) PARTITION BY RANGE (id);
    CREATE TABLE ungranted PARTITION OF granted FOR VALUES FROM (0) TO (100);
    CREATE TABLE above (id int PRIMARY KEY, who text) PARTITION BY RANGE (id);
    CREATE TABLE below PARTITION OF above FOR VALUES FROM (0) TO (100)
"""
_PUBLISHED = ("policed", "open", "root", "granted", "above")
#: `_POLICED` have a policy for their owner, or their partition has one. The policy of `open` lets every row pass.
_POLICED, _RIGHTS = ("policed", "open", "root", "below"), ("policed", "open", "root", "low", "high", "below")


class _AsKeeper(Scenario):
    """A scenario whose subscriptions connect as the role `keeper`, which owns tables and is no superuser."""

    subscribing = False

    @property
    def publisher_conninfo(self) -> str:
        user = "keeper" if self.subscribing else "postgres"
        return self.publisher_server.conninfo(dbname=self.name, user=user)


@pytest.fixture
def keeper(
    publisher_server: EmbeddedServer, subscriber_server: EmbeddedServer, tmp_path: Path
) -> Iterator[Scenario]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE ROLE keeper LOGIN REPLICATION")
        try:
            with _AsKeeper(publisher_server, subscriber_server, tmp_path) as scenario:
                scenario.tables(_TABLES)
                scenario.publisher(f"GRANT CREATE ON DATABASE {scenario.name} TO keeper")
                for table in (*_RIGHTS, "granted", "above"):
                    scenario.publisher(f"ALTER TABLE {table} OWNER TO keeper")
                for table in _POLICED:
                    rows = "true" if table == "open" else "who = 'keeper'"
                    scenario.publisher(
                        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;"
                        f"CREATE POLICY one ON {table} USING ({rows})"
                    )
                scenario.publisher(
                    f"CREATE PUBLICATION pub FOR TABLE {', '.join(_PUBLISHED)} WITH (publish_via_partition_root = true)"
                )
                for table in _PUBLISHED:
                    scenario.publisher(
                        f"INSERT INTO {table} VALUES (1, 'keeper'), (2, 'other'), (11, 'keeper'), (12, 'other')"
                    )
                scenario.subscribing = True
                yield scenario
        finally:
            admin.execute("DROP ROLE keeper")


def test_policies_hide_rows_from_a_copy_but_not_from_later_changes(keeper: Scenario) -> None:
    keeper.subscribe("pub")
    for table in _PUBLISHED:
        keeper.publisher(
            f"INSERT INTO {table} VALUES (3, 'other'), (13, 'keeper');"
            f"UPDATE {table} SET who = 'another' WHERE id IN (1, 2)"
        )
    rows = keeper.check(*_PUBLISHED)
    assert {table: len(rows_of_table) for table, rows_of_table in rows.items()} == {
        "policed": 4,
        "open": 6,
        "root": 4,
        "granted": 6,
        "above": 6,
    }
    for replica in keeper.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        results = check_consistency(replica.subscription, replica.lake, lambda _: None)
        assert {r.table: r.problem for r in results if not r.equal} == {
            "policed": HIDDEN_PROBLEM,
            "root": HIDDEN_PROBLEM,
        }
        # The replica keeps rows that the role cannot see.
        (done,) = repair(replica.subscription, replica.lake, [("public", "policed")], lambda _: None)
        assert (done.problem, done.deleted) == (HIDDEN_PROBLEM, 0)
    keeper.check(*_PUBLISHED)
