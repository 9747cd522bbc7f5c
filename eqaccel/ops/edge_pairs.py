"""Edges and their reverses: weights that depend on the length alone are made once for both, and read by both.

That is for energies with their first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eqaccel.ops.layout import to_ir_mul, to_mul_ir
from eqaccel.ops.library import call_operator, load_library
from eqaccel.ops.matrix_product import MatrixProduct, adds_rows
from eqaccel.ops.modules import TensorProductConv

if TYPE_CHECKING:  # that file needs this one
    from eqaccel.ops.neighbors import Neighbors

load_library()


@dataclass(frozen=True)
class EdgePairs:
    """Which edges are the reverse of each other: what they receive from is swapped, and their vectors are opposite.

    Attributes:
        row: (num_edges,) int32, the pair of each edge.
        edges: (num_pairs, 2) int32, the edges of each pair; the second is -1 where an edge has no reverse. On a GPU
            there may be room for more pairs: rows beyond the last have -2 there.
        differ: (1,) float64, for `rows_of`: not zero once an edge and its reverse had other values.
        search: What has found them on a GPU; None on a CPU.
    """

    row: Tensor
    edges: Tensor
    differ: Tensor
    search: Neighbors | None = None

    @classmethod
    def find(cls, vectors: Tensor, index: Tensor, num_nodes: int) -> EdgePairs:
        """Finds the pairs of any graph: an edge whose reverse is not there, or not exact, is alone.

        Args:
            vectors: (num_edges, 3) float32 or float64 on the CPU, from sender to receiver.
            index: Packed index of the edges.
            num_nodes: Number of nodes; all of them send and receive.

        Raises:
            OperandError: If an operand does not fit.
        """
        row, edges = call_operator(torch.ops.eqaccel.edge_pairs, vectors, index, num_nodes)
        return cls(row, edges, torch.zeros(1, dtype=torch.float64))

    def ranges(self, index: Tensor, num_nodes: int, size: int) -> list[PairRange]:
        """The pairs, some at a time, with all of their edges; together, ranges have the edges that there is room for.

        Args:
            index: Packed index of the edges, whose slots are the edges.
            num_nodes: Number of nodes; all of them send and receive.
            size: Pairs of a range.
        """
        all_reversible = self.search is not None
        found = call_operator(
            torch.ops.eqaccel.pair_ranges, index, self.row, self.edges, num_nodes, size, all_reversible
        )
        return [
            PairRange(number * size, slots, EdgePairs(row, edges, self.differ, self.search), part)
            for number, (slots, row, edges, part) in enumerate(zip(*[iter(found)] * 4, strict=True))
        ]

    def rows_of(self, values: Tensor, differ: Tensor) -> Tensor:
        """Values of edges, once a pair: those of the first edge, which are good for both if they are the same.

        The gradient of both goes to the first of them. That is right where values depend on an edge by its length
        alone: it does not matter then on which of two opposite vectors a force acts.

        Args:
            values: (num_edges, columns).
            differ: (1,) float64, set to one where an edge and its reverse have other values, on the device; NaN is the
                same as NaN.

        Returns:
            (num_pairs, columns).

        Raises:
            OperandError: If an operand does not fit.
        """
        source = (self.row, 0) if self.search is None else (self.search.payload, self.search.key)
        arguments = (*source, values, self.row, self.edges, differ)
        rows: Tensor = call_operator(torch.ops.eqaccel.take_pairs, *arguments)
        return rows

    def multiply(self, product: MatrixProduct, values: Tensor, matrix: Tensor) -> Tensor:
        """The sum of the values of the edges of a pair, times a matrix; zeros beyond the last pair.

        Args:
            product: Multiplies.
            values: (num_edges, terms).
            matrix: (terms, columns).

        Returns:
            (num_pairs, columns).
        """
        if self.search is not None and not adds_rows(values.device, values.dtype, product.spec):
            return self.search.add_pairs(product(values, matrix), self)
        result: Tensor = torch.ops.eqaccel.matrix_product_shared(
            product.payload, product.key, values, matrix, self.edges
        )
        return result


@dataclass(frozen=True)
class PairRange:
    """Some pairs that follow each other, and their edges, all numbered from the first.

    Attributes:
        first: Number of the first pair among all.
        slots: (num_edges,) int64, where the edges are among all.
        pairs: The pairs.
        index: Packed index of these edges; all nodes send and receive.
    """

    first: int
    slots: Tensor
    pairs: EdgePairs
    index: Tensor

    def of_pairs(self, values: Tensor) -> Tensor:
        """The rows that these pairs have of those of all; they share memory."""
        return values.narrow(0, self.first, len(self.pairs.edges))


Ranges = Callable[[int], list[PairRange]]
"""The pairs, in as many ranges as it takes where something of all of them has so many bytes; none if it may have."""


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
    ranges: Ranges = lambda _: [],
) -> Tensor:
    """A convolution whose edges have the weights of their pairs.

    The gradient can be computed once, not differentiated again, and there is none of the network. Where weights and
    their gradients take too much memory at a time, they are made for one range of pairs after another, and weights are
    multiplied once more for the gradient. Results are bitwise reproducible for the same ranges.

    Args:
        conv: The convolution, channel by channel.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        network: Makes weights.
        inputs: (num_pairs, inputs), what it makes them of.
        pairs: Of the edges.
        index: Packed index of the edges.
        ranges: Which ranges to take.
    """
    hidden = network.hidden(inputs)
    result: Tensor = _Convolution.apply(conv, network.product, pairs, ranges, index, x, y, hidden, network.matrix)
    return result


class _Convolution(torch.autograd.Function):
    """The last product and the convolution: between them, gradients have a row for each edge, and weights have not."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        conv: TensorProductConv,
        product: MatrixProduct,
        pairs: EdgePairs,
        ranges: Ranges,
        index: Tensor,
        x: Tensor,
        y: Tensor,
        hidden: Tensor,
        matrix: Tensor,
    ) -> Tensor:
        weight_bytes = len(hidden) * matrix.size(1) * matrix.element_size()
        with_gradients = ranges(3 * weight_bytes)  # which edges have each for themselves
        ctx.parts = conv, product, pairs, index, with_gradients
        parts = ranges(weight_bytes)
        if parts:
            ctx.save_for_backward(x, y, hidden, matrix)
            return _forward_in_ranges(conv, product, parts, x, y, hidden, matrix)
        weights = conv.kept_weights(product(hidden, matrix))
        ctx.save_for_backward(x, y, hidden if with_gradients else weights, matrix)
        result: Tensor = call_operator(
            torch.ops.eqaccel.tensor_product_shared, *_arguments(conv, x, y, weights, pairs, index, conv.mul_ir)
        )
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        (x, y, kept, matrix), (conv, product, pairs, index, parts) = ctx.saved_tensors, ctx.parts
        if parts:
            gx, gy, gh = _backward_in_ranges(conv, product, parts, gz, x, y, kept, matrix)
        else:
            payload, key, *operands = _arguments(conv, x, y, kept, pairs, index, conv.mul_ir)
            gx, gy, gw = torch.ops.eqaccel.tensor_product_shared_backward(payload, key, gz.contiguous(), *operands)
            gh = pairs.multiply(product, gw, matrix.t())
        return None, None, None, None, None, gx, gy, gh, None


