"""MACE's `reshape_irreps`, which puts the irreps of a channel side by side, in a form whose gradient takes less."""

from __future__ import annotations

import operator
from typing import Any, List  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.patches.nodes import Form, NodeForm, random_rows
from eqaccel.patches.replacement import Replacement


class SplitIrreps(torch.nn.Module):
    """MACE's `reshape_irreps`: it slices, and the gradient of a slice is a whole row, but of a split a part.

    Args:
        reshape: The module to stand in for.
    """

    def __init__(self, reshape: Any) -> None:
        super().__init__()
        self.muls: List[int] = list(reshape.muls)  # noqa: UP006 (TorchScript)
        self.dims: List[int] = list(reshape.dims)  # noqa: UP006 (TorchScript)
        self.lengths: List[int] = list(map(operator.mul, self.muls, self.dims))  # noqa: UP006 (TorchScript)

    def forward(self, features: Tensor) -> Tensor:
        """(num_nodes, irreps.dim) -> (num_nodes, mul, sum of 2l + 1): the irreps side by side for each channel."""
        parts = features.split(self.lengths, 1)
        fields: List[Tensor] = []  # noqa: UP006 (TorchScript)
        for i, part in enumerate(parts):
            fields.append(part.reshape(-1, self.muls[i], self.dims[i]))
        return torch.cat(fields, dim=-1)


class SplitReshape(Replacement):
    """A `reshape_irreps` of MACE, computed by `SplitIrreps`."""

    note = "replaced by a split, whose gradient takes fewer operators"
    gains_on_cpu = True

    def forward(self, tensor: Tensor) -> Tensor:
        """(num_nodes, irreps.dim) -> (num_nodes, mul, sum of 2l + 1)."""
        return self.dense(tensor)

    def dense(self, features: Tensor) -> Tensor:
        """`forward`, under the name that all replacements of node-wise modules have it."""
        return self.eqaccel(features)


def _reshape(model: torch.nn.Module, reshape: Any) -> Form:
    if getattr(getattr(reshape, "cueq_config", None), "layout_str", "mul_ir") != "mul_ir":
        raise PatchError("its features are in ir_mul layout")
    if len(set(reshape.muls)) != 1:
        raise PatchError("its irreps have other numbers of channels")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    return SplitReshape, SplitIrreps(reshape), (random_rows(3, reshape.irreps.dim, like),)


RESHAPE_FORM = NodeForm("muls", _reshape)
"""How a `reshape_irreps` is replaced."""
