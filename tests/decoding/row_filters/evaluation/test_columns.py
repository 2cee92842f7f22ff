"""Row filters evaluated column by column give the verdicts of the evaluation row by row, which are PostgreSQL's."""

from __future__ import annotations

import random
from decimal import Decimal
from itertools import product

import pyarrow as pa
import pytest

from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.evaluation.columns import NotColumnarError, compile_columnar
from pgsieve.decoding.row_filters.evaluation.compiler import compile_tree
from pgsieve.decoding.row_filters.evaluation.strings import like_matcher
from pgsieve.decoding.row_filters.evaluation.values import to_python_values
from pgsieve.decoding.row_filters.nodes import Node
from pgsieve.decoding.values.datetimes import DATE_INFINITY, TIMESTAMP_MINUS_INFINITY

COLUMNS = {
    name: FilterColumn(name, oid, modifier, "C")
    for name, oid, modifier in (
        ("s", nodes.INT2, -1),
        ("a", nodes.INT4, -1),
        ("b", nodes.INT8, -1),
        ("ok", nodes.BOOL, -1),
        ("t", nodes.TEXT, -1),
        ("v", nodes.VARCHAR, 4 + 8),
        ("p", nodes.BPCHAR, 4 + 4),
        ("n", nodes.NUMERIC, 4 + (10 << 16) + 2),
        ("m", nodes.NUMERIC, -1),
        ("f", nodes.FLOAT8, -1),
        ("d", nodes.DATE, -1),
        ("ts", nodes.TIMESTAMP, -1),
        ("u", nodes.UUID, -1),
        ("y", nodes.BYTEA, -1),
    )
}
_UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
VALUES = {
    "s": pa.array([0, 3, -3, 32767, -32768], pa.int16()),
    "a": pa.array([0, 3, -7, 2147483647, -2147483648], pa.int32()),
    "b": pa.array([0, 3, -7, 2**63 - 1, -(2**63)], pa.int64()),
    "ok": pa.array([True, False]),
    "t": pa.array(["", "a", "a ", "ä", "B", "😀", "\uffff"]),
    "v": pa.array(["", "a", "a ", "ä", "B"]),
    "p": pa.array(["    ", "a   ", "ab  ", "ä   ", "😀   "]),
    "n": pa.array([Decimal(0), Decimal("1.50"), Decimal("-99999999.99")], pa.decimal128(10, 2)),
    "m": pa.array(["0", "1.5", "NaN"]),
    "f": pa.array([0.0, -0.0, 1.5, float("nan")]),
    "d": pa.array([0, 18262, -800000, DATE_INFINITY], pa.int32()).cast(pa.date32()),
    "ts": pa.array([0, 1577836800000000, TIMESTAMP_MINUS_INFINITY], pa.int64()).cast(pa.timestamp("us")),
    "u": pa.array([_UUID, "0" * 8 + _UUID[8:]]),
    "y": pa.array([b"", b"\x00", b"\xff"]),
}
ROWS = pa.record_batch(
    {
        name: values.take(pa.array([*range(len(values)), None] * 12, pa.int64()).slice(0, 24))
        for name, values in VALUES.items()
    }
)

