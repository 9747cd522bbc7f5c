"""The matrix product beside tensor products: values, derivatives, what torch does with the operator, bad input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import eqaccel.ops  # noqa: F401

dense_product = torch.ops.eqaccel.dense_product


def matrices(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The second one is not contiguous."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 3), (4, 3)))
    return a.to(device, dtype).requires_grad_(), b.to(device, dtype).T.requires_grad_()


def test_values_are_those_of_torch(device: torch.device, dtype: torch.dtype) -> None:
    a, b = matrices(device, dtype)
    assert torch.equal(dense_product(a, b), a.mm(b))
    assert torch.equal(dense_product(a[:, :0], b[:0]), torch.zeros(5, 4, dtype=dtype, device=device))
    assert dense_product(a[:0], b).shape == (0, 4)


def test_derivatives(device: torch.device) -> None:
    operands = matrices(device)
    assert torch.autograd.gradcheck(dense_product, operands, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(dense_product, operands, check_fwd_over_rev=True, check_batched_grad=True)


def test_opcheck(device: torch.device) -> None:
    torch.library.opcheck(dense_product, matrices(device))


def test_one_gradient_is_one_product(device: torch.device) -> None:
    """The other one is not computed, and what it would need is not kept."""
    a, b = matrices(device)
    z = dense_product(a, b.detach())
    with torch.profiler.profile() as profile:
        (found,) = torch.autograd.grad(z.sum(), a)
    assert sum(event.name == "aten::mm" for event in profile.events()) == 1
    assert_close(found, b.detach().sum(1).expand(5, 3))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(low: torch.dtype, device: torch.device) -> None:
    """In float32, values as gradients that are asked for there; float64 stays as it is."""
    a, b = (operand.detach().to(low).requires_grad_() for operand in matrices(device, torch.float32))
    with torch.autocast(device.type, dtype=low):
        z = dense_product(a, b)
        assert torch.equal(z, dense_product(a.float(), b.float()))
        (first,) = torch.autograd.grad(z.square().sum(), a, create_graph=True)
        assert dense_product(*matrices(device)).dtype == torch.float64
    assert z.dtype == torch.float32
    assert torch.equal(first, (2 * z).mm(b.float().T).to(low))
    (second,) = torch.autograd.grad(first.float().sum(), b)
    assert second.dtype == low


def test_bad_input(device: torch.device) -> None:
    a, b = matrices(device)
    for operands, message in (
        ((a[0], b), "argument 'a' must be a matrix, got shape"),
        ((a, b[:, 0]), "argument 'b' must be a matrix, got shape"),
        ((a, b[1:]), r"argument 'b' must be Double of shape \(3, columns\) on .*, got Double of shape"),
        ((a, b.float()), r"argument 'b' must be Double of shape .*, got Float of shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            dense_product(*operands)
