"""Molecular dynamics with a patched calculator: energy is conserved as before, and every run repeats bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import eqaccel

pytest.importorskip("mace")
units = pytest.importorskip("ase.units")

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from mace.calculators import MACECalculator  # noqa: E402

MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "cuau_emt.model"


def start_frame() -> Atoms:
    rng = np.random.default_rng(7)
    atoms = bulk("Cu", "fcc", a=3.75, cubic=True).repeat(2)
    atoms.symbols[rng.permutation(len(atoms))[:8]] = "Au"
    atoms.rattle(0.05, rng=rng)
    MaxwellBoltzmannDistribution(atoms, temperature_K=500, rng=rng)
    return atoms


def nve(calculator: MACECalculator, steps: int) -> tuple[np.ndarray, Atoms]:
    """Total energy in eV after every step of 2 fs, and the last frame."""
    atoms = start_frame()
    atoms.calc = calculator
    energies = []
    dynamics = VelocityVerlet(atoms, 2 * units.fs)
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()))
    dynamics.run(steps)
    return np.array(energies), atoms


def calculator(dtype: str) -> MACECalculator:
    return MACECalculator(model_paths=str(MODEL), device="cpu", default_dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_energy_is_conserved_as_well_as_unpatched(dtype):
    before, atoms = nve(calculator(dtype), 40)
    after, _ = nve(eqaccel.patch(calculator(dtype)), 40)
    # The total energy is a sum of atomic energies of a few eV: that sum's rounding is all that patching may add.
    isolated = 4.0 * len(atoms)
    rounding = 16 * np.finfo(dtype).eps * (2 * isolated + abs(before).max())
    assert np.ptp(after) <= np.ptp(before) + rounding
    slopes = [np.polyfit(np.arange(len(energies)), energies, 1)[0] for energies in (before, after)]
    assert abs(slopes[1]) * len(after) <= abs(slopes[0]) * len(before) + rounding
    assert np.ptp(before) < 2e-3 * len(atoms), "the model itself does not conserve energy"


@pytest.mark.slow
def test_patched_trajectory_follows_the_unpatched_one():
    _, before = nve(calculator("float64"), 20)
    _, after = nve(eqaccel.patch(calculator("float64")), 20)
    # A force that is off by rounding moves an atom by rounding; 20 steps are too few for chaos to matter.
    assert np.abs(after.positions - before.positions).max() < 1e-10


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_patched_trajectories_repeat_bitwise(dtype):
    runs = [nve(eqaccel.patch(calculator(dtype)), 15) for _ in range(2)]
    (energies, first), (energies_again, second) = runs
    np.testing.assert_array_equal(energies, energies_again)
    np.testing.assert_array_equal(first.positions, second.positions)
    np.testing.assert_array_equal(first.get_momenta(), second.get_momenta())
    np.testing.assert_array_equal(first.get_stress(), second.get_stress())
