"""PostgreSQL's rules for plain changes of plain tables (sections 29.1, 29.2; src/test/subscription/t/001).

Left out: DROP SUBSCRIPTION, which removes the slot and the table states, concerns only the subscriber's own catalog.
"""

from __future__ import annotations

import pytest

from tests.fixtures.oracle import Scenario, both_writers

pytestmark = [pytest.mark.spark, both_writers]


def inserts_only(scenario: Scenario) -> None:
    """A table without a key, published for inserts only, with 1002 rows copied."""
    scenario.tables("CREATE TABLE tab_ins (a int)")
    scenario.publisher("INSERT INTO tab_ins SELECT generate_series(1, 1002)")
    scenario.publisher("CREATE PUBLICATION ins_only FOR TABLE tab_ins WITH (publish = 'insert')")


def test_a_table_without_a_key_is_copied_and_takes_inserts(scenario: Scenario) -> None:
    inserts_only(scenario)
    scenario.subscribe("ins_only")
    scenario.check(expect={"tab_ins": "1002|1|1002"})


def test_updates_and_deletes_that_are_not_published_are_ignored(scenario: Scenario) -> None:
    inserts_only(scenario)
    scenario.subscribe("ins_only")
    scenario.publisher(
        "INSERT INTO tab_ins SELECT generate_series(1, 50); DELETE FROM tab_ins WHERE a > 20; UPDATE tab_ins SET a = -a"
    )
    scenario.check(expect={"tab_ins": "1052|1|1002"})


