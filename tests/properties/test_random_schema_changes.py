"""Random DDL among random changes: a replica, built from stream and catalog, holds the rows of the publisher's table.

The publisher is the oracle. The replica here is a dictionary of rows by key: without Spark, many workloads fit a budget, and the
steps' own code decides. Column names and types are few, so that columns often take over each other's names. A failure prints its
seed; PGSIEVE_SEED=<seed> PGSIEVE_BUDGET_SECONDS=0 repeats it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psycopg

from pgsieve.assets.steps.subscription import Definition, SlotStream, Subscription, planned_sources
from pgsieve.assets.steps.update_transformation.relation_versions import find_version_columns
from pgsieve.assets.steps.update_transformation.schema_changes import find_former_layout
from pgsieve.assets.steps.update_transformation.slice_contents import PublishedVersion, RelationVersion
from pgsieve.decoding.changes.columns import ROW_OPERATIONS
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.messages import (
    Begin,
    Delete,
    Insert,
    OldKey,
    OldRow,
    Relation,
    Text,
    Update,
    decode,
)
from pgsieve.decoding.protocol.tuple_data import TupleData
from pgsieve.decoding.publications.evolution import SchemaChangedError, find_missing_value
from pgsieve.decoding.publications.published_tables import PublishedRelation
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.oracle import Session
from tests.fixtures.tries import budget_seconds, try_workloads

Row = dict[str, str | None]

NAMES = ("a", "b", "c", "d", "e", "f")
#: Each type with constants, and an expression that gives each row another value.
TYPES = {
    "int": (["1", "-7", "NULL"], "(random() * 9)::int"),
    "bigint": (["2", "NULL"], "(random() * 9)::bigint"),
    "text": (["'x'", "''", "NULL"], "random()::text"),
    "varchar": (["'y'", "NULL"], "random()::text"),
    "numeric(8,2)": (["1.5", "NULL"], "random()::numeric(8,2)"),
    "date": (["'2020-02-29'", "NULL"], "'2020-01-01'::date + (random() * 9)::int"),
}
COLUMNS = (
    "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 't'::regclass"
    " AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
)


class Publisher:
    """The table t, its key k, and random statements on it."""

    def __init__(self, session: Session, draw: random.Random) -> None:
        self.session, self.draw = session, draw
        self.keys = itertools.count(100)

    def columns(self) -> dict[str, str]:
        """The columns except the key, with their types; `character varying` is shown as varchar."""
        rows = {
            str(name): str(kind).replace("character varying", "varchar")
            for name, kind in self.session(COLUMNS)
        }
        return {name: {"integer": "int"}.get(kind, kind) for name, kind in rows.items() if name != "k"}

    def change(self) -> str:
        """An INSERT, UPDATE or DELETE."""
        columns, draw = self.columns(), self.draw
        name = draw.choice([*columns, "k"])
        value = str(next(self.keys)) if name == "k" else draw.choice(TYPES[columns[name]][0])
        some = "WHERE k = (SELECT k FROM t ORDER BY random() LIMIT 1)"
        key = next(self.keys)
        if draw.random() < 0.4:
            return (
                f"INSERT INTO t (k) VALUES ({key})"
                if name == "k"
                else f"INSERT INTO t (k, {name}) VALUES ({key}, {value})"
            )
        return draw.choice([f"UPDATE t SET {name} = {value} {some}", f"DELETE FROM t {some}"])

    def definition(self) -> list[str]:
        """DDL: several statements if columns take over each other's names."""
        columns, draw = self.columns(), self.draw
        free = [name for name in NAMES if name not in columns]
        kind = draw.choice(list(TYPES))
        constants, volatile = TYPES[kind]
        default = draw.choice(["", f"DEFAULT {draw.choice(constants)}", f"DEFAULT {volatile}"])
        choices = [[f"ALTER TABLE t REPLICA IDENTITY {draw.choice(['FULL', 'DEFAULT'])}"]]
        if free:
            choices += [[f"ALTER TABLE t ADD COLUMN {draw.choice(free)} {kind} {default}"]] * 3
        if columns:
            name = draw.choice(list(columns))
            choices.append([f"ALTER TABLE t DROP COLUMN {name}"])
            choices.append(
                [f"ALTER TABLE t DROP COLUMN {name}", f"ALTER TABLE t ADD COLUMN {name} {columns[name]}"]
            )
            choices.append(
                [f"ALTER TABLE t ALTER COLUMN {name} SET DEFAULT {draw.choice(TYPES[columns[name]][0])}"]
            )
            choices.append([f"ALTER TABLE t ALTER COLUMN {name} DROP DEFAULT, ALTER COLUMN {name} TYPE text"])
            choices += [[f"ALTER TABLE t RENAME COLUMN {name} TO {other}"] for other in free[:2]]
        if len(columns) > 1:
            one, other = draw.sample(list(columns), 2)
            choices.append(
                [
                    f"ALTER TABLE t RENAME COLUMN {one} TO other",
                    f"ALTER TABLE t RENAME COLUMN {other} TO {one}",
                    f"ALTER TABLE t RENAME COLUMN other TO {other}",
                ]
            )
        return draw.choice(choices)

    def transaction(self) -> None:
        """Run some statements, and keep all or some of them."""
        self.execute("BEGIN")
        for _ in range(self.draw.randint(1, 5)):
            for statement in self.definition() if self.draw.random() < 0.25 else [self.change()]:
                self.execute(statement)
        self.execute(self.draw.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))

    def execute(self, statement: str) -> None:
        """Run a statement, and print it for a failed test."""
        print(f"    {statement}")
        self.session(statement)


