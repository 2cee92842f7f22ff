"""Numbers in row filters: PostgreSQL's floating point, its rounding casts, and numerics of any size.

In: Columns. Out: Columns that have PostgreSQL's value, or fail where it does (float.h, float.c, numeric.c). Raises
nothing.
"""

from collections.abc import Callable, Mapping
from operator import add, mul, sub
from string import digits
from types import MappingProxyType
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType, DoubleType, FloatType, IntegerType, LongType, ShortType, StringType

from pgsieve.assets.steps.row_filters.expressions import bound, chosen, failure
from pgsieve.assets.steps.row_filters.python import PythonFunction
from pgsieve.decoding.row_filters import nodes
from pgsieve.decoding.row_filters.numeric import FROM_NUMERIC, TO_NUMERIC, extreme

INFINITY: Final = float("inf")


def _overflow() -> Column:
    return failure("22003", "value out of range: overflow")


def _underflow() -> Column:
    return failure("22003", "value out of range: underflow")


def _is_infinite(value: Column) -> Column:
    return F.abs(value) == F.lit(INFINITY)


# --- floating point ----------------------------------------------------------------------


def _added(compute: Callable[[Column, Column], Column]) -> Callable[[Column, Column], Column]:
    def build(left: Column, right: Column) -> Column:
        result = compute(left, right)
        overflows = _is_infinite(result) & ~_is_infinite(left) & ~_is_infinite(right)
        return F.when(overflows, _overflow()).otherwise(result)

    return build


def _multiplied(left: Column, right: Column) -> Column:
    result = mul(left, right)
    overflows = _is_infinite(result) & ~_is_infinite(left) & ~_is_infinite(right)
    underflows = (result == 0) & (left != 0) & (right != 0)
    return chosen([(overflows, _overflow()), (underflows, _underflow())], result)


def _divided(spark_type: DataType) -> Callable[[Column, Column], Column]:
    def build(left: Column, right: Column) -> Column:
        # Spark divides reals as doubles: rounding twice is rounding once here (53 bits are more than 2 * 24 + 1).
        result = (left / right).cast(spark_type)
        not_a_number = F.lit(float("nan")).cast(spark_type)
        return chosen(
            [
                ((right == 0) & (left != not_a_number), failure("22012", "division by zero")),
                ((right == 0) & left.isNotNull(), not_a_number),
                (_is_infinite(result) & ~_is_infinite(left), _overflow()),
                ((result == 0) & (left != 0) & ~_is_infinite(right), _underflow()),
            ],
            result,
        )

    return build


def float_arithmetic(operator: str, spark_type: DataType, left: Column, right: Column) -> Column:
    """+ - * / of two columns of one floating-point type."""
    builders = {"+": _added(add), "-": _added(sub), "*": _multiplied, "/": _divided(spark_type)}
    return bound(builders[operator], left, right)


_WHOLE: Final = float(1 << 52)  # from here on a double has no fraction


def _rounded(towards: Callable[[Column], Column]) -> Callable[[Column], Column]:
    # Spark's floor and ceil make a bigint of a double.
    def build(value: Column) -> Column:
        return F.when(F.abs(value) < _WHOLE, towards(value).cast(DoubleType())).otherwise(value)

    return lambda value: bound(build, value)


float_ceil, float_floor = _rounded(F.ceil), _rounded(F.floor)


def float_trunc(value: Column) -> Column:
    """Round towards zero."""
    return bound(lambda number: F.when(number < 0, float_ceil(number)).otherwise(float_floor(number)), value)


def float_sign(value: Column) -> Column:
    """-1, 0 or 1; 0 for NaN, which C compares with nothing."""
    return bound(
        lambda number: F.when(number == F.lit(float("nan")), F.lit(0.0)).otherwise(F.signum(number)), value
    )


def float_sqrt(value: Column) -> Column:
    """Return the square root; fails below zero."""

    def build(number: Column) -> Column:
        error = failure("2201F", "cannot take square root of a negative number")
        return F.when(number < 0, error).otherwise(F.sqrt(number))

    return bound(build, value)


_BITS: Final[Mapping[int, tuple[int, str, DataType]]] = MappingProxyType(
    {
        nodes.INT2: (16, "smallint", ShortType()),
        nodes.INT4: (32, "integer", IntegerType()),
        nodes.INT8: (64, "bigint", LongType()),
    }
)


