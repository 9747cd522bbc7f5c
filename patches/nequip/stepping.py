"""How NequIP's ASE calculator computes, by a step of eqaccel's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from eqaccel.patches.calculator import overridden, types_of, voigt
from eqaccel.patches.kind import Constants, Stepping, class_names, own_methods
from eqaccel.step import Outcome, System

_METHODS = ("calculate", "atoms_to_data", "call_model", "save_extra_outputs")
_TRANSFORMS = {"ChemicalSpeciesToAtomTypeMapper", "NeighborListTransform", "SortedNeighborListTransform"}


class NequipStepping(Stepping):
    """`NequIPCalculator` with a model that is not compiled."""

    library = "nequip"
    class_name = "NequIPCalculator"

    def obstacle(self, calculator: Any) -> str:
        """See `Stepping.obstacle`."""
        return unknown_parts(calculator) or overridden(calculator, self, _METHODS)

    def models(self, calculator: Any) -> list[nn.Module]:
        """See `Stepping.models`."""
        return [calculator.model]

    def cutoff(self, calculator: Any) -> float:
        """See `Stepping.cutoff`."""
        return float(_transform(calculator, "NeighborListTransform").r_max)

    def types(self, calculator: Any, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Stepping.types`."""
        table = _transform(calculator, "ChemicalSpeciesToAtomTypeMapper").lookup_table.cpu().numpy()
        return types_of(numbers, table)

    def results(self, calculator: Any, system: System, outcome: Outcome, constants: Constants) -> dict[str, Any]:
        """See `Stepping.results`."""
        energy, length = calculator.energy_units_to_eV, calculator.length_units_to_A
        results: dict[str, Any] = {"energy": energy * np.asarray(outcome.energies[0].sum())}
        results["free_energy"] = results["energy"]
        results["energies"] = energy * outcome.energies[0]
        results["forces"] = (energy / length) * outcome.forces[0]
        volume = abs(np.linalg.det(system.cells[0]))
        stress = outcome.virials[0, 0] / volume if volume > 0 else np.full((3, 3), np.nan)
        results["stress"] = voigt(stress) * (energy / length**3)
        return results


def unknown_parts(holder: Any) -> str:
    """What of the transforms and the model of a calculator or a wrapper a step does not know; empty if nothing."""
    others = [reason for t in holder.transforms if (reason := own_methods(t, "nequip", _TRANSFORMS))]
    if others or len(holder.transforms) != 2:
        return f"its data are transformed in an unknown way ({', '.join(others) or 'transforms are missing'})"
    if "ForceStressOutput" not in class_names(getattr(holder.model, "model", None)):
        return "its model does not predict forces and stress alone"
    if _transform(holder, "NeighborListTransform")._pruner is not None:
        return "pairs of types have cutoffs of their own (per_edge_type_cutoff)"
    return ""


def _transform(calculator: Any, name: str) -> Any:
    return next(t for t in calculator.transforms if name in class_names(t))
