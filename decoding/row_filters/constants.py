"""Constants of a row filter: parses them from PostgreSQL's text, and converts them between types.

In: the text between the quotes, and the oid of a type. Out: a `Constant`. Raises InvalidConstantError if the text is
not a value of the type. Raises RefusedError if the meaning of the text depends on a setting of the server
(DateStyle, TimeZone), or if pgsieve cannot represent the value. `pgsieve.decoding.row_filters.analysis` turns these
errors into messages that name the filter and the part of it that is wrong.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from fractions import Fraction
from math import inf, isfinite, isnan, nextafter
from typing import Final

from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    BPCHAR,
    BYTEA,
    DATE,
    FLOAT4,
    FLOAT8,
    INT2,
    INT4,
    INT8,
    INTEGERS,
    INTERVAL,
    NUMERIC,
    STRINGS,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
    VARCHAR,
    Constant,
    ConstantValue,
    Digits,
    Infinity,
    Interval,
)
from pgsieve.decoding.values.booleans import BOOLEANS


class RefusedError(Exception):
    """pgsieve cannot evaluate a part of a row filter exactly. The message is the reason."""


class InvalidConstantError(Exception):
    """A text is not a value of its type. `sqlstate` is the code with which PostgreSQL's input function fails."""

    def __init__(self, reason: str, sqlstate: str = "22P02") -> None:
        super().__init__(reason)
        self.sqlstate = sqlstate


INTEGER_BITS: Final = {INT2: 16, INT4: 32, INT8: 64}
# This precision is enough for every decimal that a filter can contain, without rounding.
_EXACT_CONTEXT: Final = Context(prec=20_000)

_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_NUMBER = re.compile(r"\s*([+-]?)(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?\s*", re.ASCII)
#: Numbers that some servers accept, and that pgsieve does not read.
_OTHER_NUMBER = re.compile(
    r"\s*[+-]?(?:0x[\da-f_.p+-]+|0o[0-7_]+|0b[01_]+|[\d_.e+-]*_[\d_.e+-]*|[\d.]+e[+-]?\d{5,})\s*",
    re.ASCII | re.IGNORECASE,
)
_NAN_OR_INFINITY = re.compile(r"\s*(nan|[+-]?inf(?:inity)?)\s*", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_DATE = r"\d{4}-\d{2}-\d{2}"
_TIMESTAMP = re.compile(rf"({_DATE})(?:[ T](\d{{2}}:\d{{2}}(?::\d{{2}}(?:\.\d{{1,6}})?)?))?", re.ASCII)
_TIME = re.compile(r"(\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?", re.ASCII)
_INTERVAL_UNITS: Final = {
    "yea": ("months", 12), "mon": ("months", 1), "wee": ("days", 7), "day": ("days", 1),
    "hou": ("microseconds", 3_600_000_000), "min": ("microseconds", 60_000_000),
    "sec": ("microseconds", 1_000_000),
}  # fmt: skip
_INTERVAL_PART = re.compile(
    r"([+-]?\d{1,9})\s+((?:year|month|mon|week|day|hour|minute|min|second|sec)s?)\s*", re.ASCII
)
_INTERVAL = re.compile(
    rf"\s*((?:{_INTERVAL_PART.pattern.replace('(', '(?:').replace('(?:?:', '(?:')})*)"
    r"(([+-]?)(\d{1,6}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?)?\s*",
    re.ASCII,
)
_ARRAY_ITEM = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|([^,{}"\\]*[^,{}"\\\s]))\s*(,|$)', re.DOTALL)
_ZONE = re.compile(r"([+-]\d{2})(?::?(\d{2}))?|Z|UTC", re.ASCII)
_TIMESTAMP_OUT_OF_CALENDAR: Final = (
    "the timestamp constant must be a date of the years 0001 to 9999 and a time before 24:00"
)


