"""PostgreSQL's rules for row filters.

PostgreSQL documentation, Row Filters; src/test/subscription/t/028.

Left out: a filter that raises an error at run time. The built-in subscription never gets past such a row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import errors

from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]


def filtered(scenario: Scenario, where: str, publish: str = "insert, update, delete, truncate") -> None:
    """t(a key, b, c) with identity FULL and rows 1 to 10 (b = a, c = 'row a'), published with the filter `where`."""
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int, c text); ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.publisher("INSERT INTO t SELECT i, i, 'row ' || i FROM generate_series(1, 10) i")
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE t WHERE ({where}) WITH (publish = '{publish}')")
    scenario.subscribe("pub")


def manual_example(scenario: Scenario) -> None:
    """The first example of section 29.4.7. The subscriber has the rows 6 and 9."""
    scenario.tables("CREATE TABLE t1 (a int, b int, c text, PRIMARY KEY (a, c))")
    scenario.publisher("CREATE PUBLICATION p1 FOR TABLE t1 WHERE (a > 5 AND c = 'NSW')")
    scenario.subscribe("p1")
    states = {2: "NSW", 3: "QLD", 4: "VIC", 5: "ACT", 6: "NSW", 7: "NT", 8: "QLD", 9: "NSW"}
    for a, state in states.items():
        scenario.publisher(f"INSERT INTO t1 VALUES ({a}, {100 + a}, '{state}')")
    scenario.check(expect={"t1": ["6|106|NSW", "9|109|NSW"]})


def test_differences_of_infinite_timestamps_are_infinite_from_17_on(
    scenario: Scenario, postgres_version: int
) -> None:
    """timestamp_mi in timestamp.c. Before 17 the difference is an error, which ends the built-in subscription."""
    if postgres_version < 17:
        pytest.skip("before 17 the difference is an error")
    # The replica has only the key, because Python has no infinite times for the comparison of the rows.
    scenario.publisher(
        "CREATE TABLE t (a int PRIMARY KEY, began timestamptz, ended timestamptz, least interval)"
    )
    scenario.subscriber("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE t (a) WHERE (ended - began >= least) WITH (publish = 'insert')"
    )
    scenario.subscribe("pub")
    scenario.publisher(
        """INSERT INTO t VALUES (1, '2020-01-01', 'infinity', '1 year'), (2, 'infinity', '2020-01-01', '-1 year'),
        (3, '-infinity', '2020-01-01', 'infinity'), (4, '2020-01-01', '-infinity', '-infinity'),
        (5, '2020-01-01', '2020-02-01', '30 days'), (6, '2020-01-01', '2020-02-01', 'infinity'),
        (7, '-infinity', 'infinity', '178000000 years')"""
    )
    scenario.check(expect={"t": ["1", "3", "4", "5", "7"]})


# The initial copy (PostgreSQL documentation, Initial Data Synchronization).


def test_the_initial_copy_takes_the_rows_that_match(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab_rowfilter_1 (a int PRIMARY KEY, b text); ALTER TABLE tab_rowfilter_1 REPLICA IDENTITY FULL"
    )
    scenario.publisher(
        "INSERT INTO tab_rowfilter_1 VALUES (1, 'not replicated'), (1500, 'filtered'), (1980, 'not filtered');"
        "INSERT INTO tab_rowfilter_1 SELECT x, 'test ' || x FROM generate_series(990, 1002) x;"
        "CREATE PUBLICATION pub FOR TABLE tab_rowfilter_1 WHERE (a > 1000 AND b <> 'filtered')"
    )
    scenario.subscribe("pub")
    scenario.check(expect={"tab_rowfilter_1": ["1001|test 1001", "1002|test 1002", "1980|not filtered"]})
    scenario.publisher(
        "INSERT INTO tab_rowfilter_1 VALUES (800, 'test 800'), (1600, 'test 1600'), (1601, 'test 1601'), (1700, NULL);"
        "UPDATE tab_rowfilter_1 SET b = NULL WHERE a = 1600;"
        "UPDATE tab_rowfilter_1 SET b = 'test 1601 updated' WHERE a = 1601;"
        "UPDATE tab_rowfilter_1 SET b = 'test 1700' WHERE a = 1700; DELETE FROM tab_rowfilter_1 WHERE a = 1002"
    )
    scenario.check(
        expect={
            "tab_rowfilter_1": [
                "1001|test 1001",
                "1601|test 1601 updated",
                "1700|test 1700",
                "1980|not filtered",
            ]
        }
    )


@pytest.mark.parametrize("publish", ["delete", "update", "truncate"])
def test_the_initial_copy_ignores_the_published_operations(scenario: Scenario, publish: str) -> None:
    filtered(scenario, "a > 8", publish)
    scenario.check(expect={"t": ["10|10|row 10", "9|9|row 9"]})
    scenario.publisher("INSERT INTO t VALUES (11, 11, 'not published')")
    scenario.check(expect={"t": ["10|10|row 10", "9|9|row 9"]})


def test_the_initial_copy_uses_the_filters_of_all_publications(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO t SELECT generate_series(1, 20);"
        "CREATE PUBLICATION low FOR TABLE t WHERE (a <= 3) WITH (publish = 'insert');"
        "CREATE PUBLICATION high FOR TABLE t WHERE (a >= 18) WITH (publish = 'delete')"
    )
    scenario.subscribe("low", "high")
    scenario.check(expect={"t": ["1", "18", "19", "2", "20", "3"]})
    scenario.publisher("DELETE FROM t WHERE a IN (1, 19); INSERT INTO t VALUES (0), (30)")
    scenario.check(expect={"t": ["0", "1", "18", "2", "20", "3"]})


# The transformation of updates (PostgreSQL documentation, UPDATE Transformations).


def test_an_update_whose_rows_both_match_is_an_update(scenario: Scenario) -> None:
    manual_example(scenario)
    scenario.publisher("UPDATE t1 SET b = 999 WHERE a = 6")
    scenario.check(expect={"t1": ["6|999|NSW", "9|109|NSW"]})


def test_an_update_of_a_row_that_starts_to_match_the_filter_is_an_insert(scenario: Scenario) -> None:
    manual_example(scenario)
    scenario.publisher("UPDATE t1 SET a = 555 WHERE a = 2")
    scenario.check(expect={"t1": ["555|102|NSW", "6|106|NSW", "9|109|NSW"]})


def test_an_update_of_a_row_that_no_longer_matches_the_filter_is_a_delete(scenario: Scenario) -> None:
    manual_example(scenario)
    scenario.publisher("UPDATE t1 SET c = 'VIC' WHERE a = 9")
    scenario.check(expect={"t1": ["6|106|NSW"]})


def test_an_update_whose_rows_both_fail_the_filter_is_not_replicated(scenario: Scenario) -> None:
    manual_example(scenario)
    scenario.publisher("UPDATE t1 SET c = 'SA', b = 1 WHERE a = 3; UPDATE t1 SET b = 2 WHERE a = 2")
    scenario.check(expect={"t1": ["6|106|NSW", "9|109|NSW"]})


def test_the_three_updates_of_the_manual_leave_its_two_rows(scenario: Scenario) -> None:
    manual_example(scenario)
    scenario.publisher(
        "UPDATE t1 SET b = 999 WHERE a = 6; UPDATE t1 SET a = 555 WHERE a = 2; UPDATE t1 SET c = 'VIC' WHERE a = 9"
    )
    scenario.check(expect={"t1": ["555|102|NSW", "6|999|NSW"]})


def test_an_update_that_changes_no_key_column_is_filtered_by_the_new_row(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b text)")
    scenario.publisher(
        "INSERT INTO t VALUES (1, 'x'), (9, 'x'); CREATE PUBLICATION pub FOR TABLE t WHERE (a > 5)"
    )
    scenario.subscribe("pub")
    scenario.publisher("UPDATE t SET b = 'y'")
    scenario.check(expect={"t": ["9|y"]})


def test_updates_back_and_forth_in_one_transaction_leave_the_last_state(scenario: Scenario) -> None:
    filtered(scenario, "b > 5")
    scenario.publisher(
        "BEGIN; UPDATE t SET b = 0 WHERE a = 7; UPDATE t SET b = 70, c = 'again' WHERE a = 7;"
        "UPDATE t SET b = 30 WHERE a = 3; UPDATE t SET b = 3 WHERE a = 3; UPDATE t SET b = 0 WHERE a = 8; COMMIT"
    )
    scenario.check(expect={"t": ["10|10|row 10", "6|6|row 6", "7|70|again", "9|9|row 9"]})


def test_a_key_changed_together_with_the_match_is_a_delete_of_the_old_key(scenario: Scenario) -> None:
    filtered(scenario, "b > 8")
    scenario.publisher("UPDATE t SET a = 100, b = 0 WHERE a = 9; UPDATE t SET a = 101, b = 50 WHERE a = 1")
    scenario.publisher("UPDATE t SET a = 102 WHERE a = 10")
    scenario.check(expect={"t": ["101|50|row 1", "102|10|row 10"]})


def test_the_insert_made_of_an_update_is_sent_if_only_updates_are_published(scenario: Scenario) -> None:
    filtered(scenario, "b > 8", "update")
    scenario.publisher(
        "INSERT INTO t VALUES (11, 11, 'not published'); UPDATE t SET b = 20 WHERE a = 2; UPDATE t SET b = 0 WHERE a = 9;"
        "DELETE FROM t WHERE a = 10"
    )
    scenario.check(expect={"t": ["10|10|row 10", "2|20|row 2"]})


def test_the_insert_made_of_an_update_has_unchanged_long_values_only_of_the_identity(
    scenario: Scenario,
) -> None:
    # pgoutput_row_filter() completes the new row from the old one. A value that both lack is NULL on the subscriber.
    for name in ("t", "keyed"):
        scenario.tables(
            f"CREATE TABLE {name} (a int PRIMARY KEY, b int, long text);"
            f"ALTER TABLE {name} ALTER COLUMN long SET STORAGE EXTERNAL"
        )
        scenario.publisher(
            f"INSERT INTO {name} SELECT i, i, repeat(i::text, 9000) FROM generate_series(1, 4) i"
        )
    scenario.tables("ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (b > 2), keyed WHERE (a > 2)")
    scenario.subscribe("pub")
    long = ["", *(str(i) * 9000 for i in range(1, 5))]
    copied = [f"3|3|{long[3]}", f"4|4|{long[4]}"]
    scenario.check(expect={"t": copied, "keyed": copied})
    scenario.publisher(
        """UPDATE t SET b = 5 WHERE a = 1; UPDATE t SET b = 0 WHERE a = 3; UPDATE t SET b = 40 WHERE a = 4;
        UPDATE keyed SET a = 10 WHERE a = 1; UPDATE keyed SET a = 0 WHERE a = 3; UPDATE keyed SET a = 40 WHERE a = 4"""
    )
    scenario.check(expect={"t": [f"1|5|{long[1]}", f"4|40|{long[4]}"], "keyed": ["10|1|", f"40|4|{long[4]}"]})


def test_a_filter_over_a_long_unchanged_value_of_the_identity_sees_it(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE t (a int PRIMARY KEY, b int, long text); ALTER TABLE t REPLICA IDENTITY FULL;"
        "ALTER TABLE t ALTER COLUMN long SET STORAGE EXTERNAL"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (length(long) > 8000)")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO t VALUES (1, 1, repeat('x', 9000)), (2, 2, repeat('y', 7000)), (3, 3, 'short')"
    )
    scenario.publisher("UPDATE t SET b = 10 * b; UPDATE t SET long = repeat('z', 8001) WHERE a = 3")
    scenario.check(expect={"t": [f"1|10|{'x' * 9000}", f"3|30|{'z' * 8001}"]})


def test_unchanged_long_values_stay_as_they_are(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int, long text)")
    scenario.publisher("ALTER TABLE t ALTER COLUMN long SET STORAGE EXTERNAL")
    scenario.publisher("INSERT INTO t SELECT i, i, repeat(i::text, 9000) FROM generate_series(1, 3) i")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (a > 1)")
    scenario.subscribe("pub")
    scenario.publisher(
        "UPDATE t SET b = b + 1; UPDATE t SET b = b + 1 WHERE a = 3; UPDATE t SET a = 5 WHERE a = 3"
    )
    scenario.check(expect={"t": [f"2|3|{'2' * 9000}", f"5|5|{'3' * 9000}"]})


# Which rows match.


def test_a_filter_that_is_null_does_not_match(scenario: Scenario) -> None:
    filtered(scenario, "b > 5")
    scenario.publisher(
        "INSERT INTO t VALUES (11, NULL, 'null'), (12, 12, NULL); UPDATE t SET b = NULL WHERE a = 6;"
        "UPDATE t SET b = NULL WHERE a = 1; UPDATE t SET c = 'still null' WHERE a = 1; UPDATE t SET b = 9 WHERE a = 11;"
        "DELETE FROM t WHERE a = 6; DELETE FROM t WHERE a IN (7, 8, 9, 10)"
    )
    scenario.check(expect={"t": ["11|9|null", "12|12|"]})


#: Row filters, with the numbers of the rows that match. The rows are 1 (1, apple), 2 (2, apricot), 3 (3, ''), 4 (NULL, NULL),
#: 5 (5, pear) and 6 (NULL, banana).
FILTERS: dict[str, list[int]] = {
    "b IS NULL": [4, 6],
    "(b > 2) IS NOT TRUE": [1, 2, 4, 6],
    "b IS DISTINCT FROM 3": [1, 2, 4, 5, 6],
    "b NOT IN (1, 3)": [2, 5],
    "c LIKE 'a%' OR c = ''": [1, 2, 3],
    "CASE WHEN b < 3 THEN c = 'apple' ELSE coalesce(c, 'none') = 'none' END": [1, 4],
    "(a, b) > (2, 2)": [3, 4, 5, 6],
    "NOT (b = 1 AND c = 'apple')": [2, 3, 5, 6],
}


def test_a_filter_matches_the_same_rows_as_in_sql(scenario: Scenario) -> None:
    names = [f"t{number}" for number in range(len(FILTERS))]
    for name in names:
        scenario.tables(
            f"CREATE TABLE {name} (a int PRIMARY KEY, b int, c text); ALTER TABLE {name} REPLICA IDENTITY FULL"
        )
        scenario.publisher(f"INSERT INTO {name} SELECT i, 1000, 'apple' FROM generate_series(1, 3) i")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE "
        + ", ".join(f"{name} WHERE ({where})" for name, where in zip(names, FILTERS, strict=True))
    )
    scenario.subscribe("pub")
    # Rows 1 to 3 come by updates; some of them matched before, some did not. The others come by inserts.
    for name in names:
        scenario.publisher(
            f"UPDATE {name} SET b = a, c = CASE a WHEN 1 THEN 'apple' WHEN 2 THEN 'apricot' ELSE '' END;"
            f"INSERT INTO {name} VALUES (4, NULL, NULL), (5, 5, 'pear'), (6, NULL, 'banana')"
        )
    rows = scenario.check(*names)
    matched = {
        where: [int(row[0] or 0) for row in rows[name]] for name, where in zip(names, FILTERS, strict=True)
    }
    assert matched == FILTERS


def test_a_filter_of_an_insert_only_publication_may_use_any_column(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (b > 5) WITH (publish = 'insert')")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO t VALUES (1, 1), (2, 9); UPDATE t SET b = 7; DELETE FROM t")
    scenario.check(expect={"t": ["2|9"]})


def test_a_filter_may_use_a_column_outside_the_column_list(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t (a, b) WHERE (c > 5) WITH (publish = 'insert')")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO t VALUES (1, 1, 1), (2, 2, 9)")
    scenario.check(expect={"t": ["2|2"]})


def test_a_filter_on_a_virtual_generated_column_is_one_on_its_expression(
    scenario: Scenario, postgres_version: int
) -> None:
    definition = "CREATE TABLE t (x int PRIMARY KEY, y int GENERATED ALWAYS AS (x * 2) VIRTUAL)"
    if postgres_version < 18:  # they do not exist
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(definition)
        return
    scenario.publisher(definition)
    scenario.subscriber("CREATE TABLE t (x int PRIMARY KEY, y int)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (y > 10)")
    scenario.publisher("INSERT INTO t VALUES (1), (6)")
    scenario.subscribe("pub")
    scenario.check(expect={"t": ["6"]})
    scenario.publisher(
        "INSERT INTO t VALUES (4), (7); UPDATE t SET x = 60 WHERE x = 4; UPDATE t SET x = 2 WHERE x = 7"
    )
    scenario.check(expect={"t": ["6", "60"]})


def test_a_filter_on_a_stored_generated_column_is_one_on_its_value(scenario: Scenario) -> None:
    """Servers before 18 do not send the value, but use it in the filter."""
    scenario.publisher("CREATE TABLE t (x int PRIMARY KEY, y numeric GENERATED ALWAYS AS (x / 2) STORED)")
    scenario.subscriber("CREATE TABLE t (x int PRIMARY KEY, y numeric)")
    scenario.publisher("INSERT INTO t VALUES (1), (6)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WHERE (y > 2.4) WITH (publish = 'insert')")
    scenario.subscribe("pub")
    scenario.check(expect={"t": ["6"]})
    scenario.publisher("INSERT INTO t VALUES (4), (5), (7)")
    scenario.check(expect={"t": ["6", "7"]})


def test_the_filter_of_a_table_applies_to_its_inheritance_children(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE parent (a int); CREATE TABLE child (b text) INHERITS (parent)")
    scenario.publisher(
        "INSERT INTO parent VALUES (10), (20); INSERT INTO child VALUES (0, '0'), (30, '30'), (40, '40');"
        "CREATE PUBLICATION pub FOR TABLE parent WHERE (a > 15) WITH (publish = 'insert')"
    )
    scenario.subscribe("pub")
    scenario.check(expect={"parent": ["20"], "child": ["30|30", "40|40"]})
    scenario.publisher(
        "INSERT INTO parent VALUES (14), (16); INSERT INTO child VALUES (13, '13'), (17, '17')"
    )
    scenario.check(expect={"parent": ["16", "20"], "child": ["17|17", "30|30", "40|40"]})


# Several publications (PostgreSQL documentation, Combining Multiple Row Filters).


def test_all_tables_makes_row_filters_of_other_publications_redundant(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_rf_x (x int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO tab_rf_x VALUES (0), (5), (10), (15), (20);"
        "CREATE PUBLICATION pub_x FOR TABLE tab_rf_x WHERE (x > 10); CREATE PUBLICATION pub_forall FOR ALL TABLES"
    )
    scenario.subscribe("pub_x", "pub_forall")
    scenario.check(expect={"tab_rf_x": "5|0|20"})
    scenario.publisher("INSERT INTO tab_rf_x VALUES (-99), (99)")
    scenario.check(expect={"tab_rf_x": "7|-99|99"})


def test_tables_in_schema_makes_row_filters_of_other_publications_redundant(scenario: Scenario) -> None:
    scenario.tables("CREATE SCHEMA schema_rf_x; CREATE TABLE schema_rf_x.tab_rf_x (x int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO schema_rf_x.tab_rf_x VALUES (0), (5), (10), (15), (20);"
        "CREATE PUBLICATION pub_x FOR TABLE schema_rf_x.tab_rf_x WHERE (x > 10);"
        "CREATE PUBLICATION pub_schema FOR TABLES IN SCHEMA schema_rf_x"
    )
    scenario.subscribe("pub_x", "pub_schema")
    scenario.publisher("INSERT INTO schema_rf_x.tab_rf_x VALUES (-99), (99)")
    scenario.check(expect={"schema_rf_x.tab_rf_x": "7|-99|99"})


def test_filters_of_several_publications_are_combined_with_or(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_rowfilter_2 (c int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO tab_rowfilter_2 SELECT generate_series(1, 20);"
        "CREATE PUBLICATION pub2 FOR TABLE tab_rowfilter_2 WHERE (c % 2 = 0);"
        "CREATE PUBLICATION pub3 FOR TABLE tab_rowfilter_2 WHERE (c % 3 = 0)"
    )
    scenario.subscribe("pub2", "pub3")
    scenario.check(expect={"tab_rowfilter_2": "13|2|20"})
    scenario.publisher("INSERT INTO tab_rowfilter_2 SELECT generate_series(21, 25)")
    scenario.check(expect={"tab_rowfilter_2": "16|2|24"})


def test_a_publication_without_a_filter_makes_the_others_redundant(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_rowfilter_3 (a int PRIMARY KEY, b bool)")
    scenario.publisher(
        "INSERT INTO tab_rowfilter_3 SELECT x, x % 3 = 0 FROM generate_series(1, 10) x;"
        "CREATE PUBLICATION pub1 FOR TABLE tab_rowfilter_3 WHERE (a > 5); CREATE PUBLICATION pub2 FOR TABLE tab_rowfilter_3"
    )
    scenario.subscribe("pub1", "pub2")
    scenario.check(expect={"tab_rowfilter_3": "10|1|10"})
    scenario.publisher("INSERT INTO tab_rowfilter_3 VALUES (0, true), (11, false), (12, NULL)")
    scenario.check(expect={"tab_rowfilter_3": "13|0|12"})


def test_filters_are_combined_for_each_operation_by_itself(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY, b int); ALTER TABLE t REPLICA IDENTITY FULL")
    scenario.publisher(
        "CREATE PUBLICATION pub1 FOR TABLE t WHERE (b > 0) WITH (publish = 'insert, update');"
        "CREATE PUBLICATION pub2 FOR TABLE t WHERE (b < 100) WITH (publish = 'update, delete');"
        "CREATE PUBLICATION pub3 FOR TABLE t WITH (publish = 'delete')"
    )
    scenario.subscribe("pub1", "pub2", "pub3")
    scenario.publisher("INSERT INTO t VALUES (1, -1), (2, 50), (3, 200), (4, 300), (5, 10)")
    scenario.check(expect={"t": ["2|50", "3|200", "4|300", "5|10"]})
    # Row 1 matches the filters for updates before and after, but was not inserted: there is no row to update.
    scenario.publisher("UPDATE t SET b = b - 250 WHERE a IN (1, 4); UPDATE t SET b = NULL WHERE a = 5")
    scenario.publisher("DELETE FROM t WHERE a = 3")
    scenario.check(expect={"t": ["2|50", "4|50"]})


def test_a_table_without_a_filter_is_not_filtered_by_another_tables(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_1 (a int PRIMARY KEY); CREATE TABLE tab_4 (c int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO tab_1 SELECT generate_series(1, 10); INSERT INTO tab_4 SELECT generate_series(1, 10);"
        "CREATE PUBLICATION pub FOR TABLE tab_1 WHERE (a > 7), tab_4"
    )
    scenario.subscribe("pub")
    scenario.check(expect={"tab_1": "3|8|10", "tab_4": "10|1|10"})
    scenario.publisher("UPDATE tab_1 SET a = -a; UPDATE tab_4 SET c = -c")
    scenario.check(expect={"tab_1": [], "tab_4": "10|-10|-1"})


def test_a_filter_sees_values_as_postgresql_has_them_whatever_type_the_replica_has(
    scenario: Scenario,
) -> None:
    scenario.tables(
        "CREATE TABLE t (k int PRIMARY KEY, n numeric(10,2), m numeric, d date, l int[], i smallint);"
        "ALTER TABLE t REPLICA IDENTITY FULL"
    )
    scenario.publisher(
        """CREATE PUBLICATION pub FOR TABLE t WHERE (n > 9.5 OR m % 2 = 1 OR d = 'infinity' OR l = '{1,2}' OR i / 2 = 3);
        INSERT INTO t VALUES (0, 10, 1.0000, '2024-02-29', '{3}', 1)"""
    )
    scenario.subscribe("pub")
    types = {"n": "string", "m": "decimal(20,4)", "d": "string", "l": "string", "i": "bigint"}
    for replica in scenario.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        chosen = {("public", "t", column): spark for column, spark in types.items()}
        replica.subscription = replace(replica.subscription, types=chosen)
    scenario.publisher(
        """INSERT INTO t (k, n) VALUES (1, 10), (2, 9);
        INSERT INTO t (k, m) VALUES (3, 3.0000), (4, 2.5000);
        INSERT INTO t (k, d) VALUES (5, 'infinity'), (6, '9999-01-01');
        INSERT INTO t (k, l) VALUES (7, '{1,2}'), (8, '{1,2,3}');
        INSERT INTO t (k, i) VALUES (9, 7), (10, 5)"""
    )
    scenario.check("t")  # copied again, with the chosen types
    scenario.publisher("UPDATE t SET n = CASE WHEN n IS NULL OR n < 10 THEN 100 END WHERE k IN (1, 2, 4)")
    scenario.publisher("DELETE FROM t WHERE k = 7; UPDATE t SET l = '{}', m = 5.0000 WHERE k = 8")
    scenario.publisher("INSERT INTO t (k, d) VALUES (11, 'infinity'), (12, '-infinity')")
    scenario.check(
        expect={
            "t": [
                "0|10.00|1.0000|2024-02-29|{3}|1", "2|100.00||||", "3||3.0000|||", "4|100.00|2.5000|||",
                "5|||infinity||", "8||5.0000||{}|", "9|||||7", "11|||infinity||",
            ]
        }
    )  # fmt: skip


# Changed publications.


def test_a_changed_publication_counts_from_its_place_in_the_stream(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO t VALUES (20)")
    scenario.check(expect={"t": ["20"]})
    scenario.publisher("ALTER PUBLICATION pub SET (publish = 'delete'); INSERT INTO t VALUES (21)")
    scenario.check(expect={"t": ["20"]})
    scenario.publisher("DELETE FROM t WHERE a = 20")
    scenario.check(expect={"t": []})
    scenario.publisher(
        "ALTER PUBLICATION pub SET (publish = 'insert'); ALTER PUBLICATION pub SET TABLE t WHERE (a > 30)"
    )
    scenario.check(expect={"t": []})
    scenario.publisher("INSERT INTO t VALUES (22), (33)")
    scenario.check(expect={"t": ["33"]})


def test_rows_copied_under_an_earlier_filter_stay(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (a int PRIMARY KEY)")
    scenario.publisher(
        "INSERT INTO t SELECT generate_series(1, 4); CREATE PUBLICATION pub FOR TABLE t WHERE (a > 2)"
    )
    scenario.subscribe("pub")
    scenario.check(expect={"t": ["3", "4"]})
    scenario.publisher("ALTER PUBLICATION pub SET TABLE t WHERE (a < 2)")
    scenario.check(expect={"t": ["3", "4"]})
    scenario.publisher("INSERT INTO t VALUES (0), (5)")
    scenario.check(expect={"t": ["0", "3", "4"]})
