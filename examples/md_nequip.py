"""Molecular dynamics with a NequIP model, before and after `eqaccel.patch`.

    python examples/md_nequip.py                                       # preset M on a water box, random weights
    python examples/md_nequip.py --preset L --atoms 648
    python examples/md_nequip.py --model my.nequip.zip --structure my.xyz    # a package, or a checkpoint
    python examples/md_nequip.py --model nequip.net:mir-group/NequIP-OAM-L:0.1 --structure my.xyz

Without ``--model`` the weights are random, scaled to forces of 0.5 eV/A on average, with a short-ranged repulsion that
keeps atoms from running into each other. A step costs what it costs with a trained model of that architecture, and
forces and their differences are of the usual size, but this is no model of water: molecules do not hold together.
`md.py` says what is done with the model.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.build import molecule
from md import add_arguments, compare, parse, thermalize
from nequip.data import AtomicDataDict
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.ase import NequIPCalculator
from nequip.model import PresetNequIPGNNModel
from nequip.model.saved_models import load_saved_model
from nequip.nn import GraphModuleMixin
from nequip.utils.global_state import set_global_state

WATER = ("H", "O")
SPACING = 3.1  # between molecules, in angstrom: the density of water at room temperature
MEAN_FORCE = 0.5  # of random weights, in eV/A


def water_box(molecules: int, rng: np.random.Generator) -> Atoms:
    """Returns ``molecules``^3 water molecules on a cubic lattice, turned at random."""
    box = Atoms(cell=[SPACING * molecules] * 3, pbc=True)
    for site in np.ndindex(molecules, molecules, molecules):
        water = molecule("H2O")
        water.rotate(rng.uniform(0, 360), rng.normal(size=3), center="COM")
        water.translate(SPACING * np.array(site) - water.get_center_of_mass())
        box += water
    return box


class Repulsion(GraphModuleMixin, torch.nn.Module):
    """Adds 400 eV exp(-r / 0.09 A) for every pair of atoms: nothing at the length of a bond, a wall at half of that."""

    def __init__(self, type_names: list[str], irreps_in: dict[str, object]) -> None:
        super().__init__()
        field = AtomicDataDict.PER_ATOM_ENERGY_KEY
        self._init_irreps(irreps_in=irreps_in, irreps_out={field: irreps_in[field]})

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        """Adds the energies of an atom's edges, each of which is one of the two of its pair."""
        energies = data[AtomicDataDict.PER_ATOM_ENERGY_KEY]
        halves = 200.0 * torch.exp(data[AtomicDataDict.EDGE_LENGTH_KEY] / -0.09)
        centers = data[AtomicDataDict.EDGE_INDEX_KEY][0]
        data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = energies.index_add(0, centers, halves.to(energies.dtype))
        return data


def random_model(preset: str, dtype: str, cutoff: float, example: Atoms) -> torch.nn.Module:
    """Returns a model of one of NequIP's presets with random weights, scaled to `MEAN_FORCE` on the ``example``."""

    def build(scale: float) -> torch.nn.Module:
        return PresetNequIPGNNModel(
            preset=preset,
            seed=1,
            model_dtype=dtype,
            r_max=cutoff,
            type_names=WATER,
            avg_num_neighbors=cutoff**3 * 4 / 3 * np.pi * 3 / SPACING**3,
            per_type_energy_scales=scale,
            per_type_energy_shifts=0.0,
            pair_potential={"_target_": Repulsion},
        ).eval()

    forces = calculator_of(build(1.0), "cpu").get_forces(example)
    return build(MEAN_FORCE / float(np.linalg.norm(forces, axis=1).mean()))


def calculator_of(model: torch.nn.Module, device: str) -> NequIPCalculator:
    """Returns NequIP's calculator for a model whose atom types are named after elements."""
    types = model.type_names
    species = ChemicalSpeciesToAtomTypeMapper(types, {name: name for name in types})
    neighbours = NeighborListTransform(r_max=float(model.metadata["r_max"]))
    return NequIPCalculator(model, device, transforms=[species, neighbours])


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Runs the comparison and returns what is written to ``results.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="package, checkpoint or nequip.net model, with a dtype and a cutoff of its own")
    parser.add_argument("--preset", choices=("S", "M", "L", "XL"), default="M", help="model with random weights")
    parser.add_argument("--cutoff", type=float, default=5.0, help="of the model with random weights, in angstrom")
    parser.add_argument("--structure", type=Path, help="any file that ASE reads (default: a water box)")
    parser.add_argument("--atoms", type=int, default=192, help="size of the water box, to the nearest whole cube")
    add_arguments(parser, steps=240, reference_steps=10, temperature=300.0, timestep=0.5)
    options = parse(parser, arguments)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|e3nn|nequip")
    set_global_state()  # NequIP's own defaults of torch, before a model is built or loaded

    rng = np.random.default_rng(options.seed)
    water = water_box(max(1, round((options.atoms / 3) ** (1 / 3))), rng)
    start = ase.io.read(options.structure) if options.structure else water
    thermalize(start, options.temperature, rng)
    if options.model:
        model, title = load_saved_model(options.model).eval(), Path(options.model).stem
        options.dtype = model.metadata["model_dtype"]
    else:
        model, title = random_model(options.preset, options.dtype, options.cutoff, water), f"NequIP {options.preset}"
    return compare(calculator_of(model, options.device), start, options, title, ("torch", "nequip", "e3nn", "ase"))


if __name__ == "__main__":
    main()