@dataclass
class Followed:
    """A replica as rows by key. It counts how often it was copied, and how often it followed a change in place."""

    connection: psycopg.Connection[tuple[object, ...]]
    subscription: Subscription
    definition: Definition | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    copied_at: int = 0
    transformed: int = 0
    followed: int = 0

    def run(self, end: int) -> None:
        """Follow the catalog, then apply everything that committed before `end`. Copy the table if either is ambiguous."""
        catalog = read_catalog(self.connection)
        lsn = read_current_lsn(self.connection)
        replicated = self.subscription.tables(catalog)["public", "t"]
        present = self.subscription.definition(replicated, catalog)
        sent = PublishedRelation(
            relation=replicated.table,
            publish_as=replicated.table,
            operations=frozenset(ROW_OPERATIONS),
            filters={},
            columns=present.names,
            publications=("pub",),
        )
        messages = self.messages(end)
        try:
            if self.definition is None:
                self.copy(present, lsn)
            elif present != self.definition:
                self.follow(self.definition, present, lsn)
            assert self.definition is not None
            self.apply(messages, sent, self.definition)
        except SchemaChangedError as error:
            print(f"-- copied again: {error.message}")
            self.copy(present, lsn)
        self.transformed = end

    def follow(self, definition: Definition, present: Definition, lsn: int) -> None:
        """Do what `follow_schema_changes` does to a replica in Delta."""
        planned = planned_sources(definition, present)
        former = find_former_layout(definition, present, self.transformed, lsn)
        for key, row in self.rows.items():
            self.rows[key] = {
                s.column: s.value if s.former_column is None else row[s.former_column] for s in planned
            }
        self.definition = replace(present, former=former)
        self.followed += 1

    def copy(self, present: Definition, lsn: int) -> None:
        """Copy the publisher's present rows."""
        names = ", ".join(f"{name}::text" for name in present.names)
        rows = self.connection.execute(f"SELECT {names} FROM t").fetchall()  # type: ignore[call-overload]
        contents = [dict(zip(present.names, row, strict=True)) for row in rows]
        self.rows = {str(row["k"]): row for row in contents}
        self.definition, self.copied_at = present, lsn

    def messages(self, end: int) -> list[bytes]:
        """The slot's messages of transactions that committed before `end`."""
        query = (
            f"SELECT data FROM pg_logical_slot_get_binary_changes('{self.subscription.name}', '{format_lsn(end)}',"
            " NULL, 'proto_version', '1', 'publication_names', 'pub')"
        )
        return [bytes(data) for (data,) in self.connection.execute(query)]  # type: ignore[call-overload]

    def apply(self, messages: list[bytes], sent: PublishedRelation, definition: Definition) -> None:
        """Apply changes one after the other, under the present column names."""
        commit, ordinal = 0, 0
        names: tuple[str, ...] = ()
        filled: Row = {}
        for data in messages:
            message = decode(data)
            ordinal += 1
            if isinstance(message, Begin):
                commit, ordinal = message.final_lsn, 0
            if commit < self.copied_at:
                continue
            if isinstance(message, Relation):
                part = PublishedVersion(RelationVersion(message, (commit, ordinal), None), sent, {})
                columns, added = find_version_columns(self.subscription, part, definition)
                names, filled = columns.names, {}
                for column in (definition.layout.find_column_by_name(a.name) for a in added):
                    assert column is not None
                    assert definition.former is not None
                    filled[column.name] = find_missing_value(
                        column, definition.former.layout, definition.layout
                    )
            if isinstance(message, Insert):
                self.put(names, message.new, filled, definition)
            elif isinstance(message, Update):
                self.take(names, message.old)
                self.put(names, message.new, filled, definition)
            elif isinstance(message, Delete):
                self.take(names, message.old)

    def put(self, names: tuple[str, ...], new: TupleData, filled: Row, definition: Definition) -> None:
        row = filled | _row(names, new)
        self.rows[str(row["k"])] = {name: row[name] for name in definition.names}

    def take(self, names: tuple[str, ...], old: OldKey | OldRow | None) -> None:
        if old is not None:
            del self.rows[str(_row(names, old.columns)["k"])]


