"""OpenMM computes with `eqaccel.Calculator` through OpenMM-ML: whole systems, and a molecule in a force field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")
pytest.importorskip("openmmml", reason="needs openmm and openmmml")

import mace_models as mm
import openmm
from mace.calculators import MACECalculator
from openmm import app, unit
from openmmml import MLPotential

import eqaccel
from eqaccel.patches.rounding import FACTOR, ROUNDING

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 8
TIMESTEP = 0.0005
"""Picoseconds."""

EPS = {"Reference": np.finfo(np.float64).eps, "CPU": np.finfo(np.float32).eps, "CUDA": np.finfo(np.float32).eps}
"""What positions and forces are rounded to. The first two platforms are in every wheel, CUDA is one of its own."""

OPTIONS = {"Reference": {}, "CPU": {"Threads": "1"}, "CUDA": {"Precision": "mixed"}}
"""Of contexts on a platform."""


def _platforms() -> list[str]:
    installed = {openmm.Platform.getPlatform(number).getName() for number in range(openmm.Platform.getNumPlatforms())}
    return [name for name in EPS if name != "CUDA" or (name in installed and torch.cuda.is_available())]


@pytest.fixture(params=_platforms())
def platform(request: pytest.FixtureRequest) -> Any:
    return openmm.Platform.getPlatformByName(request.param)


@pytest.fixture
def calculator(device: torch.device) -> eqaccel.Calculator:
    """Without the verification of the model, which has tests of its own."""
    return eqaccel.Calculator(mm.energy_model(), device=device, verify=False)


@pytest.fixture
def library(device: torch.device) -> MACECalculator:
    """MACE's own calculator of the same model."""
    with mm.default_dtype(torch.get_default_dtype()):
        return MACECalculator(models=mm.energy_model(), device=str(device), default_dtype="float64")


@pytest.fixture(scope="module")
def water() -> tuple[Any, Any, Any]:
    """Topology and positions of water in a box, and its system in a force field without constraints."""
    field, model = app.ForceField("tip3p.xml"), app.Modeller(app.Topology(), [])
    model.addSolvent(field, numAdded=30)
    options = {"nonbondedMethod": app.PME, "nonbondedCutoff": 0.4 * unit.nanometer, "rigidWater": False}
    return model.topology, model.positions, field.createSystem(model.topology, **options)


def simulation(system: Any, positions: Any, platform: Any) -> Any:
    context = openmm.Context(system, openmm.VerletIntegrator(TIMESTEP), platform, OPTIONS[platform.getName()])
    context.setPositions(positions)
    return context


def state(context: Any) -> tuple[float, np.ndarray, np.ndarray]:
    """Energy, forces and positions in OpenMM's units: kJ/mol and nm."""
    found = context.getState(energy=True, forces=True, positions=True)
    energy, forces, positions = found.getPotentialEnergy(), found.getForces(asNumpy=True), found.getPositions(True)
    return energy._value, forces._value, positions._value


def assert_same(contexts: list[Any]) -> None:
    """Two systems have the same energy and forces, and move the same way."""
    eps = EPS[contexts[0].getPlatform().getName()]
    (energy, forces, positions), (other_energy, other_forces, _) = map(state, contexts)
    bound, pull = FACTOR * ROUNDING * eps, np.abs(forces).sum()
    # The work of all forces over the cutoff stands for the terms that cancel in an energy.
    assert abs(energy - other_energy) <= bound * (abs(energy) + pull * mm.CUTOFF / 10)
    assert np.abs(forces - other_forces).max() <= bound * pull
    for context in contexts:
        context.setVelocitiesToTemperature(300.0, 1)
        context.getIntegrator().step(STEPS)
    end, other_end = (state(context)[2] for context in contexts)
    # No atom is lighter than 1; errors of forces move atoms by themselves times the square of the time, growing little.
    assert np.abs(end - other_end).max() <= 10 * bound * max(pull * (STEPS * TIMESTEP) ** 2, 1.0)
    assert np.abs(end - positions).max() > 1e-3


def test_whole_systems(calculator: Any, library: Any, water: Any, platform: Any) -> None:
    topology, positions, _ = water
    systems = [MLPotential("ase").createSystem(topology, calculator=each) for each in (library, calculator)]
    assert_same([simulation(system, positions, platform) for system in systems])
    note = eqaccel.report(calculator).rows[0].note
    assert f"{STEPS + 1} calls" in note
    assert f"{STEPS + 1} lists" not in note  # neighbours are kept


@pytest.mark.parametrize("interpolate", [False, True])
def test_a_molecule_in_a_force_field(
    interpolate: bool, calculator: Any, library: Any, water: Any, platform: Any
) -> None:
    topology, positions, system = water
    options: dict[str, Any] = {"atoms": [3, 4, 5], "mlLongRange": False, "interpolate": interpolate}
    contexts = []
    for each in (library, calculator):
        mixed = MLPotential("ase").createMixedSystem(topology, system, calculator=each, **options)
        contexts.append(simulation(mixed, positions, platform))
    if interpolate:
        force_field = state(simulation(system, positions, platform))[0]
        for context in contexts:
            context.setParameter("lambda_interpolate", 0.0)
            assert state(context)[0] == pytest.approx(force_field, rel=1e-5)  # sums in single precision
            context.setParameter("lambda_interpolate", 0.3)
    assert_same(contexts)


def test_systems_can_be_written(calculator: Any, water: Any) -> None:
    topology, positions, _ = water
    platform = openmm.Platform.getPlatformByName("Reference")
    system = MLPotential("ase").createSystem(topology, calculator=calculator)
    again = openmm.XmlSerializer.deserialize(openmm.XmlSerializer.serialize(system))
    assert_same([simulation(each, positions, platform) for each in (system, again)])
