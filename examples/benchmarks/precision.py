"""What less precision than float32 does to results: forces, the drift of the energy, phonons, against float64.

The alloy is the trained model that comes with the examples. Water has a model with random weights, scaled and held
together by springs as in `step`: there is none with the examples that was trained on it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import eqaccel
from eqaccel.benchmarks import pictures, report, suite
from eqaccel.benchmarks.structures import SYSTEMS, TEMPERATURE, Springs, make_sample
from eqaccel.patches.copying import duplicated
from eqaccel.patches.torch_state import default_dtype

if TYPE_CHECKING:  # the command line has to answer without it
    import ase

Array = NDArray[np.float64]

PRECISIONS: dict[str, frozenset[str]] = {
    "float32": frozenset(),
    "bfloat16 weights": frozenset({"weights"}),
    "products of 11 bits": frozenset({"products"}),
    "both": frozenset({"weights", "products"}),
}
"""What is compared with float64: the `low_precision` of `eqaccel.patch`."""

EXACT = "float64"
MEAN_FORCE = 0.5  # eV/A, of a model with random weights
_TIMESTEP = 1.0  # fs
_FRAMES, _RATTLE = 5, 0.05  # structures whose forces are compared, and how far their atoms are displaced, in angstrom
_BLOCKS = 10  # whose means a drift is fitted to
_BANDS, _POINTS = ([1, 0, 0], [0, 0, 1], [1, 1, 0], [1, 1, 1]), 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    report.add_arguments(parser)
    parser.add_argument("--subjects", type=suite.names(SUBJECTS), default="all", help=f"some of {', '.join(SUBJECTS)}")
    parser.add_argument("--precisions", type=suite.names(PRECISIONS), default="all")
    parser.add_argument("--alloy", type=Path, default=Path("examples/models/cuau_emt.model"), help="file of the model")
    parser.add_argument("--atoms", type=int, default=108, help="of the simulations")
    parser.add_argument("--steps", type=int, default=2000, help=f"of {_TIMESTEP:g} fs, at constant energy")
    parser.add_argument("--skip-phonons", action="store_true", help="as without phonopy")


def run(arguments: argparse.Namespace) -> report.Results:
    """All precisions on all subjects, float64 first."""
    torch.set_num_threads(arguments.threads)
    results = report.new_results("precision", arguments)
    start = time.monotonic()
    wanted = [name for name in PRECISIONS if {name, "all"} & set(arguments.precisions)]
    if arguments.device == "cpu":  # which rounds no factors
        wanted = [name for name in wanted if "products" not in PRECISIONS[name]]
    for name, subject in SUBJECTS.items():
        if {name, "all"} & set(arguments.subjects):
            model = subject.model(arguments)
            exact: dict[str, Array] = {}
            for which in (EXACT, *wanted):
                row = _measure(subject, model, which, arguments)
                found = row.pop("compared")
                exact = exact or found
                results["rows"].append(row if found is exact else row | _errors(found, exact))
                if arguments.json:
                    report.write(arguments.json, json.dumps(results, indent=1) + "\n")
    results["run_s"] = time.monotonic() - start
    return results


@dataclass(frozen=True)
class Subject:
    """What is simulated, with which model.

    Attributes:
        model: The model in float64, on the CPU.
        has_springs: Whether springs hold the atoms to their sites.
        crystal: Of which phonons are computed; None for what has none.
    """

    kind: str
    model: Callable[[argparse.Namespace], torch.nn.Module]
    has_springs: bool
    crystal: Callable[[], ase.Atoms] | None

    def start(self, atoms: int) -> ase.Atoms:
        """The start of a simulation, with velocities."""
        from ase.md.velocitydistribution import Stationary, thermalize_momenta

        structure = SYSTEMS[self.kind](atoms)
        thermalize_momenta(structure, temperature_K=TEMPERATURE, rng=np.random.default_rng(0))
        Stationary(structure)
        if self.has_springs:
            structure.set_constraint(Springs(structure))
        return structure


def _trained_alloy(arguments: argparse.Namespace) -> torch.nn.Module:
    import mace  # noqa: F401  (before e3nn)

    model = torch.load(arguments.alloy, weights_only=False, map_location="cpu")
    return model.double().requires_grad_(False)


def _random_water(_: argparse.Namespace) -> torch.nn.Module:
    from eqaccel.benchmarks.mace_like import Case, Shape, build_model

    shape = Shape((1, 8), 32, ("0e", "1o"), "water", cutoff=5.0, bessel=8, width=32, correlation=2)
    with default_dtype(torch.float64):
        model = build_model(torch.float64, shape)
        forces = Case.calculator(duplicated(model), "cpu").get_forces(make_sample("water"))
        Case.multiply_energies(model, MEAN_FORCE / float(np.linalg.norm(forces, axis=1).mean()))
    return model


def _ordered_alloy() -> ase.Atoms:
    """CuAu, layers of either element."""
    from ase import Atoms

    return Atoms("CuAu", scaled_positions=[[0, 0, 0], [0.5, 0.5, 0.5]], cell=[2.75, 2.75, 3.9], pbc=True)


SUBJECTS = {
    "alloy": Subject("alloy", _trained_alloy, has_springs=False, crystal=_ordered_alloy),
    "water": Subject("water", _random_water, has_springs=True, crystal=None),
}


def _measure(subject: Subject, model: torch.nn.Module, which: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a precision gives; under "compared" what is to be held against float64."""
    dtype = torch.float64 if which == EXACT else torch.float32
    options = {} if which == EXACT else {"low_precision": PRECISIONS[which]}
    with default_dtype(dtype):
        own = duplicated(model).to(arguments.device, dtype)
        calculator = eqaccel.Calculator(own, device=arguments.device, verify=False, **options)
        frames = [_frame(subject.kind, arguments.atoms, seed) for seed in range(_FRAMES)]
        energies, forces = zip(*(_evaluate(calculator, frame) for frame in frames), strict=True)
        compared = {"energies": np.array(energies) / len(frames[0]), "forces": np.concatenate(forces)}
        if subject.crystal is not None and not arguments.skip_phonons:
            compared["frequencies"] = _frequencies(subject.crystal(), calculator)
        drift = _drift(subject.start(arguments.atoms), calculator, arguments.steps)
    system = f"{subject.kind}-{len(frames[0])}"
    known = {"model": subject.kind, "system": system, "implementation": which, "note": "", "compared": compared}
    return known | {"steps": arguments.steps, "nve": drift}


