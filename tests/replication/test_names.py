"""Schemas, tables, columns and publications may have any name. No name is interpreted as SQL or as a path.

PostgreSQL documentation, Identifiers and Key Words.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import sql

from pgsieve.assets.steps.checks.consistency import check_consistency
from tests.fixtures.names import TAKEN, WHOLE, WORST, joined
from tests.fixtures.oracle import Scenario
from tests.fixtures.pgsieve_replica import PgsieveReplica

pytestmark = pytest.mark.spark


def quoted(*names: str) -> str:
    return sql.Identifier(*names).as_string(None)


def outside(scenario: Scenario) -> set[Path]:
    """The files in the scenario's folder that lie outside of the folders of a lake."""
    lakes = [scenario.folder / f"replica_{number}" / "lake" for number in range(len(scenario.replicas))]
    allowed = {folder for lake in lakes for folder in (lake / "_pgsieve", lake / "sub")}
    return {
        path
        for path in scenario.folder.rglob("*")
        if path not in {*lakes, *(lake.parent for lake in lakes), *allowed}
        and not allowed & set(path.parents)
    }


@pytest.mark.drawn
def test_every_name_is_replicated_unchanged(scenario: Scenario) -> None:
    """It takes long: a table for each odd name is copied, changed and checked."""
    scenario.tables('CREATE TABLE victim (a int PRIMARY KEY); CREATE SCHEMA "Sch.ema/..;\'`"""')
    scenario.publisher("INSERT INTO victim VALUES (1)")
    publication = quoted(WORST[0])
    schemas = ["public", "Sch.ema/..;'`\""]
    # Columns that Delta maps to other names need Spark, and so do keys that change. Two tables have both.
    columns, rest = WORST, joined()
    tables = {
        (schemas[0], rest.pop()): columns[: len(columns) // 2],
        (schemas[1], rest.pop()): columns[len(columns) // 2 :],
        **{(schemas[0], name): ("a", "b") for name in WHOLE},
        **{(schemas[1], name): ("a", "b") for name in rest},
    }
    for table, (key, *others) in tables.items():
        added = "".join(f", {quoted(name)} text" for name in others)
        scenario.tables(f"CREATE TABLE {quoted(*table)} ({quoted(key)} int PRIMARY KEY{added})")
    entries = [
        f"{quoted(*table)} WHERE ({quoted(names[0])} > 0)" if names[0] != "a" else quoted(*table)
        for table, names in tables.items()
    ]
    scenario.publisher(f"CREATE PUBLICATION {publication} FOR TABLE {', '.join(entries)}, victim")
    for table in tables:
        scenario.publisher(f"INSERT INTO {quoted(*table)} VALUES (1), (2), (-3)")
    scenario.subscribe(WORST[0])
    for table, names in tables.items():
        first, last = quoted(names[0]), quoted(names[-1])
        scenario.publisher(
            f"UPDATE {quoted(*table)} SET {last} = 'changed' WHERE {first} = 1; INSERT INTO {quoted(*table)} VALUES (4)"
        )
        if names[0] != "a":
            scenario.publisher(
                f"UPDATE {quoted(*table)} SET {first} = 5 WHERE {first} = 2;"
                f"UPDATE {quoted(*table)} SET {first} = 6 WHERE {first} = -3"
            )
    scenario.run()
    assert scenario.builtin is not None
    for replica in scenario.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        for schema, table in tables:
            wanted = scenario.builtin.rows(schema, table)
            assert len(wanted) == 4
            assert sorted(replica.rows(schema, table), key=str) == sorted(wanted, key=str), (schema, table)
        assert replica.rows("public", "victim") == [("1",)]
        for result in check_consistency(replica.subscription, replica.lake, lambda _: None):
            assert result.equal, result
    assert outside(scenario) == set()


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("scenario", "turns"),
    [
        ("spark", (2,)),
        *(
            pytest.param(writer, (1, 2), marks=pytest.mark.long)
            for writer in ("spark", "driver large alone", "driver drawn marking")
        ),
    ],
    indirect=["scenario"],
)
def test_columns_and_keys_may_have_names_that_delta_readers_and_writers_reserve(
    scenario: Scenario, turns: tuple[int, ...]
) -> None:
    """It takes long: a table for each reserved name is copied, changed and checked."""
    keyed = [f"k{number}" for number in range(len(TAKEN))]
    # The columns exclude names that delta-rs reserves: Spark would write the table, and Spark reserves other names.
    few = [quoted(name) for name in TAKEN if not name.startswith("__delta_rs_")]
    columns = ", ".join(f"{name} text" for name in few)
    scenario.tables(
        f"CREATE TABLE wide (id int PRIMARY KEY, {columns}); CREATE TABLE keyless (id int, {columns})"
    )
    for table, name in zip(keyed, TAKEN, strict=True):
        scenario.tables(f"CREATE TABLE {table} ({quoted(name)} int PRIMARY KEY, v text)")
        scenario.publisher(f"INSERT INTO {table} SELECT i, 'v' FROM generate_series(1, 9) i")
    scenario.publisher("ALTER TABLE keyless REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR ALL TABLES")
    scenario.publisher("INSERT INTO wide (id) SELECT generate_series(1, 9)")
    scenario.subscribe("pub")
    updated = ", ".join(f"{name} = 'changed'" for name in few)
    for turn in turns:
        scenario.publisher(
            f"UPDATE wide SET {updated} WHERE id % 3 = {turn}; DELETE FROM wide WHERE id = {turn + 2};"
            f"INSERT INTO wide (id) VALUES ({turn + 100}); INSERT INTO keyless (id) VALUES (1), (1)"
        )
        for table, name in zip(keyed, map(quoted, TAKEN), strict=True):
            scenario.publisher(
                f"UPDATE {table} SET v = 'changed' WHERE {name} = {turn}; DELETE FROM {table} WHERE {name} = {turn + 4};"
                f"INSERT INTO {table} VALUES ({turn + 20}, 'new')"
            )
            if scenario.writer.batches == "small":  # with large batches this needs a JVM
                scenario.publisher(f"UPDATE {table} SET {name} = {turn + 30} WHERE {name} = {turn + 6}")
        if scenario.writer.batches == "small":
            one = "ctid IN (SELECT ctid FROM keyless LIMIT 1)"
            scenario.publisher(f"DELETE FROM keyless WHERE {one}; UPDATE keyless SET {updated} WHERE {one}")
        scenario.check("wide", "keyless", *keyed)
    for replica in scenario.replicas.values():
        assert isinstance(replica, PgsieveReplica)
        assert [
            r for r in check_consistency(replica.subscription, replica.lake, lambda _: None) if not r.equal
        ] == []