def _parse_integer(text: str, bits: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise _make_number_error(text, "an integer")
    return _require_range(parse_digits(text), bits)


def parse_digits(text: str) -> int:
    """Return the number that decimal digits make, however many they are.

    `int()` raises ValueError for more than 4,300 digits, while the server reads 131,072 of them as a numeric.
    """
    return int(Decimal(text))


def _require_range(value: int, bits: int) -> int:
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise InvalidConstantError("the integer is out of range for its type", "22003")
    return value


def _parse_decimal(text: str) -> Decimal:
    if not (_NUMBER.fullmatch(text) or _NAN_OR_INFINITY.fullmatch(text)):
        raise _make_number_error(text, "a number")
    return Decimal(text.strip())


def _make_number_error(text: str, kind: str) -> RefusedError | InvalidConstantError:
    """Return the error for text that pgsieve does not read as a number of this kind."""
    if _OTHER_NUMBER.fullmatch(text):
        return RefusedError(
            f"{kind} must be in decimal digits, without underscores, with an exponent of at most four digits"
        )
    return InvalidConstantError(f"invalid input syntax for {kind}")


def _parse_double(text: str) -> float:
    decimal = _parse_decimal(text)
    value = float(decimal)
    if decimal.is_finite() and (not isfinite(value) or (value == 0 and decimal != 0)):
        raise InvalidConstantError("the number is out of range for type double precision", "22003")
    return value


def _parse_real(text: str) -> float:
    """Parse a single precision number.

    The decimal must be rounded only once. Rounding it to double precision and then to single precision can give
    another result.
    """
    decimal, double = _parse_decimal(text), _parse_double(text)
    if not isfinite(double):
        return double
    if Fraction(double) != Fraction(decimal):
        # If the double is exactly halfway between two singles, the decimal decides: the double is moved to the side on
        # which the decimal lies.
        double = _move_off_midpoint(double, towards=inf if Fraction(decimal) > Fraction(double) else -inf)
    return round_to_single(double)


def _move_off_midpoint(double: float, *, towards: float) -> float:
    """Return the next double towards a number if this double lies exactly in the middle between two singles.

    Any other double is returned unchanged.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", double))
    return nextafter(double, towards) if bits & 0x1FFFFFFF == 0x10000000 else double


def round_to_single(double: float) -> float:
    """Return the nearest single precision number; raises InvalidConstantError if there is none."""
    try:
        (value,) = struct.unpack("<f", struct.pack("<f", double))
    except OverflowError:
        raise InvalidConstantError("the number is out of range for type real", "22003") from None
    if value == 0 and double != 0:
        raise InvalidConstantError("the number is out of range for type real", "22003")
    return float(value)


def _parse_boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in BOOLEANS:
        raise InvalidConstantError("invalid input syntax for type boolean")
    return BOOLEANS[word]


def _parse_bytea(text: str) -> bytes:
    if not text.startswith("\\x"):
        raise RefusedError(r"a bytea constant must be in hex format: \x…")
    try:
        return bytes.fromhex(text[2:])
    except ValueError:
        raise InvalidConstantError("invalid hexadecimal data", "22023") from None


def _parse_uuid(text: str) -> str:
    if not _UUID.fullmatch(text):
        raise RefusedError("a uuid constant must be in its standard form")
    return text.lower()


def _parse_infinity(text: str) -> Infinity | None:
    return {"infinity": Infinity(1), "-infinity": Infinity(-1)}.get(text.strip().lower())


def _parse_date(text: str) -> date | Infinity:
    infinity = _parse_infinity(text)
    if infinity is not None:
        return infinity
    if not re.fullmatch(_DATE, text, re.ASCII):
        raise RefusedError("a date constant must be YYYY-MM-DD, in the years 0001 to 9999")
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidConstantError("date/time field value out of range", "22008") from None


def _parse_time(text: str) -> str:
    """Return the time as time_out prints it. The order of these texts is the order of the times."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise RefusedError("a time constant must be HH:MM:SS[.ffffff]")
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    fraction = (match[4] or "").rstrip("0")
    if minute > 59 or second > 59 or (hour, minute, second, fraction) > (24, 0, 0, ""):
        raise InvalidConstantError("date/time field value out of range", "22008")
    return f"{hour:02}:{minute:02}:{second:02}" + (f".{fraction}" if fraction else "")


def parse_interval(text: str) -> Interval:
    """Parse an interval that is written as IntervalStyle postgres prints it, or as whole numbers with units."""
    match = _INTERVAL.fullmatch(text)
    if match is None or not text.strip():
        raise RefusedError("an interval constant must be like '1 year 2 mons 3 days 04:05:06.7'")
    parts = _INTERVAL_PART.findall(match[1])
    fields = [unit[:3] for _, unit in parts] + (["hou", "min", "sec"] if match[2] is not None else [])
    if len(set(fields)) < len(fields):  # DecodeInterval() in src/backend/utils/adt/datetime.c
        raise InvalidConstantError("invalid input syntax for type interval", "22007")
    if match[2] is not None and (int(match[5]) > 59 or int(match[6] or 0) > 60):
        raise InvalidConstantError("interval field value out of range", "22015")
    months = days = microseconds = 0
    for amount, unit in parts:
        name, factor = _INTERVAL_UNITS[unit[:3]]
        months += int(amount) * factor * (name == "months")
        days += int(amount) * factor * (name == "days")
        microseconds += int(amount) * factor * (name == "microseconds")
    if match[2] is not None:
        clock_seconds = (int(match[4]) * 60 + int(match[5])) * 60 + int(match[6] or 0)
        microseconds += (-1 if match[3] == "-" else 1) * (
            clock_seconds * 1_000_000 + int((match[7] or "").ljust(6, "0"))
        )
    return Interval(months, days, microseconds)


def _parse_timestamp(text: str) -> datetime | Infinity:
    return _parse_infinity(text) or _parse_finite_timestamp(text)


def _parse_finite_timestamp(text: str) -> datetime:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise RefusedError("a timestamp constant must be YYYY-MM-DD HH:MM:SS[.ffffff]")
    try:
        return datetime.fromisoformat(f"{match[1]} {match[2] or '00:00'}")
    except ValueError:
        raise RefusedError(_TIMESTAMP_OUT_OF_CALENDAR) from None


def _parse_timestamptz(text: str) -> datetime | Infinity:
    infinity = _parse_infinity(text)
    if infinity is not None:
        return infinity
    zone = re.search(rf"(?<=[\d:.])\s?({_ZONE.pattern})$", text[10:], re.ASCII)
    if zone is None:
        raise RefusedError(
            "without an offset (+00), a timestamp with time zone constant depends on the session's TimeZone"
        )
    local_time = _parse_finite_timestamp(text[: 10 + zone.start()])
    offset = f"{zone[2]}:{zone[3] or '00'}" if zone[2] else "+00:00"
    try:
        return datetime.fromisoformat(f"{local_time.isoformat()}{offset}").astimezone(UTC)
    except (ValueError, OverflowError):
        raise RefusedError(_TIMESTAMP_OUT_OF_CALENDAR) from None


_INPUT_FUNCTIONS: Final[dict[int, Callable[[str], ConstantValue]]] = {
    BOOL: _parse_boolean,
    BYTEA: _parse_bytea,
    INT2: lambda text: _parse_integer(text, 16),
    INT4: lambda text: _parse_integer(text, 32),
    INT8: lambda text: _parse_integer(text, 64),
    NUMERIC: _parse_decimal,
    FLOAT4: _parse_real,
    FLOAT8: _parse_double,
    TEXT: str,
    VARCHAR: str,
    BPCHAR: str,
    DATE: _parse_date,
    TIMESTAMP: _parse_timestamp,
    TIMESTAMPTZ: _parse_timestamptz,
    TIME: _parse_time,
    INTERVAL: parse_interval,
    UUID: _parse_uuid,
}


def constant_from_text(text: str | None, type_oid: int) -> Constant:
    """Return the constant that the type's input function makes of a text; the text None stands for NULL."""
    if type_oid not in _INPUT_FUNCTIONS:
        raise RefusedError(f"constants of the type with oid {type_oid} are not supported")
    return make_constant(None if text is None else _INPUT_FUNCTIONS[type_oid](text), type_oid)


def make_constant(value: ConstantValue, type_oid: int) -> Constant:
    """Return a constant of this type; a numeric also gets its precision and scale (`Digits`)."""
    if type_oid != NUMERIC:
        return Constant(value, type_oid=type_oid)
    if value is None:
        return Constant(None, type_oid=NUMERIC, digits=Digits(1, 0))
    if not isinstance(value, Decimal):
        raise TypeError(f"a numeric constant is not a {type(value).__name__}")
    return Constant(value, type_oid=NUMERIC, digits=_count_digits(value))


def _count_digits(value: Decimal) -> Digits | None:
    if not value.is_finite():
        return None
    _, decimal_digits, exponent = value.as_tuple()
    # Trailing zeros count as digits, because they belong to the scale of the constant.
    return Digits.from_digit_counts(max(len(decimal_digits) + int(exponent), 0), max(-int(exponent), 0))


def split_array_text(text: str) -> list[str | None]:
    """Return the texts of the elements of an array constant of one dimension; None stands for NULL.

    PostgreSQL documentation, Array Value Input.
    """
    stripped_text = text.strip()
    if not (stripped_text.startswith("{") and stripped_text.endswith("}")):
        raise RefusedError("an array constant must be '{…}' of one dimension")
    element_texts, position, content = [], 0, stripped_text[1:-1].strip()
    while position < len(content):
        match = _ARRAY_ITEM.match(content, position)
        if match is None or (match[3] == "," and match.end() == len(content)):
            raise RefusedError("this form of array constant is not supported, write ARRAY[…]")
        quoted_text, unquoted_text = match[1], match[2]
        text_or_null = None if unquoted_text is None or unquoted_text.upper() == "NULL" else unquoted_text
        element_texts.append(
            text_or_null if quoted_text is None else re.sub(r"\\(.)", r"\1", quoted_text, flags=re.DOTALL)
        )
        position = match.end()
    return element_texts


def number_constant(text: str) -> Constant:
    """Return the constant for an unquoted number: an integer or bigint if the number fits, otherwise a numeric.

    PostgreSQL documentation, Numeric Constants.
    """
    if re.fullmatch(r"-?\d+", text, re.ASCII):
        value = parse_digits(text)
        for type_oid in (INT4, INT8):
            if -(1 << INTEGER_BITS[type_oid] - 1) <= value < 1 << INTEGER_BITS[type_oid] - 1:
                return Constant(value, type_oid=type_oid)
    return constant_from_text(text, NUMERIC)


def convert_constant(constant: Constant, type_oid: int) -> Constant | None:
    """Convert a constant from one number type to another, or from one string type to another.

    Returns None for other types, and for most conversions of floats (`_convert_float`). A value of type character
    loses its trailing blanks. A cast from numeric to an integer rounds half away from zero (numeric.c).
    """
    value = constant.value
    if value is None:
        return make_constant(None, type_oid)
    match value:
        case str() if type_oid in STRINGS and constant.type_oid in STRINGS:
            return Constant(value.rstrip(" ") if constant.type_oid == BPCHAR else value, type_oid=type_oid)
        case bool() | str() | bytes() | date() | Interval() | Infinity():
            return None
        case int():
            decimal_text = str(value)
        case Decimal():
            decimal_text = format(value, "f")
        case _:
            return _convert_float(value, constant.type_oid, type_oid)
    if type_oid in INTEGERS:
        if isinstance(value, Decimal):
            if not value.is_finite():
                raise InvalidConstantError("cannot convert NaN or infinity to an integer", "0A000")
            value = int(value.to_integral_value(ROUND_HALF_UP, _EXACT_CONTEXT))
        return Constant(_require_range(value, INTEGER_BITS[type_oid]), type_oid=type_oid)
    return constant_from_text(decimal_text, type_oid) if type_oid in (NUMERIC, FLOAT4, FLOAT8) else None


def _convert_float(value: float, source_oid: int, target_oid: int) -> Constant | None:
    """Convert a float to double precision, or to real if real can hold the same value. Otherwise return None."""
    if target_oid in (FLOAT8, source_oid):
        return Constant(value, type_oid=target_oid)
    if target_oid == FLOAT4 and (isnan(value) or round_to_single(value) == value):
        return Constant(value, type_oid=target_oid)
    return None


def apply_modifier(constant: Constant, modifier: tuple[int, ...]) -> Constant:
    """Cast a constant explicitly to its type with a modifier, such as `numeric(5,2)` or `varchar(3)`."""
    value = constant.value
    if value is None or not modifier:
        return constant
    match constant.type_oid, value:
        case (int(oid), Decimal()) if oid == NUMERIC:
            return make_constant(_apply_numeric_modifier(value, *modifier), NUMERIC)
        case (int(oid), str()) if oid == VARCHAR:
            return Constant(value[: modifier[0]], type_oid=VARCHAR)
        case (int(oid), str()) if oid == BPCHAR:
            return Constant(value[: modifier[0]].ljust(modifier[0]), type_oid=BPCHAR)
        case _:
            raise RefusedError("a type modifier is supported on numeric, varchar and character only")


def _apply_numeric_modifier(value: Decimal, precision: int, scale: int = 0) -> Decimal:
    if value.is_nan():
        return value
    with localcontext(_EXACT_CONTEXT):
        rounded_value = (
            value.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP) if value.is_finite() else value
        )
        if abs(rounded_value) >= Decimal(10) ** (precision - scale):
            raise InvalidConstantError("numeric field overflow", "22003")
    return rounded_value
