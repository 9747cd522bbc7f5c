"""A MACE model with random weights, a crystal for it, and its input."""

from __future__ import annotations

import ase.build
import mace  # noqa: F401  (before e3nn: it sets what e3nn 0.4.4 needs under a recent torch)
import numpy as np
import torch
from e3nn import o3
from mace import data as mace_data
from mace import modules
from mace.tools import torch_geometric, utils
from peers import default_dtype
from torch import Tensor

CUTOFF = 5.0  # angstrom


def build_model(dtype: torch.dtype, elements: int, channels: int) -> torch.nn.Module:
    """A two-layer ScaleShiftMACE with random weights."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        model = modules.ScaleShiftMACE(
            r_max=CUTOFF,
            num_bessel=10,
            num_polynomial_cutoff=5,
            max_ell=3,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            num_interactions=2,
            num_elements=elements,
            hidden_irreps=o3.Irreps(f"{channels}x0e+{channels}x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.linspace(-5.0, -1.0, elements),
            avg_num_neighbors=60.0,
            atomic_numbers=list(range(1, elements + 1)),
            correlation=3,
            gate=torch.nn.functional.silu,
            radial_MLP=[64, 64, 64],
            atomic_inter_scale=0.8,
            atomic_inter_shift=0.16,
        )
    return model.requires_grad_(False)


def diamond(atoms: int) -> ase.Atoms:
    """A cube of diamond of at least so many atoms, jittered so that no force is zero."""
    cells = max(1, round((atoms / 8) ** (1 / 3)))
    crystal = ase.build.bulk("C", "diamond", a=3.567, cubic=True) * (cells, cells, cells)
    crystal.rattle(0.02, seed=0)
    return crystal


def make_batch(model: torch.nn.Module, atoms: ase.Atoms, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The input of the model, as MACE's own data loader makes it."""
    with default_dtype(dtype):
        table = utils.AtomicNumberTable([int(z) for z in model.atomic_numbers])
        config = mace_data.config_from_atoms(atoms)
        graph = mace_data.AtomicData.from_config(config, z_table=table, cutoff=float(model.r_max))
        loader = torch_geometric.dataloader.DataLoader([graph], batch_size=1, shuffle=False)
        return {name: value.to(device) for name, value in next(iter(loader)).to_dict().items() if value is not None}
