"""Roots of rationals: sums and products are exact, and what they are rounded to is the nearest float."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from eqaccel import Irreps
from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.roots import add, root, square_of


def nearest(square: Fraction) -> float:
    """The float nearest to a root, from 60 decimal digits of it."""
    with localcontext() as context:
        context.prec = 60
        return float((Decimal(square.numerator) / Decimal(square.denominator)).sqrt())


def test_roots_are_the_nearest_floats() -> None:
    generator = np.random.default_rng(0)
    numbers = [int(n) for n in generator.integers(1, 2**62, 2000)]
    numbers += [int(n) ** 5 for n in numbers[:200]]
    for numerator, denominator in zip(numbers, reversed(numbers), strict=True):
        square = Fraction(numerator, denominator)
        assert root(square) == nearest(square)
        assert root(-square) == -root(square)
    assert [root(Fraction(n * n)) for n in (0, 1, 2**70)] == [0.0, 1.0, 2.0**70]
    # Halfway between two floats, and a little more.
    half = Fraction(1) + Fraction(1, 2**53)
    assert root(half**2) == 1.0
    assert root(half**2 + Fraction(1, 2**300)) == math.nextafter(1.0, 2.0)


@pytest.mark.parametrize(
    "square", [Fraction(1), Fraction(7, 3), Fraction(2, 3 * 5 * 7), Fraction(1, 1280), Fraction(3e6)]
)
def test_a_root_that_was_rounded_is_recognised(square: Fraction) -> None:
    value = math.sqrt(square)
    for near in (value, math.nextafter(value, 0), math.nextafter(value, math.inf)):
        assert square_of(near) == square
        assert square_of(-near) == -square


@pytest.mark.parametrize("value", [0.0, 0.1234567890123, -3.3e-9, 1e-200, -1e300, 5e-324])
def test_other_floats_stand_for_themselves(value: float) -> None:
    assert root(square_of(value)) == value


@pytest.mark.parametrize("path_normalization", ["element", "path", "none"])
@pytest.mark.parametrize("irrep_normalization", ["component", "norm", "none"])
def test_coefficients_of_e3nn_are_recognised(irrep_normalization: str, path_normalization: str) -> None:
    irreps = "32x0e+32x1o+32x2e", "0e+1o+2e+3o+4e", "32x0e+32x1o+32x2e+32x3o+32x4e"
    in1, in2, out = map(Irreps, irreps)
    couplings = [
        (i, j, k, "uvu", True)
        for i, (_, first) in enumerate(in1)
        for j, (_, second) in enumerate(in2)
        for k, (_, third) in enumerate(out)
        if third in first * second
    ]
    norms = {"irrep_normalization": irrep_normalization, "path_normalization": path_normalization}
    for path in TensorProductSpec(*irreps, couplings, **norms, convention="e3nn>=0.5").paths:
        dims = [2 * degree + 1 for degree in (path.l1, path.l2, path.l3)]
        variance = {"component": dims[2], "norm": dims[0] * dims[1], "none": 1}[irrep_normalization]
        siblings = 1 if path_normalization == "none" else sum(k == path.out for _, _, k, _, _ in couplings)
        assert square_of(path.coefficient) == Fraction(variance, siblings)


def test_sums_of_roots_of_a_rational_ratio() -> None:
    assert add(Fraction(2), Fraction(8)) == 18  # 1 + 2 roots of two
    assert add(Fraction(2), Fraction(-8)) == -2
    assert add(Fraction(-1, 3), Fraction(1, 3)) == 0
    assert add(Fraction(0), Fraction(-5)) == add(Fraction(-5), Fraction(0)) == -5
    with pytest.raises(ValueError, match="rational ratio"):
        add(Fraction(2), Fraction(3))
