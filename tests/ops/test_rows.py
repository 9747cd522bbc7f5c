"""Unit vectors and columns in another order: values, derivatives, what torch does with the operators, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import eqaccel.ops  # noqa: F401

ops = torch.ops.eqaccel


def unit(x: Tensor) -> Tensor:
    return ops.unit_vectors(x)[0]


def vectors(device: torch.device, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(device).requires_grad_()


def permutation(device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.tensor([2, 0, 3, 1], device=device)
    return order, order.argsort()


def test_unit_vectors_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    x = vectors(device).detach().to(dtype)
    assert torch.equal(unit(x), normalize(x, dim=-1))
    _, direction, length = ops.unit_vectors(x)
    assert torch.equal(direction, unit(x))
    assert torch.equal(length, torch.linalg.norm(x, dim=-1, keepdim=True))


def test_derivatives_of_unit_vectors(device: torch.device) -> None:
    x = vectors(device)
    assert torch.autograd.gradcheck(unit, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(unit, x, check_fwd_over_rev=True)

    def orders(function) -> list[Tensor]:
        found = [function(x)]
        for _ in range(4):
            found.append(torch.autograd.grad((found[-1] * x.detach()).sin().sum(), x, create_graph=True)[0])
        return found

    for order, (ours, theirs) in enumerate(zip(orders(unit), orders(lambda x: normalize(x, dim=-1)), strict=True)):
        # Each derivative divides by a length once more, and multiplies the number of terms, by less than ten.
        bound = 10**order * torch.finfo(torch.float64).eps * theirs.abs().max() / x.norm(dim=1).min() ** order
        assert bool(((ours - theirs).abs() <= bound).all())


@pytest.mark.parametrize("size", [0.0, 3e-13])
def test_short_rows_have_no_direction(size: float, device: torch.device) -> None:
    """They are divided by a bound, which does not depend on them."""
    x = torch.tensor([[size, 0.0, size], [1.0, 2.0, 3.0]], dtype=torch.float64, device=device, requires_grad=True)
    along = torch.ones_like(x)
    (first,) = torch.autograd.grad(unit(x), x, along, create_graph=True)
    assert torch.equal(first[0], along[0] / 1e-12)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.equal(second[0], torch.zeros_like(second[0]))
    assert bool(second[1].any())


def test_columns(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.arange(8.0, dtype=dtype, device=device).view(4, 2).T
    order, inverse = permutation(device)
    z = ops.permute_columns(x, order, inverse)
    assert torch.equal(z, x[:, order])
    assert z.is_contiguous()
    assert torch.equal(ops.permute_columns(z, inverse, order), x)
    assert ops.permute_columns(x[:0], order, inverse).shape == (0, 4)


def test_derivatives_of_columns(device: torch.device) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    orders = permutation(device)

    def cubes(x: Tensor) -> Tensor:
        return ops.permute_columns(x, *orders).pow(3)

    assert torch.autograd.gradcheck(cubes, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(cubes, x, check_fwd_over_rev=True)


def test_opcheck(device: torch.device) -> None:
    x, z = vectors(device), vectors(device)
    _, direction, length = (t.detach() for t in ops.unit_vectors(x))
    torch.library.opcheck(ops.unit_vectors.default, (x,))
    torch.library.opcheck(ops.unit_vectors_backward.default, (z, x, direction, length))
    rows = torch.randn(3, 4, device=device, requires_grad=True)
    torch.library.opcheck(ops.permute_columns.default, (rows, *permutation(device)))


def test_errors(device: torch.device) -> None:
    x, (order, inverse) = torch.zeros(3, 4, device=device), permutation(device)
    with pytest.raises(RuntimeError, match=r"eqaccel::unit_vectors: argument 'x' must have shape \(rows, columns\)"):
        ops.unit_vectors(x[0])
    with pytest.raises(RuntimeError, match="argument 'order' must be int64 of shape"):
        ops.permute_columns(x, order[1:], inverse)
    with pytest.raises(RuntimeError, match="argument 'inverse' must be int64 of shape"):
        ops.permute_columns(x, order, inverse.int())


def test_columns_are_checked_on_a_cpu() -> None:
    order = torch.tensor([0, 2])
    with pytest.raises(RuntimeError, match="must hold columns, 0 to 1, got 2"):
        ops.permute_columns(torch.zeros(3, 2), order, order)
