"""Row filters with PostgreSQL as the oracle: the evaluator gives the server's verdict for each row, also its errors and SQLSTATEs.

Random expressions run over random rows. The server evaluates each expression and prints it as `pg_get_expr` does for a publication.
pgsieve parses and evaluates both texts, the typed and the printed one. PGSIEVE_SEED repeats a run, PGSIEVE_BUDGET_SECONDS is the time to
spend.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from pgsieve.decoding.row_filters.analysis import parse_row_filter
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters, compute_verdicts
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.resources.lake.delta.records import quote_name
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
from tests.fixtures.filter_traps import FAILING, NULL_TESTS, TRAPS
from tests.fixtures.pgsieve_replica import engine
from tests.fixtures.random_filters import Expressions
from tests.fixtures.tries import budget_seconds, drawn_seed

SEED = drawn_seed()
BUDGET_SECONDS = budget_seconds(6)
BATCH = 50
#: Encodings of one byte and of several; some share characters with UTF-8, or need two characters of it; SQL_ASCII has no encoding.
ENCODINGS = ("LATIN1", "LATIN9", "KOI8R", "EUC_KR", "EUC_JP", "EUC_JIS_2004", "SQL_ASCII")
#: Filters whose result may differ in another encoding than UTF-8.
ENCODED = [
    "c = '∪'", "c <> '€' AND t = 'ä'", "c = t", "c = v", "v IN ('ä', 'я', '日本')", "c < 'b'", "c > 'é'", "greatest(c, v) = 'ä'",
    "(c, a) < ('ä', 1)", "octet_length(c) = 2", "bit_length(t) = 8", "ascii(c) > 200", "chr(233) = c", "chr(97) = c", "length(c) = 1",
    "left(c, 1) = 'ä'", "right(t, 1) = 'a'", "substring(c from 2) = 'b'", "position('b' in t) = 2", "strpos(c, 'ä') = 1", "lpad(c, 2) = 'a'",
    "reverse(c) = 'ba'", "c LIKE '_'", "c LIKE 'a%'", "t LIKE '%я%'", "c ~ '^.$'", "c ~ '[à-ý]'", "c ~ '^[a-z]+$'", "c ~ '[^ä]'",
    "md5(c) = md5('ä')", "upper(c) = 'A'", "upper(c) = 'Ä'", "lower(t) = 'a'", "c ILIKE 'A%'", "'ä' = ANY (ac)", "ac @> ARRAY['a']",
    "array_position(ac, 'b') = 2", "ac < ARRAY['b']", "translate(c, 'ä', 'a') = 'a'", "btrim(c, 'ä') = ''", "replace(c, 'ä', 'a') = 'a'",
    "split_part(c, 'ä', 1) = ''", "starts_with(c, 'a')", "c::varchar(1) = 'ä'", "'ä'::varchar(1) = c", "c || 'b' = 'ab'", "nullif(c, v) IS NULL",
    "c IS DISTINCT FROM t", "p = 'ä'", "c BETWEEN 'a' AND 'z'", "CASE c WHEN '∪' THEN true END",
]  # fmt: skip


@pytest.fixture(scope="module")
def sample(publisher_server: EmbeddedServer) -> Iterator[Sample]:
    with filter_sample(publisher_server, "filter_evaluation", SEED) as made:
        yield made


@pytest.fixture(scope="module")
def rows(sample: Sample) -> pa.RecordBatch:
    (batch,) = sample.rows.combine_chunks().to_batches()
    return batch


def pgsieve_verdicts(rows: pa.RecordBatch, row_filter: RowFilter, failing: bool) -> list[Verdict]:
    """pgsieve's verdict of each row. Rows are evaluated one by one if the server fails for one of them."""
    evaluate = compile_filters(row_filter.tree)
    if not failing:
        return evaluate(rows).to_pylist()
    return [one(evaluate, rows.slice(number, 1)) for number in range(rows.num_rows)]


def one(evaluate: Callable[[pa.RecordBatch], pa.BooleanArray], row: pa.RecordBatch) -> Verdict:
    try:
        return evaluate(row)[0].as_py()
    except (FilterValueError, NumericError) as error:
        return error.sqlstate or "none"


def compare(sample: Sample, rows: pa.RecordBatch, batch: list[Candidate], tally: Tally) -> int:
    """Compare both sides. Return how many filters were left out because the server fails for every row."""
    left_out = 0
    expected = sample.verdicts([f"({item.text})" for item in batch])
    for item, truth in zip(batch, expected, strict=True):
        failing = any(map(fails, truth))
        if failing and len(set(truth)) == 1:
            left_out += 1
            continue  # The planner computes constants before it reads a row, so their error comes first.
        for row_filter in item.filters:
            described = f"{item.text!r}, read as {row_filter.expression!r}, tree {row_filter.tree}"
            try:
                result = pgsieve_verdicts(rows, row_filter, failing)
            except Exception as error:
                raise AssertionError(f"seed {SEED}: {described}: {error!r}") from error
            wrong = [
                number for number, pair in enumerate(zip(truth, result, strict=True)) if pair[0] != pair[1]
            ]
            assert not wrong, (
                f"seed {SEED}: {described}: rows {wrong[:10]}: server {[truth[n] for n in wrong[:10]]}, "
                f"here {[result[n] for n in wrong[:10]]}"
            )
            tally.compared += 1
            tally.rows += len(result)
            tally.failing_rows += sum(map(fails, truth))
    return left_out


