"""Small SevenNet models with random weights, in float64 too, what SevenNet makes of structures, and its checkpoints."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import ase
import numpy as np
import sevenn
import torch
from built_once import built_once
from sevenn._const import DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator
from sevenn.model_build import build_E3_equivariant_model
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevenn.train.trainer import Trainer
from sevenn.util import chemical_species_preprocess
from structures import crystal_and_molecule
from torch_geometric.loader.dataloader import Collater

from eqaccel import report
from eqaccel.patches.torch_state import default_dtype

ELEMENTS = ["H", "C", "O"]
CUTOFF = 3.0
MODALITIES = {"mpa": 0, "omat24": 1}

_EVEN = {"is_parity": False, "self_connection_type": "linear"}
_FULL = {"is_parity": True, "self_connection_type": "nequip"}
_XPLOR = {"cutoff_function_name": "XPLOR", "cutoff_on": 2.5}
_SEVERAL = {
    "use_modality": True,
    "_number_of_modalities": 2,
    "_modal_map": MODALITIES,
    "use_modal_self_inter_intro": True,
    "use_modal_self_inter_outro": True,
    "use_modal_output_block": True,
    "use_modal_wise_shift": True,
    "use_modal_wise_scale": False,
    "shift": {"mpa": -1.5, "omat24": 2.5},
    "scale": 1.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "0": _EVEN
    | {
        "lmax": 2,
        "irreps_manual": ["4x0e", "4x0e+2x1e+1x2e", "4x0e"],
        "cutoff_function": _XPLOR,
        "shift": [-1.0, -2.0, -3.0],
        "scale": [0.5, 1.0, 1.5],
    },
    "l3i5": _EVEN
    | {"lmax": 3, "irreps_manual": ["4x0e", "4x0e+3x1e+2x2e+1x3e", "4x0e"], "conv_denominator": [3.5, 2.5]},
    "mf-ompa": _FULL
    | _SEVERAL
    | {
        "lmax": 1,
        # What is odd and not a vector reaches the energy after four layers.
        "num_convolution_layer": 4,
        "irreps_manual": ["4x0e", "4x0e+2x1o", "1x0o+4x0e+2x1o+1x1e", "4x0e+2x1o", "4x0e"],
        "cutoff_function": _XPLOR,
    },
    "omni": _FULL
    | _SEVERAL
    | {
        "lmax": 1,
        "irreps_manual": ["4x0e", "4x0e+2x1o", "4x0e"],
        "use_modal_node_embedding": True,
        "use_modal_wise_scale": True,
        "scale": {"mpa": 1.5, "omat24": 0.5},
    },
}
"""The architectures of SevenNet's potentials, with few features and layers, so that they share kernels."""


def configuration(kind: str, **changes: Any) -> dict[str, Any]:
    """What SevenNet builds a model from, and writes into checkpoints."""
    defaults = copy.deepcopy(DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG)
    own = {"cutoff": CUTOFF, "conv_denominator": 3.0, "weight_nn_hidden_neurons": [8], "num_convolution_layer": 2}
    own["version"] = sevenn.__version__
    elements = chemical_species_preprocess(ELEMENTS)
    return defaults | own | {"shift": -1.0, "scale": 1.5} | elements | KINDS[kind] | changes


@built_once
def model(kind: str = "0", dtype: str = "float32", **changes: Any) -> torch.nn.Module:
    """A model made by SevenNet's own builder, the same at every call.

    Args:
        kind: One of `KINDS`.
        dtype: What it computes in. SevenNet knows float32 alone: whatever torch's default is, it makes some parameters
            and embeds elements in that. A model in float64 is one that has been helped there.
        changes: Of the configuration.
    """
    torch.manual_seed(1)
    with default_dtype(getattr(torch, dtype)):
        built = build_E3_equivariant_model(configuration(kind, **changes)).to(getattr(torch, dtype)).eval()
    for module in built.modules():
        if dtype == "float64" and type(module).__name__ == "OnehotEmbedding":
            module.register_forward_hook(_widen)
    return built


def _widen(module: Any, _: Any, data: Any) -> None:
    for key in filter(None, (module.key_output, module.key_additional_output)):
        data[key] = data[key].double()


def is_several(model: torch.nn.Module) -> bool:
    """Whether a model has modalities."""
    return bool(getattr(model, "modal_map", None))


def replaced_layers(model: torch.nn.Module) -> int:
    """Number of layers whose convolution is eqaccel's."""
    return sum(row.accelerated and row.kind == "IrrepsConvolution" for row in report(model).rows)


def structures() -> list[ase.Atoms]:
    """A sheared periodic crystal of three elements, and a molecule in a large cell with an atom out of reach."""
    crystal, molecule = crystal_and_molecule(np.random.default_rng(3))
    molecule.set_cell([20] * 3)
    return [crystal, molecule]


def data(
    model: torch.nn.Module, atoms: list[ase.Atoms] | None = None, modality: str = "omat24", device: Any = "cpu"
) -> Any:
    """A batch as SevenNet's data loaders make it, in the dtype of the model; a fresh one at every call."""
    frames = []
    for structure in structures() if atoms is None else atoms:
        frame = AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(structure, CUTOFF))
        if is_several(model):
            frame["data_modality"] = modality
        frames.append(frame)
    batch = Collater(frames)(frames).to(device)
    if next(model.parameters()).dtype == torch.float64:  # SevenNet rounds to float32
        vectors = [unlabeled_atoms_to_graph(a, CUTOFF)["edge_vec"] for a in (structures() if atoms is None else atoms)]
        batch["edge_vec"] = torch.from_numpy(np.concatenate(vectors)).to(device)
        batch["cell_volume"] = batch["cell_volume"].double()
    return batch


def outputs(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """What a model predicts."""
    found = model(batch)
    names = ("inferred_total_energy", "atomic_energy", "inferred_force", "inferred_stress", "inferred_atomic_virial")
    return {name: found[name] for name in names if name in found}


def calculator(model: torch.nn.Module | Path | str, modality: str = "omat24", **options: Any) -> SevenNetCalculator:
    """SevenNet's own calculator; of a pretrained model, by its name, `options` say the modality."""
    chosen = {"modal": modality} if isinstance(model, Path) or is_several(model) else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends other accelerators
        return SevenNetCalculator(model, **{"device": "cpu"} | chosen | options)


def checkpoint(path: Path, kind: str, model: torch.nn.Module) -> Path:
    """A checkpoint of a model in float32, as SevenNet's training writes it."""
    trainer = Trainer(model, [], torch.optim.Adam, device="cpu")
    trainer.write_checkpoint(str(path), config=configuration(kind), epoch=1)
    return path
