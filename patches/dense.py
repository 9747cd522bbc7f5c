"""The gate of e3nn in a few operators, for GPUs.

e3nn takes its irreps apart: slices, multiplications and a concatenation, forward and backward, which take a GPU longer
to launch than to run. On a CPU they cost little, so there the plain form of the module goes on doing the work.
Everything is composed of differentiable operators of torch, and nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eqaccel.patches.replacement import Replacement


def prefers_dense(x: Tensor) -> bool:
    """Whether the dense form is the faster one where `x` lives."""
    return x.is_cuda


class FlatGate(Replacement):
    """An `e3nn.nn.Gate`, computed by `FlatActivations`."""

    note = "replaced by fewer operators on a GPU"
    gains_on_cpu = False

    def forward(self, features: Tensor) -> Tensor:
        """Maps (num_nodes, irreps_in.dim) to (num_nodes, irreps_out.dim)."""
        if features.dim() == 2 and prefers_dense(features):
            return self.dense(features)
        return self.plain_forward(features)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` in few operators."""
        return self.eqaccel(features)


class FlatActivations(torch.nn.Module):
    """A gate: columns of equal activations together, and all gates repeated by one product.

    Args:
        activations: For each column of the input, the module that it goes through; None for gated columns.
        scalars: Columns of the input that become the scalars of the output.
        gates: Columns of the input that are gates, one for each irrep of those gated.
        gated: Columns of the input that are multiplied, in the order of the output.
        multiplicand: For each of `gated`, the number of its gate.
    """

    if TYPE_CHECKING:  # buffers
        repeat: Tensor

    def __init__(
        self,
        activations: Sequence[torch.nn.Module | None],
        scalars: Sequence[int],
        gates: Sequence[int],
        gated: Sequence[int],
        multiplicand: Sequence[int],
    ) -> None:
        super().__init__()
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
            products = passive * (active @ self.repeat)
            if len(self.gated_order) == 1:  # all of them
                outputs.append(products)
            else:
                pieces = products.split(self.gated_cuts, 1)
                for number in self.gated_order:
                    outputs.append(pieces[number])
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
