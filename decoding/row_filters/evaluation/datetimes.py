"""PostgreSQL's functions of dates, timestamps and intervals, for row filters.

In: dates as days since 1970-01-01, and timestamps as microseconds since 1970-01-01. Both may be infinite. No input is
NULL. Out: the value that PostgreSQL's function returns, in the same form. Raises FilterValueError where the server
would raise an error (date.c, timestamp.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from math import isinf, isnan
from types import MappingProxyType
from typing import Any, Final

from pgsieve.decoding.row_filters.evaluation.values import DAY_MICROS, date_to_micros
from pgsieve.decoding.row_filters.nodes import (
    DATE,
    FLOAT8,
    INTERVAL,
    NUMERIC,
    TIMESTAMP,
    Constant,
    FunctionCall,
    Interval,
    Node,
)
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS
from pgsieve.decoding.row_filters.strings import FilterValueError
from pgsieve.decoding.values.datetimes import calendar_date, days_since_epoch

_SECOND_MICROS: Final = 1_000_000
_INT64_LIMIT: Final = 1 << 63
_JULIAN_EPOCH: Final = 2_440_588  # 1970-01-01 as a Julian day; PostgreSQL's dates begin with day 0
_DATE_END: Final = 2_147_483_494 - _JULIAN_EPOCH  # DATE_END_JULIAN
_TIMESTAMP_END: Final = 109_203_528 - _JULIAN_EPOCH  # TIMESTAMP_END_JULIAN


def _require_date_range(days: int) -> int:
    if -_JULIAN_EPOCH <= days < _DATE_END:
        return days
    raise FilterValueError("date out of range", sqlstate="22008")


def _require_timestamp_range(micros: int) -> int:
    if -_JULIAN_EPOCH * DAY_MICROS <= micros < _TIMESTAMP_END * DAY_MICROS:
        return micros
    raise FilterValueError("timestamp out of range", sqlstate="22008")


# --- dates -------------------------------------------------------------------------------


def _add_days(day: float, days: int) -> float:
    return day if isinf(day) else _require_date_range(int(day) + days)


def _subtract_dates(left: float, right: float) -> int:
    if isinf(left) or isinf(right):
        raise FilterValueError("cannot subtract infinite dates", sqlstate="22008")
    return int(left) - int(right)


def _count_days_of_month(year: int, month: int) -> int:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month in (4, 6, 9, 11) else 31


def _make_date(year: int, month: int, day: int) -> int:
    """Return the date with these fields. A negative year is BC. The calendar has no year 0."""
    astronomical_year = year + 1 if year < 0 else year
    if year == 0 or not 1 <= month <= 12 or not 1 <= day <= _count_days_of_month(astronomical_year, month):
        raise FilterValueError("date field value out of range", sqlstate="22008")
    return _require_date_range(days_since_epoch(astronomical_year, month, day))


def _is_finite(value: float) -> bool:
    return not isinf(value)


# --- timestamps --------------------------------------------------------------------------


def _date_to_timestamp(day: float) -> float:
    if isinf(day) or day < _TIMESTAMP_END:
        return date_to_micros(day)
    raise FilterValueError("date out of range for timestamp", sqlstate="22008")


def _timestamp_to_date(micros: float) -> float:
    return micros if isinf(micros) else micros // DAY_MICROS


def _add_months(micros: int, months: int) -> int:
    """Move a timestamp to the same day of another month, or to that month's last day if the month is shorter."""
    days, micros_of_day = divmod(micros, DAY_MICROS)
    year, month, day = calendar_date(days)
    years, month_index = divmod(month - 1 + months, 12)
    year, month = year + years, month_index + 1
    return (
        days_since_epoch(year, month, min(day, _count_days_of_month(year, month))) * DAY_MICROS
        + micros_of_day
    )


def _add_interval(interval: Interval, micros: float, sign: int = 1) -> float:
    """Add the months, then the days, then the microseconds; each sum must be in the range of timestamps."""
    if isinf(micros):
        return micros
    sum_micros = int(micros)
    if interval.months:
        sum_micros = _require_timestamp_range(_add_months(sum_micros, sign * interval.months))
    if interval.days:
        sum_micros = _require_timestamp_range(sum_micros + sign * interval.days * DAY_MICROS)
    return _require_timestamp_range(sum_micros + sign * interval.microseconds)


