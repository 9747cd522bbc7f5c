"""What the tests of `eqaccel.Calculator` share, whatever the family: structures, and when two results are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from ase import Atoms, units
from ase.build import bulk
from ase.md.nptberendsen import NPTBerendsen
from ase.md.velocitydistribution import thermalize_momenta
from ase.optimize import FIRE

from eqaccel import report
from eqaccel.errors import CalculatorError, StructureError
from eqaccel.patches.rounding import FACTOR, ROUNDING

PROPERTIES = ("energy", "free_energy", "energies", "forces", "stress")

FORCE_STEPS = 6
"""Steps of an optimiser or of dynamics that are followed."""


def results_of(calculator: Any, atoms: Atoms) -> dict[str, Any]:
    """All results of a structure, which keeps its own calculator; stress where it is periodic."""
    atoms = atoms.copy()
    atoms.calc = calculator
    names = PROPERTIES if atoms.pbc.any() and atoms.cell.rank == 3 else PROPERTIES[:-1]
    return {name: calculator.get_property(name, atoms) for name in names}


def assert_same(results: dict[str, Any], expected: dict[str, Any], volume: float, eps: float) -> None:
    """Results differ by the rounding of the sums of absolute values that they are made of, and by no more."""
    assert results.keys() == expected.keys()
    pull = np.abs(expected["forces"]).sum()
    energy = np.abs(expected["energies"]).sum() + pull * 3.0  # the work of all forces over the cutoff of the models
    scales = dict.fromkeys(PROPERTIES, energy) | {"forces": max(pull, energy / 3.0), "stress": energy / max(volume, 1)}
    for name, value in results.items():
        assert np.shape(value) == np.shape(expected[name])
        error = np.abs(np.asarray(value) - expected[name]).max(initial=0.0)
        assert error <= FACTOR * ROUNDING * eps * scales[name], name


def assert_same_on(
    calculator: Any, library: Any, structures: Iterable[Atoms], eps: float = np.finfo(float).eps
) -> None:
    """Two calculators give the same for each structure.

    MACE's own makes up a cell where a structure is not periodic, by whose volume it divides; ASE divides by that of the
    cell there is. So stresses are compared of what is periodic in all directions.
    """
    for atoms in structures:
        found, wanted = results_of(calculator, atoms), results_of(library, atoms)
        assert all(np.asarray(value).dtype == np.float64 for value in found.values())
        if "stress" in found and not atoms.pbc.all() and "MACE" in type(library).__name__:
            assert np.isfinite(found.pop("stress")).all()
            del wanted["stress"]
        assert_same(found, wanted, abs(np.linalg.det(atoms.cell.array)), eps)


def variety() -> list[Atoms]:
    """Structures of many sizes, cells and periodicities, of hydrogen, carbon and oxygen."""
    rng = np.random.default_rng(5)
    crystal = bulk("C", cubic=True)
    crystal.rattle(0.1, rng=rng)
    small = bulk("C")  # smaller than the cutoff: atoms have images of themselves for neighbours
    slab = Atoms("COH", [[0, 0, 5], [1.2, 0.1, 5.3], [0.4, 1.3, 4.8]], cell=[2.8, 2.9, 10], pbc=[True, True, False])
    sheet = Atoms("CC", [[0, 0, 0], [1.4, 0, 0]], cell=[[4.2, 0, 0], [0.3, 2.4, 0], [0, 0, 0]], pbc=[1, 1, 0])
    molecule = Atoms("OHH", [[0, 0, 0], [0.95, 0.1, 0], [-0.3, 0.9, 0.1]])
    return [crystal, Atoms("C"), small, slab, molecule, sheet, Atoms(), crystal * (2, 1, 1)]


def assert_batch_is_single_calls(calculator: Any) -> None:
    """A batch gives what calls one by one give, also when structures move, and leaves the calculator as it was."""
    structures = variety()
    first = results_of(calculator, structures[0])
    rng = np.random.default_rng(6)
    for _ in range(4):
        kept = calculator.atoms, calculator.results
        batch = calculator.batch(structures)
        assert (calculator.atoms, calculator.results) == kept
        for atoms, found in zip(structures, batch, strict=True):
            assert_same(found, results_of(calculator, atoms), abs(np.linalg.det(atoms.cell.array)), np.finfo(float).eps)
            atoms.rattle(0.02, rng=rng)
    assert first["energy"] != batch[0]["energy"]
    assert calculator.batch([]) == []
    reordered = calculator.batch(structures[::-1])
    again = calculator.batch(structures)[::-1]
    for atoms, found, wanted in zip(structures[::-1], reordered, again, strict=True):
        assert_same(found, wanted, abs(np.linalg.det(atoms.cell.array)), np.finfo(float).eps)


def follow(calculator: Any, start: Atoms, move: Callable[[Atoms], Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Positions and cell after each step of an optimiser or of dynamics."""
    atoms = start.copy()
    atoms.calc = calculator
    mover, frames = move(atoms), []
    mover.attach(lambda: frames.append((atoms.positions.copy(), atoms.cell.array.copy())))
    mover.run(steps=FORCE_STEPS, **({"fmax": 0.0} if isinstance(mover, FIRE) else {}))
    return frames


