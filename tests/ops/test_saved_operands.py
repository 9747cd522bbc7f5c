"""What linear operators keep for their gradients: no operand that no gradient needs, which is memory of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eqaccel import Linear, LinearSpec, MatrixProduct
from eqaccel.testing import assert_close


def kept_by(compute: Callable[[], Tensor]) -> tuple[Tensor, set[int]]:
    """A result, and the addresses of what is kept for its gradient."""
    addresses: set[int] = set()

    def keep(t: Tensor) -> Tensor:
        addresses.add(t.data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        return compute(), addresses


@pytest.mark.parametrize("trained", [False, True])
def test_products_keep_rows_for_matrices_that_are_trained(trained: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(6, 4, device=device).requires_grad_(), torch.randn(4, 8, device=device).requires_grad_(trained)
    product = MatrixProduct().to(device)
    c, kept = kept_by(lambda: product(a, b))
    assert (a.data_ptr() in kept, b.data_ptr() in kept) == (trained, True)
    gradients = torch.autograd.grad(c.sum(), [a, b] if trained else [a])
    rows, columns = b.detach().double().sum(1).expand(6, 4), a.detach().double().sum(0).unsqueeze(1).expand(4, 8)
    sizes = b.detach().double().abs().sum(1).expand(6, 4), a.detach().double().abs().sum(0).unsqueeze(1).expand(4, 8)
    assert_close(gradients, [rows, columns][: len(gradients)], sizes[: len(gradients)])


@pytest.mark.parametrize("of", ["x", "w", "y", "xw", "xy", "wy", "xwy"])
def test_linear_maps_keep_what_others_need(of: str, device: torch.device) -> None:
    torch.manual_seed(0)
    spec = LinearSpec("4x0e+2x1o", "3x0e+5x1o", ((0, 0, 0.5), (1, 1, 1.5)), 2)
    shapes = {"x": (5, spec.irreps_in.dim), "w": (spec.weight_numel,), "y": (5, 2)}
    values = {name: torch.randn(shape, device=device, dtype=torch.float64) for name, shape in shapes.items()}
    linear = Linear(spec).to(device)

    def gradients(of: str) -> tuple[dict[str, Tensor], set[int], dict[str, Tensor]]:
        given = {name: value.clone().requires_grad_(name in of) for name, value in values.items()}
        z, kept = kept_by(lambda: linear(given["x"], given["w"], given["y"]))
        found = torch.autograd.grad(z.square().sum(), [given[name] for name in of])
        return dict(zip(of, found, strict=True)), kept, given

    found, kept, given = gradients(of)
    for name, value in given.items():
        assert (value.data_ptr() in kept) == any(other != name for other in of)
    all_of_them = gradients("xwy")[0]
    assert all(torch.equal(value, all_of_them[name]) for name, value in found.items())