def _add_time(day: float, time: str) -> float:
    """Return the timestamp with a date and a time of the form HH:MM:SS[.ffffff]."""
    midnight_micros = _date_to_timestamp(day)
    if isinf(midnight_micros):
        return midnight_micros
    hours, minutes, seconds = time.split(":")
    micros_of_day = (int(hours) * 60 + int(minutes)) * 60 * _SECOND_MICROS + int(Decimal(seconds).scaleb(6))
    return _require_timestamp_range(int(midnight_micros) + micros_of_day)


def _subtract_timestamps(left: float, right: float) -> float:
    """Return the difference of two timestamps in microseconds.

    It is infinite if only one of them is infinite, or if they are infinities of different signs.
    """
    if isinf(left) or isinf(right):
        difference = left - right
        is_in_range = not isnan(difference)
    else:
        difference = int(left) - int(right)
        is_in_range = -_INT64_LIMIT <= difference < _INT64_LIMIT
    if not is_in_range:
        raise FilterValueError("interval out of range", sqlstate="22008")
    return difference


def _subtract_finite_timestamps(left: float, right: float) -> float:
    """Return the difference as servers before 17 do, which have no infinite intervals."""
    if isinf(left) or isinf(right):
        raise FilterValueError("cannot subtract infinite timestamps", sqlstate="22008")
    return _subtract_timestamps(left, right)


def _subtract_with_overflow(left: float, right: float) -> float:
    """Return the difference as servers before 16 do, which do not notice that it overflows."""
    if isinf(left) or isinf(right):
        return _subtract_finite_timestamps(left, right)
    return (int(left) - int(right) + _INT64_LIMIT) % (2 * _INT64_LIMIT) - _INT64_LIMIT


# --- fields ------------------------------------------------------------------------------


def _find_weekday(days: int) -> int:
    return (days + 3) % 7  # Monday is 0; 1970-01-01 was a Thursday


def _find_day_of_year(days: int) -> int:
    return days - days_since_epoch(calendar_date(days)[0], 1, 1) + 1


def _find_iso_week(days: int) -> int:
    """Return the number of a day's ISO 8601 week. A week belongs to the year in which its Thursday lies."""
    return (_find_day_of_year(days - _find_weekday(days) + 3) + 6) // 7


def _find_year(days: int) -> int:
    year, _, _ = calendar_date(days)
    return year if year > 0 else year - 1  # PostgreSQL has no year 0, so the year before 1 is -1 (1 BC).


def _find_iso_year(days: int) -> int:
    return _find_year(days - _find_weekday(days) + 3)


def _find_year_span_number(span_years: int, days: int) -> int:
    """Return the number of a day's century or millennium. Number 1 begins with year 1. Number -1 precedes it."""
    year, _, _ = calendar_date(days)
    return (year + span_years - 1) // span_years if year > 0 else -((span_years - year) // span_years)


def _find_decade(days: int) -> int:
    year, _, _ = calendar_date(days)
    return year // 10 if year >= 0 else -((9 - year) // 10)


