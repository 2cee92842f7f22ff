"""PostgreSQL's rules for partitioned tables.

PostgreSQL documentation, Partitioned Tables, publish_via_partition_root; t/013 and t/031.

The built-in subscriber may partition its tables in another way than the publisher. A replica has no partitions: it is the
table that the publication publishes, a leaf or the root. The published columns are compared.

Left out: the subscriber's own row movement and partition bounds, as far as the published tables do not show them, its triggers,
and ALL TABLES EXCEPT (PostgreSQL 19).
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]

#: Lists {1,2,3} (with another column order), {4,5,6}, and a default partition.
TAB1 = """
CREATE TABLE tab1 (a int PRIMARY KEY, b text) PARTITION BY LIST (a);
CREATE TABLE tab1_1 (b text, a int NOT NULL);
ALTER TABLE tab1 ATTACH PARTITION tab1_1 FOR VALUES IN (1, 2, 3);
CREATE TABLE tab1_2 PARTITION OF tab1 FOR VALUES IN (4, 5, 6);
CREATE TABLE tab1_def PARTITION OF tab1 DEFAULT
"""
#: The same names as plain tables, with an additional column each.
LEAVES_AS_TABLES = """
CREATE TABLE tab1_1 (a int PRIMARY KEY, c text DEFAULT 'sub2_tab1_1', b text);
CREATE TABLE tab1_2 (a int PRIMARY KEY, c text DEFAULT 'sub2_tab1_2', b text);
CREATE TABLE tab1_def (a int PRIMARY KEY, b text, c text DEFAULT 'sub2_tab1_def')
"""
#: Partitioned in another way: tab1_2 is itself partitioned, and an additional column has a default.
OTHER_PARTITIONS = """
CREATE TABLE tab1 (c text DEFAULT 'sub1_tab1', a int PRIMARY KEY, b text) PARTITION BY LIST (a);
CREATE TABLE tab1_1 (b text, c text DEFAULT 'sub1_tab1', a int NOT NULL);
ALTER TABLE tab1 ATTACH PARTITION tab1_1 FOR VALUES IN (1, 2, 3);
CREATE TABLE tab1_2 PARTITION OF tab1 (c DEFAULT 'sub1_tab1') FOR VALUES IN (4, 5, 6) PARTITION BY LIST (a);
CREATE TABLE tab1_2_1 (c text, b text, a int NOT NULL);
ALTER TABLE tab1_2 ATTACH PARTITION tab1_2_1 FOR VALUES IN (5);
CREATE TABLE tab1_2_2 PARTITION OF tab1_2 FOR VALUES IN (4, 6);
CREATE TABLE tab1_def PARTITION OF tab1 (c DEFAULT 'sub1_tab1') DEFAULT
"""


def leaves(scenario: Scenario, local: str) -> None:
    """tab1 published without publish_via_partition_root. `local` creates the subscriber's tables."""
    scenario.publisher(TAB1)
    scenario.subscriber(local)
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")


def root(scenario: Scenario, publication: str = "TABLE tab1") -> None:
    """tab1 published via its root. The subscriber has a plain table."""
    scenario.publisher(TAB1)
    scenario.subscriber("CREATE TABLE tab1 (a int PRIMARY KEY, b text)")
    scenario.publisher(f"CREATE PUBLICATION pub FOR {publication} WITH (publish_via_partition_root = true)")
    scenario.subscribe("pub")


def test_partitions_are_published_as_themselves_by_default(scenario: Scenario) -> None:
    leaves(scenario, LEAVES_AS_TABLES)
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'one'), (3, NULL), (5, 'five'), (0, 'zero')")
    scenario.check(expect={"tab1_1": ["one|1", "|3"], "tab1_2": ["5|five"], "tab1_def": ["0|zero"]})
    scenario.publisher("UPDATE tab1 SET a = 2 WHERE a = 1")
    scenario.check(expect={"tab1_1": ["one|2", "|3"], "tab1_2": ["5|five"], "tab1_def": ["0|zero"]})
    for old, new in ((5, 6), (6, 4), (4, 6)):
        scenario.publisher(f"UPDATE tab1 SET a = {new} WHERE a = {old}")
    scenario.check(expect={"tab1_1": ["one|2", "|3"], "tab1_2": ["6|five"], "tab1_def": ["0|zero"]})


