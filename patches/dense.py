"""Node-wise modules of e3nn as a few dense matrix products each, for GPUs.

e3nn multiplies block by block: slices, an einsum and a concatenation per irrep, forward and backward, which take a GPU
longer to launch than to run. Here the weights are laid out as matrices over components, zeros included, so that one
product does it for all blocks, or for all of an irrep. On a CPU the zeros would cost more than they save, so there the
module that was replaced goes on doing the work. Everything is composed of differentiable operators of torch, and
nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from eqaccel.patches.blocks import BlockProduct
from eqaccel.patches.core import Replacement
from torch import Tensor


def prefers_dense(x: Tensor) -> bool:
    """Whether the dense form is the faster one where `x` lives."""
    return x.is_cuda


def _keep_irreps(replacement: Replacement, original: torch.nn.Module) -> None:
    """Other modules read the irreps of a module that they are next to."""
    for name in ("irreps_in", "irreps_in1", "irreps_in2", "irreps_out"):
        if hasattr(original, name):
            setattr(replacement, name, getattr(original, name))


class DenseLinear(Replacement):
    """Stands in for an `e3nn.o3.Linear` with weights of its own and no bias.

    Training of its weights keeps the original: their gradients would be sums in no fixed order.

    Args:
        original: The module that the model came with.
        product: Multiplies by the matrix that `original.weight` makes.
    """

    note = "replaced by matrix products on a GPU, outside training"
    gains_on_cpu = False

    def __init__(self, original: torch.nn.Module, product: BlockProduct) -> None:
        super().__init__(original)
        _keep_irreps(self, original)
        self.product = product.train(original.training)

    def forward(self, features: Tensor) -> Tensor:
        """Maps (num_nodes, irreps_in.dim) to (num_nodes, irreps_out.dim)."""
        if prefers_dense(features) and not (self.training and self.original.weight.requires_grad):
            return self.dense(features)
        return self.original(features)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` as matrix products."""
        return self.product(features, self.original.weight).squeeze(2)


class TypedProduct(Replacement):
    """Stands in for a `FullyConnectedTensorProduct` of features with the embedding of the type of each atom.

    A product with one of a few vectors of scalars is linear, with a matrix for each type: all of them are applied, and
    the one of each atom's type is kept. Types are told by comparing the scalars with the rows of the embedding, so rows
    of no type give NaN. Training of its weights, and scalars that need a gradient, keep the original.

    Args:
        original: The module that the model came with.
        embedding: Module of the model whose `weight` (num_types, num_scalars) holds the scalars of each type.
        gather: (num_values * num_scalars,) int32: where in `original.weight` the weights of each scalar are.
        product: Multiplies by the matrices of all types, made of (num_values, num_types) values.
    """

    note = "replaced by matrix products on a GPU, outside training, where the embedding of types needs no gradient"
    gains_on_cpu = False

    def __init__(
        self, original: torch.nn.Module, embedding: torch.nn.Module, gather: Tensor, product: BlockProduct
    ) -> None:
        super().__init__(original)
        _keep_irreps(self, original)
        # Its weight is registered, not the module: `torch.func.functional_call` cannot swap what two paths lead to.
        self.source = (embedding,)
        self.register_parameter("table", embedding.weight)
        self.product = product.train(original.training)
        self.register_buffer("gather", gather, persistent=False)

    def share_parameters(self) -> None:
        """See `Replacement`."""
        super().share_parameters()
        self.register_parameter("table", self.source[0].weight)

    def forward(self, features: Tensor, node_attrs: Tensor) -> Tensor:
        """Computes the product.

        Args:
            features: (num_nodes, irreps_in1.dim).
            node_attrs: (num_nodes, num_scalars), a row of the embedding for each node.

        Returns:
            (num_nodes, irreps_out.dim)
        """
        trains = self.training and self.original.weight.requires_grad
        if prefers_dense(features) and not trains and not node_attrs.requires_grad:
            return self.dense(features, node_attrs)
        return self.original(features, node_attrs)

    def dense(self, features: Tensor, node_attrs: Tensor) -> Tensor:
        """`forward` as matrix products; no gradient in `node_attrs`."""
        table = self.table.detach()
        is_type = (node_attrs.unsqueeze(1) == table).all(2).to(features.dtype)
        share = is_type / is_type.sum(1, keepdim=True)  # types with equal rows have equal matrices
        weights = torch.index_select(self.original.weight, 0, self.gather).view(-1, table.size(1))
        products = self.product(features, (weights @ table.t()).view(-1))
        return (products * share.unsqueeze(1)).sum(2)