def test_inserts_deletes_and_updates_of_the_primary_key_are_applied(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_rep (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_rep")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO tab_rep SELECT generate_series(1, 50); DELETE FROM tab_rep WHERE a > 20; UPDATE tab_rep SET a = -a"
    )
    scenario.check(expect={"tab_rep": "20|-20|-1"})


def test_a_table_in_no_publication_is_not_replicated(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_notrep (a int); CREATE TABLE tab_rep (a int PRIMARY KEY)")
    scenario.publisher("INSERT INTO tab_notrep SELECT generate_series(1, 10); INSERT INTO tab_rep VALUES (1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_rep")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_notrep VALUES (11); INSERT INTO tab_rep VALUES (2)")
    scenario.check(expect={"tab_notrep": [], "tab_rep": ["1", "2"]})


def test_equal_rows_under_identity_full_are_changed_one_for_one(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_full (a int); ALTER TABLE tab_full REPLICA IDENTITY FULL")
    scenario.publisher(
        "INSERT INTO tab_full SELECT generate_series(1, 10); CREATE PUBLICATION pub FOR TABLE tab_full"
    )
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_full SELECT generate_series(1, 10)")
    scenario.check(expect={"tab_full": "20|1|10"})
    scenario.publisher("UPDATE tab_full SET a = a * a")
    scenario.check(expect={"tab_full": "20|1|100"})


def test_a_delete_under_identity_full_removes_one_of_several_equal_rows(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_full (a int, b text); ALTER TABLE tab_full REPLICA IDENTITY FULL")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_full")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO tab_full VALUES (1, NULL), (1, NULL), (1, NULL), (NULL, 'x'), (NULL, 'x')"
    )
    scenario.publisher("DELETE FROM tab_full WHERE ctid IN ('(0,2)', '(0,4)')")
    scenario.check(expect={"tab_full": ["1|", "1|", "|x"]})


def test_equal_text_rows_under_identity_full_are_all_updated(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_full2 (x text); ALTER TABLE tab_full2 REPLICA IDENTITY FULL")
    scenario.publisher(
        "INSERT INTO tab_full2 VALUES ('a'), ('b'), ('b'); CREATE PUBLICATION pub FOR TABLE tab_full2"
    )
    scenario.subscribe("pub")
    scenario.publisher("UPDATE tab_full2 SET x = 'bb' WHERE x = 'b'")
    scenario.check(expect={"tab_full2": ["a", "bb", "bb"]})


def test_identity_full_with_a_primary_key_updates_the_row_of_the_key(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab_full_pk (a int PRIMARY KEY, b text); ALTER TABLE tab_full_pk REPLICA IDENTITY FULL"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_full_pk")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_full_pk VALUES (1, 'foo'), (2, 'baz')")
    scenario.publisher("UPDATE tab_full_pk SET b = 'bar' WHERE a = 1")
    scenario.check(expect={"tab_full_pk": ["1|bar", "2|baz"]})


def test_identity_nothing_still_takes_inserts(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_nothing (a int); ALTER TABLE tab_nothing REPLICA IDENTITY NOTHING")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_nothing")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_nothing SELECT generate_series(1, 20)")
    scenario.check(expect={"tab_nothing": "20|1|20"})


def test_columns_included_in_the_key_index_are_no_part_of_the_key(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab_include (a int, b text, CONSTRAINT covering PRIMARY KEY (a) INCLUDE (b))"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_include")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_include SELECT generate_series(1, 50)")
    scenario.publisher("DELETE FROM tab_include WHERE a > 20; UPDATE tab_include SET a = -a")
    scenario.check(expect={"tab_include": "20|-20|-1"})
    scenario.publisher("UPDATE tab_include SET b = 'of ' || a WHERE a >= -2")
    scenario.check(expect={"tab_include": ["-1|of -1", "-2|of -2", *(f"-{a}|" for a in range(3, 21))]})


def test_a_plain_index_is_no_replica_identity_but_inserts_are_replicated(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_no_identity (c1 int); CREATE INDEX ON tab_no_identity (c1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_no_identity WITH (publish = 'insert, truncate')")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_no_identity VALUES (1)")
    scenario.check(expect={"tab_no_identity": ["1"]})


def test_a_unique_index_as_replica_identity_finds_rows(scenario: Scenario) -> None:
    scenario.tables(
        "CREATE TABLE tab_index (a int PRIMARY KEY, b int NOT NULL, c text);"
        "CREATE UNIQUE INDEX tab_index_b ON tab_index (b);"
        "ALTER TABLE tab_index REPLICA IDENTITY USING INDEX tab_index_b"
    )
    scenario.publisher("INSERT INTO tab_index SELECT i, 10 * i, 'old' FROM generate_series(1, 4) i")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_index")
    scenario.subscribe("pub")
    scenario.publisher(
        "UPDATE tab_index SET a = 5 WHERE a = 1; UPDATE tab_index SET b = 25, c = 'new' WHERE b = 20;"
        "DELETE FROM tab_index WHERE b = 30"
    )
    scenario.check(expect={"tab_index": ["5|10|old", "2|25|new", "4|40|old"]})


@pytest.mark.drawn
def test_a_table_taken_out_of_the_publication_gets_no_changes_until_it_is_back(scenario: Scenario) -> None:
    inserts_only(scenario)
    scenario.subscribe("ins_only")
    scenario.publisher("INSERT INTO tab_ins SELECT generate_series(1, 50)")
    scenario.check(expect={"tab_ins": "1052|1|1002"})
    scenario.publisher("ALTER PUBLICATION ins_only DROP TABLE tab_ins; INSERT INTO tab_ins VALUES (8888)")
    scenario.check(expect={"tab_ins": "1052|1|1002"})
    scenario.publisher("DELETE FROM tab_ins WHERE a = 8888; ALTER PUBLICATION ins_only ADD TABLE tab_ins")
    scenario.refresh(copy_data=False)
    scenario.publisher("INSERT INTO tab_ins VALUES (1003)")
    scenario.check(expect={"tab_ins": "1053|1|1003"})


@pytest.mark.drawn
def test_tables_of_a_removed_publication_keep_their_rows_also_after_a_restart(
    scenario: Scenario,
) -> None:
    inserts_only(scenario)
    scenario.tables("CREATE TABLE tab_rep (a int PRIMARY KEY)")
    scenario.publisher(
        "CREATE PUBLICATION pub FOR TABLE tab_rep; INSERT INTO tab_rep SELECT -generate_series(1, 20)"
    )
    scenario.subscribe("pub", "ins_only")
    scenario.publisher("INSERT INTO tab_ins SELECT generate_series(1, 50)")
    scenario.check(expect={"tab_ins": "1052|1|1002", "tab_rep": "20|-20|-1"})
    scenario.refresh("ins_only", copy_data=False)
    scenario.publisher("INSERT INTO tab_ins SELECT generate_series(1001, 1100); DELETE FROM tab_rep")
    scenario.restart_publisher()
    scenario.check(expect={"tab_ins": "1152|1|1100", "tab_rep": "20|-20|-1"})
    scenario.publisher("INSERT INTO tab_ins VALUES (1101); INSERT INTO tab_rep VALUES (1)")
    scenario.check(expect={"tab_ins": "1153|1|1101", "tab_rep": "20|-20|-1"})


def test_a_restart_of_the_publisher_loses_and_repeats_nothing(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab_rep (a int PRIMARY KEY)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab_rep")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_rep SELECT generate_series(1, 10)")
    scenario.check(expect={"tab_rep": "10|1|10"})
    scenario.publisher("INSERT INTO tab_rep SELECT generate_series(11, 20); DELETE FROM tab_rep WHERE a = 1")
    scenario.restart_publisher()
    scenario.publisher("UPDATE tab_rep SET a = -a WHERE a = 20")
    scenario.check(expect={"tab_rep": "19|-20|19"})


def test_one_subscription_takes_several_publications(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE temp1 (a int); CREATE TABLE temp2 (a int)")
    scenario.publisher(
        "CREATE PUBLICATION pub1 FOR TABLE temp1 WITH (publish = 'insert'); CREATE PUBLICATION pub2 FOR TABLE temp2"
    )
    scenario.subscribe("pub1", "pub2")
    scenario.publisher("INSERT INTO temp1 VALUES (1)")
    scenario.check(expect={"temp1": ["1"], "temp2": []})


def test_the_operations_of_several_publications_add_up(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b int)")
    scenario.publisher(
        "CREATE PUBLICATION inserts FOR TABLE tab WITH (publish = 'insert');"
        "CREATE PUBLICATION deletes FOR TABLE tab WITH (publish = 'delete')"
    )
    scenario.subscribe("inserts", "deletes")
    scenario.publisher(
        "INSERT INTO tab VALUES (1, 1), (2, 2); UPDATE tab SET b = 9; DELETE FROM tab WHERE a = 1; TRUNCATE tab"
    )
    scenario.check(expect={"tab": ["2|2"]})


def test_only_committed_transactions_are_replicated(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b text)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; INSERT INTO tab VALUES (1, 'kept'); SAVEPOINT s; UPDATE tab SET b = 'lost'; INSERT INTO tab VALUES (2);"
        "ROLLBACK TO s; INSERT INTO tab VALUES (3, 'kept'); COMMIT;"
        "BEGIN; INSERT INTO tab VALUES (4, 'lost'); DELETE FROM tab WHERE a = 1; ROLLBACK"
    )
    scenario.check(expect={"tab": ["1|kept", "3|kept"]})


def test_transactions_apply_in_commit_order(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b text)")
    scenario.publisher(
        "INSERT INTO tab VALUES (1, 'first'), (2, 'first'); CREATE PUBLICATION pub FOR TABLE tab"
    )
    scenario.subscribe("pub")
    with scenario.session() as early, scenario.session() as late:
        early("BEGIN; UPDATE tab SET b = 'early' WHERE a = 1")
        late("BEGIN; UPDATE tab SET b = 'late' WHERE a = 2; INSERT INTO tab VALUES (3, 'late')")
        late("COMMIT")
        scenario.check(expect={"tab": ["1|first", "2|late", "3|late"]})
        early("UPDATE tab SET b = b || ', early' WHERE a = 3; COMMIT")
    scenario.check(expect={"tab": ["1|early", "2|late", "3|late, early"]})


def test_a_row_deleted_and_inserted_again_in_one_transaction_exists(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO tab VALUES (1, 'old'), (2, 'old'); CREATE PUBLICATION pub FOR TABLE tab")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; DELETE FROM tab WHERE a = 1; INSERT INTO tab VALUES (1, 'new'); DELETE FROM tab WHERE a = 2;"
        "INSERT INTO tab VALUES (3, 'brief'); DELETE FROM tab WHERE a = 3; COMMIT"
    )
    scenario.check(expect={"tab": ["1|new"]})


def test_keys_swapped_in_one_transaction_are_swapped(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b text)")
    scenario.publisher("INSERT INTO tab VALUES (1, 'one'), (2, 'two'); CREATE PUBLICATION pub FOR TABLE tab")
    scenario.subscribe("pub")
    scenario.publisher(
        "BEGIN; UPDATE tab SET a = 0 WHERE a = 1; UPDATE tab SET a = 1 WHERE a = 2; UPDATE tab SET a = 2 WHERE a = 0; COMMIT"
    )
    scenario.check(expect={"tab": ["1|two", "2|one"]})


def test_an_upsert_is_an_insert_or_an_update(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE tab (a int PRIMARY KEY, b int)")
    scenario.publisher("INSERT INTO tab VALUES (1, 1); CREATE PUBLICATION pub FOR TABLE tab")
    scenario.subscribe("pub")
    scenario.publisher(
        "INSERT INTO tab VALUES (1, 5), (2, 5) ON CONFLICT (a) DO UPDATE SET b = tab.b + excluded.b;"
        "INSERT INTO tab VALUES (2, 7) ON CONFLICT DO NOTHING"
    )
    scenario.check(expect={"tab": ["1|6", "2|5"]})


def test_an_update_of_a_missing_row_has_no_effect_even_without_a_key(scenario: Scenario) -> None:
    # Found with PGSIEVE_SEED=2533559826: rows that were never published are updated twice.
    scenario.tables("CREATE TABLE tab_gone (a int, b int); ALTER TABLE tab_gone REPLICA IDENTITY FULL")
    scenario.publisher(
        "INSERT INTO tab_gone VALUES (1, 0), (1, 0), (2, 0);"
        "CREATE PUBLICATION pub FOR TABLE tab_gone WITH (publish = 'update, delete')"
    )
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO tab_gone VALUES (3, 0), (1, 0)")
    scenario.publisher("BEGIN; UPDATE tab_gone SET b = 1; UPDATE tab_gone SET a = 9 WHERE b = 1; COMMIT")
    scenario.check(expect={"tab_gone": ["9|1", "9|1", "9|1"]})
    scenario.publisher("DELETE FROM tab_gone")
    scenario.check(expect={"tab_gone": []})


def test_a_foreign_key_delays_no_row_and_columns_are_matched_by_name(scenario: Scenario) -> None:
    # src/test/subscription/t/002_types.pl and 003_constraints.pl: a value long enough for TOAST
    scenario.publisher(
        "CREATE TABLE tab_fk (bid int PRIMARY KEY);"
        "CREATE TABLE tab_fk_ref (id int PRIMARY KEY, junk text, bid int REFERENCES tab_fk (bid))"
    )
    scenario.subscriber(
        "CREATE TABLE tab_fk (bid int PRIMARY KEY);"
        "CREATE TABLE tab_fk_ref (id int PRIMARY KEY, bid int REFERENCES tab_fk (bid), junk text)"
    )
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.subscribe("pub")
    junk = "repeat(pi()::text, 20000)"
    scenario.publisher(f"INSERT INTO tab_fk VALUES (1); INSERT INTO tab_fk_ref VALUES (1, {junk}, 1)")
    scenario.check(expect={"tab_fk": ["1"], "tab_fk_ref": "1|1|1"})
    scenario.publisher("DROP TABLE tab_fk CASCADE; INSERT INTO tab_fk_ref (id, bid) VALUES (2, 2)")
    scenario.check(expect={"tab_fk_ref": "2|1|2"})
