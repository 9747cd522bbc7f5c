"""What is there at a time of the weights of edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eqaccel import TensorProductConv, TensorProductSpec
from eqaccel.ops import EdgePairs, Graph, LastProduct, MatrixProduct, Portions, convolve_pairs, weight_limits

SPEC = TensorProductSpec.channelwise("4x0e", "0e", "4x0e")
NODES, TERMS, LAYERS = 6, 3, 4
LAYER_BYTES = NODES * (NODES - 1) // 2 * SPEC.weight_numel * 8
"""Of the weights of pairs of all nodes."""


def results(pair_bytes: float, gradient_bytes: float) -> tuple[Portions, list[Tensor]]:
    """Layers one after another over all pairs of nodes, and gradients."""
    made = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    receiver, sender = (~torch.eye(NODES, dtype=torch.bool)).nonzero(as_tuple=True)
    positions = torch.randn(NODES, 3, **made)
    index = Graph(receiver, sender, NODES, NODES).index
    pairs = EdgePairs.find(positions[receiver] - positions[sender], index, NODES)
    portions, conv = Portions(pairs, index, pair_bytes, gradient_bytes), TensorProductConv(SPEC)
    network = LastProduct(torch.sin, MatrixProduct(), torch.randn(TERMS, SPEC.weight_numel, **made))
    inputs = torch.randn(len(pairs.edges), TERMS, **made).requires_grad_()
    start = x = torch.randn(NODES, SPEC.x_dim, **made).requires_grad_()
    y = torch.randn(len(receiver), SPEC.y_dim, **made).requires_grad_()
    for _ in range(LAYERS):
        x = convolve_pairs(conv, x, y, network, inputs, portions)
    return portions, [x.detach(), *torch.autograd.grad(x.sum(), [start, y, inputs])]


@pytest.mark.parametrize(("layers", "made"), [(4, 4), (3, 5), (2, 6), (1, 7)])
def test_weights_are_kept_while_there_is_room(layers: int, made: int) -> None:
    """Those of the oldest layers go, and are made again, with the same bits."""
    portions, found = results(layers * LAYER_BYTES, LAYER_BYTES)
    assert portions.times_made == made
    assert not portions.range_indices
    assert all(map(torch.equal, found, results(LAYERS * LAYER_BYTES, LAYER_BYTES)[1]))


def test_what_finds_no_room_at_all_is_made_in_ranges() -> None:
    portions, _ = results(LAYER_BYTES / 2, LAYER_BYTES)
    assert portions.times_made == 2 * (2 * LAYERS) - 1  # one range of the last layer is there still
    assert len(portions.range_indices) == 2


def test_layers_in_one_portion_keep_their_weights_themselves() -> None:
    assert results(LAYER_BYTES, 2 * LAYER_BYTES)[0].times_made == 0


def test_limits_are_shares_of_what_there_is() -> None:
    assert weight_limits(8.0, 1.0) == (7.0, 1.0)
    assert weight_limits(0.0, 16.0) == (4.0, 2.0)
