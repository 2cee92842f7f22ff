"""Row filters evaluated in this process, with PostgreSQL as the oracle: verdicts, and errors with their SQLSTATE.

Random expressions over random rows, as in `test_row_filters.py`. PGSIEVE_SEED repeats a run, PGSIEVE_BUDGET_SECONDS is the
time to spend.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from pgsieve.decoding.row_filters.evaluation.verdicts import condition, verdicts
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.row_filters.numeric import NumericError
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.resources.postgres.embedded import EmbeddedServer
from tests.fixtures.filter_oracle import Candidate, Sample, Tally, Verdict, candidate, fails, filter_sample
from tests.fixtures.filter_traps import FAILING, TRAPS
from tests.fixtures.random_filters import Expressions

SEED = int(os.environ.get("PGSIEVE_SEED") or random.SystemRandom().randrange(1 << 32))
BUDGET_SECONDS = float(os.environ.get("PGSIEVE_BUDGET_SECONDS", "4"))
BATCH = 50


@pytest.fixture(scope="module")
def sample(publisher_server: EmbeddedServer) -> Iterator[Sample]:
    with filter_sample(publisher_server, "filter_evaluation", SEED) as made:
        yield made


@pytest.fixture(scope="module")
def rows(sample: Sample) -> pa.RecordBatch:
    (batch,) = sample.rows.combine_chunks().to_batches()
    return batch


def found(rows: pa.RecordBatch, row_filter: RowFilter, failing: bool) -> list[Verdict]:
    """What each row comes to here; row by row where the server fails for one."""
    evaluate = condition(row_filter.tree)
    if not failing:
        return evaluate(rows).to_pylist()
    return [one(evaluate, rows.slice(number, 1)) for number in range(rows.num_rows)]


def one(evaluate: Callable[[pa.RecordBatch], pa.BooleanArray], row: pa.RecordBatch) -> Verdict:
    try:
        return evaluate(row)[0].as_py()
    except (FilterValueError, NumericError) as error:
        return error.sqlstate or "none"


def compare(sample: Sample, rows: pa.RecordBatch, batch: list[Candidate], tally: Tally) -> int:
    """Compare both sides; how many filters were left out, as the server fails for every row alike."""
    left_out = 0
    expected = sample.verdicts([f"({item.text})" for item in batch])
    for item, truth in zip(batch, expected, strict=True):
        failing = any(map(fails, truth))
        if failing and len(set(truth)) == 1:
            left_out += 1
            continue  # The planner computes constants before any row is read, and their error comes first.
        for row_filter in item.filters:
            described = f"{item.text!r}, read as {row_filter.expression!r}, tree {row_filter.tree}"
            try:
                result = found(rows, row_filter, failing)
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


def test_random_filters_are_what_the_server_evaluates(sample: Sample, rows: pa.RecordBatch) -> None:
    rng = random.Random(SEED)
    expressions, tally = Expressions(rng), Tally()
    print(f"reproduce: PGSIEVE_SEED={SEED}", flush=True)
    deadline = time.monotonic() + BUDGET_SECONDS
    while time.monotonic() < deadline:
        batch: list[Candidate] = []
        while len(batch) < BATCH:
            sampled = candidate(sample, expressions.condition(rng.randint(1, 3)), tally)
            if sampled is not None:
                batch.append(sampled)
        compare(sample, rows, batch, tally)
    print(f"seed {SEED}: {tally}")
    assert tally.compared >= BATCH


@pytest.mark.parametrize("texts", [TRAPS, FAILING])
def test_what_is_known_to_be_difficult(sample: Sample, rows: pa.RecordBatch, texts: list[str]) -> None:
    candidates = [
        Candidate(text, [sample.parsed(sample.printed(text)), sample.parsed(text)]) for text in texts
    ]
    left_out = compare(sample, rows, candidates, tally := Tally())
    # The rows are drawn: in some draws a filter fails for all of them.
    assert left_out < len(texts) // 4
    assert tally.compared == 2 * (len(texts) - left_out)


def test_a_long_list_is_looked_up(sample: Sample, rows: pa.RecordBatch) -> None:
    numbers = ", ".join(map(str, range(2, 2000)))
    halves = ", ".join(f"{number}.5" for number in range(300))
    texts = [f"a IN ({numbers})", f"a NOT IN ({numbers})", f"f IN ({halves})"]
    assert [verdicts(sample.parsed(text).tree, rows).to_pylist() for text in texts] == sample.verdicts(texts)
