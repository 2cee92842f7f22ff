"""Arrow's values and constants as values of the evaluator, and their order."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf, nan

import pyarrow as pa
import pytest

from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.evaluation.values import rank_function, to_python_value, to_python_values
from pgsieve.decoding.row_filters.nodes import Infinity, Interval
from pgsieve.decoding.values.types import column_type, convert_text

MONTH = 30 * 86_400_000_000


@pytest.mark.parametrize(
    ("type_oid", "modifier", "texts", "expected"),
    [
        (nodes.DATE, -1, ["1970-01-02", None, "infinity", "-infinity"], [1, None, inf, -inf]),
        (nodes.TIMESTAMP, -1, ["1969-12-31 23:59:59.999999", "infinity"], [-1, inf]),
        (nodes.TIMESTAMPTZ, -1, ["1970-01-01 00:00:00.5+00", "-infinity"], [500_000, -inf]),
        (nodes.NUMERIC, (10 << 16 | 2) + 4, ["1.50", None], [Decimal("1.50"), None]),
        (nodes.NUMERIC, -1, ["1.500", "Infinity"], [Decimal("1.500"), Decimal("Infinity")]),
        (nodes.INTERVAL, -1, ["1 mon", "30 days", "-720:00:00"], [MONTH, MONTH, -MONTH]),
        (nodes.FLOAT4, -1, ["0.1"], [0.10000000149011612]),
        (1182, -1, ["{1970-01-03,NULL,infinity}", None, "{}"], [[2, None, inf], None, []]),
        (3802, -1, ["{}", None], [True, None]),
        (3807, -1, ["{}", None], [True, None]),
    ],
)
def test_a_column(type_oid: int, modifier: int, texts: list[str | None], expected: list[object]) -> None:
    column = convert_text(pa.array(texts, pa.string()), column_type(type_oid, modifier), "x")
    values = to_python_values(column, type_oid)
    assert (values, list(map(str, values))) == (expected, list(map(str, expected)))


def test_a_constant() -> None:
    assert str(to_python_value(Decimal("1.5e3"))) == "1500"
    assert to_python_value(Infinity(-1)) == -inf
    assert to_python_value(Interval(1, -30, 5)) == 5
    assert to_python_value(date(1969, 12, 31)) == -1
    assert to_python_value(datetime(1970, 1, 1, 0, 0, 1)) == 1_000_000  # noqa: DTZ001 - a timestamp has no zone
    assert to_python_value(datetime(1970, 1, 1, tzinfo=UTC)) == 0
    assert to_python_value(None) is None


@pytest.mark.parametrize(
    ("type_oid", "ascending"),
    [
        (nodes.FLOAT8, [-inf, -1.0, 0.0, inf, nan]),
        (nodes.NUMERIC, [Decimal("-Infinity"), Decimal("-0.1"), Decimal("1e40"), Decimal("NaN")]),
        (1022, [[], [-inf], [0.0], [0.0, nan], [0.0, None], [nan], [None]]),
        (1016, [[], [1], [1, 2], [1, None], [2], [None]]),
    ],
)
def test_an_order(type_oid: int, ascending: list[object]) -> None:
    function = rank_function(type_oid)
    assert function is not None
    ranks = [function(value) for value in ascending]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


def test_equal_values_of_postgresql_have_the_same_rank() -> None:
    for type_oid, values in (
        (nodes.FLOAT8, [0.0, -0.0]),
        (nodes.FLOAT8, [nan, -nan]),
        (nodes.NUMERIC, [Decimal("1.5"), Decimal("1.500")]),
        (nodes.BPCHAR, ["a", "a  "]),
        (1014, [["a", ""], ["a ", "  "]]),
    ):
        function = rank_function(type_oid)
        assert function is not None
        assert len({function(value) for value in values}) == 1
    assert rank_function(nodes.TEXT) is None
