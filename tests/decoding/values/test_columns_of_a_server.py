"""The initial copy and the stream, in text and in binary format, give the same columns for values of every type.

All three are read from one server: the copy by `copy_expression` through ADBC, the stream from a slot. For most types they are
independent, so each is the others' oracle. Columns that are PostgreSQL's own text are also compared with libpq's result of a plain
SELECT, arrays with the result of the server's unnest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import adbc_driver_postgresql.dbapi
import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg import sql

from pgsieve.decoding.checksums.record_send import SentColumn, record_send, row_expression
from pgsieve.decoding.checksums.segments import RowHash
from pgsieve.decoding.errors import UnsupportedBinaryError, ValueNotRepresentableError
from pgsieve.decoding.protocol.headers import HeaderScanner
from pgsieve.decoding.protocol.messages import (
    UNCHANGED,
    Insert,
    OldKey,
    OldRow,
    Relation,
    Text,
    Update,
    decode,
)
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.builtin_types import BUILTIN_TYPES, ELEMENT_OIDS
from pgsieve.decoding.values.output import has_output
from pgsieve.decoding.values.types import column_type, convert_copy, convert_text, copy_expression
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures import samples
from tests.fixtures.tries import drawn_seed

SEED = drawn_seed()
ROWS = 150
SESSION = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c bytea_output=hex"
)


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[str]:
    """A new database; yields its conninfo."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE columns")
        conninfo = publisher_server.conninfo(dbname="columns", options=SESSION, client_encoding="UTF8")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(samples.TYPES)
        yield conninfo
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = 'columns'"
            )
        admin.execute("DROP DATABASE columns")


def read(conninfo: str, query: str) -> pa.Table:
    with adbc_driver_postgresql.dbapi.connect(conninfo) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetch_arrow_table()


def stream(conninfo: str, slot: str, *, binary: bool = False) -> pa.Array:
    """All messages that wait in the slot."""
    query = (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL,"
        f" 'proto_version', '1', 'publication_names', '{slot}', 'binary', '{binary}')"
    )
    return read(conninfo, query).column("data").combine_chunks()


def changes_of(messages: pa.Array) -> tuple[Relation, pa.Array]:
    """The Relation message, and the Insert, Update and Delete messages."""
    kind = HeaderScanner().scan(messages).kind
    relation = decode(messages[int(np.flatnonzero(kind == ord("R"))[0])].as_py())
    assert isinstance(relation, Relation)
    return relation, messages.filter(pa.array(np.isin(kind, list(b"IUD"))))


def same(one: pa.Array, other: pa.Array) -> bool:
    """Equality of every bit: NaN equals NaN, and -0 differs from 0."""
    if pa.types.is_list(one.type):
        return one.value_lengths().equals(other.value_lengths()) and same(one.flatten(), other.flatten())
    if pa.types.is_floating(one.type):
        number = pa.int64() if one.type == pa.float64() else pa.int32()
        one, other = one.view(number), other.view(number)
    return one.equals(other)


class Columns:
    """A table with a column for each sample, filled with its values, in a slot's stream."""

    def __init__(
        self, conninfo: str, table: str, columns: Sequence[samples.Sample], r: random.Random
    ) -> None:
        self.conninfo, self.table, self.samples = conninfo, table, columns
        self.names = [f"c{place}" for place in range(len(columns))]
        self.rows = [
            [None if r.random() < 0.1 else s.edges[row] if row < len(s.edges) else s.draw() for s in columns]
            for row in range(ROWS)
        ]
        definition = ", ".join(f"{n} {s.type}" for n, s in zip(self.names, columns, strict=True))
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL(f"CREATE TABLE {table} (id int PRIMARY KEY, {definition})"))
            connection.execute(sql.SQL(f"CREATE PUBLICATION {table} FOR TABLE {table}"))
            connection.execute(sql.SQL(f"SELECT pg_create_logical_replication_slot('{table}', 'pgoutput')"))
            with connection.transaction(), connection.cursor() as cursor:
                insert = sql.SQL(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * (len(columns) + 1))})")
                cursor.executemany(insert, [[number, *row] for number, row in enumerate(self.rows)])
            self.catalog = connection.execute(
                "SELECT atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 1"
                " ORDER BY attnum",
                [table],
            ).fetchall()
            self.defined = read_catalog(connection).types
            self.printed = connection.execute(sql.SQL(f"SELECT * FROM {table} ORDER BY id")).pgresult
        self.kinds = [
            column_type(*place, s.override, self.defined)
            for place, s in zip(self.catalog, columns, strict=True)
        ]

    def streamed(self, *, binary: bool) -> pa.StructArray:
        relation, messages = changes_of(stream(self.conninfo, self.table, binary=binary))
        assert [(c.type_oid, c.type_modifier) for c in relation.columns[1:]] == self.catalog
        all_columns = RelationColumns(("id", *self.names), (column_type(23, -1), *self.kinds))
        return decode_changes(messages, all_columns, new_columns=frozenset(self.names)).new

    def copied(self) -> pa.Table:
        selected = ", ".join(
            f"{copy_expression(name, *place, s.override)} AS {name}"
            for name, place, s in zip(self.names, self.catalog, self.samples, strict=True)
        )
        return read(self.conninfo, f"SELECT {selected} FROM {self.table} ORDER BY id")

    def unnested(self, name: str, oid: int, modifier: int) -> list[pa.Array | None]:
        """An array column as the server unnests it. The text of its elements is converted as the element type."""
        with psycopg.connect(self.conninfo) as connection:
            rows = connection.execute(
                sql.SQL(
                    f"SELECT {name} IS NULL, array(SELECT CASE WHEN num_nulls(e) = 0 THEN concat(e) END"
                    f" FROM unnest({name}) WITH ORDINALITY u(e, n) ORDER BY n)::text[] FROM {self.table} ORDER BY id"
                )
            ).fetchall()
        kind = column_type(oid, modifier)
        texts = pa.array([e for is_null, elements in rows if not is_null for e in elements], pa.string())
        elements = convert_text(texts, kind, name)
        ends = np.cumsum([0 if is_null else len(items) for is_null, items in rows]).tolist()
        return [
            None if is_null else elements[end - len(items) : end]
            for (is_null, items), end in zip(rows, ends, strict=True)
        ]


