"""A driver of i-PI's for `eqaccel.Calculator`, as a user would write one."""

from __future__ import annotations

from typing import Any

from ipi.pes._ase import ASEDriver

import eqaccel

__DRIVER_NAME__ = "eqaccel"
__DRIVER_CLASS__ = "EqaccelDriver"


class EqaccelDriver(ASEDriver):
    """i-PI's own driver for ASE; `model` is the file of a model."""

    def __init__(self, template: str, model: str, device: str, **options: Any) -> None:
        self._model, self._device = model, device
        super().__init__(template, **options)

    def check_parameters(self) -> None:
        super().check_parameters()
        self.ase_calculator = eqaccel.Calculator(self._model, device=self._device, verify=False)
