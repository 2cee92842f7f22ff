"""Row filters, with PostgreSQL as the oracle: what Spark says of a row is what the server says of it.

Random expressions over random rows. The server evaluates each, and prints it back as `pg_get_expr` does for a
publication; both texts, the typed and the printed one, are parsed, compiled and evaluated by Spark.
PGSIEVE_SEED repeats a run, PGSIEVE_BUDGET_SECONDS is the time to spend.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.connect.column import Column as ConnectColumn

from assets.frames.row_filter import condition
from decoding.errors import PgsieveError, UnsupportedFilterError
from decoding.row_filter import FilterColumn, RowFilter, parse_row_filter
from resources.embedded import EmbeddedServer

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(1 << 32))
BUDGET_SECONDS = float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "20"))
BATCH = 100
ERRORS_TRIED = 10
RANDOM_ROWS = 40

RELATION = "public.sample"
TABLE = """CREATE TABLE sample (id int PRIMARY KEY, s smallint, a int, b bigint, n numeric(10,2), w numeric(38,10),
 m numeric, r real, f double precision, ok boolean, t text, c text COLLATE "C", v varchar(8) COLLATE "C",
 p char(4) COLLATE "C", y bytea, d date, ts timestamp, tz timestamptz, u uuid, "Odd name" int, k jsonb)"""

SPARK_TYPES = {
    "id": "int", "s": "smallint", "a": "int", "b": "bigint", "n": "decimal(10,2)", "w": "decimal(38,10)",
    "m": "string", "r": "float", "f": "double", "ok": "boolean", "t": "string", "c": "string", "v": "string",
    "p": "string", "y": "binary", "d": "date", "ts": "timestamp_ntz", "tz": "timestamp", "u": "string",
    "Odd name": "int", "k": "string",
}  # fmt: skip

SMALL = ["0", "1", "-1", "2", "3", "-3", "5", "7", "10", "-7"]
DECIMALS = [
    "0",
    "0.00",
    "1.5",
    "-1.5",
    "1.50",
    "-0.01",
    "0.01",
    "99999999.99",
    "-99999999.99",
    "2",
    "10",
    "100",
    "3",
]
WIDE = ["9999999999999999999999999999.9999999999", "-9999999999999999999999999999.9999999999", "0.0000000001"]
UNBOUNDED = [
    "NaN", "1e40", "-1e40", "1.000000000000000000000000000000000000000001", "-0.05", "0.050", "0.5",
    "123456789012345678901234567890123456789012", "-1.55", "-1.5000", "-1.45", "-10", "-9",
]  # fmt: skip
FLOATS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "-0",
    "0",
    "0.1",
    "1.5",
    "-1.5",
    "1e20",
    "1e-20",
    "3",
    "16777217",
    "10",
]
STRINGS = [
    "", " ", "a", "A", "ab", "aB", "b", "B", "a ", "a b", "ä", "Ä", "ß", "z", "%", "_", "a%", "a_", "\\", "a\\b", "'",
    "😀", "e\u0301", "é", "a\n", "\ufffd", "１", "ab  ", "NULL", "1",
]  # fmt: skip
POOLS: dict[str, list[str]] = {
    "s": [*SMALL, "32767", "-32768"],
    "a": [*SMALL, "2147483647", "-2147483648", "16777217"],
    "b": [*SMALL, "9223372036854775807", "-9223372036854775808", "9007199254740993"],
    "n": DECIMALS,
    "w": [*DECIMALS, *WIDE],
    "m": [*DECIMALS, *WIDE, *UNBOUNDED],
    "r": FLOATS,
    "f": [*FLOATS, "9007199254740993", "1e300", "-1e-300"],
    "ok": ["true", "false"],
    "t": STRINGS,
    "c": STRINGS,
    "v": STRINGS,
    "p": [text for text in STRINGS if len(text) <= 4],
    "y": ["\\x", "\\x00", "\\x7f", "\\x80", "\\xff", "\\x0001", "\\x61"],
    "d": ["2020-01-01", "2019-12-31", "1969-12-31", "0001-01-01", "9999-12-31", "1500-03-01", "infinity", "-infinity"],
    "ts": ["2020-01-01 00:00:00", "1969-12-31 23:59:59.999999", "0001-01-01 00:00:00", "2020-01-01 00:00:00.000001",
           "1582-10-10 12:00:00", "9999-12-31 23:59:59"],
    "tz": ["2020-01-01 00:00:00+00", "1969-12-31 23:59:59.999999+00", "2020-01-01 00:00:00.000001+00",
           "1582-10-10 12:00:00+00", "2020-01-01 02:00:00+02", "2019-12-31 18:30:00-05:30"],
    "u": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
          "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A12", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "Odd name": SMALL,
    "k": ["{}", "null"],
}  # fmt: skip


# --- the server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS row_filters WITH (FORCE)")
        admin.execute("CREATE DATABASE row_filters TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'")
    with psycopg.connect(publisher_server.conninfo(dbname="row_filters"), autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'; SET client_min_messages = error")
        connection.execute(TABLE)
        yield connection


def filter_columns(connection: psycopg.Connection, relation: str) -> dict[str, FilterColumn]:
    rows = connection.execute(
        """SELECT attname, atttypid::int, atttypmod, coalesce(collname, '')
           FROM pg_attribute LEFT JOIN pg_collation c ON c.oid = attcollation
           WHERE attrelid = %s::regclass AND attnum > 0""",
        (relation,),
    )
    return {row[0]: FilterColumn(*row) for row in rows}


def printed(connection: psycopg.Connection, expression: str) -> str:
    """The expression as a publication of the server has it; raises what the server raises."""
    with connection.transaction(force_rollback=True):
        connection.execute(f"CREATE PUBLICATION p FOR TABLE sample WHERE ({expression})".encode())
        row = connection.execute("SELECT pg_get_expr(prqual, prrelid) FROM pg_publication_rel").fetchone()
    assert row is not None
    return row[0]


def verdicts(connection: psycopg.Connection, expressions: list[str]) -> list[list[bool | None] | None]:
    """What the server says of each row, per expression; None for one that fails on some row."""
    try:
        rows = connection.execute(
            f"SELECT {', '.join(expressions)} FROM sample ORDER BY id".encode()
        ).fetchall()
    except psycopg.DataError:
        if len(expressions) == 1:
            return [None]
        half = len(expressions) // 2
        return verdicts(connection, expressions[:half]) + verdicts(connection, expressions[half:])
    return [list(column) for column in zip(*rows, strict=True)]


# --- Spark -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.session.timeZone", "UTC").config("spark.sql.shuffle.partitions", "2")
    # Expressions are built by the hundred; this takes half of their time.
    builder = builder.config("spark.python.sql.dataFrameDebugging.enabled", "false")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")  # failing tasks are expected here
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    yield session
    session.stop()


def replica(spark: SparkSession, connection: psycopg.Connection) -> DataFrame:
    """The rows of the table in the Spark types of a replica."""
    names = list(SPARK_TYPES)
    # p stays character, text would lose its padding.
    texts = ", ".join(f'"{name}"' + ("" if name == "p" else "::text") for name in names)
    rows = connection.execute(f"SELECT {texts} FROM sample ORDER BY id".encode()).fetchall()
    frame = spark.createDataFrame(rows, ", ".join(f"`{name}` string" for name in names))
    return frame.select([typed(name).alias(name) for name in names]).coalesce(1).cache()


def typed(name: str) -> Column:
    text = F.col(f"`{name}`")
    kind = SPARK_TYPES[name]
    if kind == "binary":
        return F.unhex(F.substring(text, 3, 1000))
    if kind == "date":  # infinities are the least and the greatest date that Spark has
        least, greatest = (F.date_from_unix_date(F.lit(days)) for days in (-(1 << 31), (1 << 31) - 1))
        return (
            F.when(text == "infinity", greatest)
            .when(text == "-infinity", least)
            .otherwise(text.try_cast("date"))
        )
    return text.cast(kind)


def spark_verdicts(frame: DataFrame, filters: list[RowFilter]) -> list[list[bool | None]]:
    columns = [
        condition(row_filter, lambda name: F.col(f"`{name}`")).alias(f"c{number}")
        for number, row_filter in enumerate(filters)
    ]
    rows = frame.select("id", *columns).collect()
    ordered = sorted(rows, key=lambda row: row["id"])
    return [[row[f"c{number}"] for row in ordered] for number in range(len(filters))]


# --- random rows and expressions ---------------------------------------------------------


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def insert_rows(connection: psycopg.Connection, rng: random.Random) -> None:
    """Rows that hold each value of each pool once, then random ones."""
    names = [name for name in SPARK_TYPES if name != "id"]
    targets = ", ".join(f'"{name}"' for name in names)
    every = max(len(pool) for pool in POOLS.values())
    for number in range(every + RANDOM_ROWS):
        if number < every:
            values = [quoted(POOLS[name][number % len(POOLS[name])]) for name in names]
        else:
            values = ["NULL" if rng.random() < 0.15 else quoted(rng.choice(POOLS[name])) for name in names]
        statement = f"INSERT INTO sample (id, {targets}) VALUES ({number}, {', '.join(values)})"
        connection.execute(statement.encode())


@dataclass
class Sample:
    """The same rows on both sides."""

    server: psycopg.Connection
    columns: dict[str, FilterColumn]
    frame: DataFrame


@pytest.fixture(scope="module")
def sample(server: psycopg.Connection, spark: SparkSession) -> Iterator[Sample]:
    insert_rows(server, random.Random(SEED))
    frame = replica(spark, server)
    yield Sample(server, filter_columns(server, "sample"), frame)
    frame.unpersist()


COMPARISON = ["=", "<>", "<", "<=", ">", ">=", "!="]
FAMILIES: dict[str, list[str]] = {
    "integer": ["s", "a", "b", '"Odd name"', "sample.a"],
    "numeric": ["n", "w", "m"],
    "float": ["r", "f"],
    "string": ["c", "v", "p", 't COLLATE "C"'],
    "text": ["t"],
    "boolean": ["ok"],
    "bytea": ["y"],
    "date": ["d"],
    "timestamp": ["ts"],
    "timestamptz": ["tz"],
    "uuid": ["u"],
}
POOL_OF = {
    "text": "t",
    "boolean": "ok",
    "bytea": "y",
    "date": "d",
    "timestamp": "ts",
    "timestamptz": "tz",
    "uuid": "u",
}
CASTS = {
    "integer": ["smallint", "integer", "bigint", "numeric", "int8", "double precision"],
    "numeric": ["numeric", "double precision", "numeric(38,10)"],
    "float": ["double precision", "real", "float8"],
    "string": ["text", "varchar", "bpchar"],
    "text": ["text"],
}


class Expressions:
    """Random text that is mostly a valid expression."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, *choices: Callable[[], str]) -> str:
        return self.rng.choice(choices)()

    def wrapped(self, text: str) -> str:
        """Parentheses, mostly: without them precedence is what is tested."""
        return f"({text})" if self.rng.random() < 0.8 else text

    def constant(self, family: str) -> str:
        rng = self.rng
        if rng.random() < 0.04:
            return "NULL"
        match family:
            case "integer":
                text = rng.choice(POOLS["b"] if rng.random() < 0.1 else SMALL)
                return rng.choice([text, text, f"'{text}'", f"{text}::bigint", f"int4 '{rng.choice(SMALL)}'"])
            case "numeric":
                text = rng.choice(POOLS["m"])
                return rng.choice([text if text != "NaN" else "5", f"'{text}'", f"'{text}'::numeric"])
            case "float":
                text = rng.choice(POOLS["f"])
                return rng.choice(["1.5", f"'{text}'", f"'{text}'::float8", "0.1", f"{rng.choice(SMALL)}"])
            case "string":
                text = quoted(rng.choice(STRINGS))
                return rng.choice([text, text, f"{text}::text", f"{text}::bpchar", f"{text}::varchar(2)"])
            case _:
                return quoted(rng.choice(POOLS[POOL_OF[family]]))

    def value(self, family: str, depth: int) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.35:
            return self.constant(family) if rng.random() < 0.45 else rng.choice(FAMILIES[family])
        inner = lambda: self.value(family, depth - 1)  # noqa: E731
        forms = [
            lambda: f"COALESCE({inner()}, {inner()})",
            lambda: f"NULLIF({inner()}, {inner()})",
            lambda: f"CASE WHEN {self.condition(depth - 1)} THEN {inner()} ELSE {inner()} END",
            lambda: f"CASE {inner()} WHEN {inner()} THEN {inner()} WHEN {inner()} THEN {inner()} END",
        ]
        if family != "text":
            forms.append(lambda: f"{rng.choice(['GREATEST', 'LEAST'])}({inner()}, {inner()}, {inner()})")
        if family in CASTS:
            forms.append(lambda: f"({inner()})::{rng.choice(CASTS[family])}")
        if family in ("integer", "numeric"):
            forms += [
                lambda: self.wrapped(f"{inner()} {rng.choice('+-*/%')} {inner()}"),
                lambda: self.wrapped(f"{self.value('integer', depth - 1)} {rng.choice('+-*')} {inner()}"),
                lambda: f"mod({inner()}, {inner()})",
                lambda: f"abs({inner()})",
                lambda: self.wrapped(f"- {inner()}"),
            ]
        if family == "integer":
            forms.append(lambda: f"length({self.value(rng.choice(['string', 'bytea', 'text']), depth - 1)})")
        if family == "string":
            forms += [
                lambda: f"lower({inner()})",
                lambda: f"upper({inner()})",
                lambda: f'({inner()} COLLATE "C")',
            ]
        return self.pick(*forms)

    def family(self) -> str:
        return self.rng.choice(["integer", "integer", "numeric", "float", "string", "string", *FAMILIES])

    def pair(self, depth: int) -> tuple[str, str]:
        """Two values to compare, mostly of one family, or of two kinds of numbers."""
        rng = self.rng
        left = self.family()
        numbers = ["integer", "numeric", "float"]
        right = rng.choice(numbers) if left in numbers and rng.random() < 0.3 else left
        return self.value(left, depth - 1), self.value(right, depth - 1)

    def comparison(self, depth: int) -> str:
        rng = self.rng
        left, right = self.pair(depth)
        operator = rng.choice(COMPARISON if "t" not in (left, right) else ["=", "<>"])
        return self.wrapped(f"{left} {operator} {right}")

    def listed(self, depth: int) -> str:
        rng = self.rng
        family = self.family()
        items = ", ".join(self.constant(family) for _ in range(rng.randint(1, 5)))
        if rng.random() < 0.1:
            items += f", {self.value(family, depth - 1)}"
        value = self.value(family, depth - 1)
        return self.wrapped(
            rng.choice(
                [
                    f"{value} IN ({items})",
                    f"{value} NOT IN ({items})",
                    f"{value} = ANY (ARRAY[{items}])",
                    f"{value} <> ALL (ARRAY[{items}])",
                    f"{value} {rng.choice(COMPARISON)} {rng.choice(['ANY', 'ALL'])} (ARRAY[{items}])",
                ]
            )
        )

    def like(self, depth: int) -> str:
        rng = self.rng
        pieces = ["%", "_", "a", "b", "\\%", "\\_", "\\\\", "\\a", "ä", "😀", " ", "!", "!%", "."]
        pattern = quoted("".join(rng.choice(pieces) for _ in range(rng.randint(0, 4))))
        escape = rng.choice(["", "", "", " ESCAPE '!'", " ESCAPE ''"])
        operator = (
            rng.choice(["LIKE", "NOT LIKE"]) if escape else rng.choice(["LIKE", "NOT LIKE", "~~", "!~~"])
        )
        value = self.value(rng.choice(["string", "string", "text"]), depth - 1)
        return self.wrapped(f"{value} {operator} {pattern}{escape}")

    def row(self, depth: int) -> str:
        rng = self.rng
        pairs = [self.pair(depth - 1) for _ in range(rng.randint(2, 3))]
        left, right = (", ".join(side) for side in zip(*pairs, strict=True))
        operator = rng.choice([*COMPARISON, "IS DISTINCT FROM", "IS NOT DISTINCT FROM"])
        return self.wrapped(
            rng.choice([f"ROW({left}) {operator} ROW({right})", f"({left}) {operator} ({right})"])
        )

    def condition(self, depth: int) -> str:
        rng = self.rng
        if depth <= 0:
            return rng.choice(["ok", "ok", "true", "false", "NULL", "a > 1", "(c = 'a')", "(s < 3)"])
        inner = lambda: self.condition(depth - 1)  # noqa: E731

        def between() -> str:
            family = self.family()
            family = "string" if family == "text" else family
            low, high, value = (self.value(family, depth - 1) for _ in range(3))
            symmetric = rng.choice(["", "", " SYMMETRIC"])
            return self.wrapped(f"{value} {rng.choice(['', 'NOT '])}BETWEEN{symmetric} {low} AND {high}")

        def distinct() -> str:
            left, right = self.pair(depth)
            return self.wrapped(f"{left} IS {rng.choice(['', 'NOT '])}DISTINCT FROM {right}")

        def null_test() -> str:
            value = rng.choice([self.value(self.family(), depth - 1), "k", "m", "ROW(a, c)", "ROW(ok, d, 1)"])
            return self.wrapped(f"{value} IS {rng.choice(['', 'NOT '])}NULL")

        return self.pick(
            lambda: self.comparison(depth),
            lambda: self.comparison(depth),
            lambda: self.comparison(depth),
            lambda: self.wrapped(f"{inner()} {rng.choice(['AND', 'OR'])} {inner()}"),
            lambda: self.wrapped(f"{inner()} {rng.choice(['AND', 'OR'])} {inner()}"),
            lambda: self.wrapped(f"NOT {inner()}"),
            lambda: self.wrapped(
                f"{inner()} IS {rng.choice(['', 'NOT '])}{rng.choice(['TRUE', 'FALSE', 'UNKNOWN'])}"
            ),
            lambda: self.listed(depth),
            lambda: self.like(depth),
            lambda: self.row(depth),
            lambda: f"CASE WHEN {inner()} THEN {inner()} ELSE {inner()} END",
            lambda: f"COALESCE({inner()}, {inner()})",
            between,
            distinct,
            null_test,
        )


