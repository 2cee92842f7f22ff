"""The output functions float4out and float8out, with extra_float_digits above 0.

In: a number. Out: the shortest decimal from which the same number can be read again.

PostgreSQL does not print a decimal that lies in the middle between two numbers, because programs round such a decimal
in different ways. So it prints 1e+23 as 9.999999999999999e+22.

Source: src/common/d2s.c, f2s.c.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

import numpy as np

_SPECIAL_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity", 0.0: "0"}
# A number with more digits before the point than the width is printed with an exponent. The second number is the number
# of significant digits in which two different numbers always differ.
_WIDTH_8, _DIGITS_8 = 15, 17
_WIDTH_4, _DIGITS_4 = 6, 9
# Below these limits, the shortest decimal is never in the middle between two numbers. The middle is an odd multiple of
# a power of 1/2, and that has more digits.
_FIRST_TIE_8, _FIRST_TIE_4 = 2.0**50, 2.0**20


def float8_text(value: float) -> str:
    """Return the text that float8out prints."""
    if value in _SPECIAL_NAMES or math.isnan(value):
        return _print_special(value)
    magnitude = abs(value)
    shortest = Decimal(repr(magnitude))
    if magnitude >= _FIRST_TIE_8:
        next_below, next_above = math.nextafter(magnitude, 0), math.nextafter(magnitude, math.inf)
        shortest = _shortest_between(shortest, magnitude, next_below, next_above, _DIGITS_8)
    return "-" * (value < 0) + _format(shortest, _WIDTH_8)


def float4_text(value: float) -> str:
    """Return the text that float4out prints for a single precision number."""
    if value in _SPECIAL_NAMES or math.isnan(value):
        return _print_special(value)
    magnitude = np.float32(abs(value))
    shortest = Decimal(str(magnitude))
    if magnitude >= _FIRST_TIE_4:
        with np.errstate(over="ignore"):
            next_below, next_above = (
                np.nextafter(magnitude, np.float32(0)),
                np.nextafter(magnitude, np.float32(math.inf)),
            )
        shortest = _shortest_between(
            shortest, float(magnitude), float(next_below), float(next_above), _DIGITS_4
        )
    return "-" * (value < 0) + _format(shortest, _WIDTH_4)


def _print_special(value: float) -> str:
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return _SPECIAL_NAMES.get(value, "NaN")


def _shortest_between(
    shortest: Decimal, value: float, next_below: float, next_above: float, max_digits: int
) -> Decimal:
    """Return the shortest decimal that is nearer to the value than to the next numbers below and above.

    `shortest` is the shortest decimal that can be read as the value. It may be in the middle between two numbers.
    """
    exact_value = Fraction(value)
    lower_bound = (exact_value + Fraction(next_below)) / 2
    # The greatest number has no next number above. It is assumed to be as far away as the next number below.
    upper_bound = (
        exact_value * 2 - lower_bound if math.isinf(next_above) else (exact_value + Fraction(next_above)) / 2
    )
    if lower_bound < shortest < upper_bound:
        return shortest
    decimal = Decimal(value)
    for precision in range(len(shortest.normalize().as_tuple().digits), max_digits):
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
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    return f"{first}{'.' * bool(rest)}{rest}e{power:+03}"