def test_rows_of_partitions_are_copied_into_the_tables_of_the_partitions(scenario: Scenario) -> None:
    scenario.publisher(TAB1)
    scenario.subscriber(LEAVES_AS_TABLES)
    scenario.publisher("INSERT INTO tab1 SELECT a, 'row ' || a FROM generate_series(0, 7) a")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab1")
    scenario.subscribe("pub")
    scenario.check(
        expect={
            "tab1_1": ["row 1|1", "row 2|2", "row 3|3"],
            "tab1_2": ["4|row 4", "5|row 5", "6|row 6"],
            "tab1_def": ["0|row 0", "7|row 7"],
        }
    )


def test_an_update_that_moves_a_row_to_another_partition_is_a_delete_and_an_insert(
    scenario: Scenario,
) -> None:
    leaves(scenario, LEAVES_AS_TABLES)
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'x'), (4, 'y')")
    scenario.publisher("UPDATE tab1 SET a = 5 WHERE a = 1; UPDATE tab1 SET a = 10, b = 'moved' WHERE a = 4")
    scenario.check(expect={"tab1_1": [], "tab1_2": ["5|x"], "tab1_def": ["10|moved"]})


def test_partitions_may_be_partitioned_otherwise_on_the_subscriber(scenario: Scenario) -> None:
    leaves(scenario, OTHER_PARTITIONS)

    def stored(*keys: int) -> None:
        assert scenario.subscriber("SELECT a FROM tab1 ORDER BY a") == [(str(key),) for key in keys]

    scenario.publisher("INSERT INTO tab1 VALUES (1), (3), (5), (0)")
    scenario.check(expect={"tab1_1": ["|1", "|3"], "tab1_2": ["5|"], "tab1_def": ["0|"]})
    stored(0, 1, 3, 5)
    scenario.publisher("UPDATE tab1 SET a = 2 WHERE a = 1; UPDATE tab1 SET a = 6 WHERE a = 5")
    scenario.check(expect={"tab1_1": ["|2", "|3"], "tab1_2": ["6|"], "tab1_def": ["0|"]})
    stored(0, 2, 3, 6)
    scenario.publisher("UPDATE tab1 SET a = 4, b = 'moved' WHERE a = 0")
    scenario.check(expect={"tab1_1": ["|2", "|3"], "tab1_2": ["4|moved", "6|"], "tab1_def": []})
    stored(2, 3, 4, 6)
    scenario.publisher("DELETE FROM tab1 WHERE a IN (2, 3); DELETE FROM tab1_2")
    scenario.check(expect={"tab1_1": [], "tab1_2": [], "tab1_def": []})


def test_truncate_of_a_partition_empties_it_and_of_the_root_all(scenario: Scenario) -> None:
    leaves(scenario, OTHER_PARTITIONS)
    scenario.publisher("INSERT INTO tab1 VALUES (1), (2), (5)")
    scenario.publisher("TRUNCATE tab1_2")
    scenario.check(expect={"tab1_1": ["|1", "|2"], "tab1_2": [], "tab1_def": []})
    scenario.publisher("INSERT INTO tab1 VALUES (4), (9); TRUNCATE tab1")
    scenario.check(expect={"tab1_1": [], "tab1_2": [], "tab1_def": []})


def test_truncate_of_a_partition_is_not_sent_via_the_root(scenario: Scenario) -> None:
    root(scenario)
    scenario.publisher("INSERT INTO tab1 VALUES (1), (2), (5); TRUNCATE tab1_2")
    scenario.check(expect={"tab1": ["1|", "2|", "5|"]})
    scenario.publisher("TRUNCATE tab1; INSERT INTO tab1 VALUES (3, 'later')")
    scenario.check(expect={"tab1": ["3|later"]})


VIA_ROOT = """
CREATE TABLE tab2 (a int PRIMARY KEY, b text) PARTITION BY LIST (a);
CREATE TABLE tab2_1 (b text, a int NOT NULL);
ALTER TABLE tab2 ATTACH PARTITION tab2_1 FOR VALUES IN (0, 1, 2, 3);
CREATE TABLE tab2_2 PARTITION OF tab2 FOR VALUES IN (5, 6);
CREATE TABLE tab3 (a int PRIMARY KEY, b text) PARTITION BY LIST (a);
CREATE TABLE tab3_1 PARTITION OF tab3 FOR VALUES IN (0, 1, 2, 3, 5, 6)
"""


