"""A molecule in water with OpenMM: the molecule by a MACE model, the water by a force field; plain and accelerated.

    python examples/openmm_mlmm.py                   # trains a small model of alanine dipeptide first: two minutes
    python examples/openmm_mlmm.py --model my.model  # a model that knows H, C, N and O

The model that is trained learns the force field itself (Amber 14) from the molecule alone, so that the example needs no
data; it is there to be timed, not for science. "unpatched" is OpenMM-ML's own way of running a MACE model,
``MLPotential("mace")``; "patched" is ``MLPotential("ase")`` with ``eqaccel.Calculator`` of the same file. Printed and
saved to ``--out``: speed, the largest force difference, energy drift, a picture. Energies are in eV, lengths in
angstrom, times in fs.
"""

from __future__ import annotations

import argparse
import logging
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openmm
import torch
from ase import Atoms, units
from mace import tools
from mace.tools.torch_geometric.dataloader import DataLoader
from md import Run, draw, measured_runs, results_table, save_results
from openmm import app, unit
from openmmml import MLPotential
from tqdm import tqdm
from train_alloy import ROOT, build_model, graphs_of, in_double_precision, train

import eqaccel

FORCE_FIELD = ("amber14-all.xml", "amber14/tip3p.xml")
EV = units.kJ / units.mol  # in kJ/mol
VACUUM = 30.0  # angstrom, edge of the cell that a lone molecule is put into


def molecule() -> app.PDBFile:
    """Returns topology and positions of alanine dipeptide."""
    return app.PDBFile(str(ROOT / "models" / "alanine_dipeptide.pdb"))


