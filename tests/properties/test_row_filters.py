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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.connect.column import Column as ConnectColumn

from pgsieve.assets.steps.row_filters.condition import condition
from pgsieve.assets.steps.row_filters.python import udf
from pgsieve.decoding.row_filters.analysis import parse_row_filter
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.resources.lake.access import SPARK_ERRORS
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.filter_oracle import (
    Candidate,
    Sample,
    Tally,
    Verdict,
    candidate,
    fails,
    filter_columns,
    filter_sample,
)
from tests.fixtures.filter_traps import FAILING, TRAPS
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.random_filters import RELATION, Expressions

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(1 << 32))
BUDGET_SECONDS = float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "20"))
BATCH = 100
GENERATED_EVERY = 5
ERRORS_TRIED = 10

# --- Spark -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = engine().session
    session.sparkContext.setLogLevel("OFF")  # failing tasks are expected here
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    yield session
    session.sparkContext.setLogLevel("WARN")


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


@pytest.fixture(scope="module")
def sample(publisher_server: EmbeddedServer) -> Iterator[Sample]:
    with filter_sample(publisher_server, "row_filters", SEED) as made:
        yield made


@pytest.fixture(scope="module")
def frame(sample: Sample, spark: SparkSession) -> Iterator[DataFrame]:
    cached = spark.createDataFrame(sample.rows).coalesce(1).cache()
    yield cached
    cached.unpersist()


# --- the comparison ----------------------------------------------------------------------


@dataclass
class Checked:
    """A filter, and what the server says of each row."""

    text: str
    row_filter: RowFilter
    expected: list[Verdict]

    @property
    def failing(self) -> list[int]:
        return [number for number, verdict in enumerate(self.expected) if fails(verdict)]


def compare(sample: Sample, frame: DataFrame, batch: list[Candidate], tally: Tally) -> None:
    expected = sample.verdicts([f"({item.text})" for item in batch])
    checked = [
        Checked(item.text, row_filter, truth)
        for item, truth in zip(batch, expected, strict=True)
        for row_filter in item.filters
    ]
    for item, result in zip(checked, found_one_by_one(frame, checked), strict=True):
        wrong = [
            number
            for number, pair in enumerate(zip(item.expected, result, strict=True))
            if not fails(pair[0]) and pair[0] != pair[1]
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
            tally.errors_raised += fails_in_spark(
                frame.where(F.col("id") == item.failing[0]), item.row_filter
            )


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


def fails_in_spark(frame: DataFrame, row_filter: RowFilter) -> bool:
    try:
        spark_verdicts(frame, [row_filter])
    except SPARK_ERRORS:
        return True
    return False


def test_random_filters_are_what_the_server_evaluates(
    sample: Sample, frame: DataFrame, spark: SparkSession
) -> None:
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
            compare(sample, frame, batch, tally)
        batches += 1
        print(f"{tally.compared} compared", flush=True)
    print(f"seed {SEED}: {tally}")
    assert tally.compared >= BATCH
    assert tally.refused.total() < tally.compared / 4, str(tally)
    # Not all: of `1 / a > 0 AND false` Spark computes nothing, and the row is left out either way.
    assert tally.errors_raised >= tally.errors_tried / 2, str(tally)


def test_where_spark_and_postgresql_could_differ(sample: Sample, frame: DataFrame) -> None:
    candidates, tally = [], Tally()
    for text in TRAPS:
        filters = [parse_row_filter(form, sample.columns, RELATION) for form in (sample.printed(text), text)]
        candidates.append(Candidate(text, filters))
    compare(sample, frame, candidates, tally)
    assert (tally.compared, tally.failing_rows) == (2 * len(TRAPS), 0)


@pytest.mark.parametrize("text", FAILING)
def test_what_fails_on_the_server_fails_in_spark(sample: Sample, frame: DataFrame, text: str) -> None:
    (expected,) = sample.verdicts([f"({text})"])
    assert any(map(fails, expected))
    row_filter = parse_row_filter(sample.printed(text), sample.columns, RELATION)
    with pytest.raises(SPARK_ERRORS):
        spark_verdicts(frame, [row_filter])


def test_a_long_list_is_no_deep_expression(sample: Sample, frame: DataFrame) -> None:
    numbers = ", ".join(map(str, range(2, 2000)))
    halves = ", ".join(f"{number}.5" for number in range(300))
    texts = [f"a IN ({numbers})", f"a NOT IN ({numbers})", f"f IN ({halves})"]
    filters = [parse_row_filter(text, sample.columns, RELATION) for text in texts]
    assert spark_verdicts(frame, filters) == sample.verdicts(texts)


def test_many_operands_that_may_fail_in_python_stay_a_small_expression(
    sample: Sample, frame: DataFrame
) -> None:
    divisions = " OR ".join(f"m / (n - {number}.25) > {number}" for number in range(20))
    texts = [f"n IS NOT NULL AND n <> 'NaN' AND ({divisions})", f"CASE WHEN n > 20 THEN {divisions} END"]
    filters = [parse_row_filter(text, sample.columns, RELATION) for text in texts]
    assert spark_verdicts(frame, filters) == sample.verdicts(texts)


def test_every_keyword_that_needs_no_quotes_can_be_a_column(sample: Sample) -> None:
    server = sample.connection
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


def test_filters_are_made_of_what_spark_connect_has(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SPARK_CONNECT_MODE_ENABLED", "1"
    )  # functions make Connect's columns, without a server
    udf.cache_clear()  # those of this session's other columns
    for text in TRAPS:
        made = condition(parse_row_filter(text, sample.columns, RELATION), F.col)
        assert isinstance(made, ConnectColumn), text
    udf.cache_clear()