class FlatGate(Replacement):
    """Stands in for an `e3nn.nn.Gate`: columns of equal activations together, and all gates repeated by one product.

    Args:
        original: The module that the model came with.
        activations: For each column of the input, the module that it goes through; None for gated columns.
        scalars: Columns of the input that become the scalars of the output.
        gates: Columns of the input that are gates, one for each irrep of those gated.
        gated: Columns of the input that are multiplied, in the order of the output.
        multiplicand: For each of `gated`, the number of its gate.
    """

    note = "replaced by fewer operators on a GPU"
    gains_on_cpu = False

    def __init__(
        self,
        original: torch.nn.Module,
        activations: Sequence[torch.nn.Module | None],
        scalars: Sequence[int],
        gates: Sequence[int],
        gated: Sequence[int],
        multiplicand: Sequence[int],
    ) -> None:
        super().__init__(original)
        _keep_irreps(self, original)
        runs = _runs(activations)
        self.runs = [length for _, length in runs]
        self.activated = [number for number, (module, _) in enumerate(runs) if module is not None]
        self.multiplied = [number for number, (module, _) in enumerate(runs) if module is None] or [0]
        self.acts = torch.nn.ModuleList([module for module, _ in runs if module is not None])
        active = {column: place for place, column in enumerate(c for c, a in enumerate(activations) if a is not None)}
        passive = {column: place for place, column in enumerate(sorted(gated))}
        self.has_gates = len(gated) > 0
        self.scalar_cuts, self.scalar_order = _pieces([active[column] for column in scalars], len(active))
        self.gated_cuts, self.gated_order = _pieces([passive[column] for column in gated], len(passive))
        repeat = torch.zeros(len(active), len(passive))
        for column, number in zip(gated, multiplicand, strict=True):
            repeat[active[gates[number]], passive[column]] = 1.0
        self.register_buffer("repeat", repeat.to(torch.get_default_dtype()), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Maps (num_nodes, irreps_in.dim) to (num_nodes, irreps_out.dim)."""
        if prefers_dense(features):
            return self.dense(features)
        return self.original(features)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` in few operators."""
        columns = features.split(self.runs, 1)
        parts: list[Tensor] = []
        for number, act in enumerate(self.acts):
            parts.append(act(columns[self.activated[number]]))
        active = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        scalars = active.split(self.scalar_cuts, 1)
        outputs = [scalars[number] for number in self.scalar_order]
        if self.has_gates:
            inputs = [columns[number] for number in self.multiplied]
            passive = inputs[0] if len(inputs) == 1 else torch.cat(inputs, 1)
            # Each column of `repeat` has a single one, so gates are repeated to the last bit, unless torch may round
            # the operands of products (TensorFloat-32).
            products = (passive * (active @ self.repeat)).split(self.gated_cuts, 1)
            for number in self.gated_order:
                outputs.append(products[number])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _runs(items: Sequence[Any]) -> list[tuple[Any, int]]:
    """Equal neighbours, and how many of each."""
    runs: list[tuple[Any, int]] = []
    for item in items:
        if runs and runs[-1][0] is item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return runs


def _pieces(order: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """How to cut `count` columns so that pieces, put in an order, give the columns `order`; the others are left out.

    Neither list is empty, because TorchScript could not tell what it is a list of.
    """
    if not order:
        return [count], [0]
    starts = [place for n, place in enumerate(order) if n == 0 or order[n - 1] + 1 != place]
    ends = [place + 1 for n, place in enumerate(order) if n + 1 == len(order) or order[n + 1] != place + 1]
    edges = sorted({0, count, *starts, *ends})
    return [b - a for a, b in pairwise(edges)], [edges.index(start) for start in starts]