# --- the comparison ----------------------------------------------------------------------


@dataclass
class Tally:
    generated: int = 0
    by_server: int = 0
    refused: int = 0
    failing: int = 0
    failed_in_spark: int = 0
    compared: int = 0

    def __str__(self) -> str:
        return (
            f"{self.generated} generated, {self.by_server} not accepted by the server, {self.refused} refused, "
            f"{self.failing} fail on some row ({self.failed_in_spark} of {min(self.failing, ERRORS_TRIED)} tried "
            f"in Spark too), {self.compared} conditions compared"
        )


@dataclass
class Candidate:
    """An expression the server accepts, and what became of its two texts."""

    text: str
    printed: str
    filters: list[RowFilter]


def candidate(
    connection: psycopg.Connection, columns: dict[str, FilterColumn], text: str, tally: Tally
) -> Any:
    tally.generated += 1
    try:
        stored = printed(connection, text)
    except psycopg.Error:
        tally.by_server += 1
        return None
    filters = []
    for form in (stored, text):
        try:
            filters.append(parse_row_filter(form, columns, RELATION))
        except UnsupportedFilterError:
            pass
        except PgsieveError as error:
            # The server took it, so it is valid; only constants are checked when rows are read.
            raise AssertionError(f"seed {SEED}: the server accepts {form!r} of {text!r}: {error}") from error
    tally.refused += not filters
    if len(filters) == 2 and filters[0].tree == filters[1].tree:
        filters.pop()
    return Candidate(text, stored, filters) if filters else None


