"""The functions of `pgsieve.decoding.row_filters.procedures` as Spark expressions, by their names in pg_proc (`prosrc`).

In: Columns of the function's argument types. Out: its result, which fails where PostgreSQL's does (varlena.c,
oracle_compat.c, int.c). What depends on more than Columns, `pgsieve.assets.steps.row_filters.condition` compiles itself. Raises
nothing.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, BooleanType, DataType, IntegerType, LongType, StringType

from pgsieve.assets.steps.row_filters import datetimes, numbers
from pgsieve.assets.steps.row_filters.expressions import bound, chosen, failure
from pgsieve.assets.steps.row_filters.python import PythonFunction
from pgsieve.decoding.row_filters.letter_case import CaseMapping
from pgsieve.decoding.row_filters.nodes import DATE
from pgsieve.decoding.row_filters.strings import INTEGER_FUNCTIONS, STRING_FUNCTIONS

_GREATEST_LENGTH: Final = (1 << 31) - 1


def _identity(value: Column) -> Column:
    return value


def _clamped(length: Column) -> Column:
    at_least_zero = F.greatest(length, F.lit(0).cast(LongType()))
    return F.least(at_least_zero, F.lit(_GREATEST_LENGTH).cast(LongType())).cast(IntegerType())


def _substring(value: Column, start: Column, length: Column | None = None) -> Column:
    """Take `length` characters or bytes from `start` on, which may lie before the first (text_substring)."""
    if length is None:
        return F.when(start.isNotNull(), F.substr(value, F.greatest(start, F.lit(1))))

    def build(text: Column, first: Column, count: Column) -> Column:
        begin = F.greatest(first, F.lit(1))
        taken = _clamped(first.cast(LongType()) + count.cast(LongType()) - begin.cast(LongType()))
        error = failure("22011", "negative substring length not allowed")
        negative = (count < 0) & text.isNotNull() & first.isNotNull()
        cut = F.when(first.isNotNull() & count.isNotNull(), F.substr(text, begin, taken))
        return F.when(negative, error).otherwise(cut)

    return bound(build, value, start, length)


def _left(value: Column, count: Column) -> Column:
    """Take the first characters, or all but the last ones where the count is negative."""

    def build(text: Column, number: Column) -> Column:
        number = number.cast(LongType())
        taken = F.when(number < 0, F.length(text) + number).otherwise(number)
        return F.when(number.isNotNull(), F.substr(text, F.lit(1), _clamped(taken)))

    return bound(build, value, count)


def _right(value: Column, count: Column) -> Column:
    """Take the last characters, or all but the first ones where the count is negative."""

    def build(text: Column, number: Column) -> Column:
        number = number.cast(LongType())
        # The least integer is its own negation there, and leaves none out.
        skipped = chosen(
            [(number == -_GREATEST_LENGTH - 1, F.lit(0).cast(LongType())), (number < 0, -number)],
            F.length(text) - number,
        )
        start = F.least(_clamped(skipped), F.lit(_GREATEST_LENGTH - 1)) + 1
        return F.when(number.isNotNull(), F.substr(text, start))

    return bound(build, value, count)


def _padded(pad: Callable[..., Column]) -> Callable[..., Column]:
    def build(value: Column, length: Column, fill: Column | None = None) -> Column:
        return pad(value, F.greatest(length, F.lit(0)), F.lit(" ") if fill is None else fill)

    return build


def _to_hex32(value: Column) -> Column:
    return _to_hex64(value.cast(LongType()).bitwiseAND(F.lit(0xFFFFFFFF).cast(LongType())))


def _to_hex64(value: Column) -> Column:
    return F.lower(F.hex(value))


def _hashed(bits: int) -> Callable[[Column], Column]:
    return lambda value: F.unhex(F.sha2(value, bits))


def _bits(value: Column) -> Column:
    return F.octet_length(value) * F.lit(8)


# --- arrays of one dimension -------------------------------------------------------------


def _length(array: Column) -> Column:
    return F.when(F.size(array) > 0, F.size(array))


def _of_first_dimension(array: Column) -> Column:
    return F.when(F.size(array) > 0, F.lit(1))


def _found_in(array: Column) -> Callable[[Column], Column]:
    """Whether an element is in an array; NULL is found nowhere."""
    return lambda element: element.isNotNull() & F.exists(array, lambda item: item.eqNullSafe(element))


def array_contains(array: Column, other: Column) -> Column:
    """`array @> other`."""
    return bound(
        lambda whole, part: F.when(whole.isNotNull(), F.forall(part, _found_in(whole))), array, other
    )


def array_overlaps(array: Column, other: Column) -> Column:
    """`array && other`."""
    return bound(
        lambda first, second: F.when(first.isNotNull(), F.exists(second, _found_in(first))), array, other
    )


def array_position(array: Column, sought: Column) -> Column:
    """Return the place of the first element that is `sought`, which may be NULL."""

    def build(items: Column, item: Column) -> Column:
        alike = F.transform(items, lambda element: element.eqNullSafe(item))
        return F.nullif(F.array_position(alike, F.lit(True)), F.lit(0).cast(LongType())).cast(IntegerType())

    return bound(build, array, sought)


# ------------------------------------------------------------------------------------------

_PYTHON_TYPES: Final[Mapping[str, DataType]] = MappingProxyType(
    {
        "textlike": BooleanType(),
        **dict.fromkeys(("int4gcd", "int4lcm"), IntegerType()),
        **dict.fromkeys(("int8gcd", "int8lcm"), LongType()),
    }
)


@cache
def initcap(mapping: CaseMapping) -> PythonFunction:
    """Return initcap, where the case of a character depends on the one before."""
    return PythonFunction(partial(mapping.changed, "initcap"), StringType())


def in_python(name: str) -> PythonFunction | None:
    """Return the function where the executors' Python has to compute it, None where Spark does."""
    function = {**INTEGER_FUNCTIONS, **STRING_FUNCTIONS}.get(name)
    return function and PythonFunction(function, _PYTHON_TYPES.get(name, StringType()))


