"""An alteration on the publisher takes effect at its place in the WAL, not at the next run.

pgoutput reads the catalog as of each change (get_rel_sync_entry() in
src/backend/replication/pgoutput/pgoutput.c). A built-in subscription learns of tables that came or went at
ALTER SUBSCRIPTION ... REFRESH PUBLICATION.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import errors

from pgsieve.decoding.publications.catalog import PublicationError
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.replicas import BY_DEFAULT, Subscription

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]


def test_each_change_is_filtered_by_the_publication_of_that_moment(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.publisher(
        """INSERT INTO t VALUES (20), (21), (22);
        ALTER PUBLICATION pub SET (publish = 'delete');
        INSERT INTO t VALUES (23); DELETE FROM t WHERE a = 20;
        ALTER PUBLICATION pub SET (publish = 'insert'); ALTER PUBLICATION pub SET TABLE t WHERE (a > 30);
        INSERT INTO t VALUES (24), (33); DELETE FROM t WHERE a = 21"""
    )
    scenario.check(expect={"t": ["21|", "22|", "33|"]})
    scenario.publisher("INSERT INTO t VALUES (25), (34)")
    scenario.check(expect={"t": ["21|", "22|", "33|", "34|"]})


def test_a_change_goes_to_the_name_that_its_table_had_then(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY); CREATE SCHEMA s")
    scenario.tables("CREATE TABLE x (a int PRIMARY KEY); CREATE TABLE y (a int PRIMARY KEY)")
    scenario.subscriber("CREATE TABLE u (a int PRIMARY KEY); CREATE TABLE s.t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t, x, y")
    scenario.subscribe("pub")
    scenario.publisher(
        """INSERT INTO t VALUES (1);
        ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (2);
        ALTER TABLE u RENAME TO t; INSERT INTO t VALUES (3);
        ALTER TABLE t SET SCHEMA s; INSERT INTO s.t VALUES (4); DELETE FROM s.t WHERE a = 1;
        ALTER TABLE s.t SET SCHEMA public; INSERT INTO t VALUES (5)"""
    )
    scenario.check(expect={"t": ["1", "3", "5"]})
    # Two tables exchange their names; then another table has the name for a while.
    swap = "ALTER TABLE x RENAME TO z; ALTER TABLE y RENAME TO x; ALTER TABLE z RENAME TO y"
    scenario.publisher(
        f"""INSERT INTO x VALUES (1), (2); INSERT INTO y VALUES (3), (4); {swap}; INSERT INTO x VALUES (5);
        UPDATE y SET a = 6 WHERE a = 1; DELETE FROM x WHERE a = 3; DELETE FROM y WHERE a = 2; {swap}; INSERT INTO x VALUES (7)"""
    )
    scenario.check(expect={"x": ["1", "2", "5", "7"], "y": ["3", "4"]})
    scenario.publisher(
        """ALTER TABLE x RENAME TO u; CREATE TABLE x (a int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE x;
        INSERT INTO x VALUES (8); DELETE FROM x; INSERT INTO x VALUES (9); DROP TABLE x; ALTER TABLE u RENAME TO x"""
    )
    scenario.check(expect={"x": ["1", "2", "5", "7", "9"]})


def test_a_row_of_a_partition_goes_to_the_root_that_it_had_then(scenario: Scenario) -> None:
    scenario.publisher(
        """CREATE TABLE r (a int PRIMARY KEY) PARTITION BY RANGE (a);
        CREATE TABLE r0 PARTITION OF r FOR VALUES FROM (0) TO (10);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (10) TO (20);
        CREATE PUBLICATION pub FOR TABLE r WITH (publish_via_partition_root = true)"""
    )
    scenario.subscriber("CREATE TABLE r (a int PRIMARY KEY); CREATE TABLE r1 (a int PRIMARY KEY)")
    scenario.subscribe("pub")
    scenario.publisher(
        """INSERT INTO r VALUES (1), (11);
        ALTER TABLE r DETACH PARTITION r1; INSERT INTO r1 VALUES (12); DELETE FROM r1 WHERE a = 11;
        ALTER TABLE r ATTACH PARTITION r1 FOR VALUES FROM (10) TO (20); INSERT INTO r VALUES (13);
        CREATE TABLE r2 PARTITION OF r FOR VALUES FROM (20) TO (30); INSERT INTO r VALUES (21);
        DROP TABLE r0; TRUNCATE r2; INSERT INTO r VALUES (22)"""
    )
    scenario.check(expect={"r": ["1", "11", "13", "21", "22"]})


#: Changes that are published only for a while. The catalog afterwards shows no trace of it.
UNDONE = (
    """ALTER PUBLICATION p2 ADD TABLE t; INSERT INTO t VALUES (1); UPDATE t SET v = 'x' WHERE id = 100;
    ALTER PUBLICATION p2 DROP TABLE t; INSERT INTO t VALUES (2), (101);
    ALTER PUBLICATION p2 ADD TABLES IN SCHEMA public; INSERT INTO t VALUES (3);
    ALTER PUBLICATION p2 DROP TABLES IN SCHEMA public; INSERT INTO t VALUES (4), (103);
    BEGIN; ALTER PUBLICATION p2 ADD TABLE t WHERE (v = 'y'); INSERT INTO t VALUES (5, 'x'), (6, 'y');
    ALTER PUBLICATION p2 DROP TABLE t; COMMIT; INSERT INTO t VALUES (7, 'y')""",
    """ALTER TABLE r ATTACH PARTITION w FOR VALUES FROM (70) TO (80); INSERT INTO w VALUES (71);
    ALTER TABLE r DETACH PARTITION w; INSERT INTO w VALUES (72);
    CREATE TABLE x PARTITION OF r FOR VALUES FROM (80) TO (90); INSERT INTO r VALUES (81); DROP TABLE x""",
    """ALTER TABLE r DETACH PARTITION r1; INSERT INTO r1 VALUES (12); DELETE FROM r1 WHERE id = 11;
    ALTER TABLE r ATTACH PARTITION r1 FOR VALUES FROM (10) TO (20); INSERT INTO r VALUES (13)""",
)


def test_an_alteration_undone_between_two_runs_counts_while_it_lasted(scenario: Scenario) -> None:
    scenario.tables(
        """CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t REPLICA IDENTITY FULL;
        CREATE TABLE w (id int PRIMARY KEY);
        CREATE TABLE r (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE r1 PARTITION OF r FOR VALUES FROM (10) TO (20)"""
    )
    scenario.subscriber("CREATE TABLE rest PARTITION OF r DEFAULT")
    scenario.publisher(
        """INSERT INTO t VALUES (100, 'copied'), (50, 'filtered'); INSERT INTO r VALUES (11);
        CREATE PUBLICATION p1 FOR TABLE t WHERE (id > 99);
        CREATE PUBLICATION p2 FOR TABLE w, r WITH (publish_via_partition_root = true)"""
    )
    scenario.subscribe("p1", "p2")
    for statements in UNDONE:
        scenario.publisher(statements)
        scenario.check("t", "w", "r")
    scenario.check(
        expect={
            "t": ["1|", "100|x", "101|", "103|", "3|", "6|y"],
            "w": ["72"],
            "r": ["11", "13", "71", "81"],
        }
    )


def test_changes_before_a_table_left_the_publication_count(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t, u")
    scenario.subscribe("pub")
    scenario.publisher(
        """INSERT INTO t VALUES (1), (2); DELETE FROM t WHERE a = 2;
        ALTER PUBLICATION pub DROP TABLE t; INSERT INTO t VALUES (3)"""
    )
    scenario.check(expect={"t": ["1"], "u": []})
    scenario.refresh()
    scenario.publisher("DELETE FROM t; INSERT INTO u VALUES (1)")
    scenario.check(expect={"t": ["1"], "u": ["1"]})
    scenario.publisher("ALTER PUBLICATION pub ADD TABLE t; INSERT INTO t VALUES (4)")
    scenario.refresh(copy_data=False)
    scenario.publisher("INSERT INTO t VALUES (5)")
    scenario.check(expect={"t": ["1", "5"], "u": ["1"]})


def test_a_publication_may_be_dropped_after_the_subscription_left_it(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int); CREATE TABLE u (a int)")
    scenario.publisher(
        """INSERT INTO t SELECT generate_series(1, 10); CREATE PUBLICATION p1 FOR TABLE t;
        CREATE PUBLICATION p2"""
    )
    scenario.subscribe("p1", "p2")
    scenario.publisher("INSERT INTO u SELECT generate_series(1, 10); ALTER PUBLICATION p2 ADD TABLE u")
    scenario.refresh("p2")
    scenario.publisher("DROP PUBLICATION p1; INSERT INTO t VALUES (11); INSERT INTO u VALUES (11)")
    scenario.check(expect={"t": "10|1|10", "u": "11|1|11"})


def test_a_table_created_in_a_published_schema_is_copied_at_the_next_refresh(scenario: Scenario) -> None:
    scenario.tables("CREATE SCHEMA s; CREATE TABLE s.t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLES IN SCHEMA s")
    scenario.subscribe("pub")
    scenario.tables("CREATE TABLE s.u (a int PRIMARY KEY)")
    scenario.publisher("INSERT INTO s.u SELECT generate_series(1, 10); INSERT INTO s.t VALUES (1)")
    scenario.check(expect={"s.t": ["1"], "s.u": []})
    scenario.publisher("INSERT INTO s.u VALUES (11)")
    scenario.refresh()
    scenario.publisher("INSERT INTO s.u VALUES (12)")
    scenario.check(expect={"s.t": ["1"], "s.u": "12|1|12"})


def test_without_copy_data_only_later_changes_arrive(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t WHERE (a < 3)")
    scenario.subscribe("pub", copy_data=False)
    scenario.publisher("INSERT INTO t VALUES (2), (3); ALTER PUBLICATION pub SET TABLE t")
    scenario.publisher("INSERT INTO t VALUES (4)")
    scenario.check(expect={"t": ["2", "4"]})


def test_each_streamed_change_is_filtered_by_the_publication_of_that_moment(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (a < 10)")
    scenario.subscribe("pub", streaming="on")
    scenario.publisher(
        """INSERT INTO t VALUES (1), (11); ALTER PUBLICATION pub SET TABLE t WHERE (a > 10);
        INSERT INTO t VALUES (2), (12)"""
    )
    scenario.check(expect={"t": ["1", "12"]})
    scenario.publisher("INSERT INTO t VALUES (3), (13)")
    scenario.check(expect={"t": ["1", "12", "13"]})


@pytest.mark.parametrize("streaming", ["off", "on"])
def test_temporarily_published_changes_arrive_although_they_were_not_captured(
    scenario: Scenario, streaming: str
) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WITH (publish = 'delete')")
    scenario.subscribe("pub", streaming=streaming)
    scenario.publisher(
        """INSERT INTO t VALUES (1); ALTER PUBLICATION pub SET (publish = 'insert');
        INSERT INTO t VALUES (2); ALTER PUBLICATION pub SET (publish = 'truncate');
        INSERT INTO t VALUES (3)"""
    )
    scenario.check(expect={"t": ["2"]})


def test_a_missing_publication_is_ignored_from_18_on_and_an_error_before(
    scenario: Scenario, postgres_version: int, tmp_path: Path
) -> None:
    # LoadPublications() in pgoutput.c; CREATE SUBSCRIPTION itself only warns in every version.
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY); CREATE TABLE u (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION p FOR TABLE t; INSERT INTO t VALUES (1)")
    if postgres_version < 18:
        scenario.publisher(f"SELECT pg_create_logical_replication_slot('{scenario.name}_p', 'pgoutput')")
        scenario.publisher("INSERT INTO t VALUES (2)")
        peek = f"pg_logical_slot_peek_binary_changes('{scenario.name}_p', NULL, NULL, 'proto_version', '1'"
        with pytest.raises(errors.UndefinedObject, match='publication "missing" does not exist'):
            scenario.publisher(f"SELECT * FROM {peek}, 'publication_names', 'p,missing')")
        subscription = Subscription(scenario.name, scenario.publisher_conninfo, ("p", "missing"), {})
        for filtered in (False, True):
            replica = PgsieveReplica(
                subscription, tmp_path / f"{filtered}", filtered=filtered, writer=BY_DEFAULT
            )
            with pytest.raises(PublicationError, match='publication "missing" does not exist'):
                replica.run()
        return
    scenario.subscribe("p", "missing", "gone")
    scenario.publisher("INSERT INTO t VALUES (2); CREATE PUBLICATION gone FOR TABLE t WHERE (a < 0), u")
    scenario.publisher("INSERT INTO u VALUES (1); INSERT INTO t VALUES (-3)")
    scenario.refresh()
    scenario.publisher(
        """INSERT INTO u VALUES (2); ALTER PUBLICATION p SET TABLE t WHERE (a > 0); INSERT INTO t VALUES (3), (-4);
        DROP PUBLICATION gone; INSERT INTO u VALUES (3); INSERT INTO t VALUES (4), (-5)"""
    )
    scenario.check(expect={"t": ["-4", "-3", "1", "2", "3", "4"], "u": ["1", "2"]})
