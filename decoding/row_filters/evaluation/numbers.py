"""Integers, floating point and numeric in row filters, and the conversions between them.

In: Python values, none of them NULL. Out: PostgreSQL's value. Raises FilterValueError or NumericError if the
server raises an error (int.c, int8.c, float.h, float.c, numeric.c).
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
from pgsieve.decoding.row_filters.numeric import DECIMAL_FUNCTIONS, OF_DECIMAL, printed
from pgsieve.decoding.row_filters.strings import INTEGER_FUNCTIONS, FilterValueError

_BITS: Final = MappingProxyType({INT2: (16, "smallint"), INT4: (32, "integer"), INT8: (64, "bigint")})


def _identity(value: Any) -> Any:
    return value


def _division_by_zero() -> FilterValueError:
    return FilterValueError("division by zero", sqlstate="22012")


# --- integers ----------------------------------------------------------------------------


def _fitting(compute: Callable[..., int], type_oid: int) -> Callable[..., int]:
    """The same function, which raises an error for a result out of the integer type's range."""
    bits, name = _BITS[type_oid]
    limit = 1 << bits - 1

    def checked(*operands: int) -> int:
        result = compute(*operands)
        if -limit <= result < limit:
            return result
        raise FilterValueError(f"{name} out of range", sqlstate="22003")

    return checked


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise _division_by_zero()
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _remainder(left: int, right: int) -> int:
    if right == 0:
        raise _division_by_zero()
    size = abs(left) % abs(right)
    return -size if left < 0 else size


_INTEGER_ARITHMETIC: Final = MappingProxyType({"+": add, "-": sub, "*": mul, "/": _quotient, "%": _remainder})


def _inverted(value: int) -> int:
    return ~value


def _hexadecimal(bits: int) -> Callable[[int], str]:
    return lambda value: f"{value & ((1 << bits) - 1):x}"


# --- floating point ----------------------------------------------------------------------

_WHOLE: Final = float(1 << 52)  # From here on a double has no fraction.


def _single(value: float) -> float:
    """Round to single precision; a value that is too great becomes infinite."""
    return c_float(value).value


def _overflow() -> NoReturn:
    raise FilterValueError("value out of range: overflow", sqlstate="22003")


def _underflow() -> NoReturn:
    raise FilterValueError("value out of range: underflow", sqlstate="22003")


def _added(
    compute: Callable[[float, float], float], rounded: Callable[[float], float]
) -> Callable[..., float]:
    def of(left: float, right: float) -> float:
        result = rounded(compute(left, right))
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _overflow()
        return result

    return of


def _multiplied(rounded: Callable[[float], float]) -> Callable[..., float]:
    def of(left: float, right: float) -> float:
        result = rounded(left * right)
        if math.isinf(result) and not math.isinf(left) and not math.isinf(right):
            _overflow()
        if result == 0 and left != 0 and right != 0:
            _underflow()
        return result

    return of


def _divided(rounded: Callable[[float], float]) -> Callable[..., float]:
    def of(left: float, right: float) -> float:
        if math.isnan(left) or math.isnan(right):
            return math.nan
        if right == 0:
            raise _division_by_zero()
        result = rounded(left / right)
        if math.isinf(result) and not math.isinf(left):
            _overflow()
        if result == 0 and left != 0 and not math.isinf(right):
            _underflow()
        return result

    return of


def _float_arithmetic(type_oid: int) -> Mapping[str, Callable[..., float]]:
    # For real, a rounding to double first changes nothing: 53 bits are more than 2 * 24 + 1.
    rounded = _single if type_oid == FLOAT4 else _identity
    return {
        "+": _added(add, rounded), "-": _added(sub, rounded), "*": _multiplied(rounded), "/": _divided(rounded),
    }  # fmt: skip


def _towards(compute: Callable[[float], int]) -> Callable[[float], float]:
    """Round with this function; NaN, infinities and whole numbers stay as they are."""
    return lambda value: float(compute(value)) if abs(value) < _WHOLE else value


def _float_sign(value: float) -> float:
    return float((value > 0) - (value < 0))  # 0 for NaN, for which both comparisons are false


