"""Arithmetic on PostgreSQL's numeric: any number of digits, NaN, infinities, and display scales.

In: Decimals; the negated exponent of a Decimal is its display scale. Out: Decimals of the same form. Raises
NumericError with PostgreSQL's message and SQLSTATE if the server raises an error. Raises NumericError without
SQLSTATE if the result depends on the server's version.

The rules are those of src/backend/utils/adt/numeric.c. The scale of a sum is the greater scale of its operands. The
scale of a product is the sum of their scales. `_choose_quotient_scale` has the rule for quotients. Results are rounded half
away from zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_CEILING,
    ROUND_DOWN,
    ROUND_FLOOR,
    ROUND_HALF_UP,
    Context,
    Decimal,
)
from math import gcd, isqrt
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.errors import PgsieveError

# This precision is enough for every numeric, and for the product of two numerics.
_EXACT_CONTEXT: Final = Context(prec=400_000, rounding=ROUND_HALF_UP, Emax=MAX_EMAX, Emin=MIN_EMIN)
_MAX_SCALE: Final = 16_383  # NUMERIC_DSCALE_MAX
_MAX_INTEGRAL_DIGITS: Final = 131_072  # digits before the point
_MAX_DISPLAY_SCALE: Final = 1_000  # NUMERIC_MAX_DISPLAY_SCALE
_MIN_SIGNIFICANT_DIGITS: Final = 16  # NUMERIC_MIN_SIG_DIGITS
_DIGITS_PER_BASE_DIGIT: Final = 4  # DEC_DIGITS: numeric stores digits of base 10000


class NumericError(PgsieveError):
    """PostgreSQL raises an error for a numeric expression, or its result depends on PostgreSQL's version."""


def _make_division_by_zero_error() -> NumericError:
    return NumericError("division by zero", sqlstate="22012")


def _make_overflow_error() -> NumericError:
    return NumericError("value overflows numeric format", sqlstate="22003")


def decimal_from_text(text: str) -> Decimal:
    """Return the numeric that a text stands for."""
    return Decimal(text)


def expand_exponent(value: Decimal) -> Decimal:
    """Return the same number without a positive exponent.

    The functions of this module do not accept a positive exponent, such as that of Decimal("1E+3").
    """
    return _to_scale(value, _find_scale(value)) if value.is_finite() else value


def numeric_text(value: Decimal) -> str:
    """Return the text that numeric_out prints."""
    if not value.is_finite():
        return "NaN" if value.is_nan() else "Infinity" if value > 0 else "-Infinity"
    return format(_require_range(value), "f")


def _require_range(value: Decimal) -> Decimal:
    """Return the value; raises NumericError if it is out of the range of numeric.

    Zero loses its sign, because numeric has no negative zero.
    """
    if not value:
        return value.copy_abs()
    if value.is_finite() and value.adjusted() >= _MAX_INTEGRAL_DIGITS:
        raise _make_overflow_error()
    return value


def _find_scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0


def _to_scale(value: Decimal, scale: int, rounding: str = ROUND_HALF_UP) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-scale), rounding, _EXACT_CONTEXT)


