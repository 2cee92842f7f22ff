"""The initial copy and the stream lead to the same columns, for values of every type that a real server has.

Both ways are read from one server: the copy as ADBC reads `copy_expression`, the stream as a slot sends it.
For most types they are independent (binary against text), so that each is the other's oracle; columns that
are PostgreSQL's own text are also compared with what libpq is given for a plain SELECT.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import adbc_driver_postgresql.dbapi
import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg import sql

from decoding.messages import UNCHANGED, Insert, OldKey, OldRow, Relation, Text, Update, decode
from decoding.tuples import HeaderScanner, RelationColumns, decode_changes
from decoding.types import column_type, copy_expression, from_copy
from resources.embedded import EmbeddedServer

SEED = int(os.environ.get("PGSIEVE_SEED", str(random.randrange(10**6))))
ROWS = 300
SESSION = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c bytea_output=hex"
)

TYPES = """
    CREATE TYPE mood AS ENUM ('sad', 'o''k', 'A b');
    CREATE TYPE pair AS (a int, b text, c bool);
    CREATE DOMAIN truth AS bool;
    CREATE DOMAIN padded AS char(5);
    CREATE DOMAIN price AS numeric(10, 2);
    CREATE DOMAIN moment AS timestamptz;
    CREATE DOMAIN listed AS int[];
"""


def digits(r: random.Random, most: int) -> str:
    return str(r.randrange(10 ** r.randint(1, most)))


def number(r: random.Random, whole: int, scale: int) -> str:
    return f"{r.choice(['', '-'])}{digits(r, whole)}.{r.randrange(10**scale):0{scale}}"


def words(r: random.Random) -> str:
    return "".join(r.choices("aZ 9\\'\"{},()é漢😀\n\t", k=r.randint(0, 12)))


def day(r: random.Random, last: int) -> str:
    year, era = r.choice([(r.randint(1900, 2100), ""), (r.randint(1, last), ""), (r.randint(1, 4713), " BC")])
    return f"{year:04}-{r.randint(1, 12):02}-{r.randint(1, 28):02}{era}"


def moment(r: random.Random) -> str:
    date, *era = day(r, 294_246).split(" ")
    fraction = r.choice(["", f".{r.randrange(10**6):06}", f".{r.randrange(10)}"])
    return " ".join(
        [date, f"{r.randint(0, 23):02}:{r.randint(0, 59):02}:{r.randint(0, 59):02}{fraction}", *era]
    )


@dataclass(frozen=True)
class Sample:
    """A column's type, values worth trying, and how to draw others."""

    type: str
    edges: tuple[str, ...]
    draw: Callable[[], str]
    override: str | None = None


