"""Coupling tensors: exact, e3nn's to the rounding of those, with the signs of each version of e3nn."""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections import defaultdict
from fractions import Fraction
from itertools import product

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import e3nn
import numpy as np
import pytest
import torch
from e3nn import o3
from sympy import factorint
from sympy.physics.wigner import wigner_3j as complex_wigner_3j

from eqaccel.errors import IrrepsError, SpecError
from eqaccel.roots import root
from eqaccel.wigner import (
    WignerConvention,
    depends_on_convention,
    scaled_wigner_3j,
    wigner_3j,
    wigner_3j_squares,
)

TRIPLES = [(a, b, c) for a in range(8) for b in range(8) for c in range(abs(a - b), min(a + b, 7) + 1)]

IS_E3NN_04 = tuple(map(int, e3nn.__version__.split(".")[:2])) < (0, 5)
OLD, NEW = WignerConvention.E3NN_0_4, WignerConvention.E3NN_0_5

EPS = float(np.finfo(np.float64).eps)
THEIR_ROUNDING = 8 * EPS
"""Error of e3nn's entries: its tensors are unit vectors that come from sums and a norm of float64 numbers."""


@pytest.mark.parametrize("degrees", TRIPLES, ids=str)
def test_equals_the_installed_e3nn(degrees: tuple[int, int, int]) -> None:
    theirs = o3.wigner_3j(*degrees, dtype=torch.float64).numpy()
    ours = wigner_3j(*degrees)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=THEIR_ROUNDING)
    old, new = wigner_3j(*degrees, "e3nn<0.5"), wigner_3j(*degrees, "e3nn>=0.5")
    assert (old if IS_E3NN_04 else new) is ours
    np.testing.assert_array_equal(old, -new if depends_on_convention(*degrees) else new)


def test_conventions_differ_in_couplings_of_odd_sum() -> None:
    turned = [degrees for degrees in TRIPLES if depends_on_convention(*degrees)]
    assert len(turned) == 52
    assert all(sum(degrees) % 2 for degrees in turned)


@pytest.mark.skipif(not IS_E3NN_04, reason="needs e3nn 0.4, for its stored tensors")
def test_equals_e3nn_04_as_far_as_that_goes() -> None:
    for a in range(12):
        for b in range(a, 12):
            for c in range(max(b, 8), min(a + b, 11) + 1):
                theirs = o3.wigner_3j(a, b, c, dtype=torch.float64).numpy()
                np.testing.assert_allclose(wigner_3j(a, b, c, OLD), theirs, rtol=0, atol=THEIR_ROUNDING)
    with pytest.raises(IrrepsError, match="whose degrees end at 11"):
        wigner_3j(1, 12, 12, OLD)


def test_convention_is_that_of_the_installed_e3nn_or_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WignerConvention.installed() is (OLD if IS_E3NN_04 else NEW)
    monkeypatch.setitem(sys.modules, "e3nn", None)  # installed, and not imported
    assert WignerConvention.installed() is (OLD if IS_E3NN_04 else NEW)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert WignerConvention.installed() is None
    for degrees in TRIPLES:
        if not depends_on_convention(*degrees):
            assert wigner_3j(*degrees) is wigner_3j(*degrees, NEW)
            continue
        with pytest.raises(SpecError, match=r"convention: expected 'e3nn<0.5' or 'e3nn>=0.5', as the coupling"):
            wigner_3j(*degrees)
    for version, expected in (("0.4.4", OLD), ("0.5.0rc1", NEW), ("0.10.2+cpu", NEW), ("1.0", NEW), ("?", None)):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        assert WignerConvention.installed() is expected
    with pytest.raises(SpecError, match=r"convention: expected .* got '0.4'"):
        wigner_3j(0, 0, 0, "0.4")


@pytest.mark.parametrize("degrees", [(1, 2, 2), (1, 1, 2), (2, 3, 1), (5, 6, 6), (9, 10, 11)], ids=str)
def test_symmetry_fixes_the_sign_of_all_orders(degrees: tuple[int, int, int]) -> None:
    tensor, odd = wigner_3j(*degrees, NEW), (-1) ** sum(degrees)
    np.testing.assert_array_equal(wigner_3j(*np.roll(degrees, 1).tolist(), NEW), tensor.transpose(2, 0, 1))
    np.testing.assert_array_equal(wigner_3j(*degrees[::-1], NEW), odd * tensor.transpose(2, 1, 0))


