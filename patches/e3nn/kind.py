"""Any module that holds modules of e3nn, and no model of a known kind."""

from __future__ import annotations

import torch

from eqaccel.patches.e3nn.swapping import E3nnSwapping, is_of_e3nn
from eqaccel.patches.kind import ModuleKind


class E3nnKind(ModuleKind):
    """Networks of any library whose layers are modules of e3nn."""

    name = "e3nn"
    swapping = E3nnSwapping()

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether a module of e3nn is in it."""
        return any(is_of_e3nn(module) for module in model.modules())
