"""Trains the small MACE model of the examples: a copper-gold alloy, learned from ASE's EMT potential.

    python examples/train_alloy.py                       # the shipped model, about ten minutes on one core
    python examples/train_alloy.py --smoke --out /tmp/x  # a few seconds, to see that everything works

EMT is quick and runs anywhere, so the example needs neither a download nor a first-principles code; the model is a
genuine ``ScaleShiftMACE``, saved the way MACE saves its own, and everything that reads a ``.model`` file reads it.
Energies are in eV, lengths in angstrom, times in fs.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import mace.modules
import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import thermalize_momenta
from e3nn import o3  # after mace, which allows e3nn to read its own constants under torch 2.6 and later
from mace import data, tools
from mace.tools.scripts_utils import extract_config_mace_model
from mace.tools.torch_geometric.dataloader import DataLoader
from mace.tools.train import evaluate, take_step
from prettytable import PrettyTable
from torch_ema import ExponentialMovingAverage
from tqdm import tqdm

LATTICE = {"Cu": 3.61, "Au": 4.08}
COMPOSITIONS = (0.125, 0.25, 0.5, 0.75, 1.0)
TEMPERATURES = (150.0, 400.0, 700.0, 1100.0)
QUANTITIES = {"forces": True, "virials": False, "stress": True}
ROOT = Path(__file__).resolve().parent


def alloy(cells: int | tuple[int, int, int], gold: float, strain: np.ndarray, rng: np.random.Generator) -> Atoms:
    """Returns a random fcc Cu-Au solid solution.

    Args:
        cells: cubic cells (4 atoms each) along every axis, or along each.
        gold: fraction of gold atoms, 0 to 1.
        strain: symmetric strain of the cell, shape (3, 3).
        rng: decides which sites are gold.
    """
    constant = (1 - gold) * LATTICE["Cu"] + gold * LATTICE["Au"]
    atoms = bulk("Cu", "fcc", a=constant, cubic=True).repeat(cells)
    atoms.symbols[rng.permutation(len(atoms))[: round(gold * len(atoms))]] = "Au"
    atoms.set_cell(atoms.cell @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


def sample_configurations(
    count: int, rng: np.random.Generator, temperatures: Sequence[float] = TEMPERATURES
) -> Iterator[Atoms]:
    """Yields ``count`` 32-atom frames of short EMT Langevin runs, labelled with energy, forces and stress.

    Every run draws its own composition, temperature and strain; its frames are 40 fs apart, a good part of a vibration
    period, so that they differ. EMT's cutoff follows the largest element present, hence no frame is without gold.
    """
    frames_per_run = 4
    for index in range(count):
        if index % frames_per_run == 0:
            shear = rng.normal(scale=0.012, size=(3, 3))
            strain = (shear + shear.T) / 2 + rng.uniform(-0.025, 0.035) * np.eye(3)
            temperature = rng.choice(temperatures)
            atoms = alloy(2, rng.choice(COMPOSITIONS), strain, rng)
            atoms.calc = EMT()
            thermalize_momenta(atoms, temperature_K=2 * temperature, rng=rng)
            dynamics = Langevin(
                atoms, 4 * units.fs, temperature_K=temperature, friction=0.02 / units.fs, rng=rng, fixcm=False
            )
        dynamics.run(10)
        frame = Atoms(atoms.symbols, positions=atoms.positions, cell=atoms.cell, pbc=True)
        frame.info["REF_energy"] = atoms.get_potential_energy()
        frame.info["REF_stress"] = atoms.get_stress(voigt=False)
        frame.arrays["REF_forces"] = atoms.get_forces()
        yield frame


def graphs_of(frames: Sequence[Atoms], z_table: tools.AtomicNumberTable, cutoff: float) -> list[data.AtomicData]:
    """Returns what MACE's data loader takes, labels included."""
    keys = data.KeySpecification.from_defaults()
    configurations = (data.config_from_atoms(frame, keys) for frame in frames)
    return [data.AtomicData.from_config(each, z_table=z_table, cutoff=cutoff) for each in configurations]


def stress_loss() -> torch.nn.Module:
    """Returns the loss that the model is trained with: of energies, forces and stress."""
    return mace.modules.WeightedEnergyForcesStressLoss(energy_weight=20.0, forces_weight=10.0, stress_weight=500.0)


def isolated_atom_energies(z_table: tools.AtomicNumberTable) -> np.ndarray:
    """Returns the EMT energy of one free atom of each element, in eV: MACE's E0s."""
    return np.array([Atoms([z], calculator=EMT()).get_potential_energy() for z in z_table.zs])