_DAY_FIELDS: Final[Mapping[str, Callable[[int], int]]] = MappingProxyType(
    {
        "year": _find_year,
        "isoyear": _find_iso_year,
        "decade": _find_decade,
        "century": partial(_find_year_span_number, 100),
        "millennium": partial(_find_year_span_number, 1000),
        "quarter": lambda days: (calendar_date(days)[1] + 2) // 3,
        "month": lambda days: calendar_date(days)[1],
        "week": _find_iso_week,
        "day": lambda days: calendar_date(days)[2],
        "dow": lambda days: (days + 4) % 7,
        "isodow": lambda days: _find_weekday(days) + 1,
        "doy": _find_day_of_year,
        "julian": lambda days: days + _JULIAN_EPOCH,
        "epoch": lambda days: days * (DAY_MICROS // _SECOND_MICROS),
    }
)
#: The fields that are infinite for an infinite date. All others are NULL (NonFiniteTimestampTzPart() in timestamp.c).
_FIELDS_OF_INFINITY: Final = frozenset(
    ("year", "isoyear", "decade", "century", "millennium", "julian", "epoch")
)
_CLOCK_FIELDS: Final[Mapping[str, Callable[[int], int]]] = MappingProxyType(
    {
        "hour": lambda micros: micros % DAY_MICROS // (3600 * _SECOND_MICROS),
        "minute": lambda micros: micros // (60 * _SECOND_MICROS) % 60,
        "microseconds": lambda micros: micros % (60 * _SECOND_MICROS),
    }
)


def _compute_julian_day(micros: int) -> Decimal:
    days, micros_of_day = divmod(micros, DAY_MICROS)
    day_fraction = DECIMAL_FUNCTIONS["numeric_div"](Decimal(micros_of_day), Decimal(DAY_MICROS))
    return DECIMAL_FUNCTIONS["numeric_add"](Decimal(days + _JULIAN_EPOCH), day_fraction)


#: The fields of a timestamp that have a fraction. The first mapping computes them as numeric, the second as double
#: precision, with the rounding of timestamp_part_common().
_FRACTIONAL_FIELDS: Final[Mapping[str, Callable[[int], Decimal]]] = MappingProxyType(
    {
        "second": lambda micros: Decimal(micros % (60 * _SECOND_MICROS)).scaleb(-6),
        "milliseconds": lambda micros: Decimal(micros % (60 * _SECOND_MICROS)).scaleb(-3),
        "epoch": lambda micros: Decimal(micros).scaleb(-6),
        "julian": _compute_julian_day,
    }
)
_FRACTIONAL_FIELDS_AS_DOUBLE: Final[Mapping[str, Callable[[int], float]]] = MappingProxyType(
    {
        "second": lambda micros: micros // _SECOND_MICROS % 60 + micros % _SECOND_MICROS / 1e6,
        "milliseconds": lambda micros: (
            micros // _SECOND_MICROS % 60 * 1000.0 + micros % _SECOND_MICROS / 1000.0
        ),
        "epoch": lambda micros: float(micros) / 1e6,
        "julian": lambda micros: (
            micros // DAY_MICROS
            + _JULIAN_EPOCH
            + (micros % DAY_MICROS // _SECOND_MICROS + micros % _SECOND_MICROS / 1e6) / 86400.0
        ),
    }
)


def _extract_from_infinity(field: str, value: float) -> float | None:
    return value if field in _FIELDS_OF_INFINITY else None


def _extract_from_date(field: str, day: float) -> float | None:
    return _extract_from_infinity(field, day) if isinf(day) else _DAY_FIELDS[field](int(day))


def _extract_from_timestamp(
    fractional_fields: Mapping[str, Callable[[int], Any]], field: str, micros: float
) -> float | Decimal | None:
    if isinf(micros):
        return _extract_from_infinity(field, micros)
    finite_micros = int(micros)
    compute = fractional_fields.get(field) or _CLOCK_FIELDS.get(field)
    return _DAY_FIELDS[field](finite_micros // DAY_MICROS) if compute is None else compute(finite_micros)


def _extract_from_midnight(field: str, day: float) -> float | Decimal | None:
    return _extract_from_timestamp(_FRACTIONAL_FIELDS_AS_DOUBLE, field, _date_to_timestamp(day))


_MICROS_BY_UNIT: Final = MappingProxyType(
    {
        "microseconds": 1, "milliseconds": 1000, "second": _SECOND_MICROS, "minute": 60 * _SECOND_MICROS,
        "hour": 3600 * _SECOND_MICROS, "day": DAY_MICROS,
    }
)  # fmt: skip


#: Functions from a day to the first year of its decade, century or millennium.
_FIRST_YEARS: Final[Mapping[str, Callable[[int], int]]] = MappingProxyType(
    {
        "decade": lambda days: _find_decade(days) * 10,
        "century": lambda days: _find_first_year(100, _find_year_span_number(100, days)),
        "millennium": lambda days: _find_first_year(1000, _find_year_span_number(1000, days)),
    }
)


def _find_first_year(span_years: int, span_number: int) -> int:
    """Return the first year of a century or millennium; here the year 0 stands for 1 BC."""
    return span_number * span_years - span_years + 1 if span_number > 0 else span_number * span_years + 1


def _truncate(field: str, micros: float) -> float:
    """Return date_trunc: the timestamp with all fields smaller than this field at their least values."""
    if isinf(micros):
        return micros
    if field in _MICROS_BY_UNIT:
        return int(micros) // _MICROS_BY_UNIT[field] * _MICROS_BY_UNIT[field]
    days = int(micros) // DAY_MICROS
    year, month, _ = calendar_date(days)
    if field == "week":
        return _require_timestamp_range((days - _find_weekday(days)) * DAY_MICROS)
    first_month = month if field == "month" else (month - 1) // 3 * 3 + 1 if field == "quarter" else 1
    year = _FIRST_YEARS[field](days) if field in _FIRST_YEARS else year
    return _require_timestamp_range(days_since_epoch(year, first_month, 1) * DAY_MICROS)


# --- functions ---------------------------------------------------------------------------

_FIELD_FUNCTIONS: Final[Mapping[str, Callable[[str, float], Any]]] = MappingProxyType(
    {
        "extract_date": _extract_from_date,
        "extract_timestamp": partial(_extract_from_timestamp, _FRACTIONAL_FIELDS),
        "timestamp_part": partial(_extract_from_timestamp, _FRACTIONAL_FIELDS_AS_DOUBLE),
        "date_part_date": _extract_from_midnight,
        "timestamp_trunc": _truncate,
    }
)
_RESULT_CONVERSIONS: Final[Mapping[int, Callable[[float], Any]]] = MappingProxyType(
    {NUMERIC: Decimal, FLOAT8: float}
)

_INTERVAL_FUNCTIONS: Final[Mapping[str, Callable[[Interval, float], float]]] = MappingProxyType(
    {
        "timestamp_pl_interval": _add_interval,
        "timestamp_mi_interval": partial(_add_interval, sign=-1),
        "date_pl_interval": lambda interval, day: _add_interval(interval, _date_to_timestamp(day)),
        "date_mi_interval": lambda interval, day: _add_interval(interval, _date_to_timestamp(day), -1),
    }
)


def bind_constant(node: FunctionCall) -> tuple[Callable[..., Any], tuple[Node, ...]] | None:
    """Return a function and its operands, for a call with a constant field name or a constant interval.

    The function contains the constant, so it takes only the call's other operands. Returns None for a call without such
    a constant.
    """
    if node.name in _FIELD_FUNCTIONS:
        field, value = node.operands
        assert isinstance(field, Constant)
        compute = partial(_FIELD_FUNCTIONS[node.name], str(field.value).lower())
        convert = _RESULT_CONVERSIONS.get(node.type_oid)
        return (compute if convert is None else _convert_result(compute, convert)), (value,)
    if node.name in _INTERVAL_FUNCTIONS:
        interval, operand = sorted(node.operands, key=lambda operand: operand.type_oid != INTERVAL)
        assert isinstance(interval, Constant)
        assert isinstance(interval.value, Interval)
        return partial(_INTERVAL_FUNCTIONS[node.name], interval.value), (operand,)
    return None


def _convert_result(
    compute: Callable[[float], float | None], convert: Callable[[float], Any]
) -> Callable[[float], Any]:
    def convert_field(value: float) -> Any:
        result = compute(value)
        return None if result is None else convert(result)

    return convert_field


DATETIME_CONVERSIONS: Final = MappingProxyType(
    {(DATE, TIMESTAMP): _date_to_timestamp, (TIMESTAMP, DATE): _timestamp_to_date}
)
"""The casts between dates and timestamps, by the type oids of source and target."""

DATETIME_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "date_pli": _add_days,
        "integer_pl_date": lambda days, day: _add_days(day, days),
        "date_mii": lambda day, days: _add_days(day, -days),
        "date_mi": _subtract_dates,
        "date_finite": _is_finite,
        "timestamp_finite": _is_finite,
        "make_date": _make_date,
        "timestamp_date": _timestamp_to_date,
        "datetime_pl": _add_time,
        "timedate_pl": lambda time, day: _add_time(day, time),
        "timestamp_mi": _subtract_timestamps,
        "timestamp_mi_before_17": _subtract_finite_timestamps,
        "timestamp_mi_before_16": _subtract_with_overflow,
    }
)
"""The functions of dates and times, except those of `bind_constant`.

The keys are `prosrc`. If older servers implement a function in another way, that implementation has a name of pgsieve's
own (`pgsieve.decoding.row_filters.simplification`).
"""
