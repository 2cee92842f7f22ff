"""Converts dates and timestamps from PostgreSQL's ISO text or binary format to Arrow date32 and timestamp.

Values before year 1 and after 9999 are exact. infinity becomes the greatest value of Spark's type. -infinity
becomes the first instant of a year that lies before PostgreSQL's range. Spark's least value would not do: when Spark
pushes filters down, it converts their constants to the Julian calendar, which overflows near that value.

Raises ValueError for text that is not a date or timestamp, and for timestamps out of Spark's range. The error does not
contain the value. Spark's range ends in January 294247, 29 years before the end of PostgreSQL's range. No finite value
becomes an infinity.

PostgreSQL documentation, Date/Time Types; src/include/datatype/timestamp.h, EncodeDateTime() in
src/backend/utils/adt/datetime.c.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import pack_bitmap, read_fixed_width, to_big_endian

_DAY_MICROS = 86_400_000_000
POSTGRES_EPOCH_DAYS = 10_957  # 2000-01-01, POSTGRES_EPOCH_JDATE, in days since 1970-01-01


def days_since_epoch(year: int, month: int, day: int) -> int:
    """Return the number of days from 1970-01-01 to a day of the proleptic Gregorian calendar; year 0 is 1 BC."""
    # Here years start in March, so that the leap day is the last day of a year. 400 years have 146,097 days.
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
    leap_days = year // 4 - year // 100 + year // 400
    return 365 * year + leap_days + (153 * month + 2) // 5 + day - 719_469


def calendar_date(days: int) -> tuple[int, int, int]:
    """Return the year, month and day of the proleptic Gregorian calendar; year 0 is 1 BC.

    `days` are days since 1970-01-01.
    """
    # This is the inverse of days_since_epoch. It counts from 0000-03-01, in cycles of 400 years, then in years.
    cycle, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    return 400 * cycle + year + (month > 9), month - 9 if month > 9 else month + 3, day + 1


DATE_INFINITY = 2**31 - 1
"""The date that stands for 'infinity', in days since 1970-01-01: 5881580-07-11. PostgreSQL's dates end in 5874897."""
DATE_MINUS_INFINITY = days_since_epoch(-5_877_000, 1, 1)
"""The date that stands for '-infinity', in days since 1970-01-01. PostgreSQL's dates begin in 4714 BC."""
TIMESTAMP_INFINITY = 2**63 - 1
"""The timestamp that stands for 'infinity', in microseconds since 1970-01-01: 294247-01-10 04:00:54.775807."""
TIMESTAMP_MINUS_INFINITY = days_since_epoch(-290_000, 1, 1) * _DAY_MICROS
"""The timestamp that stands for '-infinity', in microseconds since 1970-01-01."""

_ISO_PATTERN = re.compile(rb"(\d{4,7})-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?(\+00)?( BC)?")
#: Matches the values that Arrow can parse, those of the years 1 to 9999. They are called regular here.
_REGULAR_PATTERN = "^[0-9]{4}-[^B]*$"


