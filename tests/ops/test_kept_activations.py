"""What products keep of activations of many edges: these are made again, and every derivative is as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from eqaccel import MatrixProduct, ScaledSilu, SiluSpec

FACTOR, SCALE = 1.7, 0.3
WIDTH = 64
LARGE, SMALL = 17_000, 100  # rows: 8.7 MB and 51 kB in float64


def network(product: MatrixProduct, activation: ScaledSilu, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    hidden = activation(product(x, first))
    return product(hidden, second)


def plain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return FACTOR * silu(SCALE * (x @ first)) @ second


def derivatives(value: Tensor, x: Tensor, weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """As in training on forces: of the output, and of its gradient, in x and the weights."""
    (gradient,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    second = torch.autograd.grad(gradient.square().sum(), (x, *weights), create_graph=True)
    third = torch.autograd.grad(sum(g.square().sum() for g in second), (x, *weights))
    return [gradient.detach(), *(g.detach() for g in second), *third]


@pytest.mark.parametrize("rows", [LARGE, SMALL])
def test_derivatives_are_those_of_torch(rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(rows, 5), (5, WIDTH), (WIDTH, 3)]
    x, *weights = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes)
    operands = [t.requires_grad_() for t in (x, *weights)]
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    found = derivatives(network(product, activation, *operands), x, tuple(weights))
    expected = derivatives(plain(*operands), x, tuple(weights))
    for ours, theirs in zip(found, expected, strict=True):
        bound = 64 * torch.finfo(torch.float64).eps * theirs.abs().sum()
        assert float((ours - theirs).abs().max()) <= bound


@pytest.mark.parametrize(("rows", "holders"), [(LARGE, 1), (SMALL, 2)])
def test_large_activations_are_not_kept(rows: int, holders: int, device: torch.device) -> None:
    """Neither those of the forward pass nor, with a graph of it, those of the backward pass."""
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    x = torch.randn(rows, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    hidden = activation(x)
    result = product(hidden, weight)
    assert hidden._use_count() == holders
    gradient = torch.ones_like(hidden).requires_grad_()
    (made,) = torch.autograd.grad(hidden, x, gradient, create_graph=True)
    before = made._use_count()
    again = product(made, weight)
    assert made._use_count() == before + holders - 1
    (of_weight,) = torch.autograd.grad(result.sum() + again.sum(), weight)
    expected = (hidden + made).detach().T @ torch.ones_like(result)
    bound = 64 * torch.finfo(torch.float64).eps * (hidden.abs() + made.abs()).sum()
    assert float((of_weight - expected).detach().abs().max()) <= bound


@pytest.mark.parametrize("rows", [LARGE, SMALL])
def test_an_activation_that_was_written_to_is_kept(rows: int, device: torch.device) -> None:
    x = torch.randn(rows, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    hidden = ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)(x)
    with torch.no_grad():
        hidden.mul_(1.5)  # as a hook of a user's may
    (found,) = torch.autograd.grad(MatrixProduct().to(device)(hidden, weight).sum(), weight)
    expected = hidden.detach().sum(0)[:, None].expand_as(weight)
    bound = 64 * torch.finfo(torch.float64).eps * hidden.detach().abs().sum()
    assert float((found - expected).abs().max()) <= bound


@pytest.mark.parametrize("takes_gradient", [False, True])
def test_checkpoints_compute_again_once(takes_gradient: bool, device: torch.device) -> None:
    """Under hooks on saved tensors nothing is looked at before the backward pass."""
    x = torch.randn(LARGE, 5, dtype=torch.float64, device=device, requires_grad=True)
    weights = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((5, WIDTH), (WIDTH, 3))]
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(len(calls))
        value = network(product, activation, x, *weights).square().sum()
        if takes_gradient:  # as for forces
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = value + gradient.square().sum()
        return value

    expected = torch.autograd.grad(function(x), (x, *weights))
    result = checkpoint(function, x, use_reentrant=False)
    assert len(calls) == 2 or takes_gradient  # a gradient that is taken inside asks for what the checkpoint has
    for ours, theirs in zip(torch.autograd.grad(result, (x, *weights)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.abs().max()))
    assert len(calls) == 3 or takes_gradient


def test_what_a_checkpoint_has_saved_is_left_to_it(device: torch.device) -> None:
    x = torch.randn(LARGE, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    calls = []

    def hidden(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)(x)

    result = MatrixProduct().to(device)(checkpoint(hidden, x, use_reentrant=False), weight)
    assert len(calls) == 1
    result.sum().backward()
    assert len(calls) == 2


def test_what_a_backward_pass_has_given_back_is_not_needed(device: torch.device) -> None:
    """The gradient of the weights alone, of activations that have been differentiated before."""
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    x = torch.randn(LARGE, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    hidden = activation(x)
    hidden.sum().backward()
    (found,) = torch.autograd.grad(product(hidden, weight).sum(), weight)
    assert torch.allclose(found, hidden.detach().sum(0)[:, None].expand(-1, 2))


def test_gradients_reach_activations_themselves(device: torch.device) -> None:
    """The gradient of weights depends on activations, which gradients may be asked for in the middle of a graph."""
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    x = torch.randn(LARGE, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    hidden = activation(x)
    (of_weight,) = torch.autograd.grad(product(hidden, weight).sum(), weight, create_graph=True)
    (found,) = torch.autograd.grad(of_weight.sum(), hidden)
    assert torch.equal(found, torch.full_like(found, 2.0))


def test_tangents_reach_gradients_of_weights(device: torch.device) -> None:
    """Forward mode over reverse mode: dual activations are kept as they are."""
    product, activation = MatrixProduct().to(device), ScaledSilu(SiluSpec(FACTOR, SCALE)).to(device)
    x, along = (torch.randn(LARGE, WIDTH, dtype=torch.float64, device=device) for _ in range(2))
    weight = torch.randn(WIDTH, 2, dtype=torch.float64, device=device, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.requires_grad_(), along)
        (of_weight,) = torch.autograd.grad(product(activation(dual), weight).sum(), weight)
        tangent = forward_ad.unpack_dual(of_weight).tangent
    y = SCALE * x.detach()
    slope = FACTOR * SCALE * torch.sigmoid(y) * (1 + y * torch.sigmoid(-y)) * along
    bound = 64 * torch.finfo(torch.float64).eps * slope.abs().sum()
    assert float((tangent - slope.sum(0)[:, None]).abs().max()) <= bound