def relaxation(atoms: Atoms) -> Any:
    """A few steps downhill."""
    return FIRE(atoms, logfile=None)


def barostat(atoms: Atoms) -> Any:
    """Dynamics whose cell changes in every step."""
    thermalize_momenta(atoms, temperature_K=500, rng=np.random.default_rng(2))
    return NPTBerendsen(
        atoms,
        timestep=0.5 * units.fs,
        temperature_K=500,
        pressure_au=units.GPa,
        taut=50 * units.fs,
        taup=100 * units.fs,
        compressibility_au=0.01 / units.GPa,
    )


def assert_follows(calculator: Any, library: Any, start: Atoms, move: Callable[[Atoms], Any]) -> None:
    """Two calculators lead the same way: an error of forces moves atoms by itself times the square of the time."""
    frames, expected = (follow(c, start, move) for c in (calculator, library))
    assert len(frames) == len(expected) > FORCE_STEPS - 1
    pull = max(np.abs(results_of(library, start)["forces"]).sum(), 1.0)
    # In units of ASE a step is at most 1, as FIRE has it, and no atom is lighter than 1; factor 10 for the growth of
    # small differences in the few steps.
    bound = 10 * FORCE_STEPS**2 * FACTOR * ROUNDING * np.finfo(float).eps * pull
    for (positions, cell), (positions_wanted, cell_wanted) in zip(frames, expected, strict=True):
        assert np.abs(positions - positions_wanted).max() <= bound
        assert np.abs(cell - cell_wanted).max() <= bound
    assert np.abs(frames[-1][0] - frames[0][0]).max() > 1e-3


def assert_copies(calculator: Any, atoms: Atoms, copies: Iterable[Callable[[Any], Any]]) -> None:
    """Copies give the same, though they share no memory of earlier calls."""
    expected = results_of(calculator, atoms)
    for make in copies:
        duplicate = make(calculator)
        assert repr(duplicate) == repr(calculator)
        assert duplicate.results.keys() == calculator.results.keys()
        duplicate.reset()
        assert_same(results_of(duplicate, atoms), expected, 1.0, np.finfo(float).eps)


def calls(calculator: Any, path: str = "calculate") -> int:
    """Evaluations that a report has counted."""
    (row,) = (row for row in report(calculator).rows if row.path == path)
    return int(row.note.partition(" calls")[0].rpartition(" ")[2])


def assert_refuses_bad_structures(calculator: Any) -> None:
    """Each is refused with what is wrong, alone and as one of several; the next good one is computed."""
    good = variety()[0]
    bad: list[tuple[Atoms, str]] = []
    for change, message in (
        (lambda a: a.numbers.__setitem__(0, 14), r"atoms: expected elements .*\(H, C, O\), got Si"),
        (lambda a: a.numbers.__setitem__(0, 300), "got atomic number 300"),
        (lambda a: a.positions.__setitem__((1, 2), np.nan), "positions: expected finite numbers, .* for atom 1"),
        (lambda a: a.positions.__setitem__((1, 2), np.inf), "positions: expected finite numbers"),
        (lambda a: a.set_cell([1.0, 1.0, 0.0]), "cell: expected cell vectors that span a volume"),
        (lambda a: a.set_cell([1.0, np.nan, 1.0]), "cell: expected finite numbers"),
    ):
        bad.append((copy.deepcopy(good), message))
        change(bad[-1][0])
    wanted = results_of(calculator, good)
    for atoms, message in bad:
        atoms.calc = calculator
        for _ in range(2):  # nothing of the first failure is taken for a result
            with pytest.raises(StructureError, match=message):
                atoms.get_potential_energy()
        with pytest.raises(StructureError, match=rf"structures\[1\]: .*{message}"):
            calculator.batch([good, atoms])
    assert results_of(calculator, good)["energy"] == wanted["energy"]
    for given, message in ((good, r"expected a list of ase\.Atoms, got one"), ([good, None], r"structures\[1\]")):
        with pytest.raises(CalculatorError, match=message):
            calculator.batch(given)