def parse_text(values: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert the text that the output functions print with DateStyle ISO and TimeZone UTC."""
    text = values if pa.types.is_string(values.type) else values.cast(pa.binary()).view(pa.string())
    try:
        return text.cast(target_type)
    except pa.ArrowInvalid:
        return _convert_with_exceptions(text, target_type)


def _convert_with_exceptions(text: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert regular values and infinities a column at a time, and all other values one by one."""
    integer_type, minus_infinity, infinity = _find_integer_type_and_infinities(target_type)
    is_regular = pc.match_substring_regex(text, _REGULAR_PATTERN)
    try:
        regular_values = pc.if_else(is_regular, text, pa.scalar(None, pa.string())).cast(target_type)
    except pa.ArrowInvalid:
        raise ValueError("not a date or timestamp in ISO format") from None
    numbers = np.array(regular_values.cast(integer_type).fill_null(0))
    is_not_regular = pc.invert(is_regular).fill_null(fill_value=False)
    is_infinity, is_minus_infinity = (
        pc.equal(text, "infinity").fill_null(fill_value=False),
        pc.equal(text, "-infinity"),
    )
    is_minus_infinity = is_minus_infinity.fill_null(fill_value=False)
    numbers[np.asarray(is_infinity)] = infinity
    numbers[np.asarray(is_minus_infinity)] = minus_infinity
    has_distant_year = pc.and_not(is_not_regular, pc.or_(is_infinity, is_minus_infinity))
    distant_indexes = np.flatnonzero(np.asarray(has_distant_year))
    for index, value in zip(
        distant_indexes, text.filter(has_distant_year).cast(pa.binary()).to_pylist(), strict=True
    ):
        numbers[index] = _parse_distant_year(value, target_type)
    return pa.array(numbers, mask=np.asarray(text.is_null())).cast(target_type)


def _parse_distant_year(value: bytes, target_type: pa.DataType) -> int:
    """Convert one value before year 1 or after 9999 to days or microseconds since 1970-01-01."""
    match = _ISO_PATTERN.fullmatch(value)
    has_zone = pa.types.is_timestamp(target_type) and target_type.tz is not None
    if (
        match is None
        or (match[4] is not None) != pa.types.is_timestamp(target_type)
        or (match[8] is not None) != has_zone
    ):
        raise ValueError("not a date or timestamp in ISO format")
    year = 1 - int(match[1]) if match[9] else int(match[1])
    days = days_since_epoch(year, int(match[2]), int(match[3]))
    if not pa.types.is_timestamp(target_type):
        return days
    seconds = int(match[4]) * 3600 + int(match[5]) * 60 + int(match[6])
    micros = days * _DAY_MICROS + seconds * 1_000_000 + int((match[7] or b"0").ljust(6, b"0"))
    if micros >= TIMESTAMP_INFINITY:
        raise ValueError("a timestamp after January 294247")
    return micros


def decode_binary(values: pa.Array, target_type: pa.DataType) -> pa.Array:
    """Convert the bytes of date_send, timestamp_send and timestamptz_send.

    These are big-endian numbers of days or microseconds since 2000-01-01. The greatest and the least number stand for
    the infinities (DATEVAL_NOEND, DT_NOEND).
    """
    integer_type, minus_infinity, infinity = _find_integer_type_and_infinities(target_type)
    numbers, is_valid = read_fixed_width(values, f">i{integer_type.bit_width // 8}")
    limits = np.iinfo(numbers.dtype)
    is_minus_infinity, is_infinity = numbers == limits.min, numbers == limits.max
    epoch_offset = POSTGRES_EPOCH_DAYS * (_DAY_MICROS if pa.types.is_timestamp(target_type) else 1)
    if ((numbers >= limits.max - epoch_offset) & ~is_infinity).any():
        raise ValueError("a timestamp after January 294247")
    numbers += np.where(is_infinity | is_minus_infinity, 0, epoch_offset).astype(numbers.dtype)
    numbers[is_infinity] = infinity
    numbers[is_minus_infinity] = minus_infinity
    validity = None if is_valid.all() else pack_bitmap(is_valid)
    return pa.Array.from_buffers(target_type, len(numbers), [validity, pa.py_buffer(numbers)])


def encode_binary(values: pa.Array) -> pa.Array:
    """Convert dates or timestamps back to the bytes of their send function."""
    integer_type, minus_infinity, infinity = _find_integer_type_and_infinities(values.type)
    is_valid = np.asarray(values.is_valid())
    integers = np.asarray(values.cast(integer_type).fill_null(0))
    limits = np.iinfo(integers.dtype)
    epoch_offset = POSTGRES_EPOCH_DAYS * (_DAY_MICROS if pa.types.is_timestamp(values.type) else 1)
    is_minus_infinity, is_infinity = integers == minus_infinity, integers == infinity
    sent_numbers = integers - np.where(is_minus_infinity | is_infinity, 0, epoch_offset).astype(
        integers.dtype
    )
    sent_numbers[is_minus_infinity] = limits.min
    sent_numbers[is_infinity] = limits.max
    return to_big_endian(sent_numbers, is_valid)


def _find_integer_type_and_infinities(target_type: pa.DataType) -> tuple[pa.DataType, int, int]:
    """Return the integer type for a date or timestamp type, and the integers for -infinity and infinity."""
    if pa.types.is_timestamp(target_type):
        return pa.int64(), TIMESTAMP_MINUS_INFINITY, TIMESTAMP_INFINITY
    return pa.int32(), DATE_MINUS_INFINITY, DATE_INFINITY