def _row(names: tuple[str, ...], columns: TupleData) -> Row:
    values = (value.content.decode() if isinstance(value, Text) else None for value in columns)
    return dict(zip(names, values, strict=True))


@contextmanager
def database(server: EmbeddedServer, name: str) -> Iterator[str]:
    """A new database; yields its conninfo. Its slot is dropped in the end."""
    with psycopg.connect(server.conninfo(), autocommit=True) as administrator:
        administrator.execute(f"CREATE DATABASE {name} TEMPLATE template0")  # type: ignore[call-overload]
        try:
            yield server.conninfo(dbname=name)
        finally:
            administrator.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
            administrator.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]


def run_workload(conninfo: str, seed: int) -> int:
    """Run random transactions. Follow after some of them, sometimes only up to an LSN before the catalog's.

    Returns how often a change of the columns was followed in place.
    """
    draw = random.Random(seed)
    session = Session(conninfo)
    session(
        "CREATE TABLE t (k int PRIMARY KEY, a int, b text); INSERT INTO t VALUES (1, 1, 'x'), (2, 2, 'y');"
        "CREATE PUBLICATION pub FOR TABLE t; SELECT pg_create_logical_replication_slot(current_database(), 'pgoutput')"
    )
    publisher = Publisher(session, draw)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        (name,) = session("SELECT current_database()")[0]
        slot_stream = SlotStream(
            name=str(name),
            source=Source("publisher", conninfo),
            slot=str(name),
            capture=str(name),
            filtered=True,
            subscriptions={str(name): ("pub",)},
        )
        followed = Followed(connection, Subscription(str(name), slot_stream))
        for _ in range(8):
            end = read_current_lsn(connection)
            for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
                publisher.transaction()
            if draw.random() < 0.3:
                print("-- run behind the catalog")
                followed.run(end)
            if draw.random() < 0.2:
                publisher.execute(draw.choice(["VACUUM FULL t", "TRUNCATE t", "ANALYZE t"]))
                if session("SELECT count(*) FROM t") == [("0",)]:
                    followed.rows.clear()
                    followed.definition = None
            print("-- run")
            followed.run(read_current_lsn(connection))
            contents = sorted((tuple(row.values()) for row in followed.rows.values()), key=repr)
            assert contents == sorted(session("SELECT * FROM t"), key=repr)
    session.close()
    return followed.followed


def test_a_replica_that_follows_any_ddl_holds_the_publishers_rows(publisher_server: EmbeddedServer) -> None:
    def followed(seed: int) -> int:
        with database(publisher_server, f"schema_changes_{seed}") as conninfo:
            return run_workload(conninfo, seed)

    # A workload in which every change led to a copy tested nothing.
    try_workloads(followed, budget_seconds(15), "changes that were followed in place")
