"""Rounding, overflow and errors of numbers. tests/properties compares every function with the server's."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from math import inf, isnan, nan

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.evaluation.numbers import (
    NUMBER_CONVERSIONS,
    NUMBER_FUNCTIONS,
    arithmetic_function,
)
from pgsieve.decoding.row_filters.nodes import FLOAT4, FLOAT8, INT2, INT4, INT8, NUMERIC


@pytest.mark.parametrize(
    ("operator", "type_oid", "left", "right", "expected"),
    [
        ("/", INT4, -7, 2, -3),
        ("%", INT4, -7, 2, -1),
        ("%", INT8, -(1 << 63), -1, 0),
        ("+", FLOAT4, 16777216.0, 1.0, 16777216.0),
        ("+", FLOAT8, inf, 1.0, inf),
        ("/", FLOAT8, 1.0, inf, 0.0),
        ("*", NUMERIC, Decimal("1.50"), Decimal("2.0"), Decimal("3.000")),
        ("/", NUMERIC, Decimal(1), Decimal(3), Decimal("0.33333333333333333333")),
    ],
)
def test_arithmetic(operator: str, type_oid: int, left: object, right: object, expected: object) -> None:
    assert str(arithmetic_function(operator, type_oid)(left, right)) == str(expected)


def test_nan_is_divided_by_zero() -> None:
    assert isnan(arithmetic_function("/", FLOAT8)(nan, 0.0))


@pytest.mark.parametrize(
    ("sqlstate", "fails"),
    [
        ("22003", partial(arithmetic_function("+", INT2), 32767, 1)),
        ("22003", partial(arithmetic_function("/", INT4), -(1 << 31), -1)),
        ("22012", partial(arithmetic_function("%", INT8), 1, 0)),
        ("22003", partial(arithmetic_function("*", FLOAT8), 1e300, 1e300)),
        ("22003", partial(arithmetic_function("*", FLOAT4), 1e-30, 1e-30)),
        ("22012", partial(arithmetic_function("/", FLOAT8), inf, 0.0)),
        ("22012", partial(arithmetic_function("%", NUMERIC), Decimal(1), Decimal(0))),
        ("22003", partial(NUMBER_FUNCTIONS["int2abs"], -32768)),
        ("2201F", partial(NUMBER_FUNCTIONS["dsqrt"], -1.0)),
        ("22003", partial(NUMBER_CONVERSIONS[FLOAT8, INT4], nan)),
        ("22003", partial(NUMBER_CONVERSIONS[FLOAT4, INT8], float(1 << 63))),
        ("22003", partial(NUMBER_CONVERSIONS[FLOAT8, FLOAT4], 1e-50)),
        ("22003", partial(NUMBER_CONVERSIONS[INT8, INT2], 32768)),
        ("22003", partial(NUMBER_CONVERSIONS[NUMERIC, FLOAT8], Decimal("1e400"))),
        ("22003", partial(NUMBER_CONVERSIONS[NUMERIC, FLOAT4], Decimal("1e-60"))),
        ("0A000", partial(NUMBER_CONVERSIONS[NUMERIC, INT4], Decimal("NaN"))),
    ],
)
def test_an_error_has_postgresqls_sqlstate(sqlstate: str, fails: Callable[[], object]) -> None:
    with pytest.raises(PgsieveError) as raised:
        fails()
    assert raised.value.sqlstate == sqlstate


def test_rounding() -> None:
    assert [NUMBER_CONVERSIONS[FLOAT8, INT4](value) for value in (0.5, 1.5, -2.5)] == [0, 2, -2]
    assert [NUMBER_CONVERSIONS[NUMERIC, INT4](Decimal(text)) for text in ("0.5", "1.5", "-2.5")] == [1, 2, -3]
    # As doubles, these would be rounded twice, and so down.
    assert NUMBER_CONVERSIONS[INT8, FLOAT4](9007199791611905) == 9007200328482816.0
    assert NUMBER_CONVERSIONS[NUMERIC, FLOAT4](Decimal("16777217.000000001")) == 16777218.0
    assert [NUMBER_FUNCTIONS["dround"](value) for value in (0.5, 2.5, inf, 1e300)] == [0.0, 2.0, inf, 1e300]
    assert isnan(NUMBER_FUNCTIONS["dceil"](nan))