def energy_and_forces(context: openmm.Context) -> tuple[float, np.ndarray]:
    """Returns the potential energy and the forces on all atoms, in eV and angstrom."""
    state = context.getState(energy=True, forces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = state.getForces(asNumpy=True).value_in_unit(unit.kilojoule_per_mole / unit.angstrom)
    return energy * EV, forces * EV


def sample_configurations(count: int, seed: int) -> Iterator[Atoms]:
    """Yields frames of hot dynamics of the lone molecule, with energy, forces and stress of the force field."""
    pdb = molecule()
    system = app.ForceField(*FORCE_FIELD).createSystem(pdb.topology)
    integrator = openmm.LangevinMiddleIntegrator(600 * unit.kelvin, 10 / unit.picosecond, 0.5 * unit.femtosecond)
    integrator.setRandomNumberSeed(seed + 1)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(pdb.positions)
    openmm.LocalEnergyMinimizer.minimize(context)
    symbols = [atom.element.symbol for atom in pdb.topology.atoms()]
    for _ in range(count):
        integrator.step(100)
        energy, forces = energy_and_forces(context)
        positions = context.getState(positions=True).getPositions(asNumpy=True).value_in_unit(unit.angstrom)
        frame = Atoms(symbols, positions=positions, cell=[VACUUM] * 3, pbc=True)
        frame.info["REF_energy"] = energy
        frame.info["REF_stress"] = -(positions.T @ forces) / VACUUM**3  # nothing crosses the faces of the cell
        frame.arrays["REF_forces"] = forces
        yield frame


def train_molecule(options: argparse.Namespace) -> Path:
    """Trains a small model of the molecule, as `train_alloy.py` trains that of the alloy; returns the file."""
    tools.set_default_dtype("float32")
    tools.set_seeds(options.seed)
    frames = sample_configurations(options.configurations, options.seed)
    frames = list(tqdm(frames, total=options.configurations, desc="frames of the force field"))
    table = tools.AtomicNumberTable([1, 6, 7, 8])
    graphs = graphs_of(frames, table, options.cutoff)
    held_out = max(2, len(graphs) // 10)
    loaders = (
        DataLoader(graphs[held_out:], batch_size=4, shuffle=True, drop_last=True),
        DataLoader(graphs[:held_out], batch_size=4),
    )
    model = build_model(loaders[0], table, options.cutoff, options.channels)
    print(train(model, *loaders, options.epochs, rate=0.01))
    path = options.out / "alanine_dipeptide.model"
    torch.save(in_double_precision(model).to(getattr(torch, options.dtype)), path)
    return path


def solvated(waters: int) -> tuple[app.Topology, unit.Quantity, openmm.System]:
    """Returns the molecule among water: topology, positions, and the system of the force field."""
    pdb, field = molecule(), app.ForceField(*FORCE_FIELD)
    model = app.Modeller(pdb.topology, pdb.positions)
    model.addSolvent(field, numAdded=waters)
    edge = min(vector[i] for i, vector in enumerate(model.topology.getPeriodicBoxVectors()))
    cutoff = min(0.9 * unit.nanometer, 0.4 * edge)
    system = field.createSystem(model.topology, nonbondedMethod=app.PME, nonbondedCutoff=cutoff, constraints=app.HBonds)
    integrator = openmm.LangevinMiddleIntegrator(300 * unit.kelvin, 10 / unit.picosecond, 1 * unit.femtosecond)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("CPU"))
    context.setPositions(model.positions)
    openmm.LocalEnergyMinimizer.minimize(context, maxIterations=200)
    integrator.step(200)
    return model.topology, context.getState(positions=True).getPositions(), system


def simulate(
    label: str, system: openmm.System, positions: unit.Quantity, steps: int, timestep: float
) -> tuple[Run, np.ndarray]:
    """Runs ``steps`` steps at constant energy; returns what was measured, and the forces on the first frame."""
    integrator = openmm.VerletIntegrator(timestep * unit.femtosecond)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("CPU"))
    context.setPositions(positions)
    _, forces = energy_and_forces(context)  # compiles and allocates, before the clock starts
    context.setVelocitiesToTemperature(300 * unit.kelvin, 1)
    integrator.step(1)

    def total() -> float:
        state = context.getState(energy=True)
        return (state.getPotentialEnergy() + state.getKineticEnergy()).value_in_unit(unit.kilojoule_per_mole) * EV

    first, times, energies, step_ms = total(), [0.0], [0.0], []
    for step in tqdm(range(1, steps + 1), desc=label, unit="step"):
        begin = time.perf_counter()
        integrator.step(1)
        step_ms.append(1e3 * (time.perf_counter() - begin))
        times.append(step * timestep)
        energies.append(1e3 * (total() - first) / system.getNumParticles())
    return Run(label, times, energies, step_ms, None), forces


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a MACE model that knows H, C, N and O (default: one is trained)")
    parser.add_argument("--configurations", type=int, default=200, help="labelled frames, a tenth of them to validate")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--channels", type=int, default=32, help="channels per degree of the hidden features")
    parser.add_argument("--cutoff", type=float, default=4.0, help="in angstrom")
    parser.add_argument("--waters", type=int, default=500, help="molecules of water")
    parser.add_argument("--steps", type=int, default=400, help="steps of the patched run")
    parser.add_argument("--reference-steps", type=int, default=40, help="steps of the unpatched run")
    parser.add_argument("--timestep", type=float, default=0.5, help="in fs")
    parser.add_argument("--device", default="auto", help="of the model (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of a model that is trained")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("eqaccel_mlmm"), help="folder of the results")
    options = parser.parse_args(arguments)
    if min(options.steps, options.reference_steps) < 1:
        parser.error("--steps and --reference-steps: expected at least 1")
    if options.waters < 60:
        parser.error("--waters: expected at least 60, which surround the molecule")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|mace")
    model = options.model or train_molecule(options)
    topology, positions, force_field = solvated(options.waters)
    atoms = list(range(molecule().topology.getNumAtoms()))
    print(f"{len(atoms)} atoms by the model, {topology.getNumAtoms() - len(atoms)} by the force field")

    def mixed(potential: MLPotential, **how: object) -> openmm.System:
        return potential.createMixedSystem(topology, force_field, atoms, mlLongRange=False, **how)

    plain = mixed(MLPotential("mace", modelPath=str(model)), returnEnergyType="energy", device=options.device)
    before, expected = simulate("unpatched", plain, positions, options.reference_steps, options.timestep)
    calculator = eqaccel.Calculator(model, device=options.device)
    print(f"\n{eqaccel.report(calculator)}\n")
    fast = mixed(MLPotential("ase"), calculator=calculator)
    after, forces = simulate("patched", fast, positions, options.steps, options.timestep)

    difference = float(np.abs(forces - expected).max())
    print(f"\n{results_table([before, after], difference, 'nve')}")
    device = f"OpenMM on {platform.machine()} CPU, the model on {options.device}"
    measured = {"atoms": topology.getNumAtoms(), "max_force_difference": difference} | measured_runs(before, after)
    results = save_results(options, device, ("torch", "mace-torch", "openmm", "openmmml"), measured)
    draw([before, after], f"alanine dipeptide in {options.waters} molecules of water", options.out / "mlmm.png")
    print(f"wrote results.json and mlmm.png to {options.out}")
    return results


if __name__ == "__main__":
    main()
