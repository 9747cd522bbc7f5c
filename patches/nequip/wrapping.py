"""How torch-sim's wrapper of NequIP models computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eqaccel.patches.kind import Wrapping
from eqaccel.patches.nequip.stepping import NequipStepping, unknown_parts
from eqaccel.patches.wrapper import changed_methods


class NequipWrapping(Wrapping):
    """`NequIPTorchSimCalc` with a model that is not compiled."""

    class_name = "nequip.integrations.torchsim.NequIPTorchSimCalc"
    stepping = NequipStepping()

    def obstacle(self, wrapper: Any) -> str:
        """See `Wrapping.obstacle`."""
        if wrapper.atomic_numbers_in_init:
            return "it was made for certain atoms (atomic_numbers)"
        return unknown_parts(wrapper) or changed_methods(wrapper, self.class_name)

    def dtype(self, wrapper: Any) -> torch.dtype:
        """See `Wrapping.dtype`; NequIP gives float64 whatever it computes in."""
        return torch.float64

    def stress(self, virials: Tensor, volumes: Tensor) -> Tensor:
        """See `Wrapping.stress`; not a number where there is no volume."""
        return torch.where(volumes != 0, virials / volumes.abs(), torch.nan)
