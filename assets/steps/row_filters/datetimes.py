"""Dates, times and intervals in row filters.

In: Columns of Spark's types, whose extremes stand for PostgreSQL's infinities (`pgsieve.decoding.values.datetimes`). Out: Columns
with PostgreSQL's value, or that fail where it does (date.c, timestamp.c). Raises nothing. An interval is a number
of microseconds as PostgreSQL compares intervals: a day has 24 hours, a month 30 days (interval_cmp_value).
"""

from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, DecimalType, IntegerType, LongType, StringType

from pgsieve.assets.steps.row_filters.expressions import bound, chosen, failure
from pgsieve.assets.steps.row_filters.numbers import INFINITY
from pgsieve.assets.steps.row_filters.python import PythonFunction
from pgsieve.decoding.row_filters.nodes import (
    DATE,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    Constant,
    FunctionCall,
    Infinity,
    Interval,
    Node,
    compared_microseconds,
)
from pgsieve.decoding.row_filters.strings import STRING_FUNCTIONS
from pgsieve.decoding.values.datetimes import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
)

INTERVAL_TYPE: Final = DecimalType(38, 0)
_SPARK: Final = MappingProxyType({DATE: "date", TIMESTAMP: "timestamp_ntz", TIMESTAMPTZ: "timestamp"})

_JULIAN_EPOCH: Final = 2_440_588  # 1970-01-01 as a Julian day; PostgreSQL's dates begin with day 0
_DATE_END: Final = 2_147_483_494 - _JULIAN_EPOCH  # DATE_END_JULIAN
_DAY: Final = 86_400_000_000
_TIMESTAMP_START: Final = -_JULIAN_EPOCH * _DAY


def _from_number(number: Column, type_oid: int) -> Column:
    if type_oid == DATE:
        return F.date_from_unix_date(number.cast(IntegerType()))
    return F.timestamp_micros(number.cast(LongType())).cast(_SPARK[type_oid])


def _number(value: Column, type_oid: int) -> Column:
    """Return the days or microseconds since 1970."""
    return F.unix_date(value) if type_oid == DATE else F.unix_micros(value.cast("timestamp"))


def _infinities(type_oid: int) -> tuple[int, int]:
    if type_oid == DATE:
        return DATE_MINUS_INFINITY, DATE_INFINITY
    return TIMESTAMP_MINUS_INFINITY, TIMESTAMP_INFINITY


def constant(value: date | datetime | Infinity, type_oid: int) -> Column:
    """Return a constant; by way of text, so that neither the driver's time zone nor a calendar touches it."""
    if isinstance(value, Infinity):
        least, greatest = _infinities(type_oid)
        return _from_number(F.lit(least if value.sign < 0 else greatest), type_oid)
    return F.lit(value.isoformat()).cast(_SPARK[type_oid])


def compared_interval(value: Interval) -> Column:
    """Return what an interval is compared by."""
    return F.lit(str(compared_microseconds(value))).cast(INTERVAL_TYPE)


def interval_from_text(value: Column) -> Column:
    """Return what a column of intervals, which is their text, is compared by."""
    compared = PythonFunction(STRING_FUNCTIONS["interval_cmp_value"], StringType())
    return compared.values(value).cast(INTERVAL_TYPE)


def _is_infinite(value: Column, type_oid: int) -> Column:
    least, greatest = (_from_number(F.lit(number), type_oid) for number in _infinities(type_oid))
    return (value == least) | (value == greatest)


def finite(value: Column, type_oid: int) -> Column:
    """Tell whether it is no infinity."""
    return ~_is_infinite(value, type_oid)


def _checked_date(days: Column) -> Column:
    """Return the date of a number of days, within PostgreSQL's range."""

    def build(number: Column) -> Column:
        fits = (number >= -_JULIAN_EPOCH) & (number < _DATE_END)
        return F.when(~fits, failure("22008", "date out of range")).otherwise(_from_number(number, DATE))

    return bound(build, days)


def add_days(value: Column, days: Column, sign: int = 1) -> Column:
    """Date + integer, date - integer."""

    def build(day: Column, number: Column) -> Column:
        later = _checked_date(F.unix_date(day).cast(LongType()) + number.cast(LongType()) * sign)
        return F.when(_is_infinite(day, DATE) & number.isNotNull(), day).otherwise(later)

    return bound(build, value, days)


