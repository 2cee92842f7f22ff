"""Schema changes on the publisher: the replica holds the rows of the publisher's table.

PostgreSQL's own subscriber needs the same DDL on its side, so `scenario.tables` runs it on both. Defaults of existing rows,
which only the publisher fills in, are then also the same on both.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.fixtures.oracle import Rows, Scenario, both_writers
from tests.fixtures.pgsieve_replica import PgsieveReplica
from tests.fixtures.schema_changes import alter, copies, replicas

pytestmark = pytest.mark.spark


def history(replica: PgsieveReplica, table: str, generation: int = 0) -> list[Mapping[str, object]]:
    """The new rows of a table's change history, in order."""
    path = replica.lake.paths.change_history("sub", "public", table, generation)
    stored = DeltaTable(path, storage_options=dict(replica.lake.store.options) or None)
    query = QueryBuilder().register("t", stored).execute("select * from t order by slice, number")
    return [row["new"] for row in pa.table(query.read_all()).to_pylist()]


def check_with_publisher(scenario: Scenario, *tables: str) -> None:
    """Compare replicas with the publisher's tables, because a built-in subscriber cannot follow DDL within a transaction."""
    scenario.run()
    for name in tables:
        wanted = Rows(scenario.publisher(f"SELECT * FROM {name}"))
        for replica in replicas(scenario):
            assert Rows(replica.rows("public", name)) == wanted, (name, replica.filtered)


def keyed(scenario: Scenario) -> None:
    """A copied table with a key and two rows."""
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, a text, b int)")
    scenario.publisher("INSERT INTO t VALUES (1, 'x', 10), (2, 'y', 20); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")


def test_an_added_column_is_null_in_rows_that_were_there(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30)")
    alter(scenario, "ALTER TABLE t ADD COLUMN c numeric(6,2)")
    scenario.publisher("INSERT INTO t VALUES (4, 'after', 40, 1.5); UPDATE t SET c = 2.5 WHERE id = 1")
    scenario.check(expect={"t": ["1|x|10|2.50", "2|y|20|", "3|before|30|", "4|after|40|1.50"]})
    assert copies(scenario, "t") == {1}
    for replica in replicas(scenario):
        assert [row.get("c") is None for row in history(replica, "t")] == [True, False, False]


def test_an_added_column_appears_without_any_change_of_a_row(scenario: Scenario) -> None:
    keyed(scenario)
    alter(scenario, "ALTER TABLE t ADD COLUMN c int, ADD COLUMN d text DEFAULT 'filled'")
    scenario.check(expect={"t": ["1|x|10||filled", "2|y|20||filled"]})
    assert copies(scenario, "t") == {1}


@both_writers
def test_a_constant_default_fills_the_rows_that_were_there(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30); UPDATE t SET b = 21 WHERE id = 2")
    alter(
        scenario,
        "ALTER TABLE t ADD COLUMN c timestamptz DEFAULT '2020-01-02 03:04:05+00', ADD COLUMN d int[] DEFAULT '{1,2}'",
    )
    alter(scenario, "ALTER TABLE t ALTER COLUMN c SET DEFAULT NULL")
    scenario.publisher(
        "INSERT INTO t VALUES (4, 'after', 40); UPDATE t SET d = NULL WHERE id = 1; DELETE FROM t WHERE id = 3"
    )
    scenario.check(
        expect={
            "t": [
                "1|x|10|2020-01-02 03:04:05+00|",
                "2|y|21|2020-01-02 03:04:05+00|{1,2}",
                "4|after|40||{1,2}",
            ]
        }
    )
    assert copies(scenario, "t") == {1}