def via_root(scenario: Scenario) -> None:
    """Via the root: tab2 listed together with a partition, and a partition of tab3."""
    scenario.publisher(VIA_ROOT)
    scenario.subscriber(
        "CREATE TABLE tab2 (a int PRIMARY KEY, c text DEFAULT 'sub1_tab2', b text) PARTITION BY RANGE (a);"
        "CREATE TABLE tab2_1 (c text DEFAULT 'sub1_tab2', b text, a int NOT NULL);"
        "ALTER TABLE tab2 ATTACH PARTITION tab2_1 FOR VALUES FROM (0) TO (10);"
        "CREATE TABLE tab3_1 (c text DEFAULT 'sub1_tab3_1', b text, a int PRIMARY KEY)"
    )
    scenario.publisher("INSERT INTO tab2 VALUES (1)")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE tab2, tab2_1, tab3_1 WITH (publish_via_partition_root = true)"
    )
    scenario.subscribe("pub")


def test_via_the_root_a_partition_listed_with_it_is_copied_once(scenario: Scenario) -> None:
    via_root(scenario)
    scenario.check(expect={"tab2": ["1|"], "tab3_1": []})


def test_via_the_root_changes_go_to_the_topmost_published_ancestor(scenario: Scenario) -> None:
    via_root(scenario)
    scenario.publisher("INSERT INTO tab2 VALUES (0), (3), (5)")
    scenario.publisher("INSERT INTO tab3 VALUES (1), (0), (3), (5)")
    scenario.check(expect={"tab2": ["0|", "1|", "3|", "5|"], "tab3_1": ["0|", "1|", "3|", "5|"]})


def test_via_the_root_a_moved_row_is_the_same_row_of_the_root(scenario: Scenario) -> None:
    via_root(scenario)
    scenario.publisher("INSERT INTO tab2 VALUES (0), (3), (5)")
    scenario.publisher("UPDATE tab2 SET a = 6 WHERE a = 5")
    scenario.check(expect={"tab2": ["0|", "1|", "3|", "6|"]})
    scenario.publisher("UPDATE tab2 SET a = 2, b = 'moved' WHERE a = 6")
    scenario.check(expect={"tab2": ["0|", "1|", "2|moved", "3|"]})
    scenario.publisher("DELETE FROM tab2")
    scenario.check(expect={"tab2": []})


def test_via_the_root_rows_of_partitions_with_another_column_order_fit_the_root(scenario: Scenario) -> None:
    root(scenario)
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'first'), (5, 'second'), (8, 'third')")
    scenario.publisher("UPDATE tab1 SET b = b || '!' WHERE a < 8; UPDATE tab1 SET a = 3 WHERE a = 8")
    scenario.check(expect={"tab1": ["1|first!", "3|third", "5|second!"]})
    scenario.publisher("DELETE FROM tab1 WHERE a IN (1, 5)")
    scenario.check(expect={"tab1": ["3|third"]})


def test_all_tables_via_the_root_publishes_the_root(scenario: Scenario) -> None:
    root(scenario, "ALL TABLES")
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'x'), (5, 'y'); UPDATE tab1 SET a = 7 WHERE a = 1")
    scenario.check(expect={"tab1": ["5|y", "7|x"]})


def test_all_tables_without_the_root_publishes_the_leaves(scenario: Scenario) -> None:
    scenario.publisher(TAB1)
    scenario.subscriber(LEAVES_AS_TABLES)
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'x'); CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab1 VALUES (4, 'y'), (9, 'z'); UPDATE tab1 SET a = 5 WHERE a = 9")
    scenario.check(expect={"tab1_1": ["x|1"], "tab1_2": ["4|y", "5|z"], "tab1_def": []})


def test_a_partition_attached_later_is_part_of_the_published_root(scenario: Scenario) -> None:
    root(scenario)
    scenario.publisher("INSERT INTO tab1 VALUES (1, 'x')")
    scenario.check(expect={"tab1": ["1|x"]})
    scenario.publisher(
        "ALTER TABLE tab1 DETACH PARTITION tab1_def;"
        "CREATE TABLE tab1_3 (extra int, b text, a int NOT NULL); ALTER TABLE tab1_3 DROP COLUMN extra;"
        "ALTER TABLE tab1 ATTACH PARTITION tab1_3 FOR VALUES IN (7, 8, 9);"
        "INSERT INTO tab1 VALUES (7, 'in the new one'); UPDATE tab1 SET a = 8 WHERE a = 1"
    )
    scenario.check(expect={"tab1": ["7|in the new one", "8|x"]})


