"""Computes PostgreSQL's arithmetic, functions and casts of numbers, so that row filters give the server's results.

In: numbers as Python values: int for smallint, integer and bigint; float for real and double precision; Decimal for
    numeric. None of them is NULL.
Out: the value that PostgreSQL computes. Raises FilterValueError or NumericError if PostgreSQL raises an error for
     these numbers, for example if they are out of range.

The rules are those of the source files int.c, int8.c, float.c and numeric.c (src/backend/utils/adt) and float.h
(src/include/utils).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from ctypes import c_float
from decimal import Decimal
from functools import partial
from operator import add, and_, mul, neg, or_, sub, xor
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    FLOAT4,
    FLOAT8,
    FLOATS,
    INT2,
    INT4,
    INT8,
    INTEGERS,
    NUMERIC,
)
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS, DECIMAL_TO_INTEGER, numeric_text
from pgsieve.decoding.row_filters.strings import INTEGER_FUNCTIONS, FilterValueError

#: Maps the oid of each integer type to its number of bits and its name.
_BITS: Final = MappingProxyType({INT2: (16, "smallint"), INT4: (32, "integer"), INT8: (64, "bigint")})


def _identity(value: Any) -> Any:
    return value


def _division_by_zero() -> FilterValueError:
    return FilterValueError("division by zero", sqlstate="22012")


# --- integers ----------------------------------------------------------------------------


def _with_range_check(compute: Callable[..., int], type_oid: int) -> Callable[..., int]:
    """Return a function that calls `compute`, and raises FilterValueError if the result does not fit the integer type."""
    bits, name = _BITS[type_oid]
    limit = 1 << bits - 1

    def checked(*operands: int) -> int:
        result = compute(*operands)
        if -limit <= result < limit:
            return result
        raise FilterValueError(f"{name} out of range", sqlstate="22003")

    return checked


def _quotient(left: int, right: int) -> int:
    """Divide integers, and round towards zero as C does. Python's `//` would round down."""
    if right == 0:
        raise _division_by_zero()
    magnitude = abs(left) // abs(right)
    return magnitude if (left < 0) == (right < 0) else -magnitude


def _remainder(left: int, right: int) -> int:
    """The remainder of a division. It has the sign of `left` as in C; Python's `%` would give the sign of `right`."""
    if right == 0:
        raise _division_by_zero()
    magnitude = abs(left) % abs(right)
    return -magnitude if left < 0 else magnitude


_INTEGER_ARITHMETIC: Final = MappingProxyType({"+": add, "-": sub, "*": mul, "/": _quotient, "%": _remainder})


def _invert_bits(value: int) -> int:
    return ~value


def _hexadecimal(bits: int) -> Callable[[int], str]:
    return lambda value: f"{value & ((1 << bits) - 1):x}"


# --- floating point ----------------------------------------------------------------------

#: From this absolute value on, each number in double precision is a whole number.
_MIN_DOUBLE_WITHOUT_FRACTION: Final = float(1 << 52)


def _round_to_single(value: float) -> float:
    """Round a number to single precision. A number that is too large for single precision becomes infinite."""
    return c_float(value).value


def _overflow() -> NoReturn:
    raise FilterValueError("value out of range: overflow", sqlstate="22003")


def _underflow() -> NoReturn:
    raise FilterValueError("value out of range: underflow", sqlstate="22003")


def _float_addition(
    compute: Callable[[float, float], float], round_result: Callable[[float], float]
) -> Callable[..., float]:
    def compute_checked(left: float, right: float) -> float:
        result = round_result(compute(left, right))
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _overflow()
        return result

    return compute_checked


def _float_multiplication(round_result: Callable[[float], float]) -> Callable[..., float]:
    def compute_checked(left: float, right: float) -> float:
        result = round_result(left * right)
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _overflow()
        if result == 0 and left != 0 and right != 0:
            _underflow()
        return result

    return compute_checked


def _float_division(round_result: Callable[[float], float]) -> Callable[..., float]:
    def compute_checked(left: float, right: float) -> float:
        if math.isnan(left) or math.isnan(right):
            return math.nan
        if right == 0:
            raise _division_by_zero()
        result = round_result(left / right)
        if math.isinf(result) and not math.isinf(left):
            _overflow()
        if result == 0 and left != 0 and not math.isinf(right):
            _underflow()
        return result

    return compute_checked


def _float_arithmetic(type_oid: int) -> Mapping[str, Callable[..., float]]:
    """Map each operator to its function for real or double precision. PostgreSQL has no `%` for these types."""
    # For real, Python computes in double precision, and the result is then rounded to single precision. Rounding twice
    # gives the same result as rounding once, because 53 bits of precision are more than 2 * 24 + 1.
    round_result = _round_to_single if type_oid == FLOAT4 else _identity
    return {
        "+": _float_addition(add, round_result),
        "-": _float_addition(sub, round_result),
        "*": _float_multiplication(round_result),
        "/": _float_division(round_result),
    }


def _float_rounding(compute: Callable[[float], int]) -> Callable[[float], float]:
    """Return a function that rounds by `compute`. It returns NaN, infinities and whole numbers unchanged."""
    return lambda value: float(compute(value)) if abs(value) < _MIN_DOUBLE_WITHOUT_FRACTION else value


def _float_sign(value: float) -> float:
    return float((value > 0) - (value < 0))  # 0 for NaN


def _float_root(value: float) -> float:
    if value < 0:
        raise FilterValueError("cannot take square root of a negative number", sqlstate="2201F")
    return math.sqrt(value)


