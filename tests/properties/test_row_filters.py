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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.connect.column import Column as ConnectColumn

from pgsieve.assets.steps.row_filters.condition import condition
from pgsieve.assets.steps.row_filters.python import udf
from pgsieve.decoding.errors import PgsieveError, UnsupportedFilterError
from pgsieve.decoding.row_filters.analysis import FilterColumn, RowFilter, parse_row_filter
from pgsieve.decoding.row_filters.letter_case import CaseMappings, of_server
from pgsieve.decoding.values.types import column_type, from_text
from pgsieve.resources.lake.lake import SPARK_ERRORS
from pgsieve.resources.postgres.case_mappings import case_mapping
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.filter_traps import FAILING, TRAPS
from tests.fixtures.locales import locales
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.random_filters import POOLS, RELATION, TABLE, Expressions, quoted

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(1 << 32))
BUDGET_SECONDS = float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "20"))
BATCH = 100
GENERATED_EVERY = 5
ERRORS_TRIED = 10
RANDOM_ROWS = 40

# What a row comes to: true, false, NULL, or an error.
FAILS: Final = "fails"
Verdict: TypeAlias = bool | str | None

VERDICT = """CREATE FUNCTION verdict(expression text, row_id int, OUT result text) LANGUAGE plpgsql AS $$
BEGIN
  EXECUTE format('SELECT (%s)::text FROM sample WHERE id = $1', expression) INTO result USING row_id;
EXCEPTION WHEN OTHERS THEN
  result := 'fails';
END $$"""

