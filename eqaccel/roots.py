"""Numbers that are a sign and the root of a rational, kept exactly and rounded once.

Coupling coefficients are such numbers, and so are the normalisations in front of them. Each is written as its signed
square: v stands as v * abs(v), a `Fraction`. The signed square of a product is the product of signed squares.
"""

from __future__ import annotations

import math
from fractions import Fraction

_BITS = 64  # of a root before it is rounded to the 53 of a float
_LARGEST_DENOMINATOR = 2**12


def root(square: Fraction) -> float:
    """The float nearest to the number of a signed square."""
    if square == 0:
        return 0.0
    numerator, denominator = abs(square.numerator), square.denominator
    half = _BITS - (numerator.bit_length() - denominator.bit_length()) // 2
    shifted = numerator << max(2 * half, 0), denominator << max(-2 * half, 0)
    whole = math.isqrt(shifted[0] // shifted[1])
    inexact = whole * whole * shifted[1] != shifted[0]
    # The last bit says whether something follows: enough for the conversion to round as it would all digits.
    magnitude = math.ldexp(float(2 * whole + inexact), -half - 1)
    return magnitude if square > 0 else -magnitude


def square_of(value: float) -> Fraction:
    """The signed square of a float: of the root of a simple rational, if the float is one but for rounding.

    Normalisations of e3nn are roots of simple rationals: of dimensions, multiplicities and numbers of paths. Modules
    keep them as floats, which e3nn rounds twice to four times. Any other float stands for itself.

    Args:
        value: Finite.

    Returns:
        A signed square whose root is at most two units in the last place from the value.
    """
    exact = Fraction(value) ** 2
    if exact == 0:
        return exact
    above_one = max(exact, 1 / exact).limit_denominator(_LARGEST_DENOMINATOR)
    simple = above_one if exact >= 1 else 1 / above_one
    is_root = abs(root(simple) - abs(value)) <= 2 * math.ulp(value)
    square = simple if is_root else exact
    return square if value > 0 else -square


def add(first: Fraction, second: Fraction) -> Fraction:
    """The signed square of a sum, for numbers whose ratio is rational.

    Raises:
        ValueError: If it is not: then the sum is not the root of a rational.
    """
    if first == 0:
        return second
    square = second / first
    numerator, denominator = math.isqrt(abs(square.numerator)), math.isqrt(square.denominator)
    ratio = Fraction(numerator, denominator)
    if ratio * ratio != abs(square):
        raise ValueError(f"expected numbers of a rational ratio, got signed squares {first} and {second}")
    factor = 1 + (ratio if square > 0 else -ratio)
    return first * factor * abs(factor)
