"""What convolutions keep of large weights of edges that are products: they are made again, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eqaccel import MatrixProduct, TensorProductConv, TensorProductSpec

CHANNELS = 512
SPEC = TensorProductSpec.channelwise(f"{CHANNELS}x0e", "0e", "0e")
NODES, TERMS = 50, 3
LARGE, SMALL = 66_000, 100  # edges: 270 MB and 410 kB of weights in float64
EPS = torch.finfo(torch.float64).eps
Weights = Callable[[Tensor, Tensor], Tensor]


class Problem:
    """A convolution whose weights are a product, and operands that need gradients."""

    def __init__(self, edges: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        shapes = [(NODES, CHANNELS), (edges, 1), (edges, TERMS), (TERMS, CHANNELS)]
        values = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
        self.x, self.y, self.hidden, self.matrix = (value.requires_grad_() for value in values)
        self.edges = torch.randint(NODES, (2, edges), generator=generator).to(device)
        self.conv, self.product = TensorProductConv(SPEC).to(device), MatrixProduct().to(device)

    def weights(self) -> Tensor:
        return self.product(self.hidden, self.matrix)

    def kept(self) -> Tensor:
        """The same numbers, that are not a product for autograd."""
        return self.weights() * 1.0

    def convolve(self, weights: Tensor) -> Tensor:
        return self.conv(self.x, self.y, weights, self.edges)

    def second_order(self, z: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
        """As in training on forces: of a gradient, and of the result."""
        (force,) = torch.autograd.grad(z.square().sum(), self.y, create_graph=True)
        return torch.autograd.grad(force.square().sum() + z.sum(), wanted)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], terms: int) -> None:
    """Sums in another order, of so many terms of the size of the largest result or smaller."""
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= terms * EPS * float(theirs.abs().max())


def test_checkpoints_compute_again_once(device: torch.device) -> None:
    problem, calls = Problem(LARGE, device), []

    def function(y: Tensor) -> Tensor:
        calls.append(len(calls))
        return problem.convolve(problem.weights()).square().sum() + 0 * y.sum()

    wanted = (problem.x, problem.y, problem.hidden, problem.matrix)
    expected = torch.autograd.grad(function(problem.y), wanted)
    result = checkpoint(function, problem.y, use_reentrant=False)
    assert len(calls) == 2
    assert_same(torch.autograd.grad(result, wanted), expected, 1024)
    assert len(calls) == 3


@pytest.mark.parametrize("edges", [LARGE, SMALL])
def test_gradients_are_those_with_kept_weights(edges: int, device: torch.device) -> None:
    problem = Problem(edges, device)
    wanted = (problem.x, problem.y, problem.hidden, problem.matrix)
    expected = problem.second_order(problem.convolve(problem.kept()), *wanted)
    assert_same(problem.second_order(problem.convolve(problem.weights()), *wanted), expected, 1024)


@pytest.mark.parametrize(("edges", "holders"), [(LARGE, 1), (SMALL, 2)])
def test_large_weights_are_not_kept(edges: int, holders: int, device: torch.device) -> None:
    """Neither by a convolution nor by its gradient."""
    problem = Problem(edges, device)
    weights = problem.weights()
    z = problem.convolve(weights)
    assert weights._use_count() == holders
    (force,) = torch.autograd.grad(z.sum(), problem.y, create_graph=True)
    assert weights._use_count() == 2 * holders - 1
    assert force.requires_grad


def test_gradients_go_on_at_once_if_nobody_sees_those_of_the_weights(device: torch.device) -> None:
    problem = Problem(LARGE, device)

    def nodes(z: Tensor) -> list[object]:
        """What made the weights, as a convolution and its gradient have it."""
        (force,) = torch.autograd.grad(z.sum(), problem.y, create_graph=True)
        return [z.grad_fn.next_functions[2][0], force.grad_fn.next_functions[3][0]]

    one, other = nodes(problem.convolve(problem.weights()))
    assert one is not other
    weights = problem.weights()
    one, other = nodes(problem.convolve(weights))
    assert one is other is weights.grad_fn


def test_gradients_reach_weights_themselves(device: torch.device) -> None:
    """They may be asked for in the middle of a graph."""
    problem = Problem(LARGE, device)
    results = []
    for weights in (problem.kept(), problem.weights()):
        results.append(problem.second_order(problem.convolve(weights), weights))
    assert_same(results[1], results[0], 64)


def test_hooks_see_whole_gradients(device: torch.device) -> None:
    problem = Problem(LARGE, device)
    seen: list[Tensor] = []

    def convolved() -> Tensor:
        weights = problem.weights()
        weights.register_hook(seen.append)
        return problem.convolve(weights)

    problem.second_order(convolved(), problem.hidden)
    weights = problem.kept()
    expected = problem.second_order(problem.convolve(weights), weights)
    assert_same(tuple(seen[-1:]), expected, 64)


def test_weights_that_were_written_to_are_kept(device: torch.device) -> None:
    problem = Problem(LARGE, device)
    weights = problem.weights()
    with torch.no_grad():
        weights *= 2.0
    (found,) = torch.autograd.grad(problem.convolve(weights).sum(), problem.y)
    (once,) = torch.autograd.grad(problem.convolve(problem.weights()).sum(), problem.y)
    assert torch.equal(found, 2.0 * once)
