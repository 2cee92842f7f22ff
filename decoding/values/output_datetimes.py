"""The output functions of date and time types, for values in binary format.

In: the bytes that a type's send function returns. Out: the text that its output function prints in a session with
DateStyle ISO, IntervalStyle postgres and TimeZone UTC. Each function prints one value, and raises ProtocolError for
bytes that are not a value.

Source: EncodeDateTime(), EncodeTimezone() and EncodeInterval() in src/backend/utils/adt/datetime.c;
src/include/datatype/timestamp.h.
"""

from __future__ import annotations

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.values.datetimes import POSTGRES_EPOCH_DAYS, calendar_date

_SECOND_MICROS = 1_000_000
_DAY_MICROS = 86_400 * _SECOND_MICROS
_DATE_INFINITIES = {2**31 - 1: "infinity", -(2**31): "-infinity"}
_TIMESTAMP_INFINITIES = {2**63 - 1: "infinity", -(2**63): "-infinity"}
_INTERVAL_INFINITIES = {
    (2**63 - 1, 2**31 - 1, 2**31 - 1): "infinity",
    (-(2**63), -(2**31), -(2**31)): "-infinity",
}


def _print_date_and_era(days: int) -> tuple[str, str]:
    """Return the text of a date, and " BC" or "" for its era; `days` are days since 2000-01-01."""
    year, month, day = calendar_date(days + POSTGRES_EPOCH_DAYS)
    printed_year, era = (year, "") if year > 0 else (1 - year, " BC")
    return f"{printed_year:04}-{month:02}-{day:02}", era


def _print_clock(micros: int) -> str:
    seconds, fraction = divmod(micros, _SECOND_MICROS)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{clock}.{fraction:06}".rstrip("0") if fraction else clock


def _read_integer(value: bytes, name: str, bits: int) -> int:
    cursor = Cursor(value, name)
    number = cursor.i32(name) if bits == 32 else cursor.i64(name)
    cursor.expect_end()
    return number


def print_date(value: bytes) -> str:
    """Print a date."""
    days = _read_integer(value, "date", 32)
    return _DATE_INFINITIES[days] if days in _DATE_INFINITIES else "".join(_print_date_and_era(days))


def format_timestamp(micros: int, zone: str = "") -> str:
    """Format a timestamp, given in microseconds since 2000-01-01."""
    if micros in _TIMESTAMP_INFINITIES:
        return _TIMESTAMP_INFINITIES[micros]
    date_text, era = _print_date_and_era(micros // _DAY_MICROS)
    return f"{date_text} {_print_clock(micros % _DAY_MICROS)}{zone}{era}"


def format_timestamptz(micros: int) -> str:
    """Format a timestamp with time zone, given in microseconds since 2000-01-01, in UTC."""
    return format_timestamp(micros, "+00")


def print_timestamp(value: bytes) -> str:
    """Print a timestamp."""
    return format_timestamp(_read_integer(value, "timestamp", 64))


def print_timestamptz(value: bytes) -> str:
    """Print a timestamp with time zone, in UTC."""
    return format_timestamptz(_read_integer(value, "timestamptz", 64))


def print_time(value: bytes) -> str:
    """Print a time of day."""
    return _print_clock(_read_integer(value, "time", 64))


def print_timetz(value: bytes) -> str:
    """Print a time of day with its time zone; the bytes have the zone in seconds west of Greenwich."""
    cursor = Cursor(value, "timetz")
    micros, seconds_west = cursor.i64("time"), cursor.i32("zone")
    cursor.expect_end()
    minutes, seconds = divmod(abs(seconds_west), 60)
    zone = f"{'-' if seconds_west > 0 else '+'}{minutes // 60:02}"
    zone += f":{minutes % 60:02}" * bool(minutes % 60 or seconds) + f":{seconds:02}" * bool(seconds)
    return _print_clock(micros) + zone


def print_interval(value: bytes) -> str:
    """Print an interval."""
    cursor = Cursor(value, "interval")
    micros, days, months = cursor.i64("time"), cursor.i32("days"), cursor.i32("months")
    cursor.expect_end()
    if (micros, days, months) in _INTERVAL_INFINITIES:
        return _INTERVAL_INFINITIES[micros, days, months]
    absolute_months = abs(months)
    years, remaining_months = absolute_months // 12, absolute_months % 12
    if months < 0:
        years, remaining_months = -years, -remaining_months
    parts: list[str] = []
    is_after_negative = (
        False  # PostgreSQL prints a plus sign before a positive part that follows a negative part.
    )
    for number, unit in ((years, "year"), (remaining_months, "mon"), (days, "day")):
        if number:
            parts.append(f"{'+' * (is_after_negative and number > 0)}{number} {unit}{'s' * (number != 1)}")
            is_after_negative = number < 0
    if micros or not parts:
        parts.append(("-" if micros < 0 else "+" * is_after_negative) + _print_clock(abs(micros)))
    return " ".join(parts)