def _errors(found: dict[str, Array], exact: dict[str, Array]) -> dict[str, Any]:
    """How far results are from those of float64."""
    off = found["forces"] - exact["forces"]
    errors: dict[str, Any] = {
        "force_error": float(np.sqrt((off**2).mean() / (exact["forces"] ** 2).mean())),
        "largest_force_error": float(np.abs(off).max()),
        "energy_error": 1e3 * float(np.abs(found["energies"] - exact["energies"]).max()),
    }
    if "frequencies" in found:
        shift = found["frequencies"] - exact["frequencies"]
        errors["phonons"] = {
            "largest": float(np.abs(shift).max()),
            "rms": float(np.sqrt((shift**2).mean())),
            "highest": float(exact["frequencies"].max()),
        }
    return errors


def _frame(kind: str, atoms: int, seed: int) -> ase.Atoms:
    structure = SYSTEMS[kind](atoms)
    structure.rattle(_RATTLE, seed=seed + 1)
    return structure


def _evaluate(calculator: Any, structure: ase.Atoms) -> tuple[float, Array]:
    return calculator.get_property("energy", structure), calculator.get_property("forces", structure)


def _drift(structure: ase.Atoms, calculator: Any, steps: int) -> dict[str, float]:
    """How the total energy of a simulation changes: its slope, how well that is known, and what it swings by."""
    from ase import units
    from ase.md.verlet import VelocityVerlet

    structure.calc = calculator
    dynamics = VelocityVerlet(structure, timestep=_TIMESTEP * units.fs)
    energies = [structure.get_total_energy() for _ in dynamics.irun(steps)]
    return fit_drift(1e3 * np.array(energies[1:]) / len(structure))


