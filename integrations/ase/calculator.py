"""The calculator itself: structures of ASE in, what ASE calls properties out."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.data import atomic_numbers, chemical_symbols
from numpy.typing import NDArray
from torch import nn

from eqaccel.errors import CalculatorError, StructureError
from eqaccel.integrations.ase.sources import PatchOptions, open_source
from eqaccel.patches.calculator import quick_changes, system_of, voigt
from eqaccel.patches.precision import LowPrecision
from eqaccel.step import System


class Calculator(AseCalculator):  # type: ignore[misc]  # ASE has no types
    """Energies, forces and stresses of a MACE, NequIP or SevenNet model, in eV and angstrom, by a step that is fast.

    Neighbours are kept for several steps, and on a GPU a step is recorded as a CUDA graph. Arrays are float64 whatever
    the model computes in. `eqaccel.report(calculator)` says what runs.

    Args:
        model: A file with a model: of `torch.save`, as MACE writes, a package (".nequip.zip") or checkpoint (".ckpt")
            of NequIP, a checkpoint (".pth") of SevenNet, or what `eqaccel.export` wrote. Opening a file runs code of
            it, so trust its source. Or the name of a model that SevenNet brings or downloads ("7net-l3i5"), where there
            is no such file. Or a model itself, patched or not: it is patched, moved and converted in place, and the
            calculator goes on with it as it changes.
        device: "auto" for the GPU that a model is on, else a GPU if torch sees one, else the CPU; "cpu", "cuda", ...
        dtype: torch.float32 or torch.float64, or its name; default: that of the model. NequIP models and exported files
            have only their own.
        head: Name of the head that computes, needed if the model has several.
        skin: Angstrom by which candidates for neighbours go beyond the cutoff. They are found anew when an atom has
            moved by half of it. Default: half an angstrom, and up to one and a half where atoms turn out to be fast.
        type_map: The type of atom for each chemical symbol, needed if the model's types have other names; NequIP's
            `chemical_species_to_atom_type_map`.
        verify: As for `eqaccel.patch`, where the model is not patched yet.
        deterministic: As for `eqaccel.patch`, where the model is not patched yet.
        low_precision: As for `eqaccel.patch`. A model that is patched already, and an exported file, have their own.
        allow_native_code: As for `eqaccel.load_exported`, for exported files.

    Raises:
        CalculatorError: If an argument makes no sense, or the model cannot be opened or computed.
        PatchError: If the model cannot be patched; it is as it was then, but for device and dtype.

    Example:
        atoms.calc = eqaccel.Calculator("my.model")
        atoms.get_potential_energy()
    """

    name = "eqaccel"
    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012 (as ASE has it)
    ignored_changes = {"initial_charges", "initial_magmoms"}  # noqa: RUF012 (as ASE has it)

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        *,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str | None = None,
        head: str | None = None,
        skin: float | None = None,
        type_map: Mapping[str, str] | None = None,
        verify: bool = True,
        deterministic: bool = True,
        low_precision: Collection[LowPrecision] = (),
        allow_native_code: bool = True,
    ) -> None:
        super().__init__()
        if skin is not None and not 0 <= skin < math.inf:
            raise CalculatorError(f"skin: expected a length in angstrom, zero or more, got {skin!r}")
        options = PatchOptions(verify, deterministic, low_precision)
        # Reports look for it under this name, see eqaccel.patches.calculator.
        self._eqaccel_step = open_source(
            model,
            device=device,
            dtype=dtype,
            head=head,
            skin=skin,
            options=options,
            allow_native_code=allow_native_code,
        )
        source, step = self._eqaccel_step, self._eqaccel_step.step()
        self._types = _types_of_elements(source.type_names, type_map)
        self.parameters.update(
            model=type(model).__name__ if isinstance(model, nn.Module) else os.fspath(model),
            device=str(step.device),
            dtype=str(step.dtype).removeprefix("torch."),
            head=source.head,
            skin=None if skin is None else float(skin),
        )

    @property
    def model(self) -> nn.Module | None:
        """The patched model, which may be trained or moved; None for an exported file."""
        return self._eqaccel_step.model

    def calculate(
        self, atoms: Any = None, properties: Sequence[str] = ("energy",), system_changes: Sequence[str] = ()
    ) -> None:
        """Computes everything that a structure has; a stress needs a cell and a periodic direction.

        Raises:
            StructureError: If the structure cannot be computed: an unknown element, positions or a cell that are not
                finite, a periodic cell without a volume.
            CalculatorError: If the model has become one that cannot be computed.
        """
        self.results = {}
        system = self._system(self.atoms if atoms is None else atoms)
        self._eqaccel_step.begin(system)
        super().calculate(atoms, properties, system_changes)
        outcome = self._eqaccel_step.evaluate(system)
        self.results = _results(system, outcome.energies[0], outcome.forces[0], outcome.virials[0, 0])

    def batch(self, structures: Sequence[Any]) -> list[dict[str, Any]]:
        """Computes many structures at once, as one graph; they may differ in size, elements, cell and periodicity.

        Structures that change a little from call to call, such as the images of a path, keep their neighbours. What the
        calculator holds of its last structure stays.

        Args:
            structures: ase.Atoms. All of them have to fit into memory together.

        Returns:
            For each structure what `results` would hold: energy, free_energy, energies, forces and, where it has one,
            stress.

        Raises:
            StructureError: As `calculate`; it names the structure.
            CalculatorError: If it is no list of structures, or the model has become one that cannot be computed.
        """
        if isinstance(structures, Atoms):
            raise CalculatorError("structures: expected a list of ase.Atoms, got one; pass [atoms]")
        systems = []
        for number, atoms in enumerate(structures):
            if not isinstance(atoms, Atoms):
                raise CalculatorError(f"structures[{number}]: expected ase.Atoms, got {type(atoms).__name__}")
            try:
                systems.append(self._system(atoms))
                systems[-1].check()
            except StructureError as error:
                raise StructureError(f"structures[{number}]: {error}") from error
        if not systems:
            return []
        outcome = self._eqaccel_step.evaluate_many(System.join(systems))
        ends = np.cumsum([len(system.types) for system in systems])[:-1]
        parts = (np.split(outcome.energies[0], ends), np.split(outcome.forces[0], ends), outcome.virials[0])
        return [_results(*of_one) for of_one in zip(systems, *parts, strict=True)]

    def check_state(self, atoms: Any, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation; "model" if it is the model alone."""
        changes = quick_changes(self.atoms, atoms, tol)
        found: list[str] = super().check_state(atoms, tol) if changes is None else changes
        found = [name for name in found if name not in self.ignored_changes]
        return found or (["model"] if self._eqaccel_step.changed() else [])

    def set(self, **kwargs: Any) -> dict[str, Any]:
        """Refuses changes: a calculator keeps what it was made with."""
        if kwargs:
            raise CalculatorError(f"set: expected no parameters, got {', '.join(kwargs)}; make a new calculator")
        return {}

    def __repr__(self) -> str:
        source, parameters = self._eqaccel_step, self.parameters
        skin = "as atoms move" if source.skin is None else f"{source.skin:g}"
        types = " ".join(source.type_names[:8]) + (" ..." if len(source.type_names) > 8 else "")
        return (
            f"Calculator({parameters['model']!r}: {source.family}, head {source.head!r}, {types}, "
            f"{parameters['dtype']} on {parameters['device']}, cutoff {source.cutoff:g}, skin {skin})"
        )

    def _system(self, atoms: Any) -> System:
        numbers = atoms.numbers
        inside = (numbers >= 0) & (numbers < len(self._types))
        types = np.where(inside, self._types[np.where(inside, numbers, 0)], -1)
        if (types < 0).any():
            known = ", ".join(chemical_symbols[number] for number in np.flatnonzero(self._types >= 0))
            wrong = sorted({_name_of(number) for number in numbers[types < 0].tolist()})
            raise StructureError(
                f"atoms: expected elements that the model knows ({known}), got {', '.join(wrong)}; use a model that "
                f"was trained on them"
            )
        return system_of(atoms, types)


