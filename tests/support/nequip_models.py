"""Small NequIP models with random weights, what NequIP makes of structures, and NequIP's packages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ase
import numpy as np
import torch
from built_once import built_once
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel, PresetNequIPGNNModel
from nequip.model.saved_models import load_saved_model
from nequip.scripts import _package_utils
from nequip.utils.global_state import set_global_state
from structures import crystal_and_molecule

from eqaccel import report

_dtype = torch.get_default_dtype()
set_global_state()
torch.set_default_dtype(_dtype)  # see the fixture nequip_defaults

ELEMENTS = ["H", "C", "O"]
CUTOFF = 3.0
KINDS = ("S", "M", "L", "XL", "parity")


@built_once
def model(kind: str = "small", dtype: str = "float64", **changes: Any) -> torch.nn.Module:
    """A model made by NequIP's own builders, the same at every call.

    Args:
        kind: A preset of NequIP's, of three layers at most, as all but the first and the last have the same kernels;
            "parity" for features of both parities; "small" for three layers of few features.
        dtype: What it computes in.
        changes: Further arguments of the builder.
    """
    options = {"seed": 1, "model_dtype": dtype, "r_max": CUTOFF, "type_names": ELEMENTS, "avg_num_neighbors": 9.0}
    options["per_type_energy_scales"] = dict(zip(ELEMENTS, (0.5, 1.0, 1.5), strict=True))
    options["per_type_energy_shifts"] = dict(zip(ELEMENTS, (-1.0, -2.0, -3.0), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "parity":
            shape = {"num_layers": 3, "l_max": 2, "parity": True, "num_features": 32}
            built = NequIPGNNModel(**options | shape | changes)
        elif kind == "small":
            shape = {"num_layers": 3, "l_max": 1, "parity": False, "num_features": [8, 4], "radial_mlp_width": 8}
            built = NequIPGNNModel(**options | shape | changes)
        else:
            shape = {"num_layers": 2 if kind == "S" else 3}
            built = PresetNequIPGNNModel(preset=kind, **options | shape | changes)
    return built.eval()


def replaced_layers(model: torch.nn.Module) -> int:
    """Number of layers whose convolution is eqaccel's."""
    return sum(row.accelerated and row.kind == "TensorProductScatter" for row in report(model).rows)


def structures() -> list[ase.Atoms]:
    """A sheared periodic crystal of three elements, and a molecule in a large cell with an atom out of reach."""
    crystal, molecule = crystal_and_molecule(np.random.default_rng(3))
    molecule.set_cell([20] * 3)
    return [crystal, molecule]


def transforms(cutoff: float = CUTOFF) -> list[torch.nn.Module]:
    """What NequIP's calculator does to a structure: atom types, then neighbours."""
    species = {element: element for element in ELEMENTS}
    return [ChemicalSpeciesToAtomTypeMapper(ELEMENTS, species), NeighborListTransform(r_max=cutoff)]


def data(
    atoms: list[ase.Atoms] | None = None, device: torch.device | str = "cpu", cutoff: float = CUTOFF
) -> dict[str, torch.Tensor]:
    """The dictionary that NequIP makes of structures, a fresh one at every call."""
    frames = []
    for structure in structures() if atoms is None else atoms:
        frame = from_ase(structure)
        for transform in transforms(cutoff):
            frame = transform(frame)
        frames.append(frame)
    return AtomicDataDict.to_(AtomicDataDict.batched_from_list(frames), device)


def packaged(built: torch.nn.Module, path: Path) -> torch.nn.Module:
    """The model as nequip loads it from a package like those of nequip-package: of renamed classes throughout."""
    metadata = "{package_version_id: 1, available_models: [eager]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.package.PackageExporter(str(path)) as exporter:
            exporter.mock([f"{name}.**" for name in _package_utils._MOCK_MODULES])
            exporter.extern([f"{name}.**" for name in _package_utils._EXTERNAL_MODULES])
            exporter.intern([f"{name}.**" for name in _package_utils._INTERNAL_MODULES])
            exporter.save_text("model", "package_metadata.txt", metadata)
            exporter.save_pickle("model", "eager_model.pkl", torch.nn.ModuleDict({"sole_model": built}))
            exporter.save_pickle("model", "example_data.pkl", data(structures()[:1]))
        loaded = load_saved_model(path)
    assert type(loaded) is not type(built)
    return loaded