def compare(connection: psycopg.Connection, frame: DataFrame, batch: list[Candidate], tally: Tally) -> None:
    expected = verdicts(connection, [f"({item.text})" for item in batch])
    checked = [
        (item, row_filter, truth)
        for item, truth in zip(batch, expected, strict=True)
        for row_filter in item.filters
        if truth is not None
    ]
    found = found_one_by_one(frame, checked)
    for (item, row_filter, truth), result in zip(checked, found, strict=True):
        if truth != result:
            wrong = [
                number for number, pair in enumerate(zip(truth, result, strict=True)) if pair[0] != pair[1]
            ]
            pytest.fail(
                f"seed {SEED}: {item.text!r}, read as {row_filter.expression!r}, tree {row_filter.tree}: rows "
                f"{wrong[:10]}: server {[truth[n] for n in wrong[:10]]}, Spark {[result[n] for n in wrong[:10]]}"
            )
    tally.compared += len(checked)
    for item, truth in zip(batch, expected, strict=True):
        if truth is None:
            tally.failing += 1
            if tally.failing <= ERRORS_TRIED:
                tally.failed_in_spark += fails(frame, item)


def found_one_by_one(
    frame: DataFrame, checked: list[tuple[Candidate, RowFilter, list[bool | None] | None]]
) -> list[list[bool | None]]:
    """Spark's verdicts on expressions that do not fail on the server: when one fails in Spark, show which."""
    filters = [row_filter for _, row_filter, _ in checked]
    try:
        return spark_verdicts(frame, filters)
    except PySparkException as error:
        if len(checked) == 1:
            item, row_filter, _ = checked[0]
            pytest.fail(
                f"seed {SEED}: {item.text!r}, read as {row_filter.expression!r}, fails in Spark only: {error}"
            )
    half = len(checked) // 2
    return found_one_by_one(frame, checked[:half]) + found_one_by_one(frame, checked[half:])