def test_vectors_couple_as_dot_and_cross_product() -> None:
    levi_civita = np.zeros((3, 3, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        levi_civita[i, j, k], levi_civita[j, i, k] = 1.0, -1.0
    np.testing.assert_array_equal(wigner_3j(1, 1, 1), levi_civita * root(Fraction(1, 6)))
    np.testing.assert_array_equal(wigner_3j(1, 1, 0)[..., 0], np.eye(3) * root(Fraction(1, 3)))


@pytest.mark.parametrize("degrees", [(7, 7, 7), (20, 21, 21), (31, 31, 0), (10, 20, 30)], ids=str)
def test_is_an_isometry_up_to_the_largest_degrees(degrees: tuple[int, int, int]) -> None:
    tensor, size = wigner_3j(*degrees, NEW), 2 * degrees[2] + 1
    # Each product of entries has three roundings of half an eps, and each sum of n products n more at most.
    absolute = np.einsum("ijk,ijl->kl", np.abs(tensor), np.abs(tensor))
    bound = (3 + tensor.shape[0] * tensor.shape[1]) * EPS / 2 * absolute
    assert (np.abs(np.einsum("ijk,ijl->kl", tensor, tensor) - np.eye(size) / size) <= bound).all()


@pytest.mark.parametrize("degrees", TRIPLES, ids=str)
def test_values_are_rounded_once_and_exactly_orthogonal(degrees: tuple[int, int, int]) -> None:
    squares, tensor = wigner_3j_squares(*degrees), wigner_3j(*degrees, NEW)
    assert {place: root(square) for place, square in squares.items()} == {
        tuple(place): tensor[tuple(place)] for place in np.argwhere(tensor).tolist()
    }
    size = 2 * degrees[2] + 1
    by_pair: dict[tuple[int, int], list[tuple[int, Fraction]]] = defaultdict(list)
    for (i, j, k), square in squares.items():
        by_pair[i, j].append((k, square))
    # Sums over i and j of products of entries (i, j, k) and (i, j, k'). Roots of different square-free numbers are
    # linearly independent over the rationals, so each root has a sum of its own.
    sums: dict[tuple[int, int, int], Fraction] = defaultdict(Fraction)
    for entries in by_pair.values():
        for (k, first), (other, second) in product(entries, entries):
            rational, squarefree = _as_root(abs(first * second))
            sums[k, other, squarefree] += rational if (first > 0) == (second > 0) else -rational
    for (k, other, squarefree), total in sums.items():
        assert total == (Fraction(1, size) if k == other and squarefree == 1 else 0)
    assert {k for k, other, _ in sums if k == other} == set(range(size))


def _as_root(square: Fraction) -> tuple[Fraction, int]:
    """The rational and the square-free integer whose root it multiplies."""
    factors = factorint(square.numerator * square.denominator)
    squarefree = math.prod(prime for prime, power in factors.items() if power % 2)
    whole = math.isqrt(square.numerator * square.denominator // squarefree)
    return Fraction(whole, square.denominator), squarefree


@pytest.mark.parametrize("degrees", [(0, 0, 0), (1, 1, 1), (2, 1, 2), (3, 2, 3), (4, 4, 4), (9, 10, 11)], ids=str)
def test_entries_follow_from_one_complex_symbol_each(degrees: tuple[int, int, int]) -> None:
    for (i, j, k), square in wigner_3j_squares(*degrees).items():
        m1, m2, m3 = i - degrees[0], j - degrees[1], k - degrees[2]
        orders = [(abs(m1), sign * abs(m2)) for sign in (1, -1) if abs(abs(m1) + sign * abs(m2)) == abs(m3)]
        a, b = orders[0]
        exact = complex_wigner_3j(*degrees, a, b, -a - b) ** 2 / (2 if m1 and m2 and m3 else 1)
        assert (abs(square).numerator, abs(square).denominator) == (exact.p, exact.q)


def test_degrees_up_to_eleven_have_one_float_for_each_magnitude() -> None:
    for a in range(12):
        for b in range(a, 12):
            for c in range(b, min(a + b, 11) + 1):
                tensor = wigner_3j(a, b, c, NEW)
                squares = {abs(square) for square in wigner_3j_squares(a, b, c).values()}
                assert len(np.unique(np.abs(tensor[tensor != 0]))) == len(squares)


def test_products_with_a_coefficient_are_rounded_once() -> None:
    for degrees in TRIPLES:
        dim = 2 * degrees[2] + 1
        scaled = scaled_wigner_3j(*degrees, -math.sqrt(dim / 3))
        for place, square in wigner_3j_squares(*degrees).items():
            assert scaled[place] == -root(square * Fraction(dim, 3))
    assert set(np.unique(scaled_wigner_3j(1, 1, 0, math.sqrt(3)))) == {0.0, 1.0}
    assert not scaled_wigner_3j(1, 2, 3, 0.0).any()


def test_is_cached_and_read_only() -> None:
    assert wigner_3j(2, 3, 1) is wigner_3j(2, 3, 1)
    for tensor in (wigner_3j(2, 3, 1), scaled_wigner_3j(2, 3, 1, 2.0)):
        with pytest.raises(ValueError, match="read-only"):
            tensor[0, 0, 0] = 1.0


@pytest.mark.parametrize("degrees", [(1, 1, 3), (3, 1, 1), (0, 1, 0), (-1, 1, 1), (1.0, 1, 1), (30, 30, 30)])
def test_errors(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(IrrepsError, match="expected"):
        wigner_3j(*degrees)
