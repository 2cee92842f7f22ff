"""Computes PostgreSQL's arithmetic, functions and casts of numbers, so that row filters give the server's results.

In: numbers as Python values, none of them NULL: int for smallint, integer and bigint; float for real and double
precision; Decimal for numeric. Out: the value that PostgreSQL computes. Raises FilterValueError or NumericError if
PostgreSQL raises an error for these numbers, for example if the result is out of range.

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
_BITS_AND_NAME_BY_TYPE: Final = MappingProxyType(
    {INT2: (16, "smallint"), INT4: (32, "integer"), INT8: (64, "bigint")}
)


def _identity(value: Any) -> Any:
    return value


def _make_division_by_zero_error() -> FilterValueError:
    return FilterValueError("division by zero", sqlstate="22012")


# --- integers ----------------------------------------------------------------------------


def _add_range_check(compute: Callable[..., int], type_oid: int) -> Callable[..., int]:
    """Return a function that calls `compute`, and raises FilterValueError if the result does not fit the integer type."""
    bits, name = _BITS_AND_NAME_BY_TYPE[type_oid]
    limit = 1 << bits - 1

    def compute_checked(*operands: int) -> int:
        result = compute(*operands)
        if -limit <= result < limit:
            return result
        raise FilterValueError(f"{name} out of range", sqlstate="22003")

    return compute_checked


def _divide_integers(left: int, right: int) -> int:
    """Divide integers, and round towards zero as C does. Python's `//` would round down."""
    if right == 0:
        raise _make_division_by_zero_error()
    magnitude = abs(left) // abs(right)
    return magnitude if (left < 0) == (right < 0) else -magnitude


def _find_remainder(left: int, right: int) -> int:
    """Return the remainder of a division. It has the sign of `left` as in C; Python's `%` would give the sign of `right`."""
    if right == 0:
        raise _make_division_by_zero_error()
    magnitude = abs(left) % abs(right)
    return -magnitude if left < 0 else magnitude


_INTEGER_ARITHMETIC: Final = MappingProxyType(
    {"+": add, "-": sub, "*": mul, "/": _divide_integers, "%": _find_remainder}
)


def _invert_bits(value: int) -> int:
    return ~value


def _make_hexadecimal_printer(bits: int) -> Callable[[int], str]:
    return lambda value: f"{value & ((1 << bits) - 1):x}"


# --- floating point ----------------------------------------------------------------------

#: From this absolute value on, each number in double precision is a whole number.
_MIN_DOUBLE_WITHOUT_FRACTION: Final = float(1 << 52)


def _round_to_single(value: float) -> float:
    """Round a number to single precision. A number that is too large for single precision becomes infinite."""
    return c_float(value).value


def _fail_overflow() -> NoReturn:
    raise FilterValueError("value out of range: overflow", sqlstate="22003")


def _fail_underflow() -> NoReturn:
    raise FilterValueError("value out of range: underflow", sqlstate="22003")


def _make_float_adder(
    compute: Callable[[float, float], float], round_result: Callable[[float], float]
) -> Callable[..., float]:
    """Return `compute`, an addition or a subtraction, with the server's check for overflow."""

    def compute_checked(left: float, right: float) -> float:
        result = round_result(compute(left, right))
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _fail_overflow()
        return result

    return compute_checked


def _make_float_multiplier(round_result: Callable[[float], float]) -> Callable[..., float]:
    def compute_checked(left: float, right: float) -> float:
        result = round_result(left * right)
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _fail_overflow()
        if result == 0 and left != 0 and right != 0:
            _fail_underflow()
        return result

    return compute_checked


def _make_float_divider(round_result: Callable[[float], float]) -> Callable[..., float]:
    def compute_checked(left: float, right: float) -> float:
        if math.isnan(left) or math.isnan(right):
            return math.nan
        if right == 0:
            raise _make_division_by_zero_error()
        result = round_result(left / right)
        if math.isinf(result) and not math.isinf(left):
            _fail_overflow()
        if result == 0 and left != 0 and not math.isinf(right):
            _fail_underflow()
        return result

    return compute_checked


def _make_float_operators(type_oid: int) -> Mapping[str, Callable[..., float]]:
    """Map each operator to its function for real or double precision. PostgreSQL has no `%` for these types."""
    # For real, Python computes in double precision, and the result is then rounded to single precision. Rounding twice
    # gives the same result as rounding once, because 53 bits of precision are more than 2 * 24 + 1.
    round_result = _round_to_single if type_oid == FLOAT4 else _identity
    return {
        "+": _make_float_adder(add, round_result),
        "-": _make_float_adder(sub, round_result),
        "*": _make_float_multiplier(round_result),
        "/": _make_float_divider(round_result),
    }


def _make_float_rounder(compute: Callable[[float], int]) -> Callable[[float], float]:
    """Return a function that rounds by `compute`. It returns NaN, infinities and whole numbers unchanged."""
    return lambda value: float(compute(value)) if abs(value) < _MIN_DOUBLE_WITHOUT_FRACTION else value


def _find_sign(value: float) -> float:
    return float((value > 0) - (value < 0))  # 0 for NaN


def _find_square_root(value: float) -> float:
    if value < 0:
        raise FilterValueError("cannot take square root of a negative number", sqlstate="2201F")
    return math.sqrt(value)


# --- arithmetic --------------------------------------------------------------------------

