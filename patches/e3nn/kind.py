"""Any module that holds modules of e3nn, and no model of a known kind."""

from __future__ import annotations

import torch

from eqaccel.patches.e3nn.swapping import E3nnSwapping
from eqaccel.patches.kind import ModuleKind
from eqaccel.patches.nodes import derives_from_e3nn


class E3nnKind(ModuleKind):
    """Networks of any library whose layers are modules of e3nn."""

    name = "e3nn"
    swapping = E3nnSwapping()

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether a module of e3nn is in it."""
        return any(map(derives_from_e3nn, model.modules()))
