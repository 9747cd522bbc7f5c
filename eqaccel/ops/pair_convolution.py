"""Convolutions with weights that depend on the length alone: they are made once for an edge and its reverse.

That is for energies with their first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eqaccel.irreps import Irreps
from eqaccel.ops.edge_pairs import EdgePairs, PairRange
from eqaccel.ops.layout import to_ir_mul, to_mul_ir
from eqaccel.ops.library import call_operator, load_library
from eqaccel.ops.matrix_product import MatrixProduct
from eqaccel.ops.modules import TensorProductConv
from eqaccel.ops.portions import Portions

load_library()

Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of x, y and the last but one result of a network."""


@dataclass(frozen=True)
class LastProduct:
    """A network that ends with a product of matrices.

    Attributes:
        hidden: Maps (rows, inputs) to (rows, terms), each row for itself.
        product: Multiplies.
        matrix: (terms, weights).
    """

    hidden: Callable[[Tensor], Tensor]
    product: MatrixProduct
    matrix: Tensor


def convolve_pairs(
    conv: TensorProductConv,
    x: Tensor,
    y: Tensor,
    network: LastProduct,
    inputs: Tensor,
    pairs: EdgePairs,
    index: Tensor,
    portions: Portions | None = None,
) -> Tensor:
    """A convolution whose edges have the weights of their pairs.

    The gradient can be computed once, not differentiated again, and there is none of the network. Where weights take
    too much memory, they are made for one range of pairs after another. Where their gradients do, which edges have each
    for themselves, these are made for some edges after the other. In either case the whole network runs once more for
    the gradient. Results are bitwise reproducible for the same portions.

    Args:
        conv: The convolution, channel by channel.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        network: Makes weights.
        inputs: (num_pairs, inputs), what it makes them of.
        pairs: Of the edges.
        index: Packed index of the edges.
        portions: What may be there at a time; None for everything.
    """
    layer = _Layer(conv, network.product, network.matrix, pairs, index, portions or Portions())
    if layer.is_one_portion(len(inputs), len(y)):
        whole: Tensor = _Convolution.apply(layer, x, y, network.hidden(inputs))
        return whole
    result: Tensor = _ConvolutionInPortions.apply(layer, network.hidden, x, y, inputs)
    return result


