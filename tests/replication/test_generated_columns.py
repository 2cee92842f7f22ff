"""Generated columns are published only from PostgreSQL 18 on, and only on request.

PostgreSQL documentation, Generated Column Replication; t/011.
"""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.fixtures.oracle import Scenario
from tests.fixtures.shop import Shop

# `make test-oldest` runs all of them on the oldest server.
pytestmark = [pytest.mark.spark, pytest.mark.drawn]

GENERATED = "CREATE TABLE {} (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) STORED, c text)"


def test_a_generated_column_that_is_not_published_is_the_subscribers_own(scenario: Scenario) -> None:
    for table in ("tab1", "plain"):
        scenario.publisher(GENERATED.format(table))
    scenario.subscriber(
        "CREATE TABLE tab1 (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 22) STORED, c text)"
    )
    scenario.subscriber("CREATE TABLE plain (a int PRIMARY KEY, b int, c text)")
    for table in ("tab1", "plain"):
        scenario.publisher(f"INSERT INTO {table} (a) VALUES (1), (2), (3)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE tab1, plain")
    scenario.subscribe("pub")
    scenario.check(expect={"tab1": ["1|", "2|", "3|"], "plain": ["1|", "2|", "3|"]})
    for table in ("tab1", "plain"):
        scenario.publisher(
            f"INSERT INTO {table} (a) VALUES (4), (5); UPDATE {table} SET a = 6, c = 'x' WHERE a = 5"
        )
    rows = ["1|", "2|", "3|", "4|", "6|x"]
    scenario.check(expect={"tab1": rows, "plain": rows})
    assert ("6", "132", "x") in scenario.subscriber("SELECT * FROM tab1")
    assert ("6", None, "x") in scenario.subscriber("SELECT * FROM plain")


def test_stored_generated_columns_are_published_on_request_or_if_listed(
    scenario: Scenario, postgres_version: int
) -> None:
    tables = ("asked", "listed", "left_out")
    for table in tables:
        scenario.publisher(GENERATED.format(table))
        scenario.subscriber(f"CREATE TABLE {table} (a int PRIMARY KEY, b int, c text)")
        scenario.publisher(f"INSERT INTO {table} (a) VALUES (1), (2), (3)")
    statement = "CREATE PUBLICATION asked FOR TABLE asked WITH (publish_generated_columns = stored)"
    if postgres_version < 18:  # the parameter does not exist
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(statement)
        return
    scenario.publisher(statement)
    scenario.publisher("CREATE PUBLICATION listed FOR TABLE listed (a, b), left_out")
    scenario.subscribe("asked", "listed")
    for table in tables:
        scenario.publisher(
            f"INSERT INTO {table} (a, c) VALUES (4, 'x'), (5, 'x'); UPDATE {table} SET a = 6 WHERE a = 5"
        )
    scenario.check(
        expect={
            "asked": ["1|2|", "2|4|", "3|6|", "4|8|x", "6|12|x"],
            "listed": ["1|2", "2|4", "3|6", "4|8", "6|12"],
            "left_out": ["1|", "2|", "3|", "4|x", "6|x"],
        }
    )


def test_virtual_generated_columns_are_never_published(scenario: Scenario, postgres_version: int) -> None:
    definition = "CREATE TABLE t (a int PRIMARY KEY, b int GENERATED ALWAYS AS (a * 2) VIRTUAL, c int)"
    if postgres_version < 18:  # they do not exist
        with pytest.raises(errors.SyntaxError):
            scenario.publisher(definition)
        return
    scenario.publisher(definition)
    scenario.subscriber("CREATE TABLE t (a int PRIMARY KEY, b int, c int)")
    scenario.publisher("INSERT INTO t (a) VALUES (1)")
    scenario.publisher("CREATE PUBLICATION pub FOR TABLE t WITH (publish_generated_columns = stored)")
    scenario.subscribe("pub")
    scenario.publisher("INSERT INTO t (a) VALUES (2); UPDATE t SET c = 3 WHERE a = 1")
    scenario.check(expect={"t": ["1|3", "2|"]})


#: Keys with a generated column that is not published. By the keys in FOUND PostgreSQL's subscriber finds rows.
KEYS = {
    "pk": "CREATE TABLE {0} (x int, z int, y int GENERATED ALWAYS AS (z * 2) STORED, v text, PRIMARY KEY (x, y))",
    "own": "CREATE TABLE {0} (x int NOT NULL, z int, y int GENERATED ALWAYS AS (x * 2) STORED NOT NULL, v text);"
    "CREATE UNIQUE INDEX {0}_y ON {0} (y); ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_y",
    "tree": "CREATE TABLE {0} (x int, z int, y int GENERATED ALWAYS AS (z * 2) STORED, v text, PRIMARY KEY (x, y))"
    " PARTITION BY RANGE (x); CREATE TABLE {0}_1 PARTITION OF {0} DEFAULT",
}
FOUND = {
    "whole": KEYS["pk"] + "; ALTER TABLE {0} REPLICA IDENTITY FULL",
    "beside": KEYS["pk"] + "; ALTER TABLE {0} ALTER x SET NOT NULL; CREATE UNIQUE INDEX {0}_x ON {0} (x);"
    "ALTER TABLE {0} REPLICA IDENTITY USING INDEX {0}_x",
}


def test_a_key_with_a_generated_column_that_is_not_published_is_refused(
    shop: Shop, postgres_version: int
) -> None:
    """The subscriber stops with an error: publisher did not send replica identity column (SQLSTATE 55000)."""
    keys = {name: text for name, text in FOUND.items() if postgres_version < 18 or name == "beside"}
    for name, definition in (KEYS | keys).items():
        for statement in definition.format(name).split(";"):
            shop.database.execute(statement)
        shop.database.execute(f"INSERT INTO {name} (x, z, v) SELECT i, i, 'old' FROM generate_series(1, 4) i")
    listed = ", ".join(KEYS | keys)
    shop.database.execute(f"CREATE PUBLICATION keys FOR TABLE {listed} WITH (publish_via_partition_root)")
    shop.configure(
        subscriptions={
            "pipe": {"source": "shop", "publications": ["keys"]},
            "publ": {"source": "shop", "publications": ["keys"], "row_filter": "publisher"},
        }
    )
    code, output = shop.cli("validate")
    assert code == 1
    for name in KEYS:
        changed = f"UPDATE {name} SET v = 'new' WHERE x = 1; DELETE FROM {name} WHERE x = 2"
        relation = f"{name}_1" if name == "tree" else name
        if postgres_version >= 18:
            assert (
                f'cannot update table "public.{relation}": Replica identity must not contain unpublished'
                in output
            )
            with pytest.raises(errors.InvalidColumnReference):
                shop.database.execute(changed)
        else:
            assert f'table "public.{name}": publisher did not send replica identity column' in output
    shop.cli("run")
    for name in keys:
        shop.database.execute(f"UPDATE {name} SET v = 'new' WHERE x = 1; DELETE FROM {name} WHERE x = 2")
        shop.database.execute(f"UPDATE {name} SET x = 9 WHERE x = 3")
    shop.cli("run")
    for name in keys:
        for subscription in ("pipe", "publ"):
            assert shop.ids(subscription, name, "x") == [1, 4, 9]
    states = {shop.state(s, name) for s in ("pipe", "publ") for name in KEYS}
    assert states == {"ready" if postgres_version >= 18 else "to be copied"}
