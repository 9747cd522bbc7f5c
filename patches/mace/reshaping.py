"""MACE's `reshape_irreps`, which puts the irreps of a channel side by side, as a permutation of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.patches.nodes import Form, NodeForm, random_rows
from eqaccel.patches.replacement import Replacement


class PermutedIrreps(torch.nn.Module):
    """MACE's `reshape_irreps` in one kernel a derivative, where slices and their gradients are several.

    Args:
        reshape: The module to stand in for.
        device: Where the features will be.
    """

    if TYPE_CHECKING:  # buffers
        order: Tensor
        inverse: Tensor

    def __init__(self, reshape: Any, device: torch.device) -> None:
        super().__init__()
        lengths = [mul * dim for mul, dim in zip(reshape.muls, reshape.dims, strict=True)]
        parts = torch.arange(sum(lengths)).split(lengths)
        fields = [part.view(-1, dim) for part, dim in zip(parts, reshape.dims, strict=True)]
        order = torch.cat(fields, 1)
        self.mul, self.width = order.shape
        self.register_buffer("order", order.flatten().to(device), persistent=False)
        self.register_buffer("inverse", order.flatten().argsort().to(device), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """(num_nodes, irreps.dim) -> (num_nodes, mul, sum of 2l + 1): the irreps side by side for each channel."""
        columns = torch.ops.eqaccel.permute_columns(features, self.order, self.inverse)
        return columns.view(features.size(0), self.mul, self.width)


class PermutingReshape(Replacement):
    """A `reshape_irreps` of MACE, computed by `PermutedIrreps`."""

    note = "replaced by a permutation of columns"
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
    return PermutingReshape, PermutedIrreps(reshape, like.device), (random_rows(3, reshape.irreps.dim, like),)


RESHAPE_FORM = NodeForm("muls", _reshape)
"""How a `reshape_irreps` is replaced."""