def difference(one: pa.Array, other: pa.Array) -> list[object]:
    """The first values that differ."""
    return [pair for pair in zip(one, other, strict=True) if not same(*(pa.array([s]) for s in pair))][:3]


def test_copy_and_stream_in_both_formats_give_the_same_columns(database):
    r = random.Random(SEED)
    own = samples.scalars(r)
    # PostgreSQL itself cannot send an array in binary format if its element type has no send function.
    sendable = [s for s in own if s.type != "aclitem"]
    table = Columns(
        database,
        "everything",
        [*own, *samples.arrays(r, sendable), *samples.of_users(r), *samples.overridden(r)],
        r,
    )
    in_text, in_binary, copied = table.streamed(binary=False), table.streamed(binary=True), table.copied()
    for place, (name, sample, kind) in enumerate(zip(table.names, table.samples, table.kinds, strict=True)):
        of_copy = convert_copy(copied.column(name).combine_chunks(), kind, name)
        of_text, of_binary = (pc.struct_field(streamed, name) for streamed in (in_text, in_binary))
        what = f"{sample.type} as {kind.spark_type}, seed {SEED}"
        for column in (of_copy, of_text, of_binary):
            assert column.type == kind.arrow_type, what
            column.validate(full=True)
            assert column.null_count == sum(row[place] is None for row in table.rows), what
        assert same(of_copy, of_text), (what, difference(of_copy, of_text))
        assert same(of_binary, of_text), (what, difference(of_binary, of_text))
        if kind.spark_type == "string":
            values = [table.printed.get_value(row, place + 1) for row in range(ROWS)]
            assert of_text.to_pylist() == [None if v is None else v.decode() for v in values], what
        if pa.types.is_list(kind.arrow_type) and sample.override is None:
            element, modifier = ELEMENT_OIDS[table.catalog[place][0]], table.catalog[place][1]
            expected = table.unnested(name, element, modifier)
            elements = [None if not v.is_valid else v.values for v in of_text]
            assert all(
                a is None if b is None else same(a, b) for a, b in zip(expected, elements, strict=True)
            ), what
    # If PostgreSQL gets a new type, it is missing here. xml needs libxml, which this server lacks.
    tried = {oid for oid, _ in table.catalog}
    # oid8 is new in 19 (tests/postgresql_19/test_statements.py).
    assert {oid for oid in BUILTIN_TYPES if has_output(oid)} - tried == {142, 6437}


def test_types_whose_binary_format_gives_no_text_are_refused(database):
    r = random.Random(SEED)
    scalars = samples.without_output(r)
    table = Columns(database, "unprinted", [*scalars, *samples.arrays(r, scalars)], r)
    # regdatabase is new in 19.
    assert {oid for oid in BUILTIN_TYPES if not has_output(oid)} - {oid for oid, _ in table.catalog} == {
        1033,
        6490,
    }
    in_text, copied = table.streamed(binary=False), table.copied()
    _, messages = changes_of(stream(database, "unprinted", binary=True))
    for place, (name, kind) in enumerate(zip(table.names, table.kinds, strict=True)):
        of_copy = convert_copy(copied.column(name).combine_chunks(), kind, name)
        assert same(of_copy, pc.struct_field(in_text, name)), table.samples[place].type
        columns = RelationColumns(("id", *table.names), (column_type(23, -1), *table.kinds))
        with pytest.raises(UnsupportedBinaryError, match=f'"{name}".*\n.*without `binary`'):
            decode_changes(messages, columns, new_columns={name})