def days_between(left: Column, right: Column) -> Column:
    """Date - date."""

    def build(later: Column, earlier: Column) -> Column:
        present = later.isNotNull() & earlier.isNotNull()
        infinite = present & (_is_infinite(later, DATE) | _is_infinite(earlier, DATE))
        error = failure("22008", "cannot subtract infinite dates")
        return F.when(infinite, error).otherwise(F.date_diff(later, earlier))

    return bound(build, left, right)


def make_date(year: Column, month: Column, day: Column) -> Column:
    """Return the date of its fields: a year below zero is BC, and there is no year 0."""

    def build(y: Column, m: Column, d: Column) -> Column:
        error = failure("22008", "date field value out of range")
        made = _checked_date(
            F.unix_date(F.make_date(F.when(y < 0, y + 1).otherwise(y), m, d)).cast(LongType())
        )
        return F.when((y == 0) & m.isNotNull() & d.isNotNull(), error).otherwise(made)

    return bound(build, year, month, day)


# --- timestamps --------------------------------------------------------------------------


def _converted(value: Column, source: int, target: int, spark_type: str) -> Column:
    least, greatest = _infinities(source)
    ends = tuple(_from_number(F.lit(end), target) for end in _infinities(target))
    return bound(
        lambda moment: chosen(
            [
                (moment == _from_number(F.lit(least), source), ends[0]),
                (moment == _from_number(F.lit(greatest), source), ends[1]),
            ],
            moment.cast(spark_type),
        ),
        value,
    )


def timestamp_from_date(value: Column) -> Column:
    """Return midnight; fails for a date after January 294247."""
    return _converted(value, DATE, TIMESTAMP, "timestamp_ntz")


def date_from_timestamp(value: Column) -> Column:
    """Return the day."""
    return _converted(value, TIMESTAMP, DATE, "date")


def moment(value: Column, type_oid: int) -> Column:
    """Return what orders a date among timestamps, dates beyond those included (date_cmp_timestamp)."""
    if type_oid == DATE:
        return F.when(value.isNotNull(), F.struct(value.alias("day"), F.lit(0).cast("bigint").alias("rest")))

    def build(timestamp: Column) -> Column:
        rest = F.pmod(_number(timestamp, TIMESTAMP), F.lit(_DAY))
        rest = F.when(_is_infinite(timestamp, TIMESTAMP), F.lit(0).cast("bigint")).otherwise(rest)
        row = F.struct(date_from_timestamp(timestamp).alias("day"), rest.alias("rest"))
        return F.when(timestamp.isNotNull(), row)

    return bound(build, value)


def _checked_timestamp(value: Column) -> Column:
    def build(result: Column) -> Column:
        start, end = (_from_number(F.lit(n), TIMESTAMP) for n in (_TIMESTAMP_START, TIMESTAMP_INFINITY))
        wrong = (result < start) | (result >= end)
        return F.when(wrong, failure("22008", "timestamp out of range")).otherwise(result)

    return bound(build, value)


def add_interval(value: Column, interval: Interval, sign: int = 1) -> Column:
    """Timestamp + interval: the months, then the days, then the rest, as Spark's interval is added, too."""
    seconds = Decimal(sign * interval.microseconds).scaleb(-6)
    added = F.make_interval(
        months=F.lit(sign * interval.months), days=F.lit(sign * interval.days), secs=F.lit(seconds)
    )

    def build(timestamp: Column) -> Column:
        later = _checked_timestamp(timestamp + added)
        return F.when(_is_infinite(timestamp, TIMESTAMP), timestamp).otherwise(later)

    return bound(build, value)


def add_time(day: Column, time: Column) -> Column:
    """Date + time, whose text is HH:MM:SS[.ffffff]."""
    parts = F.split(time, ":")
    clock = F.make_interval(
        hours=parts.getItem(0).cast("int"),
        mins=parts.getItem(1).cast("int"),
        secs=parts.getItem(2).cast("decimal(18,6)"),
    )

    def build(midnight: Column, since: Column) -> Column:
        later = _checked_timestamp(midnight + since)
        return F.when(_is_infinite(midnight, TIMESTAMP) & since.isNotNull(), midnight).otherwise(later)

    # The function is strict: beside a NULL, a date beyond the timestamps is not converted.
    return bound(build, timestamp_from_date(F.when(time.isNotNull(), day)), clock)