def build_model(loader: DataLoader, z_table: tools.AtomicNumberTable, cutoff: float, channels: int) -> torch.nn.Module:
    """Returns an untrained two-layer MACE, its scale and shift taken from the training set."""
    e0s = isolated_atom_energies(z_table)
    shift, scale = mace.modules.compute_mean_rms_energy_forces(loader, e0s)
    return mace.modules.ScaleShiftMACE(
        r_max=cutoff,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=mace.modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=mace.modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
        num_interactions=2,
        num_elements=len(z_table),
        hidden_irreps=o3.Irreps(f"{channels}x0e+{channels}x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        radial_MLP=[32, 32, 32],
        gate=torch.nn.functional.silu,
        atomic_energies=e0s,
        avg_num_neighbors=mace.modules.compute_avg_num_neighbors(loader),
        atomic_numbers=z_table.zs,
        correlation=2,
        atomic_inter_scale=scale,
        atomic_inter_shift=shift,
    )


def train(
    model: torch.nn.Module, train_loader: DataLoader, valid_loader: DataLoader, epochs: int, rate: float
) -> PrettyTable:
    """Fits ``model`` in place and returns the table of validation errors.

    The learning rate rises and falls once over the whole run; an exponential moving average of the parameters smooths
    the last steps, and the averaged parameters are the ones kept.
    """
    device = torch.device("cpu")
    loss = stress_loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=epochs * len(train_loader), pct_start=0.1, final_div_factor=100.0
    )
    average = ExponentialMovingAverage(model.parameters(), decay=0.99)
    table = PrettyTable(["epoch", "energy (meV/atom)", "forces (meV/A)", "forces (%)", "stress (meV/A^3)"])
    table.float_format = ".2"

    with tqdm(total=epochs * len(train_loader), unit="step", desc="training") as bar:
        for epoch in range(1, epochs + 1):
            for batch in train_loader:
                take_step(model, loss, batch, optimizer, average, QUANTITIES, max_grad_norm=10.0, device=device)
                schedule.step()
                bar.update()
            last = epoch == epochs
            if last:
                average.copy_to()
            if last or epoch % max(1, epochs // 10) == 0:
                with nullcontext() if last else average.average_parameters():
                    _, errors = evaluate(model, loss, valid_loader, QUANTITIES, device)
                row = [1e3 * errors[k] for k in ("rmse_e_per_atom", "rmse_f", "rmse_stress")]
                table.add_row([epoch, row[0], row[1], errors["rel_rmse_f"], row[2]])
                bar.set_postfix_str(f"validation RMSE {row[1]:.1f} meV/A")
    return table


def in_double_precision(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the trained model in float64.

    It is built anew and only its parameters are copied: ``model.double()`` would keep the Clebsch-Gordan coefficients
    of a float32 model, rounded as they are, and with them an error of 1e-8 that no later precision takes away.
    """
    tools.set_default_dtype("float64")
    exact = type(model)(**extract_config_mace_model(model))
    with torch.no_grad():
        for target, source in zip(exact.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    return exact


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models", help="folder of the trained model")
    parser.add_argument("--name", default="cuau_emt", help="the file is NAME.model")
    parser.add_argument("--configurations", type=int, default=480, help="labelled frames, a tenth of them to validate")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.01, help="highest learning rate")
    parser.add_argument("--channels", type=int, default=32, help="channels per degree of the hidden features")
    parser.add_argument("--cutoff", type=float, default=5.0, help="in angstrom")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of the training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--smoke", action="store_true", help="a handful of frames, one epoch, 8 channels")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.configurations, options.epochs, options.channels = 10, 1, 8
    return options


def main(arguments: list[str] | None = None) -> Path:
    """Makes the data, trains, prints the validation table, and returns the path of the saved model."""
    options = parse_arguments(arguments)
    logging.getLogger().setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    tools.set_default_dtype(options.dtype)
    tools.set_seeds(options.seed)
    rng = np.random.default_rng(options.seed)

    frames = list(
        tqdm(sample_configurations(options.configurations, rng), total=options.configurations, desc="EMT frames")
    )
    z_table = tools.AtomicNumberTable([29, 79])
    graphs = graphs_of(frames, z_table, options.cutoff)
    # Whole runs go to one side: frames of the same run resemble each other and would flatter the validation.
    held_out = max(2, len(graphs) // 10)
    train_loader = DataLoader(graphs[held_out:], batch_size=options.batch_size, shuffle=True, drop_last=True)
    valid_loader = DataLoader(graphs[:held_out], batch_size=options.batch_size)

    model = build_model(train_loader, z_table, options.cutoff, options.channels)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(graphs) - held_out} frames to train on")
    print(train(model, train_loader, valid_loader, options.epochs, options.rate))

    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}.model"
    torch.save(in_double_precision(model), path)
    print(f"saved {path} ({path.stat().st_size / 1e6:.1f} MB, float64)")
    return path


if __name__ == "__main__":
    main()