def _name_of(number: int) -> str:
    return chemical_symbols[number] if 0 <= number < len(chemical_symbols) else f"atomic number {number}"


def _types_of_elements(type_names: Sequence[str], type_map: Mapping[str, str] | None) -> NDArray[np.int64]:
    """The type of each atomic number, -1 where there is none."""
    unnamed = [name for name in type_names if name not in atomic_numbers]
    if type_map is None and unnamed:
        raise CalculatorError(
            f"type_map: expected the type of each element, because types of the model are not named by chemical "
            f"symbols ({', '.join(unnamed)}); pass for example type_map={{'C': {unnamed[0]!r}}}"
        )
    types = np.full(len(chemical_symbols), -1, dtype=np.int64)
    for symbol, name in (type_map or {name: name for name in type_names}).items():
        if symbol not in atomic_numbers or name not in type_names:
            raise CalculatorError(
                f"type_map: expected chemical symbols, and for each one of the model's types "
                f"({', '.join(type_names)}), got {symbol!r}: {name!r}"
            )
        types[atomic_numbers[symbol]] = list(type_names).index(name)
    return types


def _results(
    system: System, energies: NDArray[np.float64], forces: NDArray[np.float64], virial: NDArray[np.float64]
) -> dict[str, Any]:
    """Properties of one structure by their names in ASE."""
    energy = float(energies.sum())
    results = {"energy": energy, "free_energy": energy, "energies": energies, "forces": forces}
    volume = abs(np.linalg.det(system.cells[0]))
    if system.periodic[0].any() and volume > 0:
        results["stress"] = voigt(virial / volume)
    return results
