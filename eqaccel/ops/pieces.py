"""Convolutions whose weights of edges are made for some edges at a time, and made again for the gradient.

Weights of edges are the largest arrays of a model by far. Where they are the output of a network of few inputs, a
convolution over one range of slots after another needs them for a range only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eqaccel.ops.graph import EdgeRange, given_pairs, given_ranges, packed_rows
from eqaccel.ops.library import call_operator
from eqaccel.ops.modules import TensorProductConv
from eqaccel.ops.pair_convolution import LastProduct, convolve_pairs


@dataclass(frozen=True)
class EdgeWeights:
    """The weights of edges, not computed yet; they may be multiplied by a factor for each edge.

    Attributes:
        network: Maps (rows, inputs) to (rows, weights), each row for itself.
        inputs: (num_edges, inputs).
        factor: (num_edges, 1); None for one.
        last: How the network ends, if that is known.
    """

    network: Callable[[Tensor], Tensor]
    inputs: Tensor
    factor: Tensor | None = None
    last: LastProduct | None = None

    def __mul__(self, factor: Tensor) -> EdgeWeights:
        return replace(self, factor=factor if self.factor is None else self.factor * factor)

    def compute(self) -> Tensor:
        """The weights of all edges, (num_edges, weights)."""
        weights = self.network(self.inputs)
        return weights if self.factor is None else weights * self.factor


def convolve_in_pieces(
    conv: TensorProductConv, x: Tensor, y: Tensor, weights: EdgeWeights, receiver: Tensor, sender: Tensor
) -> Tensor:
    """The convolution of `conv`, in as many pieces as the memory asks for that `given_edges` allows; else in one.

    Weights that depend on lengths alone, by `depend_on_lengths`, are made once for an edge and its reverse. If they are
    made in pieces, these are ranges of pairs, see `convolve_pairs`. Others are made for ranges of receivers, and once
    more for the gradient.

    Results are bitwise reproducible for the same pieces. The gradient can be computed once, not differentiated again.

    Args:
        conv: The convolution.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        weights: Of the edges.
        receiver: (num_edges,).
        sender: (num_edges,).
    """
    num_nodes = x.size(0)
    if weights.last is not None and weights.factor is None and conv.spec.is_channelwise:
        found = given_pairs(receiver, sender, num_nodes, weights.inputs)
        if found is not None:
            return convolve_pairs(conv, x, y, weights.last, found.rows, found.portions)
    ranges = given_ranges(receiver, sender, num_nodes, y.size(0) * conv.spec.weight_numel * x.element_size())
    if not ranges:
        return conv(x, y, weights.compute(), packed_rows(receiver, sender, num_nodes, num_nodes), num_nodes)
    inputs, factor = weights.inputs, weights.factor
    result: Tensor = _Pieces.apply(conv, weights.network, ranges, x, y, inputs, factor)
    return result


class _Pieces(torch.autograd.Function):
    """Each range has rows of the output of its own, and adds to the gradient of x.

    Gradients of edges are written with room behind the last edge of a range, where those of the next range come later.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        conv: TensorProductConv,
        network: Callable[[Tensor], Tensor],
        ranges: list[EdgeRange],
        x: Tensor,
        y: Tensor,
        inputs: Tensor,
        factor: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, y, inputs, factor)
        ctx.parts = conv, network, ranges
        outputs = []
        for part in ranges:
            y_part, inputs_part, factor_part = _rows(part, y, inputs, factor)
            weights = EdgeWeights(network, inputs_part, factor_part).compute()
            arguments = conv._arguments(x, y_part, weights, part.index, part.num_rows)
            outputs.append(call_operator(torch.ops.eqaccel.tensor_product, *arguments))
        return torch.cat(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        (x, y, inputs, factor), (conv, network, ranges) = ctx.saved_tensors, ctx.parts
        room = max(len(part.slots) for part in ranges)
        gradients = [None if t is None else t.new_empty((len(t) + room, t.size(1))) for t in (y, inputs, factor)]
        gx: Tensor | None = None
        for part, gz_part in zip(ranges, gz.split([part.num_rows for part in ranges]), strict=True):
            y_part, *leaves = _rows(part, y, inputs, factor)
            leaves = [None if leaf is None else leaf.detach().requires_grad_(True) for leaf in leaves]
            with torch.enable_grad():
                weights = EdgeWeights(network, *leaves).compute()
            payload, key, *operands = conv._arguments(x, y_part, weights.detach(), part.index, part.num_rows)
            add_x, gy, gw = torch.ops.eqaccel.tensor_product_backward(payload, key, gz_part.contiguous(), *operands)
            found = iter(torch.autograd.grad(weights, [leaf for leaf in leaves if leaf is not None], gw))
            for whole, own in zip(
                gradients, (gy, *(None if leaf is None else next(found) for leaf in leaves)), strict=True
            ):
                if whole is not None:
                    whole.index_copy_(0, part.slots, own)
            gx = add_x if gx is None else gx.add_(add_x)
        return None, None, None, gx, *(None if g is None else g[: len(y)] for g in gradients)


def _rows(part: EdgeRange, *arrays: Tensor | None) -> list[Any]:
    """The rows of a range; behind the last edge, any rows that there are."""
    return [None if a is None else a.index_select(0, part.slots.clamp(max=len(a) - 1)) for a in arrays]