def samples(r: random.Random) -> list[Sample]:
    infinities = ("infinity", "-infinity")

    def integer(bits: int) -> Callable[[], str]:
        return lambda: str(r.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) >> r.randrange(bits))

    def interval() -> str:
        return f"{r.randint(-99, 99)} years {r.randint(-40, 40)} days {r.randint(-(10**6), 10**6)} seconds"

    def quoted(value: str) -> str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return [
        Sample("bool", ("t", "f"), lambda: r.choice("tf")),
        Sample("int2", ("-32768", "32767", "0"), integer(16)),
        Sample("int4", ("-2147483648", "2147483647"), integer(32)),
        Sample("int8", ("-9223372036854775808", "9223372036854775807"), integer(64)),
        Sample(
            "float4",
            ("NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "1.1"),
            lambda: repr(r.gauss(0, 1e9)),
        ),
        Sample(
            "float8",
            ("NaN", "Infinity", "-Infinity", "-0", "5e-324", "0.1"),
            lambda: repr(r.uniform(-1, 1) * 10.0 ** r.randint(-300, 300)),
        ),
        Sample("numeric(12,2)", ("0", "-0.01", "9999999999.99"), lambda: number(r, 10, 2)),
        Sample("numeric(38,0)", ("9" * 38, "-" + "9" * 38), lambda: digits(r, 38)),
        Sample("numeric(38,38)", ("0." + "9" * 38, "1e-38"), lambda: "0." + digits(r, 38)),
        Sample("numeric(4,4)", ("-0.9999",), lambda: f"0.{r.randrange(10**4):04}"),
        Sample(
            "numeric", ("NaN", "1.500", "1e-50", "1e50", "0.000"), lambda: number(r, 40, r.randint(1, 30))
        ),
        Sample("numeric(50,3)", ("NaN", "1e46"), lambda: number(r, 40, 3)),
        Sample("text", ("", " ", "\\N", "\\", "t" * 5000), lambda: words(r)),
        Sample("varchar(20)", ("", "  "), lambda: words(r)),
        Sample("char(12)", ("", "ab", " a "), lambda: words(r)),
        Sample("name", ("pg_class",), lambda: words(r)),
        Sample('"char"', ("", "a", "\\200"), lambda: r.choice("abcXYZ")),
        Sample(
            "bytea", ("\\x", "\\x00", "\\x5c78", "\\xFF"), lambda: "\\x" + r.randbytes(r.randint(0, 20)).hex()
        ),
        Sample(
            "date",
            (*infinities, "4714-11-24 BC", "5874897-12-31", "0001-12-31 BC", "10000-01-01"),
            lambda: day(r, 5_874_897),
        ),
        Sample(
            "timestamp",
            (*infinities, "4714-11-24 00:00:00 BC", "294247-01-10 04:00:54.775806"),
            lambda: moment(r),
        ),
        Sample(
            "timestamptz",
            (*infinities, "4714-11-24 00:00:00+00 BC", "294247-01-10 04:00:54.775806+00"),
            lambda: moment(r),
        ),
        Sample("timestamptz(0)", infinities, lambda: moment(r)),
        Sample("time", ("00:00", "24:00"), lambda: moment(r).split(" ")[1]),
        Sample("timetz", ("12:00+02", "23:59:59.5-12:30"), lambda: moment(r).split(" ")[1] + "+01"),
        Sample("interval", ("0", "1 year -2 days 03:04:05.678", "-1 mon"), interval),
        Sample("uuid", ("00000000-0000-0000-0000-000000000000",), lambda: r.randbytes(16).hex()),
        Sample(
            "json",
            ("null", '{"a":  1, "a": 2}', '"é"'),
            lambda: f'[{digits(r, 30)}, "{words(r).encode("unicode_escape").hex()}"]',
        ),
        Sample("jsonb", ("null", '{"b": 1.50, "a": [true]}'), lambda: f"[{number(r, 20, 5)}, null]"),
        Sample("oid", ("0", "4294967295"), lambda: str(r.randrange(2**32))),
        Sample("money", ("0", "-1.5", "92233720368547758.07"), lambda: number(r, 12, 2)),
        Sample("bit(5)", ("10101",), lambda: f"{r.randrange(32):05b}"),
        Sample("varbit", ("", "1"), lambda: f"{r.randrange(2**20):b}"),
        Sample("inet", ("10.0.0.1/8", "::1"), lambda: f"10.{r.randrange(256)}.0.{r.randrange(256)}"),
        Sample("macaddr", ("08:00:2b:01:02:03",), lambda: r.randbytes(6).hex(":")),
        Sample(
            "pg_lsn", ("0/0", "FFFFFFFF/FFFFFFFF"), lambda: f"{r.randrange(2**32):X}/{r.randrange(2**32):X}"
        ),
        Sample("point", ("(1e300,-0)",), lambda: f"({r.random()},{r.random()})"),
        Sample("tsvector", ("", "'a b':1A 'c'"), lambda: f"w{digits(r, 5)}"),
        Sample("int4range", ("empty", "(,)", "[1,10]"), lambda: f"[{r.randint(-99, 0)},{r.randint(1, 99)})"),
        Sample(
            "tstzrange",
            ("empty", "[2020-01-01,infinity)", "(,2020-01-01 12:00+02]"),
            lambda: f"[{r.randint(1000, 2000)}-01-01,)",
        ),
        Sample(
            "int4[]",
            ("{}", "{1,NULL}", "{{1,2},{3,4}}", "[0:1]={1,2}"),
            lambda: "{" + digits(r, 9) + ",NULL}",
        ),
        Sample("text[]", ("{}", '{NULL,"NULL",""}'), lambda: "{" + quoted(words(r)) + "}"),
        Sample("bool[]", ("{t,f,NULL}",), lambda: "{" + r.choice("tf") + "}"),
        Sample("bytea[]", ("{NULL}",), lambda: '{"\\\\x' + r.randbytes(3).hex() + '"}'),
        Sample("float8[]", ("{NaN,-Infinity,0.1}",), lambda: "{" + repr(r.random()) + "}"),
        Sample("timestamptz[]", ("{infinity}",), lambda: "{" + quoted(moment(r)) + "}"),
        Sample("mood", ("sad", "o'k", "A b"), lambda: r.choice(["sad", "A b"])),
        Sample("mood[]", ('{"A b",NULL}',), lambda: "{sad}"),
        Sample(
            "pair",
            ("(,,)", '(1,"a b",t)'),
            lambda: f"({r.randrange(99)},{quoted(words(r))},{r.choice('tf')})",
        ),
        Sample("truth", ("t", "f"), lambda: r.choice("tf")),
        Sample("padded", ("", "ab"), lambda: digits(r, 5)),
        Sample("price", ("NaN", "1.5"), lambda: number(r, 8, 2)),
        Sample("moment", infinities, lambda: moment(r)),
        Sample("listed", ("{}", "{1}"), lambda: "{" + digits(r, 9) + "}"),
        # The same values once more, as another Spark type than the mapping's.
        Sample("bool", ("t", "f"), lambda: r.choice("tf"), "string"),
        Sample("int2", ("-32768",), integer(16), "bigint"),
        Sample("int4", ("-2147483648",), integer(32), "string"),
        Sample("float4", ("NaN", "-0", "1.1"), lambda: repr(r.gauss(0, 1e9)), "double"),
        Sample("float8", ("NaN", "-0", "1e100"), lambda: repr(r.random()), "string"),
        Sample("numeric", ("1", "-0.50"), lambda: number(r, 20, 2), "decimal(30,4)"),
        Sample("numeric(12,2)", ("NaN",), lambda: number(r, 10, 2), "string"),
        Sample("char(12)", ("", "ab"), lambda: words(r), "string"),
        Sample("bytea", ("\\x00",), lambda: "\\x" + r.randbytes(4).hex(), "string"),
        Sample("date", infinities, lambda: day(r, 5_874_897), "string"),
        Sample("timestamp", (*infinities, "294276-12-31 23:59:59.999999"), lambda: moment(r), "string"),
        Sample("timestamptz", (*infinities, "294276-12-31 23:59:59.999999+00"), lambda: moment(r), "string"),
    ]


@pytest.fixture(scope="module")
def database(publisher_server: EmbeddedServer) -> Iterator[str]:
    """A database of its own, by conninfo."""
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE columns")
        conninfo = publisher_server.conninfo(dbname="columns", options=SESSION, client_encoding="UTF8")
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute(TYPES)
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


def stream(conninfo: str, slot: str) -> pa.Array:
    """All messages that wait in the slot."""
    query = (
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{slot}', NULL, NULL,"
        f" 'proto_version', '1', 'publication_names', '{slot}')"
    )
    return read(conninfo, query).column("data").combine_chunks()


def changes_of(messages: pa.Array) -> tuple[Relation, pa.Array]:
    """The Relation message, and the Insert, Update and Delete messages."""
    kind = HeaderScanner().scan(messages).kind
    relation = decode(messages[int(np.flatnonzero(kind == ord("R"))[0])].as_py())
    assert isinstance(relation, Relation)
    return relation, messages.filter(pa.array(np.isin(kind, list(b"IUD"))))


def same(one: pa.Array, other: pa.Array) -> bool:
    """Equality to the last bit: NaN is NaN, and -0 is not 0."""
    if pa.types.is_floating(one.type):
        number = pa.int64() if one.type == pa.float64() else pa.int32()
        one, other = one.view(number), other.view(number)
    return one.equals(other)


def test_copy_and_stream_give_the_same_columns(database):
    r = random.Random(SEED)
    columns = samples(r)
    names = [f"c{place}" for place in range(len(columns))]
    definition = ", ".join(f"{name} {sample.type}" for name, sample in zip(names, columns, strict=True))
    rows = [
        [None if r.random() < 0.1 else s.edges[row] if row < len(s.edges) else s.draw() for s in columns]
        for row in range(ROWS)
    ]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE everything (id int PRIMARY KEY, {definition})")
        connection.execute("CREATE PUBLICATION stream FOR TABLE everything")
        connection.execute("SELECT pg_create_logical_replication_slot('stream', 'pgoutput')")
        with connection.transaction(), connection.cursor() as cursor:
            insert = f"INSERT INTO everything VALUES ({', '.join(['%s'] * (len(columns) + 1))})"
            cursor.executemany(insert, [[number, *row] for number, row in enumerate(rows)])
        catalog = connection.execute(
            "SELECT atttypid::int8, atttypmod FROM pg_attribute WHERE attrelid = 'everything'::regclass AND attnum > 1 ORDER BY attnum"
        ).fetchall()
        printed = connection.execute("SELECT * FROM everything ORDER BY id").pgresult

    relation, messages = changes_of(stream(database, "stream"))
    assert [(c.type_oid, c.type_modifier) for c in relation.columns[1:]] == catalog
    kinds = [column_type(*place, s.override) for place, s in zip(catalog, columns, strict=True)]
    streamed = decode_changes(
        messages, RelationColumns(("id", *names), (column_type(23, -1), *kinds)), new_columns=frozenset(names)
    ).new

    selected = ", ".join(
        f"{copy_expression(name, *place, s.override)} AS {name}"
        for name, place, s in zip(names, catalog, columns, strict=True)
    )
    copied = read(database, f"SELECT {selected} FROM everything ORDER BY id")

    for place, (name, sample, kind) in enumerate(zip(names, columns, kinds, strict=True)):
        of_copy = from_copy(copied.column(name).combine_chunks(), kind, name)
        of_stream = pc.struct_field(streamed, name)
        what = f"{sample.type} as {kind.spark}, seed {SEED}"
        assert of_copy.type == of_stream.type == kind.arrow, what
        assert of_copy.null_count == sum(row[place] is None for row in rows), what
        different = (
            []
            if same(of_copy, of_stream)
            else [
                pair
                for pair in zip(of_copy, of_stream, strict=True)
                if not same(*(pa.array([s.as_py()], kind.arrow) for s in pair))
            ]
        )
        assert same(of_copy, of_stream), (what, different[:3])
        if kind.spark == "string":
            own = [printed.get_value(row, place + 1) for row in range(ROWS)]
            assert of_stream.to_pylist() == [None if v is None else v.decode() for v in own], what


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_changes_are_what_the_message_decoder_finds(database, identity):
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
