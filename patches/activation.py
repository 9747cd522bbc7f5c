"""Activations of scalars, as e3nn has them, in one kernel a derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.silu import SiluSpec
from eqaccel.ops import ScaledSilu
from eqaccel.patches.activation_e3nn import silu_factor
from eqaccel.patches.nodes import Form, NodeForm, random_rows
from eqaccel.patches.replacement import Replacement


class FusedActivation(Replacement):
    """An `e3nn.nn.Activation` of scalars that all go through SiLU with one factor."""

    note = "replaced by eqaccel.ScaledSilu"
    gains_on_cpu = True

    def forward(self, features: Tensor, dim: int = -1) -> Tensor:
        """Activates the scalars, which dimension `dim` has; others behind them are left out."""
        if features.size(dim) != self.eqaccel.width:
            features = features.narrow(dim, 0, self.eqaccel.width)
        return self.dense(features)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` of the scalars alone, in any shape."""
        return self.eqaccel(features)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; an activation may have been exchanged."""
        return _Scalars(self).to(self.eqaccel.activation.payload.device)


class _Scalars(torch.nn.Module):
    """What a `FusedActivation` computes with.

    Args:
        activation: The module.

    Raises:
        PatchError: If its activations are not SiLU, or not the same for all.
    """

    def __init__(self, activation: Any) -> None:
        super().__init__()
        factors = {None if act is None else silu_factor(act) for act in activation.acts}
        factor = factors.pop() if len(factors) == 1 else None
        if factor is None:
            raise PatchError("its activations are not SiLU with one factor")
        self.width = int(activation.irreps_in.dim)
        self.activation = ScaledSilu(SiluSpec(factor, 1.0))

    def forward(self, features: Tensor) -> Tensor:
        """Of any shape."""
        return self.activation(features)


def _activation(model: torch.nn.Module, activation: Any) -> Form:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    added = _Scalars(activation).to(like.device)
    return FusedActivation, added, (random_rows(3, added.width, like),)


ACTIVATION_FORM = NodeForm("acts", _activation)
"""How an `Activation` is replaced."""
