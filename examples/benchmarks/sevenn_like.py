"""SevenNet models with random weights, as they are and as its own switches build them, on water and diamond."""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ase
import sevenn
import torch
from sevenn._const import DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator
from sevenn.checkpoint import SevenNetCheckpoint
from sevenn.model_build import build_E3_equivariant_model
from sevenn.nn.convolution import message_gather
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevenn.util import chemical_species_preprocess
from torch import Tensor
from torch_geometric.loader.dataloader import Collater

from eqaccel.benchmarks.families import ModelCase
from eqaccel.benchmarks.structures import water
from eqaccel.ops.graph import packed_rows
from eqaccel.patches import Replacement
from eqaccel.patches.sevennet.parts import convolutions, one_hot_in
from eqaccel.patches.torch_state import default_dtype

CUTOFF = 5.0  # angstrom
ELEMENTS = ("H", "C", "O", "Si")
_LAYERS = 5

MODELS: Mapping[str, tuple[tuple[int, str], ...]] = MappingProxyType(
    {
        "sevennet-0": ((128, "0e"), (64, "1e"), (32, "2e")),
        "sevennet-l3i5": ((128, "0e"), (64, "1e"), (32, "2e"), (32, "3e")),
    }
)
"""The features between the layers of SevenNet-0 and SevenNet-l3i5."""


