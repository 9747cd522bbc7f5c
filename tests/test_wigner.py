"""Coupling tensors: e3nn's, to rounding, with the known signs of each version of e3nn."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import e3nn
import numpy as np
import pytest
import torch
from e3nn import o3

from eqaccel.errors import IrrepsError
from eqaccel.wigner import wigner_3j

TRIPLES = [(a, b, c) for a in range(8) for b in range(8) for c in range(abs(a - b), min(a + b, 7) + 1)]

# e3nn 0.5 replaced stored tensors by a formula, which turned the sign of these, in any order of the degrees.
_TURNED_IN_E3NN_05 = {
    *[(1, n, n) for n in range(2, 8)],
    *[(3, 4, 6), (3, 5, 7), (4, 4, 5), (4, 5, 6), (4, 6, 7), (5, 5, 5), (5, 6, 6), (5, 7, 7)],
}
_IS_E3NN_04 = tuple(map(int, e3nn.__version__.split(".")[:2])) < (0, 5)


@pytest.mark.parametrize("degrees", TRIPLES, ids=str)
def test_equals_e3nn(degrees: tuple[int, int, int]) -> None:
    sign = -1 if _IS_E3NN_04 and tuple(sorted(degrees)) in _TURNED_IN_E3NN_05 else 1
    theirs = o3.wigner_3j(*degrees, dtype=torch.float64).numpy()
    np.testing.assert_allclose(wigner_3j(*degrees), sign * theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("degrees", [(1, 2, 2), (1, 1, 2), (2, 3, 1), (5, 6, 6), (9, 10, 11)], ids=str)
def test_symmetry_fixes_the_sign_of_all_orders(degrees: tuple[int, int, int]) -> None:
    tensor, odd = wigner_3j(*degrees), (-1) ** sum(degrees)
    np.testing.assert_allclose(wigner_3j(*np.roll(degrees, 1).tolist()), tensor.transpose(2, 0, 1), atol=1e-14)
    np.testing.assert_allclose(wigner_3j(*degrees[::-1]), odd * tensor.transpose(2, 1, 0), atol=1e-14)


def test_vectors_couple_as_dot_and_cross_product() -> None:
    levi_civita = np.zeros((3, 3, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        levi_civita[i, j, k], levi_civita[j, i, k] = 1.0, -1.0
    np.testing.assert_allclose(wigner_3j(1, 1, 1), levi_civita / np.sqrt(6), atol=1e-15)
    np.testing.assert_allclose(wigner_3j(1, 1, 0)[..., 0], np.eye(3) / np.sqrt(3), atol=1e-15)


@pytest.mark.parametrize("degrees", [(7, 7, 7), (20, 21, 21), (31, 31, 0), (10, 20, 30)], ids=str)
def test_is_an_isometry_up_to_the_largest_degrees(degrees: tuple[int, int, int]) -> None:
    tensor, size = wigner_3j(*degrees), 2 * degrees[2] + 1
    np.testing.assert_allclose(np.einsum("ijk,ijl->kl", tensor, tensor), np.eye(size) / size, atol=1e-14)


def test_is_cached_and_read_only() -> None:
    assert wigner_3j(2, 3, 1) is wigner_3j(2, 3, 1)
    with pytest.raises(ValueError, match="read-only"):
        wigner_3j(2, 3, 1)[0, 0, 0] = 1.0


@pytest.mark.parametrize("degrees", [(1, 1, 3), (3, 1, 1), (0, 1, 0), (-1, 1, 1), (1.0, 1, 1), (30, 30, 30)])
def test_errors(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(IrrepsError, match="expected"):
        wigner_3j(*degrees)
