"""NequIP's self-connection, an e3nn product of features with the embedding of the type of each atom."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.ops import Linear, computed_once
from eqaccel.patches.kind import class_names
from eqaccel.patches.linear import AttributeProduct, are_rows, attribute_product
from eqaccel.patches.nodes import Form, NodeForm, random_rows


class TypedProduct(AttributeProduct):
    """A `FullyConnectedTensorProduct` of features with the embedding of the type of each atom.

    A product with one of a few vectors of scalars is linear, with matrices for each type (`TypeMatrices`). Gradients
    in the scalars are those in the embedding that they come from; others that need a gradient keep the plain form.
    """

    note = "replaced by eqaccel.Linear, where scalars need no gradient or are rows of the embedding"

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """See `AttributeProduct`; `y` holds a row of the embedding for each node."""
        if not (are_rows(x) and are_rows(y) and x.size(0) == y.size(0)):
            return False
        if torch.jit.is_scripting():  # TorchScript reads the branch that is taken
            return not y.requires_grad
        else:
            return not y.requires_grad or looked_up_types(y, self.eqaccel.embedding[0]) is not None

    def dense(self, x: Tensor, y: Tensor) -> Tensor:
        """`forward` by the kernel; gradients in `y` go to the embedding, and not through `y`."""
        return self.eqaccel(x, y, self.weight)

    def elsewhere(self) -> Mapping[str, torch.nn.Module]:
        """See `Replacement`; rows of another embedding, or those that a hook makes, are none that the kernel knows."""
        return {"type_embed": self.eqaccel.owner[0]}

    def __prepare_scriptable__(self) -> torch.nn.Module:
        """See `Replacement`; a scripted module cannot look at the embedding."""
        self.eqaccel.take_table()
        return super().__prepare_scriptable__()


def looked_up_types(scalars: Tensor, embedding: torch.nn.Embedding) -> Tensor | None:
    """The types (num_nodes,) whose rows of an embedding scalars with a gradient are, if that is for its weight alone.

    None of other scalars, and where torch may have to compute anew what autograd has kept of the lookup.
    """
    plain = embedding.padding_idx is None and not embedding.scale_grad_by_freq
    if not plain or torch.compiler.is_compiling() or scalars.retains_grad or scalars._backward_hooks:
        return None
    node: Any = scalars.grad_fn
    slices = []
    while node is not None and node.name() == "SliceBackward0" and node._saved_dim == 0:
        slices.append(slice(node._saved_start, node._saved_end, node._saved_step))
        node = node.next_functions[0][0]
    if node is None or node.name() != "EmbeddingBackward0":
        return None
    is_for_weight = getattr(node.next_functions[0][0], "variable", None) is embedding.weight
    if not is_for_weight or node._raw_saved_indices.unpack_hook is not None:
        return None
    types: Tensor = node._saved_indices
    for rows in reversed(slices):
        types = types[rows]
    return types


def shares_of_types(scalars: Tensor, table: Tensor) -> Tensor:
    """What part each type has in the atoms: (num_nodes, num_types), of rows of scalars, and those of each type."""
    is_type = (scalars.unsqueeze(1) == table).all(2).to(table.dtype)
    return is_type / is_type.sum(1, keepdim=True)  # types with equal rows have equal matrices


class TypeMatrices(torch.nn.Module):
    """Multiplies the features of each node by the matrices of its type.

    Types are told by comparing scalars with the rows of the embedding, so rows of no type give NaN. Where the embedding
    is trained they are those that were looked up: types whose rows are equal have gradients of their own.

    Args:
        owner: Module of the model that looks up the scalars of each type, in its `embed_module`.
        linear: The product with one attribute for each type.
    """

    if TYPE_CHECKING:  # buffers
        table: Tensor

    def __init__(self, owner: Any, linear: Linear) -> None:
        super().__init__()
        embedding: torch.nn.Embedding = owner.embed_module
        self.owner, self.embedding = (owner,), (embedding,)  # in tuples, since they are no children of this one
        self.linear = linear
        num_scalars = embedding.weight.shape[1]
        shapes = [linear.spec.weight_shape(path) for path in linear.spec.paths]
        # Neighbours of the same width are multiplied as one.
        self.shapes = [
            (sum(mul_in for mul_in, _, _ in group), num_scalars, mul_out)
            for mul_out, group in groupby(shapes, operator.itemgetter(2))
        ]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.register_buffer("table", embedding.weight.detach().clone(), persistent=False)

    def take_table(self) -> None:
        """Takes the scalars of each type from the embedding, by the memory that they are in."""
        self.table = self.embedding[0].weight.detach()

    def forward(self, features: Tensor, scalars: Tensor, weight: Tensor) -> Tensor:
        """The products (num_nodes, irreps_out.dim) of `features` and `scalars`, under the weights of the product."""
        if torch.jit.is_scripting():  # TorchScript reads the branch that is taken
            table = self.table
            share = shares_of_types(scalars, table)
        else:
            table = self.embedding[0].weight.to(weight)
            types = looked_up_types(scalars, self.embedding[0]) if scalars.requires_grad else None
            if types is None:
                table = table.detach()
                share = computed_once(shares_of_types, scalars.detach(), table)
            else:
                share = (types.unsqueeze(1) == torch.arange(table.size(0), device=types.device)).to(table.dtype)
        of_types: list[Tensor] = []
        for part, shape in zip(weight.split(self.sizes), self.shapes):  # noqa: B905 (TorchScript)
            of_types.append((table @ part.view(shape)).flatten())
        return self.linear(features, torch.cat(of_types), share)


def _typed(model: torch.nn.Module, product: Any) -> Form:
    owner = _type_embedding(model)
    weight = owner.embed_module.weight
    num_types, num_scalars = weight.shape
    if str(product.irreps_in2) != f"{num_scalars}x0e":
        raise PatchError(f"its second operand is {product.irreps_in2}, not the embedding of atom types")
    linear = attribute_product(product, num_types)
    atom = torch.arange(2 * num_types) % num_types
    attributes = weight.detach()[atom.to(weight.device)]
    examples = (random_rows(len(atom), product.irreps_in1.dim, product.weight), attributes)
    return TypedProduct, TypeMatrices(owner, linear), examples


def _type_embedding(model: torch.nn.Module) -> Any:
    """The module that makes rows of its embedding the attributes of all nodes."""
    embeds = [module for module in model.modules() if "NodeTypeEmbed" in class_names(module)]
    if len(embeds) != 1 or not isinstance(getattr(embeds[0], "embed_module", None), torch.nn.Embedding):
        raise PatchError("the model has no embedding of atom types, by which attributes would be told")
    if getattr(embeds[0], "do_categorical_graph_field_embed", False):
        raise PatchError("the attributes of nodes depend on more than the atom type")
    return embeds[0]


TYPED_FORM = NodeForm("irreps_in1", _typed)
"""How a `FullyConnectedTensorProduct` is replaced."""
