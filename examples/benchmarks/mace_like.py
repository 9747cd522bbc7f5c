"""MACE models with random weights, as they are and as its switches convert them; a crystal for them, and its input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import ase.build
import mace  # noqa: F401  (before e3nn: it sets what e3nn 0.4.4 needs under a recent torch)
import numpy as np
import torch
from e3nn import o3
from eqaccel.patches.verify import default_dtype
from mace import data as mace_data
from mace import modules
from mace.tools import torch_geometric, utils
from torch import Tensor

import eqaccel

CUTOFF = 6.0  # angstrom


@dataclass(frozen=True)
class Shape:
    """The shape of a two-layer ScaleShiftMACE.

    Attributes:
        elements: Number of chemical elements that it knows.
        channels: Channels of every irrep.
        irreps: Irreps between the layers.
        layers: The problems of `problems.py` that its two convolutions are, if it has 128 channels.
    """

    elements: int
    channels: int
    irreps: tuple[str, ...]
    layers: tuple[str, str]


MODELS = {
    "mp0-medium": Shape(89, 128, ("0e", "1o"), ("mp0-first", "mp0-second")),
    "large": Shape(8, 128, ("0e", "1o", "2e"), ("mp0-first", "mp0-large-second")),
}
"""MACE-MP-0 medium, and the model of the paper: "large", with eight elements."""


def build_model(dtype: torch.dtype, shape: Shape) -> torch.nn.Module:
    """A model with random weights."""
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
            num_elements=shape.elements,
            hidden_irreps=o3.Irreps("+".join(f"{shape.channels}x{ir}" for ir in shape.irreps)),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.linspace(-5.0, -1.0, shape.elements),
            avg_num_neighbors=60.0,
            atomic_numbers=list(range(1, shape.elements + 1)),
            correlation=3,
            gate=torch.nn.functional.silu,
            radial_MLP=[64, 64, 64],
            atomic_inter_scale=0.8,
            atomic_inter_shift=0.16,
        )
    return model.requires_grad_(False)


def _patched(model: torch.nn.Module, device: str) -> torch.nn.Module:
    return eqaccel.patch(copy.deepcopy(model))


def _cuequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import cuequivariance_torch  # noqa: F401  (mace itself would build a slow model without it)
    from mace.cli import convert_e3nn_cueq

    return _converted(convert_e3nn_cueq.run, model, device)


def _openequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import openequivariance  # noqa: F401
    from mace.cli import convert_e3nn_oeq

    return _converted(convert_e3nn_oeq.run, model, device)


def _converted(convert: Callable[..., torch.nn.Module], model: torch.nn.Module, device: str) -> torch.nn.Module:
    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    with default_dtype(next(model.parameters()).dtype):
        return convert(model, device=device).requires_grad_(False)


VARIANTS: dict[str, Callable[[torch.nn.Module, str], torch.nn.Module]] = {
    "eqaccel": _patched,
    "cuEquivariance": _cuequivariance,
    "OpenEquivariance": _openequivariance,
}
"""What makes a model with each library out of a plain one, as its users do."""


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
