"""float4out and float8out with extra_float_digits above 0: a number in, its shortest exact digits out.

PostgreSQL avoids a decimal that lies exactly between two numbers, because readers round it differently: it
prints 1e+23 as 9.999999999999999e+22. Source: src/common/d2s.c, f2s.c.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

import numpy as np

_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity", 0.0: "0"}
# The most digits before the point without an exponent, and the number of digits that always distinguishes two
# numbers.
_WIDTH_8, _DIGITS_8 = 15, 17
_WIDTH_4, _DIGITS_4 = 6, 9
# Below these limits, the middle between two neighbours is an odd multiple of a power of 1/2, which has more
# digits than the shortest decimals of the neighbours.
_BETWEEN_8, _BETWEEN_4 = 2.0**50, 2.0**20


def float8_text(value: float) -> str:
    """The text of float8out."""
    if value in _NAMES or math.isnan(value):
        return _special(value)
    size = abs(value)
    shortest = Decimal(repr(size))
    if size >= _BETWEEN_8:
        below, above = math.nextafter(size, 0), math.nextafter(size, math.inf)
        shortest = _between(shortest, size, below, above, _DIGITS_8)
    return "-" * (value < 0) + _printed(shortest, _WIDTH_8)


def float4_text(value: float) -> str:
    """The text of float4out for a single precision number."""
    if value in _NAMES or math.isnan(value):
        return _special(value)
    size = np.float32(abs(value))
    shortest = Decimal(str(size))
    if size >= _BETWEEN_4:
        with np.errstate(over="ignore"):
            below, above = np.nextafter(size, np.float32(0)), np.nextafter(size, np.float32(math.inf))
        shortest = _between(shortest, float(size), float(below), float(above), _DIGITS_4)
    return "-" * (value < 0) + _printed(shortest, _WIDTH_4)


def _special(value: float) -> str:
    if value == 0 and math.copysign(1, value) < 0:
        return "-0"
    return _NAMES.get(value, "NaN")


def _between(shortest: Decimal, value: float, below: float, above: float, most: int) -> Decimal:
    """The shortest decimal that is nearer to the value than to its neighbours.

    `shortest` may lie in the middle.
    """
    exact = Fraction(value)
    least = (exact + Fraction(below)) / 2
    # The neighbour above the greatest number counts as being as far away as the one below.
    greatest = exact * 2 - least if math.isinf(above) else (exact + Fraction(above)) / 2
    if least < shortest < greatest:
        return shortest
    decimal = Decimal(value)
    for precision in range(len(shortest.normalize().as_tuple().digits), most):
        rounded = [Context(precision, rounding).plus(decimal) for rounding in (ROUND_FLOOR, ROUND_CEILING)]
        for candidate in sorted(rounded, key=lambda candidate: abs(Fraction(candidate) - exact)):
            if least < candidate < greatest:
                return candidate
    return Context(most).plus(decimal)


def _printed(value: Decimal, width: int) -> str:
    _, digits, exponent = value.normalize().as_tuple()
    assert isinstance(exponent, int)
    power = len(digits) + exponent - 1
    if -4 <= power < width:
        return f"{value.normalize():f}"
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    return f"{first}{'.' * bool(rest)}{rest}e{power:+03}"