def _add(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite() and right.is_infinite() and left != right:
        return Decimal("NaN")
    return _EXACT_CONTEXT.add(left, right)


def _subtract(left: Decimal, right: Decimal) -> Decimal:
    return _add(left, right.copy_negate())


def _multiply(left: Decimal, right: Decimal) -> Decimal:
    if (left.is_infinite() and not right) or (right.is_infinite() and not left):
        return Decimal("NaN")
    product = _EXACT_CONTEXT.multiply(left, right)
    exceeds_scale = product.is_finite() and _find_scale(product) > _MAX_SCALE
    return _to_scale(product, _MAX_SCALE) if exceeds_scale else product


def _find_first_base_digit(value: Decimal) -> tuple[int, int]:
    """Return the weight and the value of the first base 10000 digit that is not zero; (0, 0) for zero."""
    if not value:
        return 0, 0
    weight = value.adjusted() // _DIGITS_PER_BASE_DIGIT
    return weight, int(abs(value).scaleb(-weight * _DIGITS_PER_BASE_DIGIT, _EXACT_CONTEXT))


def _choose_quotient_scale(left: Decimal, right: Decimal) -> int:
    """Return the scale of a quotient.

    The quotient gets at least 16 significant digits, and at least the scale of each operand (select_div_scale()).
    """
    (left_weight, left_digit), (right_weight, right_digit) = (
        _find_first_base_digit(left),
        _find_first_base_digit(right),
    )
    weight = left_weight - right_weight - (left_digit <= right_digit)
    scale = max(
        _MIN_SIGNIFICANT_DIGITS - weight * _DIGITS_PER_BASE_DIGIT, _find_scale(left), _find_scale(right), 0
    )
    return min(scale, _MAX_DISPLAY_SCALE)


def _to_scaled_integer(value: Decimal, scale: int) -> int:
    return int(value.scaleb(scale, _EXACT_CONTEXT))


def _divide_rounded(left: int, right: int) -> int:
    """Divide two integers, and round the quotient half away from zero."""
    quotient, remainder = divmod(abs(left), abs(right))
    quotient += 2 * remainder >= abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _divide(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite():
        if right.is_infinite():
            return Decimal("NaN")
        if not right:
            raise _make_division_by_zero_error()
        return left if right > 0 else left.copy_negate()
    if right.is_infinite():
        return Decimal(0)
    if not right:
        raise _make_division_by_zero_error()
    scale, common_scale = _choose_quotient_scale(left, right), max(_find_scale(left), _find_scale(right))
    ratio = _divide_rounded(
        _to_scaled_integer(left, common_scale) * 10**scale, _to_scaled_integer(right, common_scale)
    )
    return Decimal(ratio).scaleb(-scale, _EXACT_CONTEXT)


def _modulo(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite():
        if not right:
            raise _make_division_by_zero_error()
        return Decimal("NaN")
    if right.is_infinite():
        return left
    if not right:
        raise _make_division_by_zero_error()
    common_scale = max(_find_scale(left), _find_scale(right))
    dividend, divisor = _to_scaled_integer(left, common_scale), abs(_to_scaled_integer(right, common_scale))
    remainder = abs(dividend) % divisor
    return Decimal(-remainder if dividend < 0 else remainder).scaleb(-common_scale, _EXACT_CONTEXT)


def _divide_truncated(left: Decimal, right: Decimal) -> Decimal:
    if not left.is_finite() or not right.is_finite():
        return _divide(left, right)
    if not right:
        raise _make_division_by_zero_error()
    common_scale = max(_find_scale(left), _find_scale(right))
    dividend, divisor = _to_scaled_integer(left, common_scale), _to_scaled_integer(right, common_scale)
    quotient = abs(dividend) // abs(divisor)
    return Decimal(quotient if (dividend < 0) == (divisor < 0) else -quotient)


def _greatest_common_divisor(left: Decimal, right: Decimal) -> Decimal:
    if not (left.is_finite() and right.is_finite()):
        return Decimal("NaN")
    common_scale = max(_find_scale(left), _find_scale(right))
    return Decimal(
        gcd(_to_scaled_integer(left, common_scale), _to_scaled_integer(right, common_scale))
    ).scaleb(-common_scale, _EXACT_CONTEXT)


def _least_common_multiple(left: Decimal, right: Decimal) -> Decimal:
    if not (left.is_finite() and right.is_finite()):
        return Decimal("NaN")
    common_scale = max(_find_scale(left), _find_scale(right))
    left_integer, right_integer = (
        abs(_to_scaled_integer(left, common_scale)),
        abs(_to_scaled_integer(right, common_scale)),
    )
    multiple = (
        left_integer // gcd(left_integer, right_integer) * right_integer
        if left_integer and right_integer
        else 0
    )
    return Decimal(multiple).scaleb(-common_scale, _EXACT_CONTEXT)


def _square_root(value: Decimal) -> Decimal:
    if value < 0:
        raise NumericError("cannot take square root of a negative number", sqlstate="2201F")
    if value.is_infinite():
        return value
    # numeric_sqrt() computes the root's weight in decimal digits from the argument's weight in base 10000.
    base_weight = value.adjusted() // _DIGITS_PER_BASE_DIGIT if value else 0
    weight = (
        base_weight * _DIGITS_PER_BASE_DIGIT // 2 + 1
        if base_weight >= 0
        else 1 - (1 - base_weight * _DIGITS_PER_BASE_DIGIT) // 2
    )
    scale = min(max(_MIN_SIGNIFICANT_DIGITS - weight, _find_scale(value), 0), _MAX_DISPLAY_SCALE)
    return Decimal(_compute_root(value, scale)).scaleb(-scale, _EXACT_CONTEXT)


def _compute_root(value: Decimal, scale: int) -> int:
    # The integer root has one digit more than the scale. The last line rounds this digit off.
    shifted_value = int(_to_scale(value, _find_scale(value)).scaleb(2 * scale + 2, _EXACT_CONTEXT))
    return (isqrt(shifted_value) + 5) // 10


def _make_integer_rounder(rounding: str) -> Callable[[Decimal], Decimal]:
    return lambda value: _to_scale(value, 0, rounding) if value.is_finite() else value


def _sign(value: Decimal) -> Decimal:
    return Decimal((value > 0) - (value < 0))


# PostgreSQL before 18 rounds to at most this number of digits. Later versions allow more.
_MAX_ROUNDING_DIGITS: Final = 2_000


def _make_scale_rounder(rounding: str) -> Callable[[Decimal, int], Decimal]:
    def apply(value: Decimal, scale: int) -> Decimal:
        if not value.is_finite():
            return value
        if abs(scale) > _MAX_ROUNDING_DIGITS:
            raise NumericError(
                f"rounding to more than {_MAX_ROUNDING_DIGITS} digits depends on the server's version"
            )
        if scale < 0 and value.adjusted() < -scale - 1:
            return Decimal(0)
        rounded_value = _to_scale(value, scale, rounding)
        return _to_scale(rounded_value, max(scale, 0))

    return apply


def _trim_scale(value: Decimal) -> Decimal:
    if not value.is_finite():
        return value
    normalized_value = value.normalize(_EXACT_CONTEXT)
    return _to_scale(normalized_value, _find_scale(normalized_value))


def sort_key(value: Decimal) -> tuple[bool, Decimal]:
    """Return the sort key of a numeric: NaN equals NaN, and comes after every other value."""
    return value.is_nan(), Decimal(0) if value.is_nan() else value


def _handle_nan_and_range(function: Callable[..., Decimal]) -> Callable[..., Decimal]:
    """Return the function with two additions.

    The result is NaN if an operand is NaN. NumericError is raised if the result is out of the range of numeric.
    """

    def apply(*operands: Decimal | int) -> Decimal:
        if any(isinstance(operand, Decimal) and operand.is_nan() for operand in operands):
            return Decimal("NaN")
        return _require_range(function(*operands))

    return apply


def _find_scale_or_null(value: Decimal) -> int | None:
    return _find_scale(value) if value.is_finite() else None


def _find_min_scale_or_null(value: Decimal) -> int | None:
    return _find_scale(_trim_scale(value)) if value.is_finite() else None


def _make_integer_converter(bits: int, name: str) -> Callable[[Decimal], int]:
    def convert(value: Decimal) -> int:
        if not value.is_finite():
            kind = "NaN" if value.is_nan() else "infinity"
            raise NumericError(f"cannot convert {kind} to {name}", sqlstate="0A000")
        rounded_value = int(_to_scale(value, 0))
        if not -(1 << bits - 1) <= rounded_value < 1 << bits - 1:
            raise NumericError(f"{name} out of range", sqlstate="22003")
        return rounded_value

    return convert


def _apply_modifier(value: Decimal, precision: int, scale: int) -> Decimal:
    """Cast a numeric to `numeric(precision, scale)`; raises NumericError if it does not fit."""
    rounded_value = value if value.is_infinite() else _make_scale_rounder(ROUND_HALF_UP)(value, scale)
    if value.is_infinite() or (rounded_value and rounded_value.adjusted() >= precision - scale):
        raise NumericError("numeric field overflow", sqlstate="22003")
    return rounded_value


def _make_float_converter(significant_digits: int) -> Callable[[float], Decimal]:
    """Return the conversion of real or double precision to numeric.

    PostgreSQL keeps 6 significant digits of a real, and 15 of a double precision number.
    """

    def convert(value: float) -> Decimal:
        # As float8_numeric does with %.15g, print the number, and read the text as a numeric.
        return _require_range(expand_exponent(decimal_from_text(f"{value:.{significant_digits}g}")))

    return convert


DECIMAL_FUNCTIONS: Final[Mapping[str, Callable[..., Decimal]]] = MappingProxyType(
    {
        "numeric_add": _handle_nan_and_range(_add),
        "numeric_sub": _handle_nan_and_range(_subtract),
        "numeric_mul": _handle_nan_and_range(_multiply),
        "numeric_div": _handle_nan_and_range(_divide),
        "numeric_mod": _handle_nan_and_range(_modulo),
        "numeric_div_trunc": _handle_nan_and_range(_divide_truncated),
        "numeric_gcd": _handle_nan_and_range(_greatest_common_divisor),
        "numeric_lcm": _handle_nan_and_range(_least_common_multiple),
        "numeric_sqrt": _handle_nan_and_range(_square_root),
        "numeric_abs": _handle_nan_and_range(Decimal.copy_abs),
        "numeric_uminus": _handle_nan_and_range(Decimal.copy_negate),
        "numeric_uplus": _handle_nan_and_range(Decimal.__copy__),
        "numeric_sign": _handle_nan_and_range(_sign),
        "numeric_ceil": _handle_nan_and_range(_make_integer_rounder(ROUND_CEILING)),
        "numeric_floor": _handle_nan_and_range(_make_integer_rounder(ROUND_FLOOR)),
        "numeric_round": _handle_nan_and_range(
            lambda value, scale=0: _make_scale_rounder(ROUND_HALF_UP)(value, scale)
        ),
        "numeric_trunc": _handle_nan_and_range(
            lambda value, scale=0: _make_scale_rounder(ROUND_DOWN)(value, scale)
        ),
        "numeric_trim_scale": _handle_nan_and_range(_trim_scale),
        "numeric": _handle_nan_and_range(_apply_modifier),
        "float4_numeric": _make_float_converter(6),
        "float8_numeric": _make_float_converter(15),
    }
)
"""The functions whose result is numeric, by `prosrc`."""

DECIMAL_TO_INTEGER: Final[Mapping[str, Callable[[Decimal], int | None]]] = MappingProxyType(
    {
        "numeric_scale": _find_scale_or_null,
        "numeric_min_scale": _find_min_scale_or_null,
        "numeric_int2": _make_integer_converter(16, "smallint"),
        "numeric_int4": _make_integer_converter(32, "integer"),
        "numeric_int8": _make_integer_converter(64, "bigint"),
    }
)
"""The functions from a numeric to an integer, by `prosrc`. Their result can be NULL."""
