"""The output functions float4out and float8out, with extra_float_digits above 0.

In: a number. Out: the shortest decimal from which the same number can be read again.

PostgreSQL does not print a decimal that is halfway between two numbers, because programs round it in different ways. So
it prints 1e+23 as 9.999999999999999e+22.

Source: src/common/d2s.c, f2s.c.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

import numpy as np

_SPECIAL_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity", 0.0: "0"}
# `_WIDTH` is the greatest number of digits before the point that is printed without an exponent. `_DIGITS` is the number
# of significant digits with which any two different numbers of the type are printed differently.
_FLOAT8_WIDTH, _FLOAT8_DIGITS = 15, 17
_FLOAT4_WIDTH, _FLOAT4_DIGITS = 6, 9
# Below these limits, the shortest decimal is never halfway between two numbers, because a decimal that is halfway has more
# digits than a shortest decimal can have.
_FLOAT8_FIRST_TIE, _FLOAT4_FIRST_TIE = 2.0**50, 2.0**20


def print_float8(value: float) -> str:
    """Return the text that float8out prints."""
    if value in _SPECIAL_NAMES or math.isnan(value):
        return _print_special(value)
    magnitude = abs(value)
    shortest_decimal = Decimal(repr(magnitude))
    if magnitude >= _FLOAT8_FIRST_TIE:
        next_below, next_above = math.nextafter(magnitude, 0), math.nextafter(magnitude, math.inf)
        shortest_decimal = _find_shortest_decimal(
            shortest_decimal, magnitude, next_below, next_above, _FLOAT8_DIGITS
        )
    return "-" * (value < 0) + _format(shortest_decimal, _FLOAT8_WIDTH)


def print_float4(value: float) -> str:
    """Return the text that float4out prints for a single precision number."""
    if value in _SPECIAL_NAMES or math.isnan(value):
        return _print_special(value)
    magnitude = np.float32(abs(value))
    shortest_decimal = Decimal(str(magnitude))
    if magnitude >= _FLOAT4_FIRST_TIE:
        with np.errstate(over="ignore"):
            next_below, next_above = (
                np.nextafter(magnitude, np.float32(0)),
                np.nextafter(magnitude, np.float32(math.inf)),
            )
        shortest_decimal = _find_shortest_decimal(
            shortest_decimal, float(magnitude), float(next_below), float(next_above), _FLOAT4_DIGITS
        )
    return "-" * (value < 0) + _format(shortest_decimal, _FLOAT4_WIDTH)


def _print_special(value: float) -> str:
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return _SPECIAL_NAMES.get(value, "NaN")


def _find_shortest_decimal(
    shortest_decimal: Decimal, value: float, next_below: float, next_above: float, max_digits: int
) -> Decimal:
    """Return the shortest decimal that is nearer to the value than to the next numbers below and above.

    `shortest_decimal` is the shortest decimal that can be read as the value. It may be in the middle between two numbers.
    """
    exact_value = Fraction(value)
    lower_bound = (exact_value + Fraction(next_below)) / 2
    # The greatest number has no next number above. It is assumed to be as far away as the next number below.
    upper_bound = (
        exact_value * 2 - lower_bound if math.isinf(next_above) else (exact_value + Fraction(next_above)) / 2
    )
    if lower_bound < shortest_decimal < upper_bound:
        return shortest_decimal
    decimal = Decimal(value)
    for precision in range(len(shortest_decimal.normalize().as_tuple().digits), max_digits):
        candidates = [Context(precision, rounding).plus(decimal) for rounding in (ROUND_FLOOR, ROUND_CEILING)]
        for candidate in sorted(candidates, key=lambda candidate: abs(Fraction(candidate) - exact_value)):
            if lower_bound < candidate < upper_bound:
                return candidate
    return Context(max_digits).plus(decimal)


def _format(value: Decimal, width: int) -> str:
    _, digits, exponent = value.normalize().as_tuple()
    assert isinstance(exponent, int)
    power = len(digits) + exponent - 1
    if -4 <= power < width:
        return f"{value.normalize():f}"
    first_digit, later_digits = str(digits[0]), "".join(map(str, digits[1:]))
    return f"{first_digit}{'.' * bool(later_digits)}{later_digits}e{power:+03}"