FUNCTIONS: Final[Mapping[str, Callable[..., Column]]] = MappingProxyType(
    {
        **dict.fromkeys(("int2abs", "int4abs", "int8abs", "float4abs", "float8abs", "numeric_abs"), F.abs),
        **dict.fromkeys(("int2um", "int4um", "int8um", "float4um", "float8um", "numeric_uminus"), F.negative),
        **dict.fromkeys(("int2up", "int4up", "int8up", "float4up", "float8up"), _identity),
        **dict.fromkeys(("int2and", "int4and", "int8and"), Column.bitwiseAND),
        **dict.fromkeys(("int2or", "int4or", "int8or"), Column.bitwiseOR),
        **dict.fromkeys(("int2xor", "int4xor", "int8xor"), Column.bitwiseXOR),
        **dict.fromkeys(("int2not", "int4not", "int8not"), F.bitwise_not),
        "to_hex32": _to_hex32,
        "to_hex64": _to_hex64,
        "dsign": numbers.float_sign,
        "dceil": numbers.float_ceil,
        "dfloor": numbers.float_floor,
        "dround": F.rint,
        "dtrunc": numbers.float_trunc,
        "dsqrt": numbers.float_sqrt,
        **dict.fromkeys(("textcat", "byteacat"), F.concat),
        **dict.fromkeys(("textlen", "byteaoctetlen"), F.length),
        "bpcharlen": lambda text: F.length(F.rtrim(text)),
        **dict.fromkeys(("textoctetlen", "bpcharoctetlen"), F.octet_length),
        **dict.fromkeys(("textbitlen", "byteabitlen"), _bits),
        **dict.fromkeys(("text_substr", "bytea_substr"), _substring),
        "text_left": _left,
        "text_right": _right,
        "textpos": lambda text, sought: F.call_function("position", sought, text),
        "text_starts_with": F.startswith,
        **dict.fromkeys(("btrim", "btrim1"), F.trim),
        **dict.fromkeys(("ltrim", "ltrim1"), F.ltrim),
        **dict.fromkeys(("rtrim", "rtrim1"), F.rtrim),
        "replace_text": F.replace,
        "translate": partial(F.call_function, "translate"),
        "repeat": F.repeat,
        "text_reverse": F.reverse,
        "split_part": F.split_part,
        "lpad": _padded(F.lpad),
        "rpad": _padded(F.rpad),
        "ascii": F.ascii,
        "md5_text": lambda text: F.md5(text.cast(BinaryType())),
        "md5_bytea": F.md5,
        "sha256_bytea": _hashed(256),
        "sha512_bytea": _hashed(512),
        "date_pli": datetimes.add_days,
        "integer_pl_date": lambda days, date: datetimes.add_days(date, days),
        "date_mii": partial(datetimes.add_days, sign=-1),
        "date_mi": datetimes.days_between,
        "datetime_pl": datetimes.add_time,
        "timedate_pl": lambda time, date: datetimes.add_time(date, time),
        "date_finite": partial(datetimes.finite, type_oid=DATE),
        "make_date": datetimes.make_date,
        "timestamp_date": datetimes.date_from_timestamp,
        "array_cardinality": F.size,
        "array_length": _length,
        "array_lower": _of_first_dimension,
        "array_ndims": _of_first_dimension,
        "array_position": array_position,
        "arraycontains": array_contains,
        "arraycontained": lambda array, other: array_contains(other, array),
        "arrayoverlap": array_overlaps,
    }
)