def fails(frame: DataFrame, item: Candidate) -> bool:
    try:
        spark_verdicts(frame, item.filters)
    except PySparkException:
        return True
    return False


def test_random_filters_are_what_the_server_evaluates(sample: Sample) -> None:
    rng = random.Random(SEED)
    expressions, tally = Expressions(rng), Tally()
    deadline = time.monotonic() + BUDGET_SECONDS
    while time.monotonic() < deadline:
        batch: list[Candidate] = []
        while len(batch) < BATCH:
            found = candidate(sample.server, sample.columns, expressions.condition(rng.randint(1, 3)), tally)
            if found is not None:
                batch.append(found)
        compare(sample.server, sample.frame, batch, tally)
    print(f"seed {SEED}: {tally}")
    assert tally.compared >= BATCH
    assert tally.refused < tally.generated / 2, str(tally)
    # Not all: of `1 / a > 0 AND false` Spark computes nothing, and the row is left out either way.
    assert tally.failed_in_spark >= min(tally.failing, ERRORS_TRIED) / 2, str(tally)


# Where Spark and PostgreSQL could differ.
TRAPS = [
    # three-valued logic
    "ok IS NOT TRUE", "ok IS NOT UNKNOWN", "NOT (ok AND a > 1)", "a IN (1, NULL)", "a NOT IN (1, NULL)", "NULL",
    "a = NULL", "a IS NOT DISTINCT FROM NULL", "(a, c) IN ((1, 'a'), (2, NULL))", "ROW(a, c) IS NULL",
    "ROW(a, c) IS NOT NULL", "a = ANY ('{}'::int[])", "a <> ALL ('{1,NULL}'::int[])", "a > ANY (ARRAY[1, NULL])",
    "a > ALL (ARRAY[1, NULL])",
    # truncation and signs of integers
    "s / 3 = -2", "s % 3 = -1", "mod(s, -3) = 1", "s / -3 = 2", "s::bigint / 7::int2 < 0", "(s / 2) * 2 = s",
    "-7 / 2 = -3", "(-2147483648) % -1 = 0", "b % -1 = 0", "s::int + 32767 > 32767", "s / -1 > 0",
    "length(c)::bigint * 2147483647 > 5",
    # an error behind a condition
    "a <> 0 AND (10 / a > 1 OR 10 / a < -1)", "a = 0 OR 10 / a > 1 OR 10 / a < -1",
    "CASE WHEN a <> 0 THEN 10 / a > 1 END", "COALESCE(a = 0 OR NULL, 10 / a > 1)",
    "a <> 0 AND s <> 0 AND 10 / a > 1 / s AND 10 / a < 5",
    # numbers of two kinds
    "b = 9007199254740993", "b::float8 = f", "b > 9007199254740992::float8", "a < 2.5", "a = 2147483647.0", "b < n",
    "b = w", "b < 9223372036854775808", "n = '1.500'", "n > 1.4999999999999999999999999999999999999999",
    "w > 9999999999999999999999999999", "r = 0.1", "r = '0.1'", "r < f", "r = f", "r = a", "n > f", "f > 1e19",
    "r IN (0.1, 1.5)", "r IN ('0.1', '1.5')", "s < 1e3", "n + s > 0", "n * s < 10", "n - 0.005 > 0", "- n < 0",
    "abs(n) = 1.5", "n * 1.001 > 1.5", "w > m", "w = m", "n = m", "a = m",
    # numeric without precision
    "m > 1.5", "m < -1.5", "m = 1.50", "m = 'NaN'", "m >= 'NaN'", "m < 'Infinity'", "m > '-Infinity'", "m = 0",
    "m < 1e-20", "m > 1e39", "m < -1e39", "m > 123456789012345678901234567890123456789011.9",
    "m IN (1.5, 0.05, 10)", "m <> ALL (ARRAY[0.5, 2])", "COALESCE(m, 1) > 0", "COALESCE(m, n, a) <= 1.5",
    "NULLIF(m, 0) IS NULL", "m BETWEEN SYMMETRIC 1 AND -1.5", "m IS DISTINCT FROM w", "m = m", "m > -1.5",
    "CASE WHEN ok THEN m ELSE n END > 1", "m < 1.000000000000000000000000000000000000000001",
    # floating point
    "f = 'NaN'", "f >= 'NaN'", "f > 'Infinity'", "f = -0.0", "f = 0", "f IN (0, 'NaN')", "r = 'NaN'",
    "GREATEST(f, 0) = 'NaN'", "LEAST(f, r, 0) < 0", "f = '-0'", "f = f", "f IS NOT DISTINCT FROM 'NaN'", "- f = 0",
    "abs(f) > 1", "NULLIF(f, 'NaN') IS NULL",
    # the order and the length of strings
    "c < 'b'", "c > 'Z'", "c < 'é'", "c > '😀'", "c >= ''", "c = 'a'", "c = 'a '", "c BETWEEN 'a' AND 'b'",
    "length(c) = 1", "length(c) = 2", "length(v) < 2", "length(y) = 1", "GREATEST(c, 'b') = 'b'",
    "LEAST(c, v) < 'a'", "c = 'NULL'", "c = ''''", "t = 'ä'", "t <> 'a '", "'abc'::varchar(2)::text = 'ab'",
    # padded strings
    "p = 'a'", "p = 'a   '", "p = c", "p = v", "v = 'a '", "p < 'b'", "p > 'a' COLLATE \"C\"", "p IN ('a', 'ab ')",
    "p = ' '", "p = ''", "length(p) = 1", "COALESCE(p, c) = 'a'", "COALESCE(c, p) = 'a'", "COALESCE(v, p) = 'a'",
    "CASE WHEN ok THEN p ELSE v END = 'a'", "NULLIF(p, 'a') IS NULL", "p::text = 'a'", "c::bpchar = 'a'",
    "'a '::bpchar = c", "p::text LIKE 'a'", "p LIKE 'a'", "p LIKE 'a%'", "p LIKE 'a   '", "p LIKE '____'",
    "c = 'a'::char(3)", "p LIKE 'a '::bpchar", "p IS DISTINCT FROM 'a'",
    # patterns
    "c LIKE '_'", "c LIKE '__'", "c LIKE 'a%'", r"c LIKE '%\%'", r"c LIKE '\%'", r"c LIKE '\\'", r"c LIKE '%\\%'",
    "c LIKE '%'", "c LIKE ''", "c LIKE 'a_'", "t LIKE ANY (ARRAY['a%', '_'])", r"c LIKE '\a'", "c LIKE 'a\n'",
    "c LIKE '%!%' ESCAPE '!'", r"c LIKE 'a\b' ESCAPE ''", "t NOT LIKE 'a%'", "t !~~ 'a%'", "c LIKE 'a.*'",
    "NOT c LIKE ALL (ARRAY['%b', 'a%'])",
    # letters
    "lower(c) = 'a'", "lower(c) = 'ä'", "upper(c) = 'SS'", "upper(c) = 'Ä'", "upper(v) = 'AB'",
    # the rest
    r"y < '\x80'", r"y > '\x7f'", r"y = '\x'", r"y BETWEEN '\x00' AND '\x0001'", "ok > false", "ok < true",
    "ok = 'yes'", "ok", "d < '2020-01-01'", "d > '9999-12-31'", "d < '0001-01-01'", "d = '1500-03-01'",
    "ts < '2020-01-01 00:00:00.000001'", "ts = '1582-10-10 12:00:00'", "ts > '0001-01-01'",
    "tz = '2020-01-01 00:00:00+00'", "tz < '2020-01-01 05:30:00+05:30'",
    "tz IN ('2020-01-01 02:00:00+02', '1969-12-31 23:59:59.999999+00')", "k IS NULL",
    "u < 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12'", "u = 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A12'",
    "u > 'A0000000-0000-0000-0000-000000000000'", "ROW(a, c) < ROW(2, 'b')", "ROW(s, a, c) >= ROW(1, 2, 'a')",
    "ROW(a, ok) IS DISTINCT FROM ROW(1, true)", '"Odd name" > 2',
]  # fmt: skip


