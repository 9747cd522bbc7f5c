"""How torch-sim's wrapper of MACE models computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eqaccel.patches.kind import Wrapping
from eqaccel.patches.mace.stepping import MaceStepping
from eqaccel.patches.wrapper import changed_methods, unknown_neighbors


class MaceWrapping(Wrapping):
    """`MaceModel` of torch-sim."""

    class_name = "torch_sim.models.mace.MaceModel"
    stepping = MaceStepping()

    def obstacle(self, wrapper: Any) -> str:
        """See `Wrapping.obstacle`."""
        if wrapper.atomic_numbers_in_init:
            return "it was made for certain atoms (atomic_numbers)"
        return changed_methods(wrapper, self.class_name) or unknown_neighbors(wrapper)

    def head(self, wrapper: Any) -> int:
        """See `Wrapping.head`; models with several compute the first, if they are not told."""
        return 0

    def cutoff(self, wrapper: Any) -> float | Tensor:
        """See `Wrapping.cutoff`."""
        cutoff: float | Tensor = wrapper.r_max
        return cutoff

    def stress(self, virials: Tensor, volumes: Tensor) -> Tensor:
        """See `Wrapping.stress`; zero where there is no volume."""
        stress = virials / volumes.abs()
        return torch.where(stress.abs() < 1e10, stress, 0.0)