@pytest.mark.drawn
def test_a_volatile_default_rewrites_the_table_which_is_copied_again(scenario: Scenario) -> None:
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY)")
    scenario.publisher("INSERT INTO t VALUES (1), (2); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    # The rows are in order, so that both sides draw the same numbers.
    alter(scenario, "CREATE SEQUENCE s; ALTER TABLE t ADD COLUMN c int DEFAULT nextval('s')")
    scenario.check(expect={"t": ["1|1", "2|2"]})
    assert copies(scenario, "t") == {2}


def test_a_dropped_column_is_gone_and_its_values_stay_in_the_history(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30)")
    alter(scenario, "ALTER TABLE t DROP COLUMN a")
    scenario.publisher("INSERT INTO t VALUES (4, 40); UPDATE t SET b = 0 WHERE id = 1")
    scenario.check(expect={"t": ["1|0", "2|20", "3|30", "4|40"]})
    scenario.publisher("DELETE FROM t WHERE id = 2")
    scenario.check(expect={"t": ["1|0", "3|30", "4|40"]})
    assert copies(scenario, "t") == {1}
    for replica in replicas(scenario):
        options = dict(replica.lake.store.options) or None
        first = DeltaTable(
            replica.lake.paths.replica("sub", "public", "t"), version=0, storage_options=options
        )
        assert [field.name for field in first.schema().fields] == ["id", "a", "b"]


@both_writers
def test_a_renamed_column_keeps_its_values(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("UPDATE t SET a = 'before' WHERE id = 1; INSERT INTO t VALUES (3, 'before', 30)")
    alter(scenario, "ALTER TABLE t RENAME COLUMN a TO name; ALTER TABLE t RENAME COLUMN id TO key")
    scenario.publisher("UPDATE t SET name = 'after' WHERE key = 2; DELETE FROM t WHERE key = 3")
    scenario.check(expect={"t": ["1|before|10", "2|after|20"]})
    assert copies(scenario, "t") == {1}


@pytest.mark.drawn
def test_columns_that_exchange_their_names_keep_their_values(scenario: Scenario) -> None:
    """It takes long because Spark starts: only Spark renames columns."""
    scenario.tables("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    scenario.publisher("INSERT INTO t VALUES (1, 1, 2), (2, 1, 2); CREATE PUBLICATION pub FOR TABLE t")
    scenario.subscribe("pub")
    exchange = "ALTER TABLE t RENAME COLUMN a TO c; ALTER TABLE t RENAME COLUMN b TO a; ALTER TABLE t RENAME COLUMN c TO b"
    alter(scenario, exchange)
    scenario.publisher("UPDATE t SET a = 7 WHERE id = 1")
    scenario.check(expect={"t": ["1|1|7", "2|1|2"]})
    alter(scenario, exchange)
    alter(scenario, exchange)
    scenario.publisher("UPDATE t SET a = 8 WHERE id = 2")
    alter(scenario, exchange)
    scenario.check(expect={"t": ["1|1|7", "2|1|8"]})


def test_a_column_dropped_and_added_again_under_its_name_is_another_one(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30)")
    alter(scenario, "ALTER TABLE t DROP COLUMN b; ALTER TABLE t ADD COLUMN b int")
    scenario.publisher("INSERT INTO t VALUES (4, 'after', 40)")
    scenario.check(expect={"t": ["1|x|", "2|y|", "3|before|", "4|after|40"]})


def test_ddl_that_changes_no_value_copies_nothing(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30)")
    alter(
        scenario,
        "ALTER TABLE t ALTER COLUMN a TYPE varchar, ALTER COLUMN a SET NOT NULL, ALTER COLUMN a SET STORAGE EXTERNAL;"
        "ALTER TABLE t ALTER COLUMN b SET DEFAULT 7",
    )
    scenario.publisher("UPDATE t SET a = 'after' WHERE id = 3")
    scenario.check(expect={"t": ["1|x|10", "2|y|20", "3|after|30"]})
    assert copies(scenario, "t") == {1}


@both_writers
def test_a_type_change_with_other_values_causes_a_copy_and_a_new_history(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("INSERT INTO t VALUES (3, 'before', 30)")
    scenario.check(expect={"t": ["1|x|10", "2|y|20", "3|before|30"]})
    alter(scenario, "ALTER TABLE t ALTER COLUMN b TYPE text USING 'n' || b")
    scenario.publisher("UPDATE t SET b = 'after' WHERE id = 3")
    scenario.check(expect={"t": ["1|x|n10", "2|y|n20", "3|before|after"]})
    scenario.publisher("INSERT INTO t VALUES (4, 'z', 'n40')")
    scenario.check(expect={"t": ["1|x|n10", "2|y|n20", "3|before|after", "4|z|n40"]})
    for replica in replicas(scenario):
        assert history(replica, "t") == [{"id": 3, "a": "before", "b": 30}]
        assert history(replica, "t", 1)[-1] == {"id": 4, "a": "z", "b": "n40"}


@pytest.mark.drawn
def test_values_rewritten_without_another_type_are_copied(scenario: Scenario) -> None:
    keyed(scenario)
    alter(scenario, "ALTER TABLE t ALTER COLUMN a TYPE text USING upper(a)")
    scenario.check(expect={"t": ["1|X|10", "2|Y|20"]})


@pytest.mark.drawn
def test_a_rewrite_that_changes_no_definition_copies_nothing(scenario: Scenario) -> None:
    keyed(scenario)
    scenario.publisher("VACUUM FULL t; INSERT INTO t VALUES (3, 'z', 30)")
    scenario.check(expect={"t": ["1|x|10", "2|y|20", "3|z|30"]})
    scenario.publisher("TRUNCATE t; CLUSTER t USING t_pkey; INSERT INTO t VALUES (4, 'w', 40)")
    scenario.check(expect={"t": ["4|w|40"]})
    assert copies(scenario, "t") == {1}


@pytest.mark.drawn
def test_a_column_may_get_a_name_that_parquet_forbids_and_lose_it_again(scenario: Scenario) -> None:
    """It takes long because Spark starts: only Spark maps column names."""
    keyed(scenario)
    scenario.publisher("UPDATE t SET b = 11 WHERE id = 1")
    alter(scenario, 'ALTER TABLE t RENAME COLUMN a TO "a, (b)"')
    scenario.publisher("INSERT INTO t VALUES (3, 'z', 30); UPDATE t SET b = 12 WHERE id = 1")
    scenario.check(expect={"t": ["1|x|12", "2|y|20", "3|z|30"]})
    alter(scenario, 'ALTER TABLE t RENAME COLUMN "a, (b)" TO "A"')
    scenario.publisher("INSERT INTO t VALUES (4, 'w', 40); UPDATE t SET b = 13 WHERE id = 1")
    scenario.check(expect={"t": ["1|x|13", "2|y|20", "3|z|30", "4|w|40"]})


@pytest.mark.drawn
@pytest.mark.parametrize("streaming", ["on", pytest.param("parallel", marks=pytest.mark.long)])
def test_any_ddl_in_and_around_a_streamed_transaction_is_followed(scenario: Scenario, streaming: str) -> None:
    """It may take long: five tables are altered within a streamed transaction, and two replicas follow."""
    names = ("dropped", "renamed", "retyped", "filled", "all_at_once")
    scenario.publisher(f"ALTER DATABASE {scenario.name} SET logical_decoding_work_mem = '64kB'")
    for name in names:
        scenario.tables(f"CREATE TABLE {name} (a int PRIMARY KEY, b text, c int)")
        scenario.publisher(f"INSERT INTO {name} VALUES (1, 'copied', 1), (2, 'copied', 2)")
    # The subscriber cannot get these columns within the transaction, so it has them before.
    scenario.subscriber(
        """ALTER TABLE renamed ADD COLUMN d text; ALTER TABLE retyped ALTER COLUMN c TYPE bigint;
        ALTER TABLE filled ADD COLUMN d int DEFAULT 7; ALTER TABLE all_at_once ADD COLUMN d int, ADD COLUMN e date"""
    )
    scenario.publisher(f"CREATE PUBLICATION pub FOR TABLE {', '.join(names)}")
    scenario.subscribe("pub", streaming=streaming)

    def fill(first: int, last: int) -> None:
        for name in names:
            scenario.publisher(
                f"INSERT INTO {name} SELECT i, repeat('x', 80), i FROM generate_series({first}, {last}) i"
            )

    scenario.publisher(
        "UPDATE renamed SET b = 'before' WHERE a = 1; ALTER TABLE filled REPLICA IDENTITY FULL"
    )
    with scenario.session() as other:
        scenario.publisher("BEGIN")
        fill(3, 300)
        scenario.publisher(
            """SAVEPOINT s; ALTER TABLE dropped DROP COLUMN b; INSERT INTO dropped VALUES (2001, 1);
            ALTER TABLE filled ADD COLUMN d text; ROLLBACK TO s;
            ALTER TABLE dropped DROP COLUMN c, ADD COLUMN gone int; ALTER TABLE dropped DROP COLUMN gone;
            ALTER TABLE dropped ADD COLUMN c int; ALTER TABLE renamed RENAME COLUMN b TO d;
            ALTER TABLE retyped ALTER COLUMN c TYPE bigint USING c * 1000000000000;
            ALTER TABLE filled ADD COLUMN d int DEFAULT 7;
            ALTER TABLE all_at_once DROP COLUMN b, ADD COLUMN d int, ADD COLUMN e date DEFAULT '2024-02-29';
            ALTER TABLE all_at_once RENAME COLUMN d TO b"""
        )
        other("CREATE TABLE unpublished (a int); INSERT INTO unpublished VALUES (1)")
        for name in names:
            scenario.publisher(
                f"INSERT INTO {name} (a, c) SELECT i, i FROM generate_series(301, 700) i;"
                f"UPDATE {name} SET c = c + 1 WHERE a % 2 = 0; DELETE FROM {name} WHERE a % 3 = 0"
            )
        scenario.run()
        scenario.publisher("COMMIT")
    scenario.publisher("ALTER TABLE retyped DROP COLUMN b; UPDATE retyped SET c = -1 WHERE a = 2")
    check_with_publisher(scenario, *names)
    scenario.check("filled")
    for name in names:
        scenario.publisher(f"INSERT INTO {name} (a) VALUES (3); UPDATE {name} SET c = 0 WHERE a = 1")
    check_with_publisher(scenario, *names)


@pytest.mark.drawn
def test_a_replica_is_the_table_that_has_its_name_now(scenario: Scenario) -> None:
    scenario.tables(
        """CREATE SCHEMA s; CREATE TABLE renamed (a int PRIMARY KEY); CREATE TABLE moved (a int PRIMARY KEY);
        CREATE TABLE s.below (a int PRIMARY KEY); CREATE TABLE again (a int PRIMARY KEY, b text)"""
    )
    scenario.publisher("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO renamed VALUES (1)")
    scenario.subscribe("pub")
    tables = ("renamed", "moved", "s.below", "again")
    for name in tables:
        scenario.publisher(f"INSERT INTO {name} VALUES (2), (3); DELETE FROM {name} WHERE a = 2")
    alter(
        scenario,
        """ALTER TABLE renamed RENAME TO other; ALTER SCHEMA s RENAME TO z; ALTER TABLE moved SET SCHEMA z;
        DROP TABLE again; CREATE TABLE again (b text, a int PRIMARY KEY)""",
    )
    scenario.publisher("INSERT INTO again VALUES ('first', 1), ('first', 2)")
    alter(scenario, "DROP TABLE again; CREATE TABLE again (a int PRIMARY KEY, c date)")
    tables = ("other", "z.moved", "z.below", "again")
    for name in tables:
        scenario.publisher(f"INSERT INTO {name} VALUES (4), (5); DELETE FROM {name} WHERE a = 4")
    scenario.refresh()
    for name in tables:
        scenario.publisher(f"DELETE FROM {name} WHERE a = 5; INSERT INTO {name} VALUES (7)")
    scenario.check(
        expect={"other": ["1", "3", "7"], "z.moved": ["3", "7"], "z.below": ["3", "7"], "again": ["7|"]}
    )
