"""Convolutions whose weights of edges are made for some edges at a time, and made again for the gradient.

Weights of edges are the largest arrays of a model by far. Where they are the output of a network of few inputs, a
convolution over one range of slots after another needs them for a range only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqaccel.ops.graph import given_ranges
from eqaccel.ops.library import call_operator
from eqaccel.ops.modules import TensorProductConv


@dataclass(frozen=True)
class EdgeWeights:
    """The weights of edges, not computed yet; they may be multiplied by a factor for each edge.

    Attributes:
        network: Maps (rows, inputs) to (rows, weights), each row for itself.
        inputs: (num_edges, inputs).
        factor: (num_edges, 1); None for one.
    """

    network: Callable[[Tensor], Tensor]
    inputs: Tensor
    factor: Tensor | None = None

    def __mul__(self, factor: Tensor) -> EdgeWeights:
        return EdgeWeights(self.network, self.inputs, factor if self.factor is None else self.factor * factor)

    def compute(self) -> Tensor:
        """The weights of all edges, (num_edges, weights)."""
        weights = self.network(self.inputs)
        return weights if self.factor is None else weights * self.factor


def convolve_in_pieces(
    conv: TensorProductConv, x: Tensor, y: Tensor, weights: EdgeWeights, receiver: Tensor, sender: Tensor
) -> Tensor:
    """The convolution of `conv`, in as many pieces as the memory asks for that `given_edges` allows; else in one.

    Results are bitwise reproducible for the same pieces. The gradient can be computed once, not differentiated again.

    Args:
        conv: The convolution.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        weights: Of the edges.
        receiver: (num_edges,).
        sender: (num_edges,).
    """
    num_nodes, num_edges = x.size(0), y.size(0)
    ranges = given_ranges(receiver, sender, num_nodes, num_edges * conv.spec.weight_numel * x.element_size())
    if len(ranges) == 1:
        return conv(x, y, weights.compute(), ranges[0][2], num_nodes)
    factor = x.new_ones(()) if weights.factor is None else weights.factor
    result: Tensor = _Pieces.apply(conv, weights.network, ranges, x, y, weights.inputs, factor)
    return result


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        conv: TensorProductConv,
        network: Any,
        ranges: Any,
        x: Tensor,
        y: Tensor,
        inputs: Tensor,
        factor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, y, inputs, factor)
        ctx.parts = conv, network, ranges
        total: Tensor | None = None
        for begin, end, index in ranges:
            weights = network(inputs[begin:end]) * _rows(factor, begin, end)
            part = call_operator(
                torch.ops.eqaccel.tensor_product, *conv._arguments(x, y[begin:end], weights, index, x.size(0))
            )
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        (x, y, inputs, factor), (conv, network, ranges) = ctx.saved_tensors, ctx.parts
        gx, gy, g_inputs = torch.zeros_like(x), torch.zeros_like(y), torch.zeros_like(inputs)
        g_factor = torch.zeros_like(factor) if ctx.needs_input_grad[6] else None
        for begin, end, index in ranges:
            leaves = [inputs[begin:end].detach().requires_grad_(True), _rows(factor, begin, end).detach()]
            leaves[1].requires_grad_(g_factor is not None)
            with torch.enable_grad():
                weights = network(leaves[0]) * leaves[1]
            arguments = conv._arguments(x, y[begin:end], weights.detach(), index, x.size(0))
            part_x, part_y, part_w = torch.ops.eqaccel.tensor_product_backward(*arguments[:2], gz, *arguments[2:])
            gx.add_(part_x)
            gy[begin:end] = part_y
            found = torch.autograd.grad(weights, [leaf for leaf in leaves if leaf.requires_grad], part_w)
            g_inputs[begin:end] = found[0]
            if g_factor is not None:
                g_factor[begin:end] = found[1]
        return None, None, None, gx, gy, g_inputs, g_factor


def _rows(factor: Tensor, begin: int, end: int) -> Tensor:
    return factor[begin:end] if factor.dim() else factor
