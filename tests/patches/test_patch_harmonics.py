"""Spherical harmonics by polynomials give the numbers and derivatives of e3nn's."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.autograd import grad, gradgradcheck

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn import o3
from patch_checks import assert_close

from eqaccel import Polynomial
from eqaccel.codegen import Direction
from eqaccel.errors import PatchError
from eqaccel.families.polynomial import MAX_POWER, execute_polynomial
from eqaccel.patches import nodes
from eqaccel.patches.harmonics import polynomial_of
from eqaccel.patches.replacement import preview
from eqaccel.patches.torch_state import default_dtype
from eqaccel.testing import ERROR_CONSTANT

pytestmark = pytest.mark.filterwarnings("ignore")


def pair(irreps: str, normalize: bool = True, normalization: str = "component") -> tuple[torch.nn.Module, ...]:
    original = o3.SphericalHarmonics(irreps, normalize, normalization)
    return original, preview(original, *nodes.build_form(torch.nn.Linear(1, 1), original, nodes.E3NN_FORMS))


@pytest.mark.parametrize("normalization", ["component", "integral", "norm"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("irreps", ["0e+1o+2e+3o", "0e+1o", "2x1o+3o+0e", "0e+1e+2e", "0e+1o+2e+3o+4e", "7o+0e+5o"])
def test_values_and_derivatives(irreps: str, normalize: bool, normalization: str, device: torch.device) -> None:
    with default_dtype(torch.float64):
        results = []
        for module in pair(irreps, normalize, normalization):
            vectors = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            vectors = vectors.to(device).requires_grad_()
            value = module.to(device)(vectors)
            (first,) = grad((value**3).sum(), vectors, create_graph=True)
            results.append((value, first, grad((first**2).sum(), vectors)[0]))
    for value, expected in zip(results[1], results[0], strict=True):
        assert_close(value, expected)


def test_derivatives_of_higher_order() -> None:
    _, fast = pair("0e+1o+2e+3o", normalize=False)
    vectors = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda v: grad((fast(v) ** 2).sum(), v, create_graph=True)[0], vectors)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (2, 5, 3)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    original, fast = pair("0e+1o+2e")
    vectors = torch.randn(shape)
    # On the sphere the terms of a component of degree two add up to the root of five at most.
    bound = 2 * ERROR_CONSTANT * torch.finfo(torch.float32).eps * math.sqrt(5)
    assert bool(((fast(vectors) - original(vectors)).abs() <= bound).all())
    assert torch.equal(torch.jit.script(fast)(vectors), fast(vectors))


def test_coefficients_in_closed_form() -> None:
    """The same bits for every model: another rounding would be another kernel, and other trajectories."""
    fast = pair("0e+1o+2e+3o")[1].eqaccel.spec
    assert fast == pair("0e+1o+2e+3o")[1].eqaccel.spec
    found = {(term.output, term.features): term.coefficient for term in fast.terms}
    assert len(found) == 28
    assert found[0, ()] == 1.0
    assert found[4, (0, 2)] == math.sqrt(15)  # sqrt(15) x z
    assert found[12, (1, 1, 1)] == math.sqrt(7)
    assert found[6, (0, 0)] == found[6, (2, 2)] == -math.sqrt(5 / 4)


def test_a_vector_of_zero() -> None:
    original, fast = pair("0e+1o+2e+3o")
    zero = torch.zeros(1, 3, requires_grad=True)
    assert torch.equal(fast(zero), original(zero))
    assert torch.isfinite(grad(fast(zero).sum(), zero)[0]).all()


def test_high_degrees_are_left() -> None:
    with pytest.raises(PatchError, match="degree 12, above 11"):
        polynomial_of(SimpleNamespace(_ls_list=[0, 12], normalization="integral"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("degree", range(4, 12))
def test_high_degrees(degree: int, dtype: torch.dtype) -> None:
    """Rounding is proportional to sums of absolute values: of lower harmonics, three of which are multiplied."""
    kernels = polynomial_of(o3.SphericalHarmonics([degree], True, "component"))
    vectors = torch.nn.functional.normalize(
        torch.randn(200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1
    ).to(dtype)
    found = kernels(vectors, torch.ones(200, 1, dtype=dtype)).double()
    expected = o3.spherical_harmonics([degree], vectors.double(), False, "component")
    scale, ones = vectors.double().numpy(), np.ones((200, 1))
    parts = [part for part in kernels.modules() if isinstance(part, Polynomial)]
    for part in parts:
        scale = execute_polynomial(part.spec, Direction.FORWARD, scale, ones, absolute=True).z
    assert len(parts) == (2 if degree < 10 else 3)
    bound = sum(MAX_POWER**n for n in range(len(parts))) * ERROR_CONSTANT * torch.finfo(dtype).eps * scale
    assert (np.abs((found - expected).numpy()) <= bound).all()