def test_columns_dropped_and_added_on_the_publisher_are_followed_through_a_unique_index(
    scenario: Scenario,
) -> None:
    scenario.publisher(
        "CREATE TABLE tab5 (a int NOT NULL, b int); CREATE UNIQUE INDEX tab5_a ON tab5 (a);"
        "ALTER TABLE tab5 REPLICA IDENTITY USING INDEX tab5_a"
    )
    scenario.subscriber(
        "CREATE TABLE tab5 (a int NOT NULL, b int, c int) PARTITION BY LIST (a);"
        "CREATE TABLE tab5_1 PARTITION OF tab5 DEFAULT;"
        "CREATE UNIQUE INDEX tab5_a ON tab5 (a); ALTER TABLE tab5 REPLICA IDENTITY USING INDEX tab5_a;"
        "ALTER TABLE tab5_1 REPLICA IDENTITY USING INDEX tab5_1_a_idx"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab5")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab5 VALUES (1, 1); UPDATE tab5 SET a = 2 WHERE a = 1")
    scenario.check(expect={"tab5": ["2|1"]})
    # The subscriber's leaf gets another column order.
    scenario.subscriber(
        "ALTER TABLE tab5 DETACH PARTITION tab5_1; ALTER TABLE tab5_1 DROP COLUMN b; ALTER TABLE tab5_1 ADD COLUMN b int;"
        "UPDATE tab5_1 SET b = 1; ALTER TABLE tab5 ATTACH PARTITION tab5_1 DEFAULT"
    )
    scenario.publisher("UPDATE tab5 SET a = 3 WHERE a = 2")
    scenario.check(expect={"tab5": ["3|1"]})
    scenario.publisher(
        "ALTER TABLE tab5 DROP COLUMN b, ADD COLUMN c int; ALTER TABLE tab5 ADD COLUMN b int;"
        "UPDATE tab5 SET c = 1 WHERE a = 3"
    )
    scenario.check(expect={"tab5": ["3|1|"]})  # the publisher's order is now a, c, b
    scenario.subscriber("ALTER TABLE tab5 REPLICA IDENTITY NOTHING")  # the leaf's own identity still counts
    scenario.publisher("UPDATE tab5 SET a = 4 WHERE a = 3")
    scenario.check(expect={"tab5": ["4|1|"]})


def test_via_the_root_only_the_column_list_of_the_root_counts(
    scenario: Scenario, postgres_version: int
) -> None:
    scenario.publisher(
        "CREATE TABLE test_root (a int PRIMARY KEY, b int, c int) PARTITION BY RANGE (a);"
        "CREATE TABLE test_root_1 PARTITION OF test_root FOR VALUES FROM (1) TO (10);"
        "CREATE TABLE test_root_2 PARTITION OF test_root FOR VALUES FROM (10) TO (20);"
        "CREATE PUBLICATION pub1 FOR TABLE test_root (a) WITH (publish_via_partition_root = true);"
        "CREATE PUBLICATION pub2 FOR TABLE test_root_1 (a, b) WITH (publish_via_partition_root = true)"
    )
    scenario.subscriber("CREATE TABLE test_root (a int PRIMARY KEY, b int, c int)")
    if (
        postgres_version < 16
    ):  # these copy the partition in addition to its root; pgsieve does as later versions do
        scenario.subscriber("CREATE TABLE test_root_1 (a int PRIMARY KEY, b int)")
    scenario.publisher("INSERT INTO test_root VALUES (1, 2, 3), (10, 20, 30)")
    scenario.subscribe("pub1", "pub2")
    scenario.publisher("INSERT INTO test_root VALUES (2, 3, 4), (11, 21, 31)")
    scenario.check(expect={"test_root": ["1", "2", "10", "11"]})
    stored = scenario.subscriber("SELECT * FROM test_root ORDER BY a")
    assert stored == [(key, None, None) for key in ("1", "2", "10", "11")]


@pytest.mark.parametrize(
    "scenario", ["spark", pytest.param("driver large on_s3", marks=pytest.mark.long)], indirect=True
)
def test_via_the_root_a_partition_with_another_identity_sends_changes_that_find_no_row(
    scenario: Scenario,
) -> None:
    scenario.publisher(
        "CREATE TABLE tab (a int PRIMARY KEY, b int NOT NULL, c text) PARTITION BY LIST (a);"
        "CREATE TABLE tab_1 PARTITION OF tab FOR VALUES IN (1, 2, 3, 4);"
        "CREATE TABLE tab_2 PARTITION OF tab DEFAULT; CREATE UNIQUE INDEX tab_1_b ON tab_1 (b);"
        "ALTER TABLE tab_1 REPLICA IDENTITY USING INDEX tab_1_b;"
        "INSERT INTO tab SELECT i, i, 'old' FROM generate_series(1, 9) i; DELETE FROM tab WHERE a IN (4, 8);"
        "CREATE PUBLICATION pub FOR TABLE tab WITH (publish_via_partition_root = true)"
    )
    scenario.subscriber("CREATE TABLE tab (a int PRIMARY KEY, b int NOT NULL, c text)")
    scenario.subscribe("pub")
    # An UPDATE of b sends the old tuple, which lacks a. The old tuple of a DELETE lacks a, too.
    scenario.publisher(
        "UPDATE tab SET c = 'new' WHERE a = 1; UPDATE tab SET b = 20 WHERE a = 2; UPDATE tab SET a = 4 WHERE a = 3;"
        "DELETE FROM tab WHERE a = 4; UPDATE tab SET a = 8 WHERE a = 1; UPDATE tab SET c = 'new' WHERE a > 6"
    )
    rows = ["1|1|new", "2|2|old", "3|3|old", "5|5|old", "6|6|old", "7|7|new", "8|1|new", "9|9|new"]
    scenario.check(expect={"tab": rows})