# --- the server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(publisher_server: EmbeddedServer) -> Iterator[psycopg.Connection]:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS row_filters WITH (FORCE)")
        locale = next(iter(locales(admin).values()))
        admin.execute(f"CREATE DATABASE row_filters TEMPLATE template0 ENCODING 'UTF8' {locale}".encode())
    with psycopg.connect(publisher_server.conninfo(dbname="row_filters"), autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'; SET client_min_messages = error")
        connection.execute(TABLE)
        connection.execute(VERDICT)
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


def verdicts(connection: psycopg.Connection, expressions: list[str]) -> list[list[Verdict]]:
    """What the server says of each row, per expression."""
    try:
        rows = connection.execute(
            f"SELECT {', '.join(expressions)} FROM sample ORDER BY id".encode()
        ).fetchall()
    except psycopg.Error:
        if len(expressions) == 1:
            each = connection.execute("SELECT verdict(%s, id) FROM sample ORDER BY id", expressions)
            return [[{"true": True, "false": False, None: None}.get(row[0], FAILS) for row in each]]
        half = len(expressions) // 2
        return verdicts(connection, expressions[:half]) + verdicts(connection, expressions[half:])
    return [list(column) for column in zip(*rows, strict=True)]


# --- Spark -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = engine().session
    session.sparkContext.setLogLevel("OFF")  # failing tasks are expected here
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    yield session
    session.sparkContext.setLogLevel("WARN")


def replica(spark: SparkSession, connection: psycopg.Connection) -> DataFrame:
    """The rows of the table as a replica has them, from what the server prints."""
    names = filter_columns(connection, "sample")
    printed = ", ".join(f'CASE WHEN num_nulls("{name}") = 0 THEN concat("{name}") END' for name in names)
    rows = connection.execute(f"SELECT {printed} FROM sample ORDER BY id".encode()).fetchall()
    arrays = {}
    for column, values in zip(names.values(), zip(*rows, strict=True), strict=True):
        kind = column_type(column.type_oid, column.type_modifier)
        arrays[column.name] = from_text(pa.array(values, pa.string()), kind, column.name)
    return spark.createDataFrame(pa.table(arrays)).coalesce(1).cache()


def spark_verdicts(
    frame: DataFrame, filters: list[RowFilter], failing: list[list[int]] | None = None
) -> list[list[Verdict]]:
    """What Spark says of each row, per filter; `failing` are the rows that it is not asked for."""
    columns = []
    for number, (row_filter, rows) in enumerate(zip(filters, failing or [[]] * len(filters), strict=True)):
        evaluated = ~F.col("id").isin(rows) if rows else None
        compiled = condition(row_filter, lambda name: F.col(f"`{name}`"), evaluated)
        guarded = compiled if evaluated is None else F.when(evaluated, compiled)
        columns.append(guarded.alias(f"c{number}"))
    ordered = sorted(frame.select("id", *columns).collect(), key=lambda row: row["id"])
    return [[row[f"c{number}"] for row in ordered] for number in range(len(filters))]


# --- rows --------------------------------------------------------------------------------


def insert_rows(connection: psycopg.Connection, rng: random.Random) -> None:
    """Rows that hold each value of each pool once, then random ones."""
    targets = ", ".join(f'"{name}"' for name in POOLS)
    every = max(len(pool) for pool in POOLS.values())
    for number in range(every + RANDOM_ROWS):
        if number < every:
            values = [quoted(pool[number % len(pool)]) for pool in POOLS.values()]
        else:
            values = ["NULL" if rng.random() < 0.15 else quoted(rng.choice(pool)) for pool in POOLS.values()]
        statement = f"INSERT INTO sample (id, {targets}) VALUES ({number}, {', '.join(values)})"
        connection.execute(statement.encode())


@dataclass
class Sample:
    """The same rows on both sides."""

    server: psycopg.Connection
    columns: dict[str, FilterColumn]
    frame: DataFrame
    mappings: CaseMappings


@pytest.fixture(scope="module")
def sample(server: psycopg.Connection, spark: SparkSession) -> Iterator[Sample]:
    insert_rows(server, random.Random(SEED))
    frame = replica(spark, server)
    mapping = case_mapping(server, "default", words=True)
    yield Sample(server, filter_columns(server, "sample"), frame, of_server({"default": mapping}))
    frame.unpersist()


# --- the comparison ----------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the expressions that were drawn."""

    generated: int = 0
    by_server: int = 0
    compared: int = 0
    rows: int = 0
    failing_rows: int = 0
    errors_tried: int = 0
    errors_raised: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        refused = ", ".join(f"{reason}: {count}" for reason, count in self.refused.most_common(12))
        return (
            f"{self.generated} generated, {self.by_server} not accepted by the server, {self.compared} conditions "
            f"compared on {self.rows} rows, {self.failing_rows} rows fail ({self.errors_raised} of "
            f"{self.errors_tried} tried in Spark too), {self.refused.total()} refused ({refused})"
        )


@dataclass
class Candidate:
    """An expression the server accepts, and what became of its two texts."""

    text: str
    printed: str
    filters: list[RowFilter]


def candidate(sample: Sample, text: str, tally: Tally) -> Candidate | None:
    tally.generated += 1
    try:
        stored = printed(sample.server, text)
    except psycopg.Error:
        tally.by_server += 1
        return None
    filters, reason = [], ""
    for form in (stored, text):
        try:
            filters.append(parse_row_filter(form, sample.columns, RELATION, sample.mappings))
        except UnsupportedFilterError as error:
            reason = error.message.rsplit(": ", 1)[1]
        except PgsieveError as error:
            # The server took it, so it is valid; only constants are checked when rows are read.
            raise AssertionError(f"seed {SEED}: the server accepts {form!r} of {text!r}: {error}") from error
    if not filters:
        tally.refused[reason] += 1
        return None
    if len(filters) == 2 and filters[0].tree == filters[1].tree:
        filters.pop()
    return Candidate(text, stored, filters)


@dataclass
class Checked:
    """A filter, and what the server says of each row."""

    text: str
    row_filter: RowFilter
    expected: list[Verdict]

    @property
    def failing(self) -> list[int]:
        return [number for number, verdict in enumerate(self.expected) if verdict is FAILS]


def compare(connection: psycopg.Connection, frame: DataFrame, batch: list[Candidate], tally: Tally) -> None:
    expected = verdicts(connection, [f"({item.text})" for item in batch])
    checked = [
        Checked(item.text, row_filter, truth)
        for item, truth in zip(batch, expected, strict=True)
        for row_filter in item.filters
    ]
    for item, result in zip(checked, found_one_by_one(frame, checked), strict=True):
        wrong = [
            number
            for number, pair in enumerate(zip(item.expected, result, strict=True))
            if pair[0] is not FAILS and pair[0] != pair[1]
        ]
        if wrong:
            pytest.fail(
                f"seed {SEED}: {item.text!r}, read as {item.row_filter.expression!r}, tree {item.row_filter.tree}: "
                f"rows {wrong[:10]}: server {[item.expected[n] for n in wrong[:10]]}, "
                f"Spark {[result[n] for n in wrong[:10]]}"
            )
        tally.compared += 1
        tally.rows += len(result)
        tally.failing_rows += len(item.failing)
        if item.failing and tally.errors_tried < ERRORS_TRIED:
            tally.errors_tried += 1
            tally.errors_raised += fails(frame.where(F.col("id") == item.failing[0]), item.row_filter)


def found_one_by_one(frame: DataFrame, checked: list[Checked]) -> list[list[Verdict]]:
    """Spark's verdicts on rows that do not fail on the server: when one fails in Spark, show which."""
    filters, failing = [item.row_filter for item in checked], [item.failing for item in checked]
    try:
        return spark_verdicts(frame, filters, failing)
    except SPARK_ERRORS as error:
        if len(checked) == 1:
            item = checked[0]
            pytest.fail(
                f"seed {SEED}: {item.text!r}, read as {item.row_filter.expression!r}, fails in Spark only: {error}"
            )
    half = len(checked) // 2
    return found_one_by_one(frame, checked[:half]) + found_one_by_one(frame, checked[half:])


@contextmanager
def code_generation(spark: SparkSession, *, enabled: bool) -> Iterator[None]:
    settings = {
        "spark.sql.codegen.wholeStage": str(enabled).lower(),
        "spark.sql.codegen.factoryMode": "FALLBACK" if enabled else "NO_CODEGEN",
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in settings:
            spark.conf.unset(name)


def fails(frame: DataFrame, row_filter: RowFilter) -> bool:
    try:
        spark_verdicts(frame, [row_filter])
    except SPARK_ERRORS:
        return True
    return False


def test_random_filters_are_what_the_server_evaluates(sample: Sample, spark: SparkSession) -> None:
    rng = random.Random(SEED)
    expressions, tally = Expressions(rng), Tally()
    print(f"reproduce: PGSIEVE_SEED={SEED}", flush=True)
    deadline, batches = time.monotonic() + BUDGET_SECONDS, 0
    while time.monotonic() < deadline:
        batch: list[Candidate] = []
        while len(batch) < BATCH:
            sampled = candidate(sample, expressions.condition(rng.randint(1, 3)), tally)
            if sampled is not None:
                batch.append(sampled)
        # Compiling generated code takes most of the time; both ways of evaluating are Spark's.
        generated = batches % GENERATED_EVERY == 0
        with code_generation(spark, enabled=generated):
            compare(sample.server, sample.frame, batch, tally)
        batches += 1
        print(f"{tally.compared} compared", flush=True)
    print(f"seed {SEED}: {tally}")
    assert tally.compared >= BATCH
    assert tally.refused.total() < tally.compared / 4, str(tally)
    # Not all: of `1 / a > 0 AND false` Spark computes nothing, and the row is left out either way.
    assert tally.errors_raised >= tally.errors_tried / 2, str(tally)


def test_where_spark_and_postgresql_could_differ(sample: Sample) -> None:
    candidates, tally = [], Tally()
    for text in TRAPS:
        forms = printed(sample.server, text), text
        filters = [parse_row_filter(form, sample.columns, RELATION) for form in forms]
        candidates.append(Candidate(text, forms[0], filters))
    compare(sample.server, sample.frame, candidates, tally)
    assert (tally.compared, tally.failing_rows) == (2 * len(TRAPS), 0)


@pytest.mark.parametrize("text", FAILING)
def test_what_fails_on_the_server_fails_in_spark(sample: Sample, text: str) -> None:
    (expected,) = verdicts(sample.server, [f"({text})"])
    assert FAILS in expected
    row_filter = parse_row_filter(printed(sample.server, text), sample.columns, RELATION)
    with pytest.raises(SPARK_ERRORS):
        spark_verdicts(sample.frame, [row_filter])


def test_a_long_list_is_no_deep_expression(sample: Sample) -> None:
    numbers = ", ".join(map(str, range(2, 2000)))
    halves = ", ".join(f"{number}.5" for number in range(300))
    texts = [f"a IN ({numbers})", f"a NOT IN ({numbers})", f"f IN ({halves})"]
    filters = [parse_row_filter(text, sample.columns, RELATION) for text in texts]
    assert spark_verdicts(sample.frame, filters) == verdicts(sample.server, texts)


def test_many_operands_that_may_fail_in_python_stay_a_small_expression(sample: Sample) -> None:
    divisions = " OR ".join(f"m / (n - {number}.25) > {number}" for number in range(20))
    texts = [f"n IS NOT NULL AND n <> 'NaN' AND ({divisions})", f"CASE WHEN n > 20 THEN {divisions} END"]
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
    udf.cache_clear()  # those of this session's other columns
    for text in TRAPS:
        made = condition(parse_row_filter(text, columns, RELATION), F.col)
        assert isinstance(made, ConnectColumn), text
    udf.cache_clear()