def _float_root(value: float) -> float:
    if value < 0:
        raise FilterValueError("cannot take square root of a negative number", sqlstate="2201F")
    return math.sqrt(value)


# --- arithmetic --------------------------------------------------------------------------

_NUMERIC_ARITHMETIC: Final = MappingProxyType(
    {"+": "numeric_add", "-": "numeric_sub", "*": "numeric_mul", "/": "numeric_div", "%": "numeric_mod"}
)


def arithmetic(operator: str, type_oid: int) -> Callable[..., Any]:
    """Return `+ - * / %` of two numbers of one type."""
    if type_oid in INTEGERS:
        return _fitting(_INTEGER_ARITHMETIC[operator], type_oid)
    if type_oid in FLOATS:
        return _float_arithmetic(type_oid)[operator]
    return DECIMAL_FUNCTIONS[_NUMERIC_ARITHMETIC[operator]]


# --- conversions -------------------------------------------------------------------------


def _real_from_integer(value: int) -> float:
    """Round once; through double precision the value would be rounded twice."""
    return float(np.int64(value).astype(np.float32))


def _rounded_integer(value: float, bits: int, name: str) -> int:
    """Round half to even; fails beyond the integer's range and for NaN."""
    limit = float(1 << bits - 1)
    if math.isfinite(value) and -limit <= (whole := round(value)) < limit:
        return whole
    raise FilterValueError(f"{name} out of range", sqlstate="22003")


def _real_from_double(value: float) -> float:
    result = _single(value)
    if math.isinf(result) and not math.isinf(value):
        _overflow()
    if result == 0 and value != 0:
        _underflow()
    return result


def _float_from_numeric(convert: Callable[[Decimal], float]) -> Callable[[Decimal], float]:
    """The same conversion, which raises an error for a number out of the type's range (float8in_internal)."""

    def of(value: Decimal) -> float:
        result = convert(value)
        if (math.isinf(result) and value.is_finite()) or (result == 0 and value != 0):
            raise FilterValueError("out of range for type double precision or real", sqlstate="22003")
        return result

    return of


def _real_from_decimal(value: Decimal) -> float:
    # Arrow rounds a text once; through double precision the value would be rounded twice.
    result: float = pa.scalar(printed(value)).cast(pa.float32()).as_py()
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
        rounded = partial(_rounded_integer, bits=bits, name=name)
        conversions |= {
            (integer, NUMERIC): Decimal,
            (integer, FLOAT4): _real_from_integer,
            (integer, FLOAT8): float,
            (NUMERIC, integer): OF_DECIMAL[f"numeric_int{bits // 8}"],
            **dict.fromkeys(((FLOAT4, integer), (FLOAT8, integer)), rounded),
            **{(source, integer): _fitting(_identity, integer) for source in INTEGERS if source != integer},
        }
    return conversions


CONVERSIONS: Final = MappingProxyType(_conversions())
"""Casts between numbers and boolean, by source and target."""

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **DECIMAL_FUNCTIONS,
        **OF_DECIMAL,
        **INTEGER_FUNCTIONS,
        **{f"int{bits // 8}abs": _fitting(abs, oid) for oid, (bits, _) in _BITS.items()},
        **{f"int{bits // 8}um": _fitting(neg, oid) for oid, (bits, _) in _BITS.items()},
        **dict.fromkeys(("float4abs", "float8abs"), abs),
        **dict.fromkeys(("float4um", "float8um"), neg),
        **dict.fromkeys(("int2up", "int4up", "int8up", "float4up", "float8up"), _identity),
        **dict.fromkeys(("int2and", "int4and", "int8and"), and_),
        **dict.fromkeys(("int2or", "int4or", "int8or"), or_),
        **dict.fromkeys(("int2xor", "int4xor", "int8xor"), xor),
        **dict.fromkeys(("int2not", "int4not", "int8not"), _inverted),
        "to_hex32": _hexadecimal(32),
        "to_hex64": _hexadecimal(64),
        "dsign": _float_sign,
        "dceil": _towards(math.ceil),
        "dfloor": _towards(math.floor),
        "dround": _towards(round),
        "dtrunc": _towards(math.trunc),
        "dsqrt": _float_root,
    }
)
"""Functions of numbers, by `prosrc`."""