def integer_from_float(value: Column, type_oid: int) -> Column:
    """Round half to even; fails beyond the integer's range and for NaN."""
    bits, name, spark_type = _BITS[type_oid]
    limit = float(1 << bits - 1)

    def build(number: Column) -> Column:
        fits = (number >= -limit) & (number < limit)
        return F.when(~fits, failure("22003", f"{name} out of range")).otherwise(number.cast(spark_type))

    return bound(build, F.rint(value.cast(DoubleType())))


def real_from_double(value: Column) -> Column:
    """Round to a single; fails where that is infinite or zero of a number that is not."""

    def build(number: Column) -> Column:
        result = number.cast(FloatType())
        overflows = _is_infinite(result) & ~_is_infinite(number)
        underflows = (result == 0) & (number != 0)
        return chosen([(overflows, _overflow()), (underflows, _underflow())], result)

    return bound(build, value)


def in_order(value: Column) -> Column:
    """Return the value of an integer operation, to be computed before those that it is an operand of.

    Spark takes nested sums and products for one, and computes its constants first (ReorderAssociativeOperator in
    catalyst/optimizer/expressions.scala): it would overflow where PostgreSQL does not, and the other way round.
    """
    return F.bitwise_not(F.bitwise_not(value))


# --- numeric -----------------------------------------------------------------------------


def numeric_function(name: str) -> PythonFunction:
    """Return the function of numerics with this `prosrc`, over their texts."""
    if name in TO_NUMERIC:
        return PythonFunction(TO_NUMERIC[name], StringType())
    type_oid = {"numeric_int2": nodes.INT2, "numeric_int8": nodes.INT8}.get(name, nodes.INT4)
    return PythonFunction(FROM_NUMERIC[name], _BITS[type_oid][2])


def _greatest(*texts: str | None) -> str | None:
    return extreme(texts, greatest=True)


def _least(*texts: str | None) -> str | None:
    return extreme(texts, greatest=False)


def numeric_extreme(function: str) -> PythonFunction:
    """Return GREATEST or LEAST over texts of numerics."""
    return PythonFunction(_greatest if function == "GREATEST" else _least, StringType(), strict=False)


def float_from_text(value: Column, spark_type: DataType) -> Column:
    """Convert a numeric's text; fails where the number is out of the type's range (float8in_internal)."""

    def build(text: Column) -> Column:
        result = text.cast(spark_type)
        error = failure("22003", "out of range for type double precision or real")
        is_zero = ~text.rlike("[1-9Na]")
        wrong = (_is_infinite(result) & ~text.contains("n")) | ((result == 0) & ~is_zero)
        return F.when(wrong, error).otherwise(result)

    return bound(build, value)


_NINES: Final = digits[::-1]


def numeric_order(text: Column) -> Column:
    """Return a string that sorts as the numeric whose text this is: any number of digits, NaN and infinities.

    PostgreSQL prints a numeric without exponent and without leading zeros, so its size is the number of digits
    before the point, then those digits, then the ones after it. Below zero the order turns round: nines
    complement, and an end mark greater than any digit. numeric.c: NaN is equal to itself and the greatest.
    """
    return bound(_numeric_order, text)


def _numeric_order(text: Column) -> Column:
    negative = text.startswith("-")
    size = F.ltrim(text, F.lit("-"))
    whole = F.substring_index(size, ".", 1)
    point = F.instr(size, ".") > 0
    rest = F.when(point, F.rtrim(F.substring_index(size, ".", -1), F.lit("0"))).otherwise(F.lit(""))
    ordered = F.concat(F.lpad(F.length(whole).cast(StringType()), 6, "0"), whole, F.lit("."), rest)
    return chosen(
        [
            (text == F.lit("NaN"), F.lit("7")),
            (text == F.lit("Infinity"), F.lit("6")),
            (text == F.lit("-Infinity"), F.lit("2")),
            ((whole == F.lit("0")) & (rest == F.lit("")), F.lit("4")),
            (negative, F.concat(F.lit("3"), F.translate(ordered, digits, _NINES), F.lit("~"))),
        ],
        F.concat(F.lit("5"), ordered),
    )