def compare_random_filters(sample: Sample, rows: pa.RecordBatch, seconds: float) -> Tally:
    rng = random.Random(SEED)
    expressions, tally = Expressions(rng), Tally()
    print(f"reproduce: PGSIEVE_SEED={SEED}", flush=True)
    deadline = time.monotonic() + seconds
    # Some filters of a batch may be left out because the server fails for every row.
    while tally.compared < BATCH or time.monotonic() < deadline:
        batch: list[Candidate] = []
        while len(batch) < BATCH:
            sampled = candidate(sample, expressions.condition(rng.randint(1, 3)), tally)
            if sampled is not None:
                batch.append(sampled)
        compare(sample, rows, batch, tally)
    print(f"drawn: seed {SEED}, {tally}")
    return tally


def test_random_filters_give_the_servers_verdicts(sample: Sample, rows: pa.RecordBatch) -> None:
    tally = compare_random_filters(sample, rows, BUDGET_SECONDS)
    assert tally.compared >= BATCH
    assert tally.refused.total() < tally.compared / 4, str(tally)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_filters_over_text_of_another_encoding_give_the_servers_verdicts(
    publisher_server: EmbeddedServer, encoding: str
) -> None:
    with filter_sample(publisher_server, "encoded_filters", SEED, encoding) as sample:
        (rows,) = sample.rows.combine_chunks().to_batches()
        tally = compare_random_filters(sample, rows, BUDGET_SECONDS / 4)
        candidates = [
            pgsieve_verdicts
            for text in ENCODED
            if (pgsieve_verdicts := candidate(sample, text, tally)) is not None
        ]
        compare(sample, rows, candidates, tally)
    refused = sum(n for reason, n in tally.refused.items() if f"encoding, which is {encoding}" in reason)
    assert refused
    assert tally.compared > BATCH / 2


@pytest.mark.parametrize("texts", [TRAPS, FAILING, NULL_TESTS])
def test_difficult_filters(sample: Sample, rows: pa.RecordBatch, texts: list[str]) -> None:
    candidates = [
        Candidate(text, [sample.parsed(sample.printed(text)), sample.parsed(text)]) for text in texts
    ]
    left_out = compare(sample, rows, candidates, tally := Tally())
    # The rows are random: with some rows a filter fails for all of them.
    assert left_out < len(texts) // 4
    assert tally.compared == 2 * (len(texts) - left_out)


@pytest.mark.drawn
@pytest.mark.spark
def test_rows_from_spark_get_the_same_verdicts(sample: Sample, rows: pa.RecordBatch) -> None:
    """It takes long because Spark starts. As on executors, `mapInArrow` runs over the sample's columns, in two tasks."""
    trees = [sample.parsed(text).tree for text in TRAPS]
    names = rows.schema.names

    def evaluated(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [batch.column("id"), *(compute_verdicts(tree, batch) for tree in trees)]
            yield pa.RecordBatch.from_arrays(columns, ["id", *(f"c{number}" for number in range(len(trees)))])

    ddl = ", ".join(["id int", *(f"c{number} boolean" for number in range(len(trees)))])
    frame = engine().session.createDataFrame(pa.Table.from_batches([rows])).repartition(2)
    pgsieve_verdicts = (
        frame.select(*(F.col(quote_name(name)) for name in names))
        .mapInArrow(evaluated, ddl)
        .toArrow()
        .sort_by("id")
    )
    for number, (text, tree) in enumerate(zip(TRAPS, trees, strict=True)):
        assert pgsieve_verdicts[f"c{number}"].to_pylist() == compute_verdicts(tree, rows).to_pylist(), text


def test_a_long_list_is_looked_up(sample: Sample, rows: pa.RecordBatch) -> None:
    numbers = ", ".join(map(str, range(2, 2000)))
    halves = ", ".join(f"{number}.5" for number in range(300))
    texts = [f"a IN ({numbers})", f"a NOT IN ({numbers})", f"f IN ({halves})"]
    assert [
        compute_verdicts(sample.parsed(text).tree, rows).to_pylist() for text in texts
    ] == sample.verdicts(texts)


def test_several_operands_that_may_fail(sample: Sample, rows: pa.RecordBatch) -> None:
    divisions = " OR ".join(f"m / (n - {number}.25) > {number}" for number in range(20))
    texts = [f"n IS NOT NULL AND n <> 'NaN' AND ({divisions})", f"CASE WHEN n > 20 THEN {divisions} END"]
    assert [
        compute_verdicts(sample.parsed(text).tree, rows).to_pylist() for text in texts
    ] == sample.verdicts(texts)


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