def test_arrays_that_no_list_can_hold(database):
    """More than one dimension, or subscripts that do not begin at 1, are refused in every format."""
    shapes = ("{{1,2},{3,4}}", "[0:1]={1,2}", "[2:2]={NULL}", "{{{1}}}")
    refused = [
        samples.Sample(f"{kind}[]", (shape,), lambda: "{}") for kind in ("int4", "text") for shape in shapes
    ]
    table = Columns(database, "shapes", refused, NeverNull())
    copied = table.copied()
    columns = RelationColumns(("id", *table.names), (column_type(23, -1), *table.kinds))
    for binary in (False, True):
        _, messages = changes_of(stream(database, "shapes", binary=binary))
        for name in table.names:
            with pytest.raises(ValueNotRepresentableError, match=f""""{name}".*\n.*{name}': string"""):
                decode_changes(messages, columns, new_columns={name})
    for name, kind in zip(table.names, table.kinds, strict=True):
        with pytest.raises(ValueNotRepresentableError, match=f""""{name}".*\n.*{name}': string"""):
            convert_copy(copied.column(name).combine_chunks(), kind, name)


class NeverNull(random.Random):
    """Draws numbers that make no value NULL."""

    def random(self) -> float:
        return 0.5


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_changes_equal_those_of_the_message_decoder(database, identity):
    slot = f"changes_{identity.lower()}"
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in (
            f"CREATE TABLE {slot} (id text PRIMARY KEY, n int, long text STORAGE EXTERNAL, other text STORAGE EXTERNAL)",
            f"ALTER TABLE {slot} REPLICA IDENTITY {identity}",
            f"CREATE PUBLICATION {slot} FOR TABLE {slot}",
            f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
            f"INSERT INTO {slot} SELECT i, i, repeat('x', 3000 * (i % 2)), repeat('y', 3000) FROM generate_series(1, 40) i",
            f"UPDATE {slot} SET n = NULL WHERE n % 3 = 0",
            f"UPDATE {slot} SET id = id || 'b', long = 'now short' WHERE n % 5 = 0",
            f"DELETE FROM {slot} WHERE n % 7 = 0",
        ):
            connection.execute(sql.SQL(statement))
    relation, messages = changes_of(stream(database, slot))
    names = tuple(column.name for column in relation.columns)
    kinds = tuple(column_type(column.type_oid, column.type_modifier) for column in relation.columns)
    decoded = decode_changes(messages, RelationColumns(names, kinds))

    def row(image):
        if image is None:
            return None
        texts = {
            n: v.content.decode() if isinstance(v, Text) else None for n, v in zip(names, image, strict=True)
        }
        return texts | {"n": texts["n"] and int(texts["n"])}

    single = [decode(message.as_py()) for message in messages]
    old = [None if isinstance(m, Insert) else m.old for m in single]
    new = [getattr(m, "new", None) for m in single]
    assert decoded.operation.to_pylist() == [type(m).__name__[0] for m in single]
    assert decoded.old_kind.to_pylist() == [{type(None): "", OldKey: "K", OldRow: "O"}[type(o)] for o in old]
    assert decoded.old.to_pylist() == [row(o and o.columns) for o in old]
    assert decoded.new.to_pylist() == [row(n) for n in new]
    unsent = [[c for c, v in zip(names, n or (), strict=bool(n)) if v == UNCHANGED] or None for n in new]
    assert decoded.unchanged.to_pylist() == unsent
    assert any(unsent)
    assert {type(m.old) for m in single if isinstance(m, Update)} == (
        {OldRow} if identity == "FULL" else {OldKey, type(None)}
    )


def test_rows_of_a_replica_have_the_servers_bytes_and_hashes(database):
    """record_send and hash_array_extended, for each column alone and for all together, also for long rows."""
    r = random.Random(SEED)
    own = samples.scalars(r)
    everything = [*own, *samples.arrays(r, own), *samples.of_users(r), *samples.overridden(r)]
    table = Columns(database, "hashed", everything, r)
    copied = table.copied()
    arrays = [
        convert_copy(copied.column(name).combine_chunks(), kind, name)
        for name, kind in zip(table.names, table.kinds, strict=True)
    ]
    columns = [
        SentColumn.for_column(name, oid, kind)
        for name, (oid, _), kind in zip(table.names, table.catalog, table.kinds, strict=True)
    ]
    queried = ", ".join(f"{row_expression([c])} AS c{place}" for place, c in enumerate(columns))
    sent = read(database, f"SELECT {queried} FROM hashed ORDER BY id").combine_chunks()
    alike = []
    for place, (array, column, sample) in enumerate(zip(arrays, columns, everything, strict=True)):
        computed, expected = record_send([array], [column]), sent.column(f"c{place}").combine_chunks()
        if sample.override == "array<decimal(20,4)>":
            assert not computed.equals(expected), (
                "the server no longer prints each element with its own scale"
            )
        else:
            assert computed.equals(expected), (sample, SEED, difference(computed, expected))
            alike.append(place)
    for count in (1, 3, len(alike)):
        chosen = alike[:count]
        row_hash = RowHash(tuple(columns[i] for i in chosen), r.getrandbits(64))
        batch = pa.RecordBatch.from_arrays([arrays[i] for i in chosen], [f"c{i}" for i in chosen])
        hashes = read(database, f"SELECT {row_hash.expression} FROM hashed ORDER BY id").column(0)
        assert np.asarray(hashes).view(np.uint64).tolist() == row_hash.compute_hashes(batch).tolist(), SEED
