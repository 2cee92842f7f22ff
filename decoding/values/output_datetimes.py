"""The output functions of date and time types: the bytes of their send functions in, ISO text out.

The text is that of a session with DateStyle ISO, IntervalStyle postgres and TimeZone UTC. Each function
prints one value, and raises ProtocolError for bytes that are no value. Source: EncodeDateTime, EncodeTimezone
and EncodeInterval in src/backend/utils/adt/datetime.c; src/include/datatype/timestamp.h.
"""

from __future__ import annotations

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.values.datetimes import POSTGRES_EPOCH_DAYS, calendar_date

_SECOND = 1_000_000
_DAY = 86_400 * _SECOND
_LIMITS_4 = {2**31 - 1: "infinity", -(2**31): "-infinity"}
_LIMITS_8 = {2**63 - 1: "infinity", -(2**63): "-infinity"}
_INTERVAL_LIMITS = {
    (2**63 - 1, 2**31 - 1, 2**31 - 1): "infinity",
    (-(2**63), -(2**31), -(2**31)): "-infinity",
}


def _date(days: int) -> tuple[str, str]:
    """Return a day, counted from 2000-01-01, as a date and its era."""
    year, month, day = calendar_date(days + POSTGRES_EPOCH_DAYS)
    shown, era = (year, "") if year > 0 else (1 - year, " BC")
    return f"{shown:04}-{month:02}-{day:02}", era


def _clock(micros: int) -> str:
    seconds, fraction = divmod(micros, _SECOND)
    shown = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{shown}.{fraction:06}".rstrip("0") if fraction else shown


def _only(value: bytes, name: str, bits: int) -> int:
    cursor = Cursor(value, name)
    number = cursor.i32(name) if bits == 32 else cursor.i64(name)
    cursor.end()
    return number


def date(value: bytes) -> str:
    """Print a date."""
    days = _only(value, "date", 32)
    return _LIMITS_4[days] if days in _LIMITS_4 else "".join(_date(days))


def timestamp_text(micros: int, zone: str = "") -> str:
    """Print a timestamp, in microseconds since 2000-01-01."""
    if micros in _LIMITS_8:
        return _LIMITS_8[micros]
    day, era = _date(micros // _DAY)
    return f"{day} {_clock(micros % _DAY)}{zone}{era}"


def timestamptz_text(micros: int) -> str:
    """Print a timestamp with time zone, in UTC."""
    return timestamp_text(micros, "+00")


def timestamp(value: bytes) -> str:
    """Print a timestamp."""
    return timestamp_text(_only(value, "timestamp", 64))


def timestamptz(value: bytes) -> str:
    """Print a timestamp with time zone, in UTC."""
    return timestamptz_text(_only(value, "timestamptz", 64))


def time(value: bytes) -> str:
    """Print a time of day."""
    return _clock(_only(value, "time", 64))


def timetz(value: bytes) -> str:
    """Print a time of day with its zone; the server sends the zone in seconds west of Greenwich."""
    cursor = Cursor(value, "timetz")
    micros, west = cursor.i64("time"), cursor.i32("zone")
    cursor.end()
    minutes, seconds = divmod(abs(west), 60)
    zone = f"{'-' if west > 0 else '+'}{minutes // 60:02}"
    zone += f":{minutes % 60:02}" * bool(minutes % 60 or seconds) + f":{seconds:02}" * bool(seconds)
    return _clock(micros) + zone


def interval(value: bytes) -> str:
    """Print an interval."""
    cursor = Cursor(value, "interval")
    micros, days, months = cursor.i64("time"), cursor.i32("days"), cursor.i32("months")
    cursor.end()
    if (micros, days, months) in _INTERVAL_LIMITS:
        return _INTERVAL_LIMITS[micros, days, months]
    size = abs(months)
    years, rest = size // 12, size % 12
    if months < 0:
        years, rest = -years, -rest
    parts: list[str] = []
    before = False  # Whether the previous part was negative: after it, a positive part has a sign.
    for number, unit in ((years, "year"), (rest, "mon"), (days, "day")):
        if number:
            parts.append(f"{'+' * (before and number > 0)}{number} {unit}{'s' * (number != 1)}")
            before = number < 0
    if micros or not parts:
        parts.append(("-" if micros < 0 else "+" * before) + _clock(abs(micros)))
    return " ".join(parts)