def time_between(left: Column, right: Column, type_oid: int) -> Column:
    """Timestamp - timestamp, as intervals are compared; fails for infinities, as it does before PostgreSQL 17."""

    def build(later: Column, earlier: Column) -> Column:
        present = later.isNotNull() & earlier.isNotNull()
        infinite = present & (_is_infinite(later, type_oid) | _is_infinite(earlier, type_oid))
        exact = DecimalType(20, 0)
        difference = _number(later, type_oid).cast(exact) - _number(earlier, type_oid).cast(exact)
        too_long = F.abs(difference) >= F.lit(str(1 << 63)).cast(exact)
        return chosen(
            [
                (infinite, failure("22008", "cannot subtract infinite timestamps")),
                (too_long, failure("22008", "interval out of range")),
            ],
            difference.cast(INTERVAL_TYPE),
        )

    return bound(build, left, right)


# --- fields ------------------------------------------------------------------------------


def _year(value: Column) -> Column:
    year = F.year(value)
    return F.when(year > 0, year).otherwise(year - 1)  # there is no year 0: before 1 comes 1 BC


_FIELDS: Final[Mapping[str, Callable[[Column], Column]]] = MappingProxyType(
    {
        "year": _year,
        "quarter": F.quarter,
        "month": F.month,
        "week": F.weekofyear,
        "day": F.dayofmonth,
        "dow": lambda value: F.dayofweek(value) - 1,
        "isodow": lambda value: F.weekday(value) + 1,
        "doy": F.dayofyear,
        "hour": F.hour,
        "minute": F.minute,
    }
)


def extract(field: str, value: Column, type_oid: int, result: DataType) -> Column:
    """Return a field: of an infinity the year is infinite, and other fields are NULL."""

    def build(moment: Column) -> Column:
        finite_value = _FIELDS[field](moment).cast(result)
        if field != "year":
            return F.when(_is_infinite(moment, type_oid), F.lit(None)).otherwise(finite_value)
        least, greatest = (_from_number(F.lit(number), type_oid) for number in _infinities(type_oid))
        ends = ("-Infinity", "Infinity") if isinstance(result, StringType) else (-INFINITY, INFINITY)
        return chosen([(moment == least, F.lit(ends[0])), (moment == greatest, F.lit(ends[1]))], finite_value)

    return bound(build, value)


def truncate(field: str, value: Column) -> Column:
    """Set the fields below this one to their least values."""

    def build(timestamp: Column) -> Column:
        shorter = F.date_trunc(field.removesuffix("s"), timestamp.cast("timestamp")).cast("timestamp_ntz")
        return F.when(_is_infinite(timestamp, TIMESTAMP), timestamp).otherwise(_checked_timestamp(shorter))

    return bound(build, value)


# --- functions that are made for a field, an interval or a type --------------------------


def is_parameter(node: Node) -> bool:
    """Tell what a function is made with rather than called on: a field's name, an interval."""
    return isinstance(node, Constant) and (node.type_oid == TEXT or isinstance(node.value, Interval))


def function_of(node: FunctionCall, result: DataType) -> Callable[..., Column] | None:
    """Return the function that a call is of, over its other operands; None for one that depends on no such."""
    made = _MADE.get(node.name)
    if made is None:
        return None
    parameters = [o.value for o in node.operands if isinstance(o, Constant) and is_parameter(o)]
    (parameter,) = parameters or [None]
    (type_oid, *_) = [operand.type_oid for operand in node.operands if not is_parameter(operand)]
    return lambda *values: made(parameter, type_oid, result, *values)


def _add_to_date(interval: Interval, value: Column, sign: int = 1) -> Column:
    return add_interval(timestamp_from_date(value), interval, sign)


_MADE: Final[Mapping[str, Callable[..., Column]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("extract_date", "extract_timestamp", "timestamp_part"),
            lambda field, type_oid, result, value: extract(field.lower(), value, type_oid, result),
        ),
        "date_part_date": lambda field, _, result, value: extract(
            field.lower(), timestamp_from_date(value), TIMESTAMP, result
        ),
        "timestamp_trunc": lambda field, _, __, value: truncate(field.lower(), value),
        "timestamp_pl_interval": lambda interval, _, __, value: add_interval(value, interval),
        "timestamp_mi_interval": lambda interval, _, __, value: add_interval(value, interval, -1),
        "date_pl_interval": lambda interval, _, __, value: _add_to_date(interval, value),
        "date_mi_interval": lambda interval, _, __, value: _add_to_date(interval, value, -1),
        "timestamp_mi": lambda _, type_oid, __, left, right: time_between(left, right, type_oid),
        "timestamp_finite": lambda _, type_oid, __, value: finite(value, type_oid),
    }
)