def test_via_the_root_its_row_filter_is_used_and_not_that_of_the_partition(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE parent (a int PRIMARY KEY) PARTITION BY RANGE (a);"
        "CREATE TABLE child PARTITION OF parent DEFAULT"
    )
    scenario.publisher(
        "CREATE PUBLICATION p4 FOR TABLE parent WHERE (a < 5), child WHERE (a >= 5) "
        "WITH (publish_via_partition_root = true)"
    )
    scenario.subscribe("p4")
    scenario.publisher("INSERT INTO parent VALUES (2), (4), (6); INSERT INTO child VALUES (3), (5), (7)")
    scenario.check(expect={"parent": ["2", "3", "4"]})


def test_without_the_root_the_row_filter_of_the_partition_is_used(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE parent (a int PRIMARY KEY) PARTITION BY RANGE (a);"
        "CREATE TABLE child PARTITION OF parent DEFAULT"
    )
    scenario.publisher(
        "CREATE PUBLICATION p4 FOR TABLE parent, child WHERE (a >= 5) WITH (publish_via_partition_root = false)"
    )
    scenario.subscribe("p4")
    scenario.publisher("INSERT INTO parent VALUES (2), (4), (6); INSERT INTO child VALUES (3), (5), (7)")
    scenario.check(expect={"child": ["5", "6", "7"]})


def test_a_row_moved_between_partitions_is_filtered_as_a_delete_and_as_an_insert(scenario: Scenario) -> None:
    scenario.publisher(
        "CREATE TABLE moving (part int, a int, b text, PRIMARY KEY (part, a)) PARTITION BY LIST (part);"
        "CREATE TABLE moving_1 PARTITION OF moving FOR VALUES IN (1);"
        "CREATE TABLE moving_2 PARTITION OF moving FOR VALUES IN (2);"
        "CREATE PUBLICATION pub FOR TABLE moving WHERE (a > 10) WITH (publish_via_partition_root = true)"
    )
    scenario.subscriber("CREATE TABLE moving (part int, a int, b text, PRIMARY KEY (part, a))")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO moving VALUES (1, 5, 'out'), (1, 15, 'in'), (1, 25, 'stays'), (1, 6, 'never')"
    )
    scenario.publisher(
        "UPDATE moving SET part = 2, a = 50 WHERE a = 5; UPDATE moving SET part = 2, a = 1 WHERE a = 15;"
        "UPDATE moving SET part = 2 WHERE a = 25; UPDATE moving SET part = 2 WHERE a = 6"
    )
    scenario.check(expect={"moving": ["2|50|out", "2|25|stays"]})


def test_the_publication_of_the_higher_level_alone_filters(scenario: Scenario) -> None:
    # Operations combine over all publications, but filters come only from those that publish as the root. Here the root's
    # publication has no filter for updates (get_rel_sync_entry and pgoutput_row_filter_init in pgoutput.c).
    scenario.publisher(
        "CREATE TABLE top (a int PRIMARY KEY, b int) PARTITION BY RANGE (a);"
        "CREATE TABLE leaf PARTITION OF top DEFAULT;"
        "CREATE PUBLICATION high FOR TABLE top WHERE (a > 10) "
        "WITH (publish = 'insert', publish_via_partition_root = true);"
        "CREATE PUBLICATION low FOR TABLE leaf WHERE (a > 100) WITH (publish = 'update')"
    )
    scenario.subscriber(
        "CREATE TABLE top (a int PRIMARY KEY, b int); CREATE TABLE leaf (a int PRIMARY KEY, b int)"
    )
    scenario.subscribe("high", "low")
    scenario.publisher(
        "INSERT INTO top VALUES (5, 0), (50, 0), (500, 0); UPDATE top SET b = 1; DELETE FROM top"
    )
    scenario.check(expect={"top": ["50|1", "500|1"]})