def fit_drift(energies: Array) -> dict[str, float]:
    """A line through the means of blocks of energies, in meV an atom, one a step.

    Returns:
        `drift` and its standard error `drift_error` in meV an atom and ns, and `swing`, the root mean square of what
        energies differ from the line by, in meV an atom.
    """
    times = 1e-6 * _TIMESTEP * np.arange(len(energies))
    blocks = [part.mean() for part in np.array_split(energies, _BLOCKS)]
    centres = np.array([part.mean() for part in np.array_split(times, _BLOCKS)])
    slope, offset = np.polyfit(centres, blocks, 1)
    rest = np.array(blocks) - slope * centres - offset
    error = np.sqrt((rest**2).sum() / (_BLOCKS - 2) / ((centres - centres.mean()) ** 2).sum())
    swing = float(np.sqrt(((energies - slope * times - offset) ** 2).mean()))
    return {"drift": float(slope), "drift_error": float(error), "swing": swing}


def _frequencies(crystal: ase.Atoms, calculator: Any) -> Array:
    """Phonons along lines from near the centre of the zone to faces, an edge and a corner, in THz."""
    import phonopy
    from ase import Atoms
    from phonopy.structure.atoms import PhonopyAtoms

    symbols, sites = list(crystal.symbols), crystal.get_scaled_positions()
    cell = PhonopyAtoms(symbols=symbols, cell=crystal.cell.array, scaled_positions=sites)
    phonons = phonopy.Phonopy(cell, supercell_matrix=np.diag([3, 3, 2]), log_level=0)
    phonons.generate_displacements(distance=0.01)
    phonons.forces = [
        _evaluate(calculator, Atoms(list(s.symbols), scaled_positions=s.scaled_positions, cell=s.cell, pbc=True))[1]
        for s in phonons.supercells_with_displacements
    ]
    phonons.produce_force_constants()
    phonons.run_band_structure([np.linspace(0.05, 0.5, _POINTS)[:, None] * end for end in _BANDS])
    return np.array(phonons.get_band_structure_dict()["frequencies"])


def format_table(results: report.Results) -> str:
    """A row for each precision of each subject."""
    header = [
        "system",
        "precision",
        "forces, relative",
        "largest, meV/A",
        "energy, meV/atom",
        "drift, meV/atom/ns",
        "swing, meV/atom",
        "phonons, largest, THz",
        "rms, THz",
    ]
    lines = []
    for row in results["rows"]:
        nve, phonons = row["nve"], row.get("phonons")
        cells = [row["system"], row["implementation"]]
        if "force_error" in row:
            cells += [
                f"{row['force_error']:.1e}",
                f"{1e3 * row['largest_force_error']:.2g}",
                f"{row['energy_error']:.1e}",
            ]
        else:
            cells += ["-"] * 3
        cells += [f"{nve['drift']:+.2g} ± {nve['drift_error']:.1g}", f"{nve['swing']:.2g}"]
        cells += [f"{phonons['largest']:.1e}", f"{phonons['rms']:.1e}"] if phonons else ["-", "-"]
        lines.append(cells)
    return report.table(lines, header)


def draw(results: report.Results, path: Path) -> Sequence[Path]:
    """Relative errors of forces."""
    rows = [row for row in results["rows"] if "force_error" in row]
    systems = list(dict.fromkeys(row["system"] for row in rows))
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    errors = {(row["system"], row["implementation"]): row["force_error"] for row in rows}
    series = {name: [errors.get((system, name)) for system in systems] for name in names}
    return pictures.grouped(results, path, systems, series, "error of forces, relative", "Forces against float64")
