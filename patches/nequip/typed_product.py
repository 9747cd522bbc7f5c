"""NequIP's self-connection as matrix products, for GPUs.

It is an e3nn product of features with the embedding of the type of each atom. See `eqaccel.patches.dense`, whose forms
are of the same sort.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from eqaccel.patches import dense
from eqaccel.patches.blocks import Block, BlockProduct
from eqaccel.patches.kind import class_names
from eqaccel.patches.nodes import Form, NodeForm, block_product, check_weights, random_rows
from eqaccel.patches.replacement import Replacement
from torch import Tensor

from eqaccel.errors import PatchError

_MULTIPLICATIONS = 2**19
"""Multiplications per node that a GPU does in the time of a few launches."""


class TypedProduct(Replacement):
    """A `FullyConnectedTensorProduct` of features with the embedding of the type of each atom.

    A product with one of a few vectors of scalars is linear, with a matrix for each type (`TypeMatrices`): all of them
    are applied, and the one of each atom's type is kept. Training of its weights, and scalars that need a gradient,
    keep the plain form.
    """

    note = "replaced by matrix products on a GPU, outside training, where the embedding of types needs no gradient"
    gains_on_cpu = False

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Computes the product.

        Args:
            x: (num_nodes, irreps_in1.dim).
            y: (num_nodes, num_scalars), a row of the embedding for each node.
            weight: Weights in the place of its own, as e3nn takes them.

        Returns:
            (num_nodes, irreps_out.dim)
        """
        own = weight is None and x.dim() == 2 and y.dim() == 2
        trains = self.training and self.weight.requires_grad
        if own and dense.prefers_dense(x) and not trains and not y.requires_grad:
            return self.dense(x, y)
        return self.plain_forward(x, y, weight)

    def dense(self, x: Tensor, y: Tensor) -> Tensor:
        """`forward` as matrix products; no gradient in `y`."""
        return self.eqaccel(x, y, self.weight)

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """See `Replacement`; a scripted module cannot look at the embedding."""
        self.eqaccel.take_table()
        return super().__prepare_scriptable__()


class TypeMatrices(torch.nn.Module):
    """Multiplies the features of each node by the matrix of its type.

    Types are told by comparing scalars with the rows of the embedding, so rows of no type give NaN.

    Args:
        embedding: Module of the model whose `weight` (num_types, num_scalars) holds the scalars of each type.
        gather: (num_values * num_scalars,) int32: where among the weights of the product those of each scalar are.
        product: Multiplies by the matrices of all types, made of (num_values, num_types) values.
    """

    def __init__(self, embedding: torch.nn.Module, gather: Tensor, product: BlockProduct) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple, since it is no child of this one
        self.product = product
        self.register_buffer("gather", gather, persistent=False)
        self.register_buffer("table", None, persistent=False)
        self.take_table()

    def take_table(self) -> None:
        """Copies the scalars of each type from the embedding."""
        self.table = self.embedding[0].weight.detach().clone()

    def forward(self, features: Tensor, scalars: Tensor, weight: Tensor) -> Tensor:
        """The products (num_nodes, irreps_out.dim) of `features` and `scalars`, under the weights of the product."""
        if torch.jit.is_scripting():  # noqa: SIM108 (TorchScript reads the branch that is taken)
            table = self.table
        else:
            table = self.embedding[0].weight.detach().to(weight)
        is_type = (scalars.unsqueeze(1) == table).all(2).to(features.dtype)
        share = is_type / is_type.sum(1, keepdim=True)  # types with equal rows have equal matrices
        weights = torch.index_select(weight, 0, self.gather).view(-1, table.size(1))
        products = self.product(features, (weights @ table.t()).view(-1))
        return (products * share.unsqueeze(1)).sum(2)


def _typed(model: torch.nn.Module, product: Any) -> Form:
    check_weights(product)
    table = _type_embedding(model)
    num_types, num_scalars = table.weight.shape
    if str(product.irreps_in2) != f"{num_scalars}x0e":
        raise PatchError(f"its second operand is {product.irreps_in2}, not the embedding of atom types")
    blocks, gather, offset, width = [], [], 0, 0
    rows, columns = product.irreps_in1.slices(), product.irreps_out.slices()
    for item in product.instructions:
        if item.connection_mode != "uvw" or not item.has_weight:
            raise PatchError(f"it has a path of mode {item.connection_mode}")
        mul_in, _, mul_out = item.path_shape
        weights = offset + torch.arange(mul_in * num_scalars * mul_out).view(mul_in, num_scalars, mul_out)
        gather.append(weights.transpose(1, 2).flatten())
        values = width + torch.arange(mul_in * mul_out).view(mul_in, mul_out)
        offset, width = offset + weights.numel(), width + values.numel()
        dim = product.irreps_in1[item.i_in1].ir.dim
        # e3nn normalises by the components of the output, which a product with a scalar does not sum over.
        scale = item.path_weight / dim**0.5
        blocks.append(Block(rows[item.i_in1].start, columns[item.i_out].start, dim, values, scale))
    dims = (product.irreps_in1.dim, product.irreps_out.dim)
    matrices = block_product(*dims, blocks, num_types, product.weight)
    usual = sum(block.values.numel() * block.components for block in blocks) * num_scalars
    if matrices.multiplications > max(usual, _MULTIPLICATIONS):
        raise PatchError(f"matrices for each of {num_types} atom types would take more operations than they save")
    index = torch.cat(gather).to(product.weight.device, torch.int32)
    atom = torch.arange(2 * num_types) % num_types
    attributes = table.weight.detach()[atom.to(table.weight.device)]
    examples = (random_rows(len(atom), dims[0], product.weight), attributes)
    return TypedProduct, TypeMatrices(table, index, matrices), examples


def _type_embedding(model: torch.nn.Module) -> Any:
    """The embedding whose rows are the attributes of all nodes."""
    embeds = [module for module in model.modules() if "NodeTypeEmbed" in class_names(module)]
    if len(embeds) != 1 or not isinstance(getattr(embeds[0], "embed_module", None), torch.nn.Embedding):
        raise PatchError("no kernel for species-indexed linear layers without an embedding of atom types")
    if getattr(embeds[0], "do_categorical_graph_field_embed", False):
        raise PatchError("the attributes of nodes depend on more than the atom type")
    return embeds[0].embed_module


TYPED_FORM = NodeForm("irreps_in1", _typed)
"""How a `FullyConnectedTensorProduct` is replaced."""