def test_where_spark_and_postgresql_could_differ(sample: Sample) -> None:
    candidates, tally = [], Tally()
    for text in TRAPS:
        forms = printed(sample.server, text), text
        filters = [parse_row_filter(form, sample.columns, RELATION) for form in forms]
        candidates.append(Candidate(text, forms[0], filters))
    compare(sample.server, sample.frame, candidates, tally)
    assert (tally.compared, tally.failing) == (2 * len(TRAPS), 0)


@pytest.mark.parametrize(
    "text",
    [
        "10 / a > 1", "mod(b, a) = 0", "a + 1 > 0", "s * s > 0", "- b > 0", "abs(s) > 0", "b - 2 < 0",
        "s / (-1)::smallint > 0", "b / -1 > 0", "b::int > 0", "a::smallint > 0", "ok OR 10 / a > 1",
        "CASE WHEN ok THEN 1 / a ELSE 0 END > 0", "CASE WHEN a = 0 THEN NULL ELSE s END = 10 / a",
        "CASE WHEN a = 0 THEN NULL ELSE s END + 10 / a > 0", "NULLIF(CASE WHEN a = 0 THEN NULL ELSE s END, 10 / a) > 0",
    ],
)  # fmt: skip
def test_what_fails_on_the_server_fails_in_spark(sample: Sample, text: str) -> None:
    assert verdicts(sample.server, [f"({text})"]) == [None]
    row_filter = parse_row_filter(printed(sample.server, text), sample.columns, RELATION)
    with pytest.raises(PySparkException):
        spark_verdicts(sample.frame, [row_filter])


