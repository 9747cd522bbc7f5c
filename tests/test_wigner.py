"""Coupling tensors: e3nn's, to rounding, with the signs of each version of e3nn."""

from __future__ import annotations

import importlib.metadata
import os
import sys

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import e3nn
import numpy as np
import pytest
import torch
from e3nn import o3

from eqaccel.errors import IrrepsError, SpecError
from eqaccel.wigner import WignerConvention, depends_on_convention, wigner_3j

TRIPLES = [(a, b, c) for a in range(8) for b in range(8) for c in range(abs(a - b), min(a + b, 7) + 1)]

IS_E3NN_04 = tuple(map(int, e3nn.__version__.split(".")[:2])) < (0, 5)
OLD, NEW = WignerConvention.E3NN_0_4, WignerConvention.E3NN_0_5


@pytest.mark.parametrize("degrees", TRIPLES, ids=str)
def test_equals_the_installed_e3nn(degrees: tuple[int, int, int]) -> None:
    theirs = o3.wigner_3j(*degrees, dtype=torch.float64).numpy()
    ours = wigner_3j(*degrees)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)
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
                np.testing.assert_allclose(wigner_3j(a, b, c, OLD), theirs, rtol=0, atol=1e-14)
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
    np.testing.assert_allclose(wigner_3j(*np.roll(degrees, 1).tolist(), NEW), tensor.transpose(2, 0, 1), atol=1e-14)
    np.testing.assert_allclose(wigner_3j(*degrees[::-1], NEW), odd * tensor.transpose(2, 1, 0), atol=1e-14)


def test_vectors_couple_as_dot_and_cross_product() -> None:
    levi_civita = np.zeros((3, 3, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        levi_civita[i, j, k], levi_civita[j, i, k] = 1.0, -1.0
    np.testing.assert_allclose(wigner_3j(1, 1, 1), levi_civita / np.sqrt(6), atol=1e-15)
    np.testing.assert_allclose(wigner_3j(1, 1, 0)[..., 0], np.eye(3) / np.sqrt(3), atol=1e-15)


@pytest.mark.parametrize("degrees", [(7, 7, 7), (20, 21, 21), (31, 31, 0), (10, 20, 30)], ids=str)
def test_is_an_isometry_up_to_the_largest_degrees(degrees: tuple[int, int, int]) -> None:
    tensor, size = wigner_3j(*degrees, NEW), 2 * degrees[2] + 1
    np.testing.assert_allclose(np.einsum("ijk,ijl->kl", tensor, tensor), np.eye(size) / size, atol=1e-14)


def test_is_cached_and_read_only() -> None:
    assert wigner_3j(2, 3, 1) is wigner_3j(2, 3, 1)
    with pytest.raises(ValueError, match="read-only"):
        wigner_3j(2, 3, 1)[0, 0, 0] = 1.0


@pytest.mark.parametrize("degrees", [(1, 1, 3), (3, 1, 1), (0, 1, 0), (-1, 1, 1), (1.0, 1, 1), (30, 30, 30)])
def test_errors(degrees: tuple[int, int, int]) -> None:
    with pytest.raises(IrrepsError, match="expected"):
        wigner_3j(*degrees)