def _arguments(
    conv: TensorProductConv, x: Tensor, y: Tensor, weights: Tensor, pairs: EdgePairs, index: Tensor, mul_ir: bool
) -> tuple[Any, ...]:
    rest = pairs.row, index, x.size(0), conv.z_dim, mul_ir, conv.deterministic
    return conv.payload, conv.key, x, y, weights, *rest


def _forward_in_ranges(
    conv: TensorProductConv,
    product: MatrixProduct,
    parts: list[PairRange],
    x: Tensor,
    y: Tensor,
    hidden: Tensor,
    matrix: Tensor,
) -> Tensor:
    """The sum over ranges, in the layout of kernels, so that this is changed once."""
    x = to_ir_mul(x, conv.spec.irreps_in1) if conv.mul_ir else x
    z: Tensor | None = None
    for part in parts:
        weights = conv.kept_weights(product(part.of_pairs(hidden), matrix))
        arguments = _arguments(conv, x, y.index_select(0, part.slots), weights, part.pairs, part.index, False)
        own = call_operator(torch.ops.eqaccel.tensor_product_shared, *arguments)
        z = own if z is None else z.add_(own)
        del weights, arguments, own  # before there are others
    assert z is not None
    return to_mul_ir(z, conv.spec.irreps_out) if conv.mul_ir else z


def _backward_in_ranges(
    conv: TensorProductConv,
    product: MatrixProduct,
    parts: list[PairRange],
    gz: Tensor,
    x: Tensor,
    y: Tensor,
    hidden: Tensor,
    matrix: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, y and `hidden`; each range adds to that of x, and has rows of its own of the others."""
    x = to_ir_mul(x, conv.spec.irreps_in1) if conv.mul_ir else x
    gz = to_ir_mul(gz, conv.spec.irreps_out) if conv.mul_ir else gz.contiguous()
    gx: Tensor | None = None
    gy, gh = torch.empty_like(y), torch.empty_like(hidden)
    for part in parts:
        weights = conv.kept_weights(product(part.of_pairs(hidden), matrix))
        payload, key, *operands = _arguments(
            conv, x, y.index_select(0, part.slots), weights, part.pairs, part.index, False
        )
        add_x, own_y, gw = torch.ops.eqaccel.tensor_product_shared_backward(payload, key, gz, *operands)
        del weights, operands  # before there are others
        gx = add_x if gx is None else gx.add_(add_x)
        gy.index_copy_(0, part.slots, own_y)
        part.of_pairs(gh).copy_(part.pairs.multiply(product, gw, matrix.t()))
        del gw
    assert gx is not None
    return to_mul_ir(gx, conv.spec.irreps_in1) if conv.mul_ir else gx, gy, gh