def test_a_long_list_is_no_deep_expression(sample: Sample) -> None:
    numbers = ", ".join(map(str, range(2, 2000)))
    halves = ", ".join(f"{number}.5" for number in range(300))
    texts = [f"a IN ({numbers})", f"a NOT IN ({numbers})", f"f IN ({halves})"]
    filters = [parse_row_filter(text, sample.columns, RELATION) for text in texts]
    assert spark_verdicts(sample.frame, filters) == verdicts(sample.server, texts)


def test_every_keyword_that_needs_no_quotes_can_be_a_column(server: psycopg.Connection) -> None:
    words = [row[0] for row in server.execute("SELECT word FROM pg_get_keywords() ORDER BY word")]
    with server.transaction(force_rollback=True):
        definitions = ", ".join(f'"{word}" bigint' for word in words)
        server.execute(f"CREATE TABLE keywords ({definitions})".encode())
        columns = filter_columns(server, "keywords")
        for word in words:
            text = "{0} = 5 AND ({0} + 1 > 2 OR {0} IS NULL) AND {0} BETWEEN 1 AND {0}".format(f'"{word}"')
            server.execute(f"CREATE PUBLICATION p FOR TABLE keywords WHERE ({text})".encode())
            row = server.execute("SELECT pg_get_expr(prqual, prrelid) FROM pg_publication_rel").fetchone()
            server.execute("DROP PUBLICATION p")
            assert row is not None
            as_printed = parse_row_filter(row[0], columns, "public.keywords")
            assert as_printed.columns == {word}
            assert as_printed.tree == parse_row_filter(text, columns, "public.keywords").tree


def test_filters_are_made_of_what_spark_connect_has(
    server: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = filter_columns(server, "sample")
    monkeypatch.setenv(
        "SPARK_CONNECT_MODE_ENABLED", "1"
    )  # functions make Connect's columns, without a server
    for text in TRAPS:
        made = condition(parse_row_filter(text, columns, RELATION), F.col)
        assert isinstance(made, ConnectColumn), text
