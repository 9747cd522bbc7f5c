"""How SevenNet's wrapper for torch-sim computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from eqaccel.patches.kind import Wrapping, class_names
from eqaccel.patches.sevennet.parts import modalities
from eqaccel.patches.sevennet.stepping import SMALLEST_VOLUME, SevennetStepping
from eqaccel.patches.wrapper import changed_methods, unknown_neighbors


class SevennetWrapping(Wrapping):
    """`SevenNetModel` of SevenNet's, of any modality."""

    class_name = "sevenn.torchsim.SevenNetModel"
    stepping = SevennetStepping()

    def obstacle(self, wrapper: Any) -> str:
        """See `Wrapping.obstacle`."""
        forces: Any = getattr(wrapper.model, "force_output", None)
        if "ForceStressOutputFromEdge" not in class_names(forces):
            return "its model does not predict forces and stress from edges"
        if modalities(wrapper.model) and wrapper.modal not in modalities(wrapper.model):
            return f"its model computes another modality than {wrapper.modal!r}"
        return changed_methods(wrapper, self.class_name) or unknown_neighbors(wrapper)

    def cutoff(self, wrapper: Any) -> float | Tensor:
        """See `Wrapping.cutoff`."""
        cutoff: float | Tensor = wrapper.cutoff
        return cutoff

    def stress(self, virials: Tensor, volumes: Tensor) -> Tensor:
        """See `Wrapping.stress`; SevenNet divides by a small volume where there is none, or a negative one."""
        return virials / volumes.clamp(min=SMALLEST_VOLUME)