# --- arithmetic --------------------------------------------------------------------------

_NUMERIC_ARITHMETIC: Final = MappingProxyType(
    {"+": "numeric_add", "-": "numeric_sub", "*": "numeric_mul", "/": "numeric_div", "%": "numeric_mod"}
)


def arithmetic(operator: str, type_oid: int) -> Callable[..., Any]:
    """Return the function that computes an operator for two numbers of the same type.

    The operators are `+`, `-`, `*` and `/`, and for integers and numeric also `%`.
    """
    if type_oid in INTEGERS:
        return _with_range_check(_INTEGER_ARITHMETIC[operator], type_oid)
    if type_oid in FLOATS:
        return _float_arithmetic(type_oid)[operator]
    return DECIMAL_FUNCTIONS[_NUMERIC_ARITHMETIC[operator]]


# --- conversions -------------------------------------------------------------------------


def _real_from_integer(value: int) -> float:
    """Convert an integer to real, and round only once. A conversion to Python's float first would round twice."""
    return float(np.int64(value).astype(np.float32))


def _integer_from_float(value: float, bits: int, name: str) -> int:
    """Round a float to an integer of `bits` bits. A number halfway between two integers becomes the even one.

    Raises FilterValueError for NaN, infinities, and numbers that the integer type `name` cannot hold.
    """
    limit = float(1 << bits - 1)
    if math.isfinite(value) and -limit <= (whole := round(value)) < limit:
        return whole
    raise FilterValueError(f"{name} out of range", sqlstate="22003")


def _real_from_double(value: float) -> float:
    result = _round_to_single(value)
    if math.isinf(result) and not math.isinf(value):
        _overflow()
    if result == 0 and value != 0:
        _underflow()
    return result


def _float_from_numeric(convert: Callable[[Decimal], float]) -> Callable[[Decimal], float]:
    """Return a function that converts a numeric by `convert`, and checks the result as the server does.

    The function raises FilterValueError if a finite number becomes infinite, or if a number other than 0 becomes 0
    (float8in_internal() in float.c).
    """

    def compute_checked(value: Decimal) -> float:
        result = convert(value)
        if (math.isinf(result) and value.is_finite()) or (result == 0 and value != 0):
            raise FilterValueError("out of range for type double precision or real", sqlstate="22003")
        return result

    return compute_checked


def _real_from_decimal(value: Decimal) -> float:
    # Arrow rounds a text to real only once. A conversion to Python's float first would round twice.
    result: float = pa.scalar(numeric_text(value)).cast(pa.float32()).as_py()
    return result


def _conversions() -> dict[tuple[int, int], Callable[[Any], Any]]:
    conversions: dict[tuple[int, int], Callable[[Any], Any]] = {
        (FLOAT4, FLOAT8): _identity,
        (FLOAT8, FLOAT4): _real_from_double,
        (FLOAT4, NUMERIC): DECIMAL_FUNCTIONS["float4_numeric"],
        (FLOAT8, NUMERIC): DECIMAL_FUNCTIONS["float8_numeric"],
        (NUMERIC, FLOAT4): _float_from_numeric(_real_from_decimal),
        (NUMERIC, FLOAT8): _float_from_numeric(float),
        (INT4, BOOL): bool,
        (BOOL, INT4): int,
    }
    for integer, (bits, name) in _BITS.items():
        round_result = partial(_integer_from_float, bits=bits, name=name)
        conversions |= {
            (integer, NUMERIC): Decimal,
            (integer, FLOAT4): _real_from_integer,
            (integer, FLOAT8): float,
            (NUMERIC, integer): DECIMAL_TO_INTEGER[f"numeric_int{bits // 8}"],
            **dict.fromkeys(((FLOAT4, integer), (FLOAT8, integer)), round_result),
            **{
                (source, integer): _with_range_check(_identity, integer)
                for source in INTEGERS
                if source != integer
            },
        }
    return conversions


CONVERSIONS: Final = MappingProxyType(_conversions())
"""Maps the type oids of a source and a target to the function that casts a value from the source type to the target type.

The types are the types of numbers. Integer can be cast to boolean and back, too.
"""

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **DECIMAL_FUNCTIONS,
        **DECIMAL_TO_INTEGER,
        **INTEGER_FUNCTIONS,
        **{f"int{bits // 8}abs": _with_range_check(abs, oid) for oid, (bits, _) in _BITS.items()},
        **{f"int{bits // 8}um": _with_range_check(neg, oid) for oid, (bits, _) in _BITS.items()},
        **dict.fromkeys(("float4abs", "float8abs"), abs),
        **dict.fromkeys(("float4um", "float8um"), neg),
        **dict.fromkeys(("int2up", "int4up", "int8up", "float4up", "float8up"), _identity),
        **dict.fromkeys(("int2and", "int4and", "int8and"), and_),
        **dict.fromkeys(("int2or", "int4or", "int8or"), or_),
        **dict.fromkeys(("int2xor", "int4xor", "int8xor"), xor),
        **dict.fromkeys(("int2not", "int4not", "int8not"), _invert_bits),
        "to_hex32": _hexadecimal(32),
        "to_hex64": _hexadecimal(64),
        "dsign": _float_sign,
        "dceil": _float_rounding(math.ceil),
        "dfloor": _float_rounding(math.floor),
        "dround": _float_rounding(round),
        "dtrunc": _float_rounding(math.trunc),
        "dsqrt": _float_root,
    }
)
"""Maps the server's internal name of a function of numbers (`prosrc` in pg_proc) to a Python function that does the same."""
