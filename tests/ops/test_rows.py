"""Unit vectors and columns in another order: values, derivatives, what torch does with the operators, bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import eqaccel.ops  # noqa: F401

ops = torch.ops.eqaccel


def unit(x: Tensor) -> Tensor:
    return ops.unit_vectors(x)[0]


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths."""
    return ops.unit_vectors(x)[:2]


def lengths(x: Tensor) -> Tensor:
    return torch.linalg.norm(x, dim=-1, keepdim=True)


def vectors(device: torch.device, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(device).requires_grad_()


def permutation(device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.tensor([2, 0, 3, 1], device=device)
    return order, order.argsort()


def test_unit_vectors_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    x = vectors(device).detach().to(dtype)
    assert torch.equal(unit(x), normalize(x, dim=-1))
    _, length, direction, divisor = ops.unit_vectors(x)
    assert torch.equal(direction, unit(x))
    assert torch.equal(length, lengths(x))
    assert torch.equal(divisor, length)


def test_derivatives_of_unit_vectors(device: torch.device) -> None:
    x = vectors(device)
    for function in (unit, lambda x: ops.unit_vectors(x)[1], both):
        assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, check_batched_grad=True)

    def orders(function) -> list[Tensor]:
        found = [function(x)]
        for _ in range(4):
            found.append(torch.autograd.grad((found[-1] * x.detach()).sin().sum(), x, create_graph=True)[0])
        return found

    def product(unit: Tensor, length: Tensor) -> Tensor:
        return unit * length.cos()

    for ours, theirs in (
        (unit, lambda x: normalize(x, dim=-1)),
        (lambda x: product(*both(x)), lambda x: product(normalize(x, dim=-1), lengths(x))),
    ):
        for order, (value, expected) in enumerate(zip(orders(ours), orders(theirs), strict=True)):
            # Each derivative divides by a length once more, and multiplies the number of terms, by less than ten.
            bound = 10**order * torch.finfo(torch.float64).eps * expected.abs().max() / x.norm(dim=1).min() ** order
            assert bool(((value - expected).abs() <= bound).all())


def operators(run: Callable[[], Any]) -> int:
    """How many operators of torch compute something, each by a kernel of its own on a GPU."""
    with torch.profiler.profile() as profile:
        run()
    events = [event for event in profile.events() if event.name.startswith("aten::") and event.name not in NO_KERNEL]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in events)


NO_KERNEL = {"aten::empty", "aten::detach"}


def test_kernels_of_a_step_of_training(device: torch.device) -> None:
    """They compute unit vectors and lengths, their gradient, and the gradient of that."""
    x = vectors(device)
    given = [torch.ones(6, width, dtype=torch.float64, device=device, requires_grad=True) for width in (3, 1)]
    assert operators(lambda: both(x)) == 5
    found = both(x)
    assert operators(lambda: torch.autograd.grad(found, x, given, create_graph=True)) == 5
    (first,) = torch.autograd.grad(found, x, given, create_graph=True)
    along = torch.ones_like(first)
    assert operators(lambda: torch.autograd.grad(first, (*given, x), along)) == 11


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
    (of_length,) = torch.autograd.grad(ops.unit_vectors(x)[1].sum(), x)
    assert torch.equal(of_length[0], torch.zeros_like(of_length[0]))


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
    _, length, direction, divisor = (t.detach() for t in ops.unit_vectors(x))
    torch.library.opcheck(ops.unit_vectors.default, (x,))
    for of_length in (length.requires_grad_(), length.new_empty(0)):
        torch.library.opcheck(ops.unit_vectors_backward.default, (z, of_length, x, direction, divisor))
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
