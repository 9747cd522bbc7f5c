"""How SevenNet's ASE calculator computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from eqaccel.patches.calculator import overridden, types_of, voigt
from eqaccel.patches.kind import Constants, Stepping, class_names
from eqaccel.patches.sevennet.parts import modalities
from eqaccel.prepare import model_dtype, scalar_name
from eqaccel.step import Outcome, System

SMALLEST_VOLUME = 1e-3  # cubic angstrom, which SevenNet divides by where there is no cell


class SevennetStepping(Stepping):
    """`SevenNetCalculator`, of any modality."""

    library = "sevenn"
    class_name = "SevenNetCalculator"

    def obstacle(self, calculator: Any) -> str:
        """See `Stepping.obstacle`."""
        forces: Any = getattr(calculator.model, "force_output", None)
        if "ForceStressOutputFromEdge" not in class_names(forces):
            return "its model does not predict forces and stress from edges"
        # The versions before 0.13 have neither.
        if getattr(calculator, "compute_atomic_virial", False) or getattr(forces, "use_atomic_virial", False):
            return "it computes the virial of each atom (compute_atomic_virial)"
        if modalities(calculator.model) and calculator.modal not in modalities(calculator.model):
            return f"its model computes another modality than {calculator.modal!r}"
        return overridden(calculator, self, ("calculate", "output_to_results"))

    def models(self, calculator: Any) -> list[nn.Module]:
        """See `Stepping.models`."""
        return [calculator.model]

    def head(self, calculator: Any) -> int:
        """See `Stepping.head`."""
        return list(modalities(calculator.model)).index(calculator.modal) if modalities(calculator.model) else 0

    def cutoff(self, calculator: Any) -> float:
        """See `Stepping.cutoff`."""
        return float(calculator.cutoff)

    def types(self, calculator: Any, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Stepping.types`."""
        table = np.full(max(calculator.type_map) + 1, -1)
        table[list(calculator.type_map)] = list(calculator.type_map.values())
        return types_of(numbers, table)

    def results(self, calculator: Any, system: System, outcome: Outcome, constants: Constants) -> dict[str, Any]:
        """See `Stepping.results`; arrays are of the dtype of the model, as SevenNet's."""
        scalar = np.dtype(scalar_name(model_dtype(calculator.model)))
        energy = float(outcome.energies[0].sum())
        volume = max(abs(np.linalg.det(system.cells[0])), SMALLEST_VOLUME)
        return {
            "free_energy": energy,
            "energy": energy,
            "energies": outcome.energies[0].astype(scalar),
            "forces": outcome.forces[0].astype(scalar),
            "stress": voigt(outcome.virials[0, 0] / volume).astype(scalar),
            "num_edges": outcome.num_edges,
        }
