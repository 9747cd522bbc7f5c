"""Small MACE models with random weights, one builder per kind, and inputs for them made by MACE itself.

Import this before anything of e3nn: `import mace` sets what e3nn 0.4.4 needs under a recent torch.
"""

from __future__ import annotations

from typing import Any

import ase
import mace  # noqa: F401
import numpy as np
import torch
from built_once import built_once
from e3nn import o3
from mace import data as mace_data
from mace import modules
from mace.tools import torch_geometric, utils
from structures import crystal_and_molecule

from eqaccel.patches.torch_state import default_dtype

ELEMENTS = (1, 6, 8)
CUTOFF = 3.0

INTERACTIONS = (
    "RealAgnosticInteractionBlock",
    "RealAgnosticResidualInteractionBlock",
    "RealAgnosticDensityInteractionBlock",
    "RealAgnosticDensityResidualInteractionBlock",
    "RealAgnosticAttResidualInteractionBlock",
    "RealAgnosticResidualNonLinearInteractionBlock",
)


def _options(interaction: str, hidden_irreps: str, elements: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    block = getattr(modules, interaction, None) or getattr(modules.blocks, interaction)
    options = {
        "r_max": CUTOFF,
        "num_bessel": 4,
        "num_polynomial_cutoff": 5,
        "max_ell": 2,
        "interaction_cls": block,
        "interaction_cls_first": block,
        "num_interactions": 2,
        "num_elements": len(elements),
        "hidden_irreps": o3.Irreps(hidden_irreps),
        "MLP_irreps": o3.Irreps("8x0e"),
        "atomic_energies": np.linspace(-3.0, -1.0, len(elements)),
        "avg_num_neighbors": 6.0,
        "atomic_numbers": list(elements),
        "correlation": 2,
        "gate": torch.nn.functional.silu,
        "radial_MLP": [16, 16],
    }
    return options | changes


TINY: dict[str, Any] = {"hidden_irreps": "4x0e", "max_ell": 1, "correlation": 1, "radial_MLP": [8]}
"""Of an `energy_model` with few and small kernels, for what depends on no number of them."""


@built_once
def energy_model(
    interaction: str = "RealAgnosticResidualInteractionBlock",
    *,
    hidden_irreps: str = "8x0e+8x1o",
    dtype: torch.dtype = torch.float64,
    cls: type = modules.ScaleShiftMACE,
    **changes: Any,
) -> torch.nn.Module:
    """A two-layer `ScaleShiftMACE` (or a class derived from MACE) of one kind of interaction block."""
    if issubclass(cls, modules.ScaleShiftMACE):
        changes = {"atomic_inter_scale": 1.3, "atomic_inter_shift": 0.1} | changes
    with default_dtype(dtype):
        torch.manual_seed(7)
        return cls(**_options(interaction, hidden_irreps, ELEMENTS, **changes))


def mp0_medium_like(dtype: torch.dtype = torch.float32, num_elements: int = 89) -> torch.nn.Module:
    """The architecture of MACE-MP-0 medium: 128x0e+128x1o, degrees up to 3, correlation 3, cutoff 6 angstrom."""
    with default_dtype(dtype):
        torch.manual_seed(7)
        options = _options(
            "RealAgnosticResidualInteractionBlock",
            "128x0e+128x1o",
            tuple(range(1, num_elements + 1)),
            r_max=6.0,
            num_bessel=10,
            max_ell=3,
            MLP_irreps=o3.Irreps("16x0e"),
            avg_num_neighbors=60.0,
            correlation=3,
            radial_MLP=[64, 64, 64],
        )
        return modules.ScaleShiftMACE(atomic_inter_scale=0.8, atomic_inter_shift=0.16, **options)


@built_once
def dipole_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """An `AtomicDipolesMACE`: dipoles only."""
    with default_dtype(dtype):
        torch.manual_seed(7)
        options = _options("RealAgnosticResidualInteractionBlock", "8x0e+8x1o", ELEMENTS)
        return modules.AtomicDipolesMACE(**options | {"atomic_energies": None, "MLP_irreps": o3.Irreps("8x1o")})


@built_once
def energy_dipole_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """An `EnergyDipolesMACE`: energy, forces, stress and dipoles."""
    with default_dtype(dtype):
        torch.manual_seed(7)
        options = _options("RealAgnosticResidualInteractionBlock", "8x0e+8x1o", ELEMENTS)
        return modules.EnergyDipolesMACE(**options | {"MLP_irreps": o3.Irreps("8x0e+8x1o")})


@built_once
def dielectric_model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """An `AtomicDielectricMACE`: charges, dipoles, polarizabilities and their derivatives."""
    with default_dtype(dtype):
        torch.manual_seed(7)
        options = _options("RealAgnosticResidualInteractionBlock", "8x0e+8x1o+8x2e", ELEMENTS)
        mlp = o3.Irreps("8x0e+8x1o+8x2e")
        model = modules.AtomicDielectricMACE(**options | {"atomic_energies": None, "MLP_irreps": mlp})
    # Its constants are made in single precision whatever the default is.
    return model.to(dtype)


def structures() -> list[ase.Atoms]:
    """A sheared periodic crystal of three elements and a molecule with an atom out of reach of the others."""
    rng = np.random.default_rng(3)
    crystal, molecule = crystal_and_molecule(rng)
    for atoms in (crystal, molecule):
        atoms.arrays["charges"] = rng.uniform(-0.5, 0.5, len(atoms))
    return [crystal, molecule]


def batch(
    model: torch.nn.Module, atoms: list[ase.Atoms] | None = None, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The input dictionary that MACE's own data loader makes, a fresh one at every call, where the model is."""
    atoms = structures() if atoms is None else atoms
    like = next(model.parameters())
    dtype = dtype or like.dtype
    table = utils.AtomicNumberTable([int(z) for z in model.atomic_numbers])
    keys = mace_data.KeySpecification(info_keys={"total_charge": "charge"}, arrays_keys={"charges": "charges"})
    with default_dtype(dtype):
        configs = [mace_data.config_from_atoms(frame, key_specification=keys) for frame in atoms]
        graphs = [
            mace_data.AtomicData.from_config(config, z_table=table, cutoff=float(model.r_max)) for config in configs
        ]
        loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs), shuffle=False)
        return next(iter(loader)).to(like.device).to_dict()
