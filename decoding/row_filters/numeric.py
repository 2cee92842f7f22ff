"""Arithmetic on PostgreSQL's numeric: any number of digits, NaN, infinities, and display scales.

In: numerics as decimals; the negated exponent is the display scale. Out: the result, as such a decimal.
Raises NumericError with PostgreSQL's message and SQLSTATE if the server raises an error, and without SQLSTATE
if the result depends on the server's version. The rules are those of utils/adt/numeric.c: a sum has the
greater scale of its operands, a product the sum of their scales, a quotient the scale of `_quotient_scale`;
results round half away from zero.
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

# Room for every numeric, and for a product of two.
_EXACT: Final = Context(prec=400_000, rounding=ROUND_HALF_UP, Emax=MAX_EMAX, Emin=MIN_EMIN)
_GREATEST_SCALE: Final = 16_383  # NUMERIC_DSCALE_MAX
_GREATEST_WEIGHT: Final = 131_072  # digits before the point
_GREATEST_DISPLAY_SCALE: Final = 1_000  # NUMERIC_MAX_DISPLAY_SCALE
_SIGNIFICANT: Final = 16  # NUMERIC_MIN_SIG_DIGITS
_BASE_DIGITS: Final = 4  # DEC_DIGITS: numeric counts in base 10000


class NumericError(PgsieveError):
    """PostgreSQL refuses to evaluate a numeric expression, or the result depends on its version."""


def _division_by_zero() -> NumericError:
    return NumericError("division by zero", sqlstate="22012")


def _overflow() -> NumericError:
    return NumericError("value overflows numeric format", sqlstate="22003")


def parsed(text: str) -> Decimal:
    """The numeric with this text."""
    return Decimal(text)


def written_out(value: Decimal) -> Decimal:
    """The same number without a positive exponent, as this module's functions need it."""
    return _to_scale(value, _scale(value)) if value.is_finite() else value


def printed(value: Decimal) -> str:
    """The text that numeric_out prints; zero has no sign."""
    if not value.is_finite():
        return "NaN" if value.is_nan() else "Infinity" if value > 0 else "-Infinity"
    return format(_fitting(value), "f")


def _fitting(value: Decimal) -> Decimal:
    """Return a result with the sign of zero removed; raise if it is out of numeric's range.

    A result beyond numeric's range raises NumericError.
    """
    if not value:
        return value.copy_abs()
    if value.is_finite() and value.adjusted() >= _GREATEST_WEIGHT:
        raise _overflow()
    return value


def _scale(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0


def _to_scale(value: Decimal, scale: int, rounding: str = ROUND_HALF_UP) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-scale), rounding, _EXACT)


