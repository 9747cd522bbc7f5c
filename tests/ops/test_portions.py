"""What is there at a time of the weights of edges."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eqaccel import TensorProductConv, TensorProductSpec
from eqaccel.ops import (
    EdgePairs,
    Graph,
    LastProduct,
    MatrixProduct,
    MemoryLimits,
    Portions,
    WeightLimits,
    convolve_pairs,
)

SPEC = TensorProductSpec.channelwise("4x0e", "0e", "4x0e")
NODES, TERMS, LAYERS = 6, 3, 4
PAIRS = NODES * (NODES - 1) // 2
ROW_BYTES = SPEC.weight_numel * 8
LAYER_BYTES = PAIRS * ROW_BYTES
"""Of the weights of pairs of all nodes."""


def results(*limits: float, absolute: bool = False) -> tuple[Portions, list[Tensor]]:
    """Layers one after another over all pairs of nodes, and gradients; or sums of absolute values for both."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.abs() if absolute else values

    receiver, sender = (~torch.eye(NODES, dtype=torch.bool)).nonzero(as_tuple=True)
    positions = torch.arange(3.0 * NODES).view(NODES, 3).square()
    index = Graph(receiver, sender, NODES, NODES).index
    pairs = EdgePairs.find(positions[receiver] - positions[sender], index, NODES)
    portions = Portions(pairs, index, MemoryLimits(*limits))
    inputs = made(len(pairs.edges), TERMS).requires_grad_()
    start = x = made(NODES, SPEC.x_dim).requires_grad_()
    y, matrix = made(len(receiver), SPEC.y_dim).requires_grad_(), made(TERMS, SPEC.weight_numel)
    network = LastProduct(torch.clone, MatrixProduct(), matrix)
    for _ in range(LAYERS):
        x = convolve_pairs(TensorProductConv(SPEC), x, y, network, inputs, portions)
    return portions, [x.detach(), *torch.autograd.grad(x.sum(), [start, y, inputs])]


@pytest.mark.parametrize(("layers", "made"), [(4, 4), (3, 5), (2, 6), (1, 7)])
def test_weights_are_kept_while_there_is_room(layers: int, made: int) -> None:
    """Those of the oldest layers go, and are made again, with the same bits."""
    portions, found = results(layers * LAYER_BYTES, 2 * LAYER_BYTES)
    assert portions.times_made == made
    assert all(map(torch.equal, found, results(LAYERS * LAYER_BYTES, 2 * LAYER_BYTES)[1]))


def test_what_finds_no_room_at_all_is_made_in_ranges() -> None:
    portions, _ = results(LAYER_BYTES / 2, 2 * LAYER_BYTES)
    assert portions.times_made == 2 * (2 * LAYERS) - 1  # one range of the last layer is there still
    assert len(portions.range_indices) == 2


def edges_of(portions: Portions) -> list[int]:
    """Numbers of edges of all ranges."""
    return sorted((len(index) - 2 * NODES - 4) // 3 for index in portions.range_indices)


class RowsOfGradients(TorchDispatchMode):
    """Notes of how many edges there are gradients of weights, when these are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.eqaccel.matrix_product.default and args[3].size(1) == TERMS:
            self.rows.append(args[2].size(0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pairs", "gradients", "edges", "rows"),
    [
        (15, 30, [], []),
        (15, 29, [], [15, 15]),
        (15, 11, [], [10, 10, 10]),
        (15, 1, [], [1] * 30),  # an edge at least
        (14, 30, [14, 16], []),  # eight pairs and seven
        (8, 16, [14, 16], []),
        (8, 8, [14, 16], [7, 7, 8, 8]),
        (5, 7, [10, 10, 10], [5] * 6),
        (1, 1, [2] * 15, [1] * 30),
    ],
)
def test_portions_are_as_large_as_there_is_room(pairs: int, gradients: int, edges: list[int], rows: list[int]) -> None:
    """Rows of weights of pairs and of gradients of edges, of 15 pairs: few ranges, and few parts of their edges."""
    portions, found = results(pairs * ROW_BYTES, gradients * ROW_BYTES)
    assert edges_of(portions) == edges
    with RowsOfGradients() as noted:
        again = results(pairs * ROW_BYTES, gradients * ROW_BYTES)[1]
    assert noted.rows == rows * LAYERS
    assert all(map(torch.equal, found, again))
    # A layer is a sum over neighbours of products, and so is its gradient, which adds up layers too.
    roundings = 2 * LAYERS * (NODES + TERMS + SPEC.weight_numel + 4)
    whole, sizes = results()[1], results(absolute=True)[1]
    for value, right, size in zip(found, whole, sizes, strict=True):
        assert bool(((value - right).abs() <= roundings * torch.finfo(torch.float64).eps * size).all())


@pytest.mark.parametrize(("room", "layers"), [(0, 4), (14, 4), (15, 1), (30, 1), (1000, 0)])
def test_gradients_have_what_weights_leave(room: int, layers: int) -> None:
    """Of 30 edges of a layer, with room for 15 and for what weights leave, earlier layers' among them."""
    with RowsOfGradients() as noted:
        results((15 + room) * ROW_BYTES, 15 * ROW_BYTES)
    assert noted.rows == [15, 15] * layers  # the last ones; for others there is room


@pytest.mark.parametrize(
    ("gradients", "besides", "edges", "rows"),
    [
        (6, 0, [10, 10, 10], [5] * 6),
        (6, 10, [10, 10, 10], [5] * 6),
        (6, 28, [14, 16], [5, 5, 4, 6, 6, 4]),  # weights take a half of it
        (6, 30, [], [6] * 5),
        (1, 0, [10, 10, 10], [1] * 30),
        (1, 30, [], [2] * 15),  # of sixteen portions
    ],
)
def test_memory_besides_keeps_pieces_few(gradients: int, besides: int, edges: list[int], rows: list[int]) -> None:
    """With room for weights of five pairs."""
    with RowsOfGradients() as noted:
        portions, _ = results(5 * ROW_BYTES, gradients * ROW_BYTES, besides * ROW_BYTES)
    assert edges_of(portions) == edges
    assert sorted(noted.rows) == sorted(rows * LAYERS)


def test_limits_are_what_was_asked_for_or_some_of_what_there_is() -> None:
    asked, machine = WeightLimits(8, 1), WeightLimits(0, 0)
    assert asked.get() == (7, 1, 0)
    assert not asked.may_be_halved
    assert machine.get().besides == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.may_be_halved


@pytest.mark.parametrize(("memory", "bytes_at_first"), [(64, 8), (2**36, 3.7 * 2**30)])
def test_shares_are_halved_four_times(memory: float, bytes_at_first: float) -> None:
    limits = WeightLimits(0, memory)
    found = [limits.get()]
    while limits.may_be_halved:
        limits.halve()
        found.append(limits.get())
    for halves, (pairs, gradients, besides) in enumerate(found):
        assert besides == memory / 2**halves
        assert (pairs, gradients) == (bytes_at_first / 2**halves * 7 / 8, bytes_at_first / 2**halves / 8)
    assert len(found) == 5
