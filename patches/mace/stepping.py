"""How MACE's ASE calculator computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from eqaccel.patches.calculator import overridden, types_of, voigt
from eqaccel.patches.kind import Constants, Stepping
from eqaccel.prepare import model_dtype, scalar_name
from eqaccel.step import Outcome, System


class MaceStepping(Stepping):
    """`MACECalculator`, with one model or a committee."""

    library = "mace"
    class_name = "MACECalculator"

    def obstacle(self, calculator: Any) -> str:
        """See `Stepping.obstacle`."""
        if calculator.model_type != "MACE":
            return f"it predicts more than energies (model_type {calculator.model_type!r})"
        if calculator.use_compile:
            return "its models are compiled (compile_mode)"
        if calculator.compute_atomic_stresses:
            return "it computes the stress of each atom (compute_atomic_stresses)"
        return overridden(calculator, self, ("calculate", "_atoms_to_batch", "_clone_batch"))

    def models(self, calculator: Any) -> list[nn.Module]:
        """See `Stepping.models`."""
        return list(calculator.models)

    def head(self, calculator: Any) -> int:
        """See `Stepping.head`; MACE computes the last one where there is none of that name."""
        heads = list(calculator.available_heads)
        return heads.index(calculator.head) if calculator.head in heads else len(heads) - 1

    def cutoff(self, calculator: Any) -> float:
        """See `Stepping.cutoff`."""
        return float(calculator.r_max)

    def types(self, calculator: Any, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Stepping.types`."""
        known = calculator.z_table.zs
        table = np.full(max(known) + 1, -1)
        table[known] = np.arange(len(known))
        return types_of(numbers, table)

    def results(self, calculator: Any, system: System, outcome: Outcome, constants: Constants) -> dict[str, Any]:
        """See `Stepping.results`; forces and stress are of the dtype of the model, as MACE's."""
        energy, length = calculator.energy_units_to_eV, calculator.length_units_to_A
        scalar = np.dtype(scalar_name(model_dtype(calculator.models[0])))
        volume = abs(np.linalg.det(_cell(system, self.cutoff(calculator))))
        stress = outcome.virials[:, 0] / volume
        stress = np.where(np.abs(stress) < 1e10, stress, 0.0)
        of_models = {
            "energy": outcome.energies.sum(axis=1) * energy,
            "node_energy": outcome.energies * energy,
            "forces": (outcome.forces * (energy / length)).astype(scalar),
            "stress": (stress * (energy / length**3)).astype(scalar),
        }
        results: dict[str, Any] = {}
        for name, values in of_models.items():
            results[name] = values[0] if len(values) == 1 else values.mean(axis=0)
            if len(values) > 1 and name != "node_energy":
                results[f"{name}_comm"] = values.astype(scalar)
                results[f"{name}_var"] = values.var(axis=0)
        results["energy"] = float(results["energy"])
        if "energy_var" in results:
            results["energy_var"] = float(results["energy_var"])
        results["free_energy"] = results["energy"]
        results["energies"] = results["node_energy"].copy()
        results["node_energy"] -= constants()[system.types]
        results["stress"] = voigt(results["stress"])
        return results


def _cell(system: System, cutoff: float) -> NDArray[np.float64]:
    """The cell by whose volume MACE divides: one that it makes up where the structure is not periodic."""
    cell = system.cells[0].copy() if system.cells[0].any() else np.eye(3)
    if not system.periodic[0].all():
        extent = (np.abs(system.positions).max(initial=0.0) + 1) * 5 * cutoff
        open_axes = ~system.periodic[0]
        cell[open_axes] = extent * np.eye(3)[open_axes]
    return cell
