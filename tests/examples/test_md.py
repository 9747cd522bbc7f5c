"""Molecular dynamics with a patched calculator: energy is conserved as before, and every run repeats bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from folders import EXAMPLES

import eqaccel

pytest.importorskip("mace")
units = pytest.importorskip("ase.units")

from ase import Atoms  # noqa: E402
from ase.build import bulk  # noqa: E402
from ase.md.velocitydistribution import thermalize_momenta  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from mace.calculators import MACECalculator  # noqa: E402

MODEL = EXAMPLES / "models/cuau_emt.model"


def start_frame() -> Atoms:
    rng = np.random.default_rng(7)
    atoms = bulk("Cu", "fcc", a=3.75, cubic=True).repeat(2)
    atoms.symbols[rng.permutation(len(atoms))[:8]] = "Au"
    atoms.rattle(0.05, rng=rng)
    thermalize_momenta(atoms, temperature_K=500, rng=rng)
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
def test_patched_run_follows_the_unpatched_one_and_conserves_energy_as_well(dtype):
    steps, eps = 40, np.finfo(dtype).eps
    before, expected = nve(calculator(dtype), steps)
    after, atoms = nve(eqaccel.patch(calculator(dtype)), steps)
    assert np.ptp(before) < 1e-3 * len(atoms), "the model itself does not conserve energy to 1 meV/atom"

    # The total energy sums the energies of the atoms, free and bound, some eV each: patching may add that sum's
    # rounding, and no more.
    rounding = 16 * eps * (2 * 4.0 * len(atoms))
    assert np.ptp(after) <= np.ptp(before) + rounding
    slope_before, slope_after = (np.polyfit(np.arange(steps + 1), energies, 1)[0] for energies in (before, after))
    assert abs(slope_after) * steps <= abs(slope_before) * steps + 2 * rounding

    # A force sums some 50 terms of some 10 eV/A, whose rounding acts on the lightest atom over the whole run; the
    # factor 10 is for the growth of small differences in a crystal, which is slow.
    force_error = eps * 50 * 10.0
    acceleration = force_error / atoms.get_masses().min()
    bound = 10 * acceleration * (steps * 2 * units.fs) ** 2 / 2
    assert np.abs(atoms.positions - expected.positions).max() < bound


def test_patched_trajectories_repeat_bitwise():
    runs = [nve(eqaccel.patch(calculator("float32")), 15) for _ in range(2)]
    (energies, first), (energies_again, second) = runs
    np.testing.assert_array_equal(energies, energies_again)
    np.testing.assert_array_equal(first.positions, second.positions)
    np.testing.assert_array_equal(first.get_momenta(), second.get_momenta())
    np.testing.assert_array_equal(first.get_stress(), second.get_stress())


def test_a_model_rounded_to_float32_can_be_patched_in_float64():
    # Many published models are saved in float32, and MACE runs them in float64 with the coefficients rounded as saved.
    rounded = calculator("float64")
    rounded.models = [model.float().double() for model in rounded.models]
    atoms = start_frame()
    expected = rounded.get_forces(atoms)
    eqaccel.patch(rounded)
    rounded.reset()
    np.testing.assert_allclose(rounded.get_forces(atoms), expected, atol=100 * np.finfo("float32").eps)
