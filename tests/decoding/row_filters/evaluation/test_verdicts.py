"""The verdicts of a batch, and its errors. tests/properties proves that the verdicts are PostgreSQL's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import reduce

import pyarrow as pa
import pytest

from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.evaluation.verdicts import compile_filters, compute_verdicts
from pgsieve.decoding.row_filters.nodes import BOOL, INT4, TEXT, ColumnValue, FunctionCall, Node, Not
from pgsieve.decoding.row_filters.strings import FilterValueError

COLUMNS = {
    "a": FilterColumn("a", INT4, -1, ""),
    "t": FilterColumn("t", TEXT, -1, "C"),
    "l": FilterColumn("l", 1007, -1, ""),
}
ROWS = pa.RecordBatch.from_pydict(
    {
        "t": pa.array(["x", None, "xy", ""]),
        "a": pa.array([0, 5, None, -7], pa.int32()),
        "l": pa.array([[1, 2], None, [], [None, 5]], pa.list_(pa.int32())),
    }
)


def tree(text: str) -> Node:
    return parse_row_filter(text, COLUMNS, "public.t").tree


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a > 0 OR t = 'x'", [True, True, None, False]),
        ("a > 0 AND t = 'x'", [False, None, False, False]),
        ("true", [True, True, True, True]),
        ("a <> 0 AND 10 / a > 1", [False, True, None, False]),
        ("5 = ANY (l)", [False, None, False, True]),
        ("a < ALL (l)", [True, None, True, None]),
        ("t LIKE 'x%' OR t IS NULL", [True, True, True, False]),
    ],
)
def test_a_verdict_is_true_false_or_null(text: str, expected: list[bool | None]) -> None:
    results = compute_verdicts(tree(text), ROWS)
    assert results.type == pa.bool_()
    assert results.to_pylist() == expected


def test_an_empty_batch_has_no_verdicts() -> None:
    assert compute_verdicts(tree("10 / a > 1"), ROWS.slice(0, 0)).to_pylist() == []
    assert compute_verdicts(tree("NULL"), ROWS.slice(1, 2)).to_pylist() == [None, None]


def test_an_error_has_postgresqls_words_and_no_value() -> None:
    with pytest.raises(FilterValueError) as raised:
        compute_verdicts(tree("10 / a > 1"), ROWS)
    assert (str(raised.value), raised.value.sqlstate) == ("division by zero [22012]", "22012")


def test_a_row_has_to_pass_one_of_several_filters() -> None:
    evaluate = compile_filters(tree("a = 0 OR a IS NULL"), tree("10 / a < 0"))
    assert evaluate(ROWS).to_pylist() == [True, False, True, True]
    with pytest.raises(FilterValueError):
        compile_filters(tree("10 / a < 0"), tree("a = 0"))(ROWS)


def test_an_expression_without_a_counterpart_is_refused_before_a_row_is_read() -> None:
    with pytest.raises(TypeError, match="the function pg_sleep"):
        compile_filters(FunctionCall("pg_sleep", (ColumnValue("a", type_oid=INT4),), type_oid=BOOL))
    deep = reduce(lambda node, _: Not(node), range(20_000), tree("a > 0"))
    with pytest.raises(RecursionError):
        compile_filters(deep)


def test_without_any_filter_no_row_passes() -> None:
    assert compile_filters()(ROWS).to_pylist() == [False] * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # In the first row the division is not evaluated; in the second row the pattern decides nothing.
        ("(t ~ '^(x|y)+$' OR 10 / a = 2) AND a % 7 <> 5", [True, False, None, False]),
        ("CASE WHEN t ~ '(y)+' THEN a IS NULL ELSE 10 / (a + 1) > 1 END", [True, False, True, False]),
        ("lower(t || 'Z') ~ 'x(y|z)*$'", [True, None, True, False]),
        ("substring(t, 1, 1) ~ 'x' OR t LIKE ''", [True, None, True, True]),
    ],
)
def test_parts_that_cannot_fail_are_computed_by_columns_even_if_others_may_fail(
    text: str, expected: list[bool | None]
) -> None:
    assert compute_verdicts(tree(text), ROWS).to_pylist() == expected


def test_several_threads_may_use_a_condition() -> None:
    evaluate = compile_filters(tree("a = ANY (l) IS NOT TRUE"))
    batches = [ROWS.slice(number % 4) for number in range(40)] * 5
    with ThreadPoolExecutor(4) as pool:
        results = [result.to_pylist() for result in pool.map(evaluate, batches)]
    assert results == [evaluate(batch).to_pylist() for batch in batches]
