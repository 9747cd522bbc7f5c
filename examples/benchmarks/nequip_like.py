"""NequIP models with random weights, as they are and as its own modifiers change them, on water and diamond."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import ase
import torch
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.integrations.ase import NequIPCalculator
from nequip.model import NequIPGNNModel, PresetNequIPGNNModel, modify
from nequip.nn import PerTypeScaleShift
from nequip.nn.interaction_block import InteractionBlock
from nequip.utils.global_state import set_global_state
from torch import Tensor

from eqaccel.benchmarks.families import ModelCase
from eqaccel.benchmarks.structures import diamond, water
from eqaccel.patches.torch_state import default_dtype

CUTOFF = 6.0  # angstrom
ELEMENTS = ("H", "C", "O")

_nequip_defaults = partial(default_dtype, torch.float64)
"""NequIP makes float64 the default of the whole process, whatever a model computes in; here only where it runs."""


@dataclass(frozen=True)
class Shape:
    """The shape of a model, and what it is run on.

    Attributes:
        structure: Makes a structure of about so many atoms.
        atoms: How many, unless others are asked for.
        options: Of NequIP's builders.
    """

    structure: Callable[[int], ase.Atoms]
    atoms: int
    options: Mapping[str, Any]


MODELS = {
    "nequip-water": Shape(water, 5184, {"num_layers": 4, "l_max": 1, "parity": True, "num_features": 32}),
    "nequip-l": Shape(diamond, 1000, {"preset": "L"}),
    "nequip-m": Shape(water, 192, {"preset": "M"}),
}
"""A small model for a large box of water, and presets of NequIP's: one for GPUs, one that a CPU can run too."""


def build_model(dtype: torch.dtype, options: Mapping[str, Any]) -> torch.nn.Module:
    """A model with random weights."""
    builder = PresetNequIPGNNModel if "preset" in options else NequIPGNNModel
    with _nequip_defaults():
        set_global_state()
        model = builder(
            seed=0,
            model_dtype=str(dtype).removeprefix("torch."),
            r_max=CUTOFF,
            type_names=ELEMENTS,
            avg_num_neighbors=100.0,
            per_type_energy_scales=1.0,
            per_type_energy_shifts=0.0,
            **options,
        )
    return model.eval().requires_grad_(False)


def _transforms() -> list[Callable[..., Any]]:
    """What makes the input of a model out of a structure."""
    return [ChemicalSpeciesToAtomTypeMapper(ELEMENTS), NeighborListTransform(r_max=CUTOFF)]


def make_inputs(structures: Sequence[ase.Atoms]) -> dict[str, Tensor]:
    """The input of a model, as NequIP's own calculator and data loader make it."""
    frames = []
    with _nequip_defaults():
        for atoms in structures:
            data = from_ase(atoms)
            for transform in _transforms():
                data = transform(data)
            frames.append(data)
        return AtomicDataDict.batched_from_list(frames) if len(frames) > 1 else frames[0]


def _cuequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import cuequivariance_torch  # noqa: F401

    return _modified("enable_CuEquivariance", model, device)


def _openequivariance(model: torch.nn.Module, device: str) -> torch.nn.Module:
    import openequivariance  # noqa: F401

    return _modified("enable_OpenEquivariance", model, device)


def _modified(modifier: str, model: torch.nn.Module, device: str) -> torch.nn.Module:
    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    with _nequip_defaults():
        modified = modify(copy.deepcopy(model), [{"modifier": modifier}])
    return modified.to(device).eval().requires_grad_(False)


class Case(ModelCase):
    """A NequIP model on the structure that it is for."""

    variants = MappingProxyType({"cuEquivariance": _cuequivariance, "OpenEquivariance": _openequivariance})

    @staticmethod
    def sizes(model: str, device: str) -> Sequence[int]:
        """One for each model."""
        return (MODELS[model].atoms,)

    @staticmethod
    def systems(model: str, device: str) -> Sequence[str]:
        """Carbon and a large box of water."""
        return ("carbon-1000", "water-5184") if device == "cuda" else ("carbon-64", "water-192")

    @staticmethod
    def training_systems(model: str) -> Sequence[str]:
        """Carbon and water of about as many atoms."""
        return ("carbon-64", "water-81")

    @staticmethod
    def plain_model(model: str, options: argparse.Namespace) -> torch.nn.Module:
        """The model, of other multiplicities if these are given."""
        return build_model(getattr(torch, options.dtype), _options(model, options))

    @staticmethod
    def multiply_energies(model: torch.nn.Module, factor: float) -> None:
        """By its `PerTypeScaleShift`."""
        for module in model.modules():
            if isinstance(module, PerTypeScaleShift):
                module.scales *= factor

    @staticmethod
    def calculator(model: torch.nn.Module, device: str, compiled: bool = False) -> NequIPCalculator:
        """NequIP's; it compiles models in files of their own, ahead of time."""
        if compiled:
            raise NotImplementedError("NequIP compiles packaged models, ahead of time")
        return NequIPCalculator(model, device, transforms=_transforms())

    @staticmethod
    def working_dtype(dtype: torch.dtype) -> torch.dtype:
        """That of NequIP's data, whatever a model computes in."""
        return torch.float64

    @classmethod
    def build(cls, model: str, atoms: int, options: argparse.Namespace) -> Case:
        """The model, of other multiplicities if these are given."""
        plain = cls.plain_model(model, options).to(options.device)
        structure = MODELS[model].structure(atoms)
        wide = getattr(torch, options.dtype) == torch.float64
        exact = plain if wide else cls.exact_model(model, plain, options).to(options.device)
        return cls(plain, exact, AtomicDataDict.to_(make_inputs([structure]), options.device), len(structure))

    @staticmethod
    def batch(model: torch.nn.Module, structures: Sequence[ase.Atoms], dtype: torch.dtype) -> dict[str, Tensor]:
        """As `make_inputs`; they are float64, whatever a model computes in."""
        return make_inputs(structures)

    @staticmethod
    def evaluate(model: torch.nn.Module, inputs: dict[str, Tensor], training: bool = False) -> dict[str, Tensor]:
        """Energy, forces and stress."""
        with _nequip_defaults():
            outputs = model.train(training)(inputs)
        return outputs | {"energy": outputs["total_energy"]}

    def products(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The `tp_scatter` of the interaction blocks."""
        return [block.tp_scatter for block in model.modules() if isinstance(block, InteractionBlock)]

    def convolve(self, product: torch.nn.Module, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """Calls it as the interaction blocks do, whose edges start at their receivers."""
        return product(x, y, w, edge_index[0], edge_index[1])


def _options(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """What NequIP's builders are called with."""
    return {**MODELS[model].options, **({"num_features": options.channels} if options.channels else {})}