BY_COLUMNS = [
    *(f"a {operator} 3" for operator in ("=", "<>", "<", "<=", ">", ">=")),
    *(
        f"n {operator} {c}"
        for operator, c in product(("=", "<", ">="), ("1.5", "1.505", "-99999999.99", "12345678901"))
    ),
    *(f"t {operator} 'a'" for operator in ("=", "<", ">=")),
    *(f"{text} LIKE '{p}'" for text, p in product(("t", "p", "lower(v)"), ("a%", "%_b", "", "a\\_%"))),
    *(f"{text} ~ '{p}'" for text, p in product(("t", "p", "t || v"), ("^(a|b)+$", "[^b]", "", "ä?.$"))),
    "s < a",
    "s < b AND a < b",
    "b % 16 = 3 OR a % 7 = -0",
    "a % 5 = -2",
    "p = 'ab'",
    "p <> 'a   '",
    "v = t",
    "t < '\uffff' AND t > 'B'",
    "ok",
    "NOT ok OR a IS NULL",
    "ok IS NOT TRUE AND (a > 0) IS UNKNOWN",
    "ok IS FALSE",
    "a IS NOT DISTINCT FROM s",
    "a IS DISTINCT FROM NULL",
    "n IS NOT DISTINCT FROM 1.5",
    "a IN (1, 3, NULL)",
    "a NOT IN (1, 3, NULL)",
    "a NOT IN (1, 3)",
    "t IN ('a', 'ä', '')",
    "p IN ('a', '😀')",
    "d > '2019-12-31' AND d <> 'infinity'",
    "d = 'infinity' OR ts = '-infinity'",
    "ts >= '2020-01-01'",
    f"u = '{_UUID}' OR u < '{_UUID}'",
    "y > '\\x00'",
    "m IS NULL OR f IS NOT NULL",
    "true",
    "a = NULL",
    "NULL",
    "a BETWEEN 0 AND 3",
]
ROW_BY_ROW = [
    "m > 1",
    "f > 1",
    "a + 1 > 3",
    "10 / a > 1",
    "a % s = 1",
    "length(t) = 1",
    "substring(t, 1, a) LIKE 'a%'",
    "n + 1 > 2",
    "n < 'NaN'",
]


def tree(text: str) -> Node:
    return parse_row_filter(text, COLUMNS, "public.t").tree


def row_by_row(node: Node) -> list[bool | None]:
    program = compile_tree(node)
    values = [to_python_values(ROWS.column(name), oid) for name, oid in program.columns.items()]
    rows = zip(*values, strict=True) if values else [()] * ROWS.num_rows
    return [program.evaluate([*row, *program.scratch_values]) for row in rows]


def by_columns(node: Node) -> list[bool | None]:
    computed = compile_columnar(node)(ROWS)
    assert computed.type == pa.bool_()
    return [computed.as_py()] * ROWS.num_rows if isinstance(computed, pa.Scalar) else computed.to_pylist()


@pytest.mark.parametrize("text", BY_COLUMNS)
def test_columns_give_the_verdicts_of_rows(text: str) -> None:
    assert by_columns(tree(text)) == row_by_row(tree(text))


@pytest.mark.parametrize("text", ROW_BY_ROW)
def test_filters_that_may_fail_or_compare_specially_are_evaluated_row_by_row(text: str) -> None:
    with pytest.raises(NotColumnarError):
        compile_columnar(tree(f"a > 0 AND ({text})"))


def _combined(draw: random.Random, depth: int) -> str:
    if not depth:
        return f"({draw.choice(BY_COLUMNS)})"
    match draw.randrange(4):
        case 0:
            return f"(NOT {_combined(draw, depth - 1)})"
        case 1:
            condition = _combined(draw, depth - 1)
            return f"({condition} IS {draw.choice(('TRUE', 'NOT TRUE', 'NOT FALSE', 'UNKNOWN', 'NOT NULL'))})"
        case _:
            connective = draw.choice((" AND ", " OR "))
            return f"({connective.join(_combined(draw, depth - 1) for _ in range(draw.randint(2, 3)))})"


def test_combinations_give_the_verdicts_of_rows() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        text = _combined(draw, draw.randint(1, 3))
        assert by_columns(tree(text)) == row_by_row(tree(text)), text


def test_patterns_match_the_same_by_columns_as_by_rows() -> None:
    """All patterns of up to four parts. Arrow treats patterns with a percent sign at an end specially."""
    texts = ["".join(text) for size in range(4) for text in product("a\\%\n", repeat=size)]
    rows = pa.record_batch({"t": pa.array(texts)})
    column = nodes.ColumnValue("t", "C", type_oid=nodes.TEXT)
    for size in range(5):
        for parts in product(("a", "%", "_", "\\%", "\\_", "\\\\"), repeat=size):
            pattern = "".join(parts)
            matches = compile_columnar(nodes.Like(column, pattern))(rows).to_pylist()
            assert matches == [like_matcher(pattern)(text) for text in texts], pattern