class _Convolution(torch.autograd.Function):
    """The last product and the convolution: between them, gradients have a row for each edge, and weights have not."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, x: Tensor, y: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        weights = layer.weights(hidden)
        ctx.layer = layer
        ctx.save_for_backward(x, y, weights)
        return layer.convolve(x, y, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        return None, *ctx.layer.gradients(gz.contiguous(), *ctx.saved_tensors)


class _ConvolutionInPortions(torch.autograd.Function):
    """The network too: what it has on the way to its last but one result, which is kept, is made again in the end."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, layer: _Layer, network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, inputs: Tensor
    ) -> Tensor:
        hidden = network(inputs)
        ctx.parts = layer, network, layer.ranges(len(hidden))
        ctx.save_for_backward(x, y, inputs, hidden)
        return layer.convolve_ranges(ctx.parts[-1], x, y, hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        (x, y, inputs, hidden), (layer, network, parts) = ctx.saved_tensors, ctx.parts
        gx, gy, gh = layer.gradients_of_ranges(parts, gz, x, y, hidden)
        leaf = inputs.detach().requires_grad_(True)
        with torch.enable_grad():
            again = network(leaf)
        return None, None, gx, gy, *torch.autograd.grad(again, leaf, gh)


@dataclass(frozen=True)
class _Layer:
    """A convolution with the last product of its network, over a graph; `name` is what its weights are kept by."""

    conv: TensorProductConv
    product: MatrixProduct
    matrix: Tensor
    pairs: EdgePairs
    index: Tensor
    portions: Portions
    name: object = field(default_factory=object)

    def is_one_portion(self, num_pairs: int, num_edges: int) -> bool:
        """Whether weights of so many pairs may be there at a time, and gradients of so many edges."""
        return not self.ranges(num_pairs) and self.edges_at_a_time(num_edges) == num_edges

    def ranges(self, num_pairs: int) -> list[PairRange]:
        """The ranges of pairs that weights are made for at a time; none for all at once."""
        return self.portions.ranges(num_pairs * self._row_bytes)

    def edges_at_a_time(self, num_edges: int) -> int:
        """Of so many edges, those whose weights have gradients at a time."""
        return self.portions.edges_at_a_time(num_edges, self._row_bytes)

    @property
    def _row_bytes(self) -> int:
        return self.matrix.size(1) * self.matrix.element_size()

    def weights(self, hidden: Tensor) -> Tensor:
        """Of pairs, as the convolution keeps them."""
        return self.conv.kept_weights(self.product(hidden, self.matrix))

    def convolve(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The convolution with weights of all pairs."""
        return self._convolve(self.pairs, self.index, x, y, weights, self.conv.mul_ir)

    def gradients(self, gz: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Gradients:
        """All of them at once."""
        return self._gradients(self.pairs, self.index, gz, x, y, weights, self.conv.mul_ir)

    def convolve_ranges(self, parts: list[PairRange], x: Tensor, y: Tensor, hidden: Tensor) -> Tensor:
        """The sum over ranges, in the layout of kernels, so that this is changed once."""
        if not parts:
            return self.convolve(x, y, self._made(0, hidden))
        x, z = self._in_kernels(x, self.conv.spec.irreps_in1), None
        for part, own_y in zip(parts, _in_ranges(y, parts), strict=True):
            weights = self._made(part.first, part.of_pairs(hidden))
            own = self._convolve(part.pairs, part.index, x, own_y, weights, False)
            z = own if z is None else z.add_(own)
            del weights, own  # before there are others
        assert z is not None
        return to_mul_ir(z, self.conv.spec.irreps_out) if self.conv.mul_ir else z

    def gradients_of_ranges(
        self, parts: list[PairRange], gz: Tensor, x: Tensor, y: Tensor, hidden: Tensor
    ) -> Gradients:
        """`gradients`, of which ranges add to that of x, and have rows of their own of the others."""
        if not parts:
            weights = self._taken(0, hidden)
            return self._gradients(self.pairs, self.index, gz.contiguous(), x, y, weights, self.conv.mul_ir)
        x = self._in_kernels(x, self.conv.spec.irreps_in1)
        gz = self._in_kernels(gz.contiguous(), self.conv.spec.irreps_out)
        gx, gh, gy = torch.zeros_like(x), torch.empty_like(hidden), torch.empty_like(y)
        own_ys = _in_ranges(y, parts)
        own_gys = gy.split([len(own) for own in own_ys])
        # The weights of the last range are those that are there still.
        for part, own_y, own_gy in reversed(list(zip(parts, own_ys, own_gys, strict=True))):
            weights = self._taken(part.first, part.of_pairs(hidden))
            own = self._gradients(part.pairs, part.index, gz, x, own_y, weights, False)
            for whole, added in zip((own_gy, part.of_pairs(gh)), own[1:], strict=True):
                whole.copy_(added)
            gx.add_(own[0])
            del weights, own, added  # before there are others
        gy = torch.empty_like(gy).index_copy_(0, _order(parts), gy)
        return to_mul_ir(gx, self.conv.spec.irreps_in1) if self.conv.mul_ir else gx, gy, gh

    def _made(self, first: int, hidden: Tensor) -> Tensor:
        return self.portions.kept.made((self.name, first), lambda: self.weights(hidden), len(hidden) * self._row_bytes)

    def _taken(self, first: int, hidden: Tensor) -> Tensor:
        return self.portions.kept.taken((self.name, first), lambda: self.weights(hidden), len(hidden) * self._row_bytes)

    def _in_kernels(self, rows: Tensor, irreps: Irreps) -> Tensor:
        """Rows in the layout that kernels have."""
        return to_ir_mul(rows, irreps) if self.conv.mul_ir else rows

    def _convolve(self, pairs: EdgePairs, index: Tensor, x: Tensor, y: Tensor, weights: Tensor, mul_ir: bool) -> Tensor:
        conv = self.conv
        rest = pairs.row, index, x.size(0), conv.z_dim, mul_ir, conv.deterministic
        z: Tensor = call_operator(torch.ops.eqaccel.tensor_product_shared, conv.payload, conv.key, x, y, weights, *rest)
        return z

    def _gradients(
        self, pairs: EdgePairs, index: Tensor, gz: Tensor, x: Tensor, y: Tensor, weights: Tensor, mul_ir: bool
    ) -> Gradients:
        conv, product = self.conv, self.product
        gx, gy, gh = torch.ops.eqaccel.shared_convolution_backward(
            *(conv.payload, conv.key, product.payload, product.key, *pairs.source, gz, x, y, weights, self.matrix),
            *(pairs.row, pairs.edges, index, x.size(0), conv.z_dim, mul_ir, conv.deterministic),
            self.edges_at_a_time(len(y)),
        )
        return gx, gy, gh


def _order(parts: list[PairRange]) -> Tensor:
    """Where the edges of ranges are among all, one range after another."""
    return torch.cat([part.slots for part in parts])


def _in_ranges(y: Tensor, parts: list[PairRange]) -> list[Tensor]:
    """The rows of each range."""
    # Written to where they go: torch reads rows of few columns, a block for each, much slower than it writes them.
    order = _order(parts)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return list(torch.empty_like(y).index_copy_(0, place, y).split([len(part.slots) for part in parts]))