def _add(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite() and right.is_infinite() and left != right:
        return Decimal("NaN")
    return _EXACT.add(left, right)


def _subtract(left: Decimal, right: Decimal) -> Decimal:
    return _add(left, right.copy_negate())


def _multiply(left: Decimal, right: Decimal) -> Decimal:
    if (left.is_infinite() and not right) or (right.is_infinite() and not left):
        return Decimal("NaN")
    product = _EXACT.multiply(left, right)
    too_fine = product.is_finite() and _scale(product) > _GREATEST_SCALE
    return _to_scale(product, _GREATEST_SCALE) if too_fine else product


def _leading(value: Decimal) -> tuple[int, int]:
    """Return the weight in base 10000 of the first digit that is not zero, and that digit.

    The result is (0, 0) for zero.
    """
    if not value:
        return 0, 0
    weight = value.adjusted() // _BASE_DIGITS
    return weight, int(abs(value).scaleb(-weight * _BASE_DIGITS, _EXACT))


def _quotient_scale(left: Decimal, right: Decimal) -> int:
    """Return a quotient's scale: at least 16 significant digits, and at least each operand's scale."""
    (left_weight, left_digit), (right_weight, right_digit) = _leading(left), _leading(right)
    weight = left_weight - right_weight - (left_digit <= right_digit)
    scale = max(_SIGNIFICANT - weight * _BASE_DIGITS, _scale(left), _scale(right), 0)
    return min(scale, _GREATEST_DISPLAY_SCALE)


def _unscaled(value: Decimal, scale: int) -> int:
    return int(value.scaleb(scale, _EXACT))


def _rounded_ratio(left: int, right: int) -> int:
    """Divide and round half away from zero."""
    quotient, remainder = divmod(abs(left), abs(right))
    quotient += 2 * remainder >= abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _divide(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite():
        if right.is_infinite():
            return Decimal("NaN")
        if not right:
            raise _division_by_zero()
        return left if right > 0 else left.copy_negate()
    if right.is_infinite():
        return Decimal(0)
    if not right:
        raise _division_by_zero()
    scale, common = _quotient_scale(left, right), max(_scale(left), _scale(right))
    ratio = _rounded_ratio(_unscaled(left, common) * 10**scale, _unscaled(right, common))
    return Decimal(ratio).scaleb(-scale, _EXACT)


def _modulo(left: Decimal, right: Decimal) -> Decimal:
    if left.is_infinite():
        if not right:
            raise _division_by_zero()
        return Decimal("NaN")
    if right.is_infinite():
        return left
    if not right:
        raise _division_by_zero()
    common = max(_scale(left), _scale(right))
    dividend, divisor = _unscaled(left, common), abs(_unscaled(right, common))
    remainder = abs(dividend) % divisor
    return Decimal(-remainder if dividend < 0 else remainder).scaleb(-common, _EXACT)


def _divide_truncated(left: Decimal, right: Decimal) -> Decimal:
    if not left.is_finite() or not right.is_finite():
        return _divide(left, right)
    if not right:
        raise _division_by_zero()
    common = max(_scale(left), _scale(right))
    dividend, divisor = _unscaled(left, common), _unscaled(right, common)
    quotient = abs(dividend) // abs(divisor)
    return Decimal(quotient if (dividend < 0) == (divisor < 0) else -quotient)


def _greatest_common_divisor(left: Decimal, right: Decimal) -> Decimal:
    if not (left.is_finite() and right.is_finite()):
        return Decimal("NaN")
    common = max(_scale(left), _scale(right))
    return Decimal(gcd(_unscaled(left, common), _unscaled(right, common))).scaleb(-common, _EXACT)


def _least_common_multiple(left: Decimal, right: Decimal) -> Decimal:
    if not (left.is_finite() and right.is_finite()):
        return Decimal("NaN")
    common = max(_scale(left), _scale(right))
    first, second = abs(_unscaled(left, common)), abs(_unscaled(right, common))
    multiple = first // gcd(first, second) * second if first and second else 0
    return Decimal(multiple).scaleb(-common, _EXACT)


def _square_root(value: Decimal) -> Decimal:
    if value < 0:
        raise NumericError("cannot take square root of a negative number", sqlstate="2201F")
    if value.is_infinite():
        return value
    # The root's weight in decimal digits, from the argument's in base 10000 (numeric_sqrt).
    base = value.adjusted() // _BASE_DIGITS if value else 0
    weight = base * _BASE_DIGITS // 2 + 1 if base >= 0 else 1 - (1 - base * _BASE_DIGITS) // 2
    scale = min(max(_SIGNIFICANT - weight, _scale(value), 0), _GREATEST_DISPLAY_SCALE)
    return Decimal(_root_to_scale(value, scale)).scaleb(-scale, _EXACT)


def _root_to_scale(value: Decimal, scale: int) -> int:
    # The integer root has one digit more than the scale; the last line rounds by that digit.
    shifted = int(_to_scale(value, max(_scale(value), 0)).scaleb(2 * scale + 2, _EXACT))
    return (isqrt(shifted) + 5) // 10


def _whole(rounding: str) -> Callable[[Decimal], Decimal]:
    return lambda value: _to_scale(value, 0, rounding) if value.is_finite() else value


def _sign(value: Decimal) -> Decimal:
    return Decimal((value > 0) - (value < 0))


# PostgreSQL before 18 rounds to at most this many digits; later versions allow more.
_GREATEST_PLACE: Final = 2_000


def _at_scale(rounding: str) -> Callable[[Decimal, int], Decimal]:
    def apply(value: Decimal, scale: int) -> Decimal:
        if not value.is_finite():
            return value
        if abs(scale) > _GREATEST_PLACE:
            raise NumericError(
                f"rounding to more than {_GREATEST_PLACE} digits depends on the server's version"
            )
        if scale < 0 and value.adjusted() < -scale - 1:
            return Decimal(0)
        rounded = _to_scale(value, scale, rounding)
        return _to_scale(rounded, max(scale, 0))

    return apply


def _trimmed(value: Decimal) -> Decimal:
    if not value.is_finite():
        return value
    normal = value.normalize(_EXACT)
    return _to_scale(normal, _scale(normal))


def rank(value: Decimal) -> tuple[bool, Decimal]:
    """The sort key of numerics: NaN equals NaN, and sorts after every other value."""
    return value.is_nan(), Decimal(0) if value.is_nan() else value


def _passing_nan(function: Callable[..., Decimal]) -> Callable[..., Decimal]:
    """Wrap a function: NaN if an operand is NaN; otherwise its result, if that is in numeric's range."""

    def of_decimals(*operands: Decimal | int) -> Decimal:
        if any(isinstance(operand, Decimal) and operand.is_nan() for operand in operands):
            return Decimal("NaN")
        return _fitting(function(*operands))

    return of_decimals


def _scale_of(value: Decimal) -> int | None:
    return _scale(value) if value.is_finite() else None


def _least_scale_of(value: Decimal) -> int | None:
    return _scale(_trimmed(value)) if value.is_finite() else None


def _integer(bits: int, name: str) -> Callable[[Decimal], int]:
    def convert(value: Decimal) -> int:
        if not value.is_finite():
            kind = "NaN" if value.is_nan() else "infinity"
            raise NumericError(f"cannot convert {kind} to {name}", sqlstate="0A000")
        whole = int(_to_scale(value, 0))
        if not -(1 << bits - 1) <= whole < 1 << bits - 1:
            raise NumericError(f"{name} out of range", sqlstate="22003")
        return whole

    return convert


def _with_modifier(value: Decimal, precision: int, scale: int) -> Decimal:
    """Return the numeric under `numeric(precision, scale)`; raises NumericError when it does not fit."""
    rounded = value if value.is_infinite() else _at_scale(ROUND_HALF_UP)(value, scale)
    if value.is_infinite() or (rounded and rounded.adjusted() >= precision - scale):
        raise NumericError("numeric field overflow", sqlstate="22003")
    return rounded


def _from_float(significant: int) -> Callable[[float], Decimal]:
    """Return the conversion of real (6 significant digits) or double precision (15) to numeric."""

    def convert(value: float) -> Decimal:
        # float8_numeric prints with %.15g, and reads the result.
        return _fitting(written_out(parsed(f"{value:.{significant}g}")))

    return convert


DECIMAL_FUNCTIONS: Final[Mapping[str, Callable[..., Decimal]]] = MappingProxyType(
    {
        "numeric_add": _passing_nan(_add),
        "numeric_sub": _passing_nan(_subtract),
        "numeric_mul": _passing_nan(_multiply),
        "numeric_div": _passing_nan(_divide),
        "numeric_mod": _passing_nan(_modulo),
        "numeric_div_trunc": _passing_nan(_divide_truncated),
        "numeric_gcd": _passing_nan(_greatest_common_divisor),
        "numeric_lcm": _passing_nan(_least_common_multiple),
        "numeric_sqrt": _passing_nan(_square_root),
        "numeric_abs": _passing_nan(Decimal.copy_abs),
        "numeric_uminus": _passing_nan(Decimal.copy_negate),
        "numeric_uplus": _passing_nan(Decimal.__copy__),
        "numeric_sign": _passing_nan(_sign),
        "numeric_ceil": _passing_nan(_whole(ROUND_CEILING)),
        "numeric_floor": _passing_nan(_whole(ROUND_FLOOR)),
        "numeric_round": _passing_nan(lambda value, scale=0: _at_scale(ROUND_HALF_UP)(value, scale)),
        "numeric_trunc": _passing_nan(lambda value, scale=0: _at_scale(ROUND_DOWN)(value, scale)),
        "numeric_trim_scale": _passing_nan(_trimmed),
        "numeric": _passing_nan(_with_modifier),
        "float4_numeric": _from_float(6),
        "float8_numeric": _from_float(15),
    }
)
"""Functions whose result is numeric, as a decimal, by `prosrc`."""

OF_DECIMAL: Final[Mapping[str, Callable[[Decimal], int | None]]] = MappingProxyType(
    {
        "numeric_scale": _scale_of,
        "numeric_min_scale": _least_scale_of,
        "numeric_int2": _integer(16, "smallint"),
        "numeric_int4": _integer(32, "integer"),
        "numeric_int8": _integer(64, "bigint"),
    }
)
"""Functions of a numeric, as a decimal, whose result is an integer, by `prosrc`."""
