"""Convolutions with weights that depend on the length alone: they are made once for an edge and its reverse.

That is for energies with their first derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eqaccel.ops.library import call_operator, load_library
from eqaccel.ops.matrix_product import MatrixProduct
from eqaccel.ops.modules import TensorProductConv
from eqaccel.ops.portions import Portions

load_library()


@dataclass(frozen=True)
class LastProduct:
    """A network that ends with a product of matrices.

    Attributes:
        hidden: Maps (rows, inputs) to (rows, terms), each row for itself.
        product: Multiplies.
        matrix: (terms, weights).
        keeps_inputs_alone: Whether that is all that `hidden` keeps for its gradient.
    """

    hidden: Callable[[Tensor], Tensor]
    product: MatrixProduct
    matrix: Tensor
    keeps_inputs_alone: bool = False

    def weights(self, inputs: Tensor) -> Tensor:
        """What the whole network gives, (rows, weights); there is no gradient of its parameters."""
        result: Tensor = self.product(self.hidden(inputs), self.matrix)
        return result


def convolve_pairs(
    conv: TensorProductConv, x: Tensor, y: Tensor, network: LastProduct, inputs: Tensor, portions: Portions
) -> Tensor:
    """A convolution whose edges have the weights of their pairs.

    The gradient can be computed once, not differentiated again, and there is none of the network. Where weights take
    too much memory, they are made for one range of pairs after another. Where their gradients do, which edges have each
    for themselves, these are made for some edges after the other. In either case the whole network runs once more for
    the gradient, unless it keeps its inputs alone. Results are bitwise reproducible for the same portions.

    Args:
        conv: The convolution, channel by channel.
        x: (num_nodes, x_dim).
        y: (num_edges, y_dim).
        network: Makes weights.
        inputs: (num_pairs, inputs), what it makes them of.
        portions: The pairs, and what may be there at a time.
    """
    product, matrix = network.product, network.matrix.detach()
    keeps = network.keeps_inputs_alone or portions.is_one_portion(matrix)
    hidden = network.hidden(inputs) if keeps else _RunsAgain.apply(network.hidden, inputs)
    operands = x, y, hidden, matrix, portions.held, conv.z_dim, conv.mul_ir, conv.deterministic
    operator = torch.ops.eqaccel.shared_convolution
    result: Tensor = call_operator(operator, conv.payload, conv.key, product.payload, product.key, *operands)
    return result


class _RunsAgain(torch.autograd.Function):
    """A network of which nothing is kept on the way: it runs once more for the gradient."""

    @staticmethod
    def forward(ctx: Any, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:  # type: ignore[override]
        ctx.network = network
        ctx.save_for_backward(inputs)
        return network(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        leaf = ctx.saved_tensors[0].detach().requires_grad_(True)
        with torch.enable_grad():
            again = ctx.network(leaf)
        return None, *torch.autograd.grad(again, leaf, gradient)
