"""Dates beyond Python's calendar, ranges and infinities. tests/properties compares every function with the server's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import pytest

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.row_filters.evaluation.datetimes import (
    DATETIME_CONVERSIONS,
    DATETIME_FUNCTIONS,
    bind_constant,
)
from pgsieve.decoding.row_filters.evaluation.values import DAY_MICROS
from pgsieve.decoding.row_filters.nodes import (
    DATE,
    FLOAT8,
    INTERVAL,
    NUMERIC,
    TEXT,
    TIMESTAMP,
    ColumnValue,
    Constant,
    FunctionCall,
    Interval,
)
from pgsieve.decoding.values.datetimes import calendar_date, days_since_epoch

FIRST, LAST = days_since_epoch(-4713, 11, 24), days_since_epoch(5_874_897, 12, 31)
FIRST_TIMESTAMP, LAST_TIMESTAMP = FIRST * DAY_MICROS, days_since_epoch(294_277, 1, 1) * DAY_MICROS - 1


def made(name: str, parameter: Constant, type_oid: int, result: int) -> Callable[..., object]:
    of = ColumnValue("x", type_oid=type_oid)
    resolved = bind_constant(FunctionCall(name, (parameter, of), type_oid=result))
    assert resolved is not None
    function, operands = resolved
    assert operands == (of,)
    return function


def field(name: str, of: str, type_oid: int = TIMESTAMP, result: int = NUMERIC) -> Callable[..., object]:
    return made(of, Constant(name, type_oid=TEXT), type_oid, result)


def plus(interval: Interval) -> Callable[..., object]:
    return made("timestamp_pl_interval", Constant(interval, type_oid=INTERVAL), TIMESTAMP, TIMESTAMP)


def test_the_calendar_has_no_end() -> None:
    for days in (FIRST, FIRST + 1, -719_528, -1, 0, 59, 60, 11_016, 2_932_896, 2_932_897, LAST):
        assert days_since_epoch(*calendar_date(days)) == days
    assert calendar_date(FIRST) == (-4713, 11, 24)
    assert calendar_date(-719_469) == (0, 2, 29)


def test_infinities_stay() -> None:
    assert DATETIME_FUNCTIONS["date_pli"](inf, 5) == inf
    assert DATETIME_FUNCTIONS["date_mii"](-inf, 5) == -inf
    assert DATETIME_FUNCTIONS["datetime_pl"](inf, "24:00:00") == inf
    assert plus(Interval(1, 1, 1))(-inf) == -inf
    assert [DATETIME_CONVERSIONS[pair](inf) for pair in ((DATE, TIMESTAMP), (TIMESTAMP, DATE))] == [inf, inf]
    assert field("year", "extract_timestamp")(-inf) == -inf
    assert field("year", "timestamp_part", result=FLOAT8)(inf) == inf
    assert field("hour", "extract_timestamp")(inf) is None
    assert field("week", "timestamp_trunc", result=TIMESTAMP)(inf) == inf


def test_an_interval_is_added_months_first() -> None:
    start = days_since_epoch(2020, 1, 31) * DAY_MICROS
    assert plus(Interval(1, 0, 0))(start) == days_since_epoch(2020, 2, 29) * DAY_MICROS
    assert plus(Interval(13, 1, -1))(start) == days_since_epoch(2021, 3, 1) * DAY_MICROS - 1
    assert (
        plus(Interval(-13, 0, 0))(days_since_epoch(1, 1, 5) * DAY_MICROS)
        == days_since_epoch(-1, 12, 5) * DAY_MICROS
    )


@pytest.mark.parametrize(
    "fails",
    [
        partial(DATETIME_FUNCTIONS["date_pli"], LAST, 1),
        partial(DATETIME_FUNCTIONS["date_mii"], FIRST, 1),
        partial(DATETIME_FUNCTIONS["date_mi"], inf, 0),
        partial(DATETIME_FUNCTIONS["make_date"], 0, 1, 1),
        partial(DATETIME_FUNCTIONS["make_date"], 2021, 2, 29),
        partial(DATETIME_FUNCTIONS["make_date"], 5_874_898, 1, 1),
        partial(DATETIME_CONVERSIONS[DATE, TIMESTAMP], LAST),
        partial(plus(Interval(0, 0, 1)), LAST_TIMESTAMP),
        partial(plus(Interval(-1, 31, 0)), FIRST_TIMESTAMP),
        partial(DATETIME_FUNCTIONS["timestamp_mi"], inf, inf),
        partial(DATETIME_FUNCTIONS["timestamp_mi_before_17"], -inf, inf),
        partial(DATETIME_FUNCTIONS["timestamp_mi"], LAST_TIMESTAMP, FIRST_TIMESTAMP),
        partial(field("year", "timestamp_trunc", result=TIMESTAMP), FIRST_TIMESTAMP),
    ],
)
def test_values_out_of_range_fail(fails: Callable[[], object]) -> None:
    with pytest.raises(PgsieveError) as raised:
        fails()
    assert raised.value.sqlstate == "22008"


def test_before_16_the_difference_of_timestamps_overflows() -> None:
    minus = DATETIME_FUNCTIONS["timestamp_mi_before_16"]
    assert minus(LAST_TIMESTAMP, FIRST_TIMESTAMP) == LAST_TIMESTAMP - FIRST_TIMESTAMP - 2**64
    assert minus(3, 5) == -2
    with pytest.raises(PgsieveError, match="cannot subtract infinite timestamps"):
        minus(0, inf)


def test_years_before_christ() -> None:
    assert DATETIME_FUNCTIONS["make_date"](-1, 2, 29) == days_since_epoch(0, 2, 29)
    assert field("year", "extract_date", DATE)(days_since_epoch(0, 2, 29)) == -1
    assert field("week", "extract_date", DATE)(days_since_epoch(2021, 1, 3)) == 53