_NUMERIC_ARITHMETIC: Final = MappingProxyType(
    {"+": "numeric_add", "-": "numeric_sub", "*": "numeric_mul", "/": "numeric_div", "%": "numeric_mod"}
)


def arithmetic_function(operator: str, type_oid: int) -> Callable[..., Any]:
    """Return the function that computes an operator for two numbers of the same type.

    The operators are `+`, `-`, `*` and `/`, and for integers and numeric also `%`.
    """
    if type_oid in INTEGERS:
        return _add_range_check(_INTEGER_ARITHMETIC[operator], type_oid)
    if type_oid in FLOATS:
        return _make_float_operators(type_oid)[operator]
    return DECIMAL_FUNCTIONS[_NUMERIC_ARITHMETIC[operator]]


# --- conversions -------------------------------------------------------------------------


def _integer_to_real(value: int) -> float:
    """Convert an integer to real, and round only once. A conversion to Python's float first would round twice."""
    return float(np.int64(value).astype(np.float32))


def _float_to_integer(value: float, bits: int, name: str) -> int:
    """Round a float to an integer of `bits` bits. A number halfway between two integers becomes the even one.

    Raises FilterValueError for NaN, infinities, and numbers that the integer type `name` cannot hold.
    """
    limit = float(1 << bits - 1)
    if math.isfinite(value) and -limit <= (whole_number := round(value)) < limit:
        return whole_number
    raise FilterValueError(f"{name} out of range", sqlstate="22003")


def _double_to_real(value: float) -> float:
    result = _round_to_single(value)
    if math.isinf(result) and not math.isinf(value):
        _fail_overflow()
    if result == 0 and value != 0:
        _fail_underflow()
    return result


def _make_numeric_converter(convert: Callable[[Decimal], float]) -> Callable[[Decimal], float]:
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


def _decimal_to_real(value: Decimal) -> float:
    # Arrow rounds a text to real only once. A conversion to Python's float first would round twice.
    result: float = pa.scalar(numeric_text(value)).cast(pa.float32()).as_py()
    return result


def _list_conversions() -> dict[tuple[int, int], Callable[[Any], Any]]:
    conversions: dict[tuple[int, int], Callable[[Any], Any]] = {
        (FLOAT4, FLOAT8): _identity,
        (FLOAT8, FLOAT4): _double_to_real,
        (FLOAT4, NUMERIC): DECIMAL_FUNCTIONS["float4_numeric"],
        (FLOAT8, NUMERIC): DECIMAL_FUNCTIONS["float8_numeric"],
        (NUMERIC, FLOAT4): _make_numeric_converter(_decimal_to_real),
        (NUMERIC, FLOAT8): _make_numeric_converter(float),
        (INT4, BOOL): bool,
        (BOOL, INT4): int,
    }
    for integer_oid, (bits, name) in _BITS_AND_NAME_BY_TYPE.items():
        round_result = partial(_float_to_integer, bits=bits, name=name)
        conversions |= {
            (integer_oid, NUMERIC): Decimal,
            (integer_oid, FLOAT4): _integer_to_real,
            (integer_oid, FLOAT8): float,
            (NUMERIC, integer_oid): DECIMAL_TO_INTEGER[f"numeric_int{bits // 8}"],
            **dict.fromkeys(((FLOAT4, integer_oid), (FLOAT8, integer_oid)), round_result),
            **{
                (source, integer_oid): _add_range_check(_identity, integer_oid)
                for source in INTEGERS
                if source != integer_oid
            },
        }
    return conversions


NUMBER_CONVERSIONS: Final = MappingProxyType(_list_conversions())
"""Maps the type oids of a source and a target to the function that casts a value from the source type to the target type.

The types are those of numbers. Integer can be cast to boolean and back, too.
"""

NUMBER_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **DECIMAL_FUNCTIONS,
        **DECIMAL_TO_INTEGER,
        **INTEGER_FUNCTIONS,
        **{
            f"int{bits // 8}abs": _add_range_check(abs, oid)
            for oid, (bits, _) in _BITS_AND_NAME_BY_TYPE.items()
        },
        **{
            f"int{bits // 8}um": _add_range_check(neg, oid)
            for oid, (bits, _) in _BITS_AND_NAME_BY_TYPE.items()
        },
        **dict.fromkeys(("float4abs", "float8abs"), abs),
        **dict.fromkeys(("float4um", "float8um"), neg),
        **dict.fromkeys(("int2up", "int4up", "int8up", "float4up", "float8up"), _identity),
        **dict.fromkeys(("int2and", "int4and", "int8and"), and_),
        **dict.fromkeys(("int2or", "int4or", "int8or"), or_),
        **dict.fromkeys(("int2xor", "int4xor", "int8xor"), xor),
        **dict.fromkeys(("int2not", "int4not", "int8not"), _invert_bits),
        "to_hex32": _make_hexadecimal_printer(32),
        "to_hex64": _make_hexadecimal_printer(64),
        "dsign": _find_sign,
        "dceil": _make_float_rounder(math.ceil),
        "dfloor": _make_float_rounder(math.floor),
        "dround": _make_float_rounder(round),
        "dtrunc": _make_float_rounder(math.trunc),
        "dsqrt": _find_square_root,
    }
)
"""Maps the server's internal name of a function of numbers (`prosrc` in pg_proc) to a Python function that does the same."""
