"""Edges and their reverses: weights that depend on the length alone are made once for both, and read by both.

That is for energies with their first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
        search: What has found them on a GPU; None on a CPU.
    """

    row: Tensor
    edges: Tensor
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
        return cls(*call_operator(torch.ops.eqaccel.edge_pairs, vectors, index, num_nodes))

    def rows_of(self, values: Tensor, check: bool = True) -> Tensor | None:
        """Values of edges, once a pair; None if those of an edge and its reverse differ anywhere.

        The gradient of both goes to the first of them. That is right where values depend on an edge by its length
        alone: it does not matter then on which of two opposite vectors a force acts.

        Args:
            values: (num_edges, columns).
            check: Whether to compare, which waits for a GPU; without it they are known to be the same.
        """
        first, second = self.edges.unbind(1)
        rows = values.index_select(0, first)
        if not check:
            return rows
        of_reverse = values.detach().index_select(0, torch.where(second < 0, first, second))
        return rows if torch.equal(rows.detach(), of_reverse) else None

    def multiply(self, product: MatrixProduct, values: Tensor, matrix: Tensor) -> Tensor:
        """The sum of the values of the edges of a pair, times a matrix; zeros beyond the last pair.

        Args:
            product: Multiplies.
            values: (num_edges, terms).
            matrix: (terms, columns).

        Returns:
            (num_pairs, columns).
        """
        if self.search is not None and not adds_rows(values.device, values.dtype):
            return self.search.add_pairs(product(values, matrix), self)
        result: Tensor = torch.ops.eqaccel.matrix_product_shared(
            product.payload, product.key, values, matrix, self.edges
        )
        return result


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
    conv: TensorProductConv, x: Tensor, y: Tensor, network: LastProduct, inputs: Tensor, pairs: EdgePairs, index: Tensor
) -> Tensor:
    """A convolution whose edges have the weights of their pairs.

    The gradient can be computed once, not differentiated again, and there is none of the network.

    Args:
        conv: The convolution, channel by channel.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        network: Makes weights.
        inputs: (num_pairs, inputs), what it makes them of.
        pairs: Of the edges.
        index: Packed index of the edges.
    """
    hidden = network.hidden(inputs)
    result: Tensor = _Convolution.apply(conv, network.product, pairs, index, x, y, hidden, network.matrix)
    return result


class _Convolution(torch.autograd.Function):
    """The last product and the convolution: between them, gradients have a row for each edge, and weights have not."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        conv: TensorProductConv,
        product: MatrixProduct,
        pairs: EdgePairs,
        index: Tensor,
        x: Tensor,
        y: Tensor,
        hidden: Tensor,
        matrix: Tensor,
    ) -> Tensor:
        weights = product(hidden, matrix)
        ctx.save_for_backward(x, y, weights, matrix)
        ctx.parts = conv, product, pairs, index
        result: Tensor = call_operator(
            torch.ops.eqaccel.tensor_product_shared, *_arguments(conv, x, y, weights, pairs, index)
        )
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gz: Tensor) -> Any:
        (x, y, weights, matrix), (conv, product, pairs, index) = ctx.saved_tensors, ctx.parts
        payload, key, *operands = _arguments(conv, x, y, weights, pairs, index)
        gx, gy, gw = torch.ops.eqaccel.tensor_product_shared_backward(payload, key, gz.contiguous(), *operands)
        return None, None, None, None, gx, gy, pairs.multiply(product, gw, matrix.t()), None


def _arguments(
    conv: TensorProductConv, x: Tensor, y: Tensor, weights: Tensor, pairs: EdgePairs, index: Tensor
) -> tuple[Any, ...]:
    payload, key, *operands = conv._arguments(x, y, weights, index, x.size(0))
    return payload, key, *operands[:3], pairs.row, *operands[3:]