def configuration(model: str, channels: int | None = None) -> dict[str, Any]:
    """What SevenNet builds a model from, by its name; of other multiplicities, for the scalars, if these are given."""
    features = [(mul if channels is None else max(1, channels * mul // 128), ir) for mul, ir in MODELS[model]]
    scalars, hidden = f"{features[0][0]}x0e", "+".join(f"{mul}x{ir}" for mul, ir in features)
    cutoff = {"cutoff_function_name": "poly_cut", "poly_cut_p_value": 6}
    return {
        **copy.deepcopy(DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG),
        **chemical_species_preprocess(list(ELEMENTS)),
        "version": sevenn.__version__,
        "cutoff": CUTOFF,
        "channel": features[0][0],
        "irreps_manual": [scalars, *[hidden] * (_LAYERS - 1), scalars],
        "lmax": len(features) - 1,
        "is_parity": False,
        "num_convolution_layer": _LAYERS,
        "cutoff_function": {"cutoff_function_name": "XPLOR", "cutoff_on": 4.5} if model == "sevennet-0" else cutoff,
        "self_connection_type": "linear",
        "conv_denominator": 50.0,
        "shift": 0.0,
        "scale": 1.0,
    }


def build_model(dtype: torch.dtype, config: Mapping[str, Any]) -> torch.nn.Module:
    """A model with random weights; SevenNet's own are float32 whatever the default is, so all are converted."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        return build_E3_equivariant_model(dict(config)).to(dtype).eval().requires_grad_(False)


def make_inputs(structures: Sequence[ase.Atoms], dtype: torch.dtype) -> dict[str, Tensor]:
    """The input of a model, as SevenNet's own data loader makes it, but in any dtype."""
    graphs = [unlabeled_atoms_to_graph(atoms, CUTOFF) for atoms in structures]
    frames = [AtomGraphData.from_numpy_dict(dict(graph)) for graph in graphs]
    tensors = {name: value for name, value in Collater(frames)(frames).items() if isinstance(value, Tensor)}
    tensors["edge_vec"] = torch.cat([torch.from_numpy(graph["edge_vec"]) for graph in graphs])
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def _switched(switch: str, model: torch.nn.Module, device: str) -> torch.nn.Module:
    """The model as SevenNet's loader gives it of a checkpoint, with one of the loader's switches on."""
    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*allback to e3nn")  # where a switch changes nothing, SevenNet says so
        file = Path(folder) / "checkpoint.pth"
        torch.save({"config": model.eqaccel_configuration, "model_state_dict": model.state_dict()}, file)
        switched = SevenNetCheckpoint(file).build_model(**{switch: True})
    return switched.to(device).eval().requires_grad_(False)


def _cuequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import cuequivariance_torch  # noqa: F401

    return _switched("enable_cueq", model, device)


def _openequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import openequivariance  # noqa: F401

    return _switched("enable_oeq", model, device)


class Case(ModelCase):
    """A SevenNet model on water."""

    variants = MappingProxyType({"cuEquivariance": _cuequivariance, "OpenEquivariance": _openequivariance})

    @staticmethod
    def sizes(model: str, device: str) -> Sequence[int]:
        """Some thousand atoms for a GPU."""
        return (192,) if device == "cpu" else (192, 1029)

    @staticmethod
    def systems(model: str, device: str) -> Sequence[str]:
        """Water, and for a GPU carbon."""
        return ("carbon-1000", "water-1029") if device == "cuda" else ("water-192",)

    @staticmethod
    def training_systems(model: str) -> Sequence[str]:
        """Carbon and water of about as many atoms."""
        return ("carbon-64", "water-81")

    @staticmethod
    def plain_model(model: str, options: argparse.Namespace) -> torch.nn.Module:
        """The model, of other multiplicities if these are given."""
        config = configuration(model, options.channels)
        built = build_model(getattr(torch, options.dtype), config)
        built.eqaccel_configuration = config
        return built

    @staticmethod
    def multiply_energies(model: torch.nn.Module, factor: float) -> None:
        """By the scale of its `Rescale`."""
        model.rescale_atomic_energy.scale *= factor

    @staticmethod
    def calculator(model: torch.nn.Module, device: str, compiled: bool = False) -> SevenNetCalculator:
        """SevenNet's, which computes in float32 alone."""
        if compiled:
            raise NotImplementedError("SevenNet has no compiled models")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends other accelerators
            return SevenNetCalculator(model, device=device)

    @staticmethod
    def working_dtype(dtype: torch.dtype) -> torch.dtype:
        """That of SevenNet's data, whatever a model computes in."""
        return torch.float32

    @classmethod
    def build(cls, model: str, atoms: int, options: argparse.Namespace) -> Case:
        """The model, of other multiplicities if these are given."""
        dtype = getattr(torch, options.dtype)
        plain = cls.plain_model(model, options).to(options.device)
        structure = water(atoms)
        exact = plain if dtype == torch.float64 else cls.exact_model(model, plain, options).to(options.device)
        inputs = {name: value.to(options.device) for name, value in make_inputs([structure], dtype).items()}
        return cls(plain, exact, inputs, len(structure))

    @staticmethod
    def batch(model: torch.nn.Module, structures: Sequence[ase.Atoms], dtype: torch.dtype) -> dict[str, Tensor]:
        """As `make_inputs`."""
        return make_inputs(structures, dtype)

    @staticmethod
    def evaluate(model: torch.nn.Module, inputs: dict[str, Tensor], training: bool = False) -> dict[str, Tensor]:
        """Energy, forces and stress."""
        dtype = next(model.parameters()).dtype
        given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        with one_hot_in(model, dtype):
            outputs = model.train(training)(given)
        return {**outputs, "energy": outputs["inferred_total_energy"], "forces": outputs["inferred_force"]}

    def products(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The `IrrepsConvolution` of the layers."""
        return [module for _, _, module in convolutions(model)]

    @staticmethod
    def operands(product: torch.nn.Module, *given: Any) -> Sequence[Tensor]:
        """A product takes the data of the model, and makes weights itself."""
        (data,) = given
        return data["x"], data["edge_attr"], product.weight_nn(data["edge_embedding"])

    def convolve(self, product: torch.nn.Module, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """As its modules do, whose edges start at their receivers."""
        receiver, sender = edge_index
        if isinstance(product, Replacement):
            return product.eqaccel(x, y, w, packed_rows(receiver, sender, len(x), len(x)), len(x))
        return message_gather(x, receiver, product.convolution(x[sender], y, w))
