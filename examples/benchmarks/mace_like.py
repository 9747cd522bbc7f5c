"""MACE models with random weights, as they are and as its own switches convert them, on diamond."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import ase
import mace  # noqa: F401  (before e3nn: it sets what e3nn 0.4.4 needs under a recent torch)
import numpy as np
import torch
from e3nn import o3
from mace import data as mace_data
from mace import modules
from mace.calculators import MACECalculator
from mace.tools import torch_geometric, utils
from mace.tools.scatter import scatter_sum
from torch import Tensor

from eqaccel.benchmarks.families import ModelCase
from eqaccel.benchmarks.structures import SYSTEMS, diamond
from eqaccel.patches import Replacement
from eqaccel.patches.torch_state import default_dtype


@dataclass(frozen=True)
class Shape:
    """The shape of a two-layer ScaleShiftMACE.

    Attributes:
        numbers: Atomic numbers of the elements that it knows.
        channels: Channels of every irrep.
        irreps: Irreps between the layers.
        system: The kind of structures that it is run on.
        cutoff: In angstrom.
        bessel: Number of radial functions.
        width: Of the layers of its radial networks.
        correlation: Largest degree of its polynomials.
    """

    numbers: tuple[int, ...]
    channels: int
    irreps: tuple[str, ...]
    system: str = "carbon"
    cutoff: float = 6.0
    bessel: int = 10
    width: int = 64
    correlation: int = 3


MODELS = {
    "mp0-medium": Shape(tuple(range(1, 90)), 128, ("0e", "1o")),
    "large": Shape(tuple(range(1, 9)), 128, ("0e", "1o", "2e")),
    "alloy": Shape((29, 79), 32, ("0e", "1o"), "alloy", cutoff=5.0, bessel=8, width=32, correlation=2),
}
"""MACE-MP-0 medium; the model of the paper: "large", with eight elements; and the one that the examples come with."""


def build_model(dtype: torch.dtype, shape: Shape) -> torch.nn.Module:
    """A model with random weights."""
    torch.manual_seed(0)
    with default_dtype(dtype):
        model = modules.ScaleShiftMACE(
            r_max=shape.cutoff,
            num_bessel=shape.bessel,
            num_polynomial_cutoff=5,
            max_ell=3,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            num_interactions=2,
            num_elements=len(shape.numbers),
            hidden_irreps=o3.Irreps("+".join(f"{shape.channels}x{ir}" for ir in shape.irreps)),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.linspace(-5.0, -1.0, len(shape.numbers)),
            avg_num_neighbors=60.0,
            atomic_numbers=list(shape.numbers),
            correlation=shape.correlation,
            gate=torch.nn.functional.silu,
            radial_MLP=[shape.width] * 3,
            atomic_inter_scale=0.8,
            atomic_inter_shift=0.16,
        )
    return model.requires_grad_(False)


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


def make_batch(model: torch.nn.Module, structures: Sequence[ase.Atoms], dtype: torch.dtype) -> dict[str, Tensor]:
    """The input of the model, as MACE's own data loader makes it."""
    with default_dtype(dtype):
        table = utils.AtomicNumberTable([int(z) for z in model.atomic_numbers])
        graphs = [
            mace_data.AtomicData.from_config(
                mace_data.config_from_atoms(atoms), z_table=table, cutoff=float(model.r_max)
            )
            for atoms in structures
        ]
        loader = torch_geometric.dataloader.DataLoader(graphs, batch_size=len(graphs), shuffle=False)
        return {name: value for name, value in next(iter(loader)).to_dict().items() if value is not None}


class Case(ModelCase):
    """A MACE model on a cube of what it is for."""

    variants = MappingProxyType({"cuEquivariance": _cuequivariance, "OpenEquivariance": _openequivariance})

    @staticmethod
    def sizes(model: str, device: str) -> Sequence[int]:
        """A crystal of each kind that GPUs are used for; one between them on a CPU."""
        return (64, 1000) if device == "cuda" else (216,)

    @staticmethod
    def systems(model: str, device: str) -> Sequence[str]:
        """Crystals of all sizes, and the silicon of other benchmarks of steps."""
        kind = MODELS[model].system
        sizes = (8, 64, 216, 1000, 8000, 46656, 157464) if device == "cuda" else (8, 64, 216)
        silicon = device == "cuda" and kind == "carbon"
        return [*(f"{kind}-{atoms}" for atoms in sizes), *(["silicon-1000"] if silicon else [])]

    @staticmethod
    def training_systems(model: str) -> Sequence[str]:
        """A crystal of carbon, or crystals of the alloy: as the model of the examples was trained on, and larger."""
        return ("carbon-64",) if MODELS[model].system == "carbon" else ("alloy-32", "alloy-108")

    @staticmethod
    def plain_model(model: str, options: argparse.Namespace) -> torch.nn.Module:
        """The model, of other sizes if these are given."""
        numbers = tuple(range(1, options.elements + 1)) if options.elements else None
        given = {"numbers": numbers, "channels": options.channels}
        shape = replace(MODELS[model], **{key: value for key, value in given.items() if value})
        return build_model(getattr(torch, options.dtype), shape)

    @staticmethod
    def multiply_energies(model: torch.nn.Module, factor: float) -> None:
        """By its `scale_shift`."""
        model.scale_shift.scale *= factor
        model.scale_shift.shift *= factor

    @staticmethod
    def calculator(model: torch.nn.Module, device: str, compiled: bool = False) -> MACECalculator:
        """MACE's, with its `compile_mode` or without."""
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        mode = "default" if compiled else None
        return MACECalculator(models=model, device=device, default_dtype=dtype, compile_mode=mode)

    @staticmethod
    def working_dtype(dtype: torch.dtype) -> torch.dtype:
        """That of the model, which its calculator sets by itself."""
        return dtype

    @classmethod
    def build(cls, model: str, atoms: int, options: argparse.Namespace) -> Case:
        """The model, of other sizes if these are given; its own numbers count as right."""
        dtype = getattr(torch, options.dtype)
        plain = cls.plain_model(model, options).to(options.device)
        kind = MODELS[model].system
        crystal = diamond(atoms) if kind == "carbon" else SYSTEMS[kind](atoms)
        inputs = {name: value.to(options.device) for name, value in make_batch(plain, [crystal], dtype).items()}
        return cls(plain, plain, inputs, len(crystal))

    batch = staticmethod(make_batch)

    @staticmethod
    def evaluate(model: torch.nn.Module, inputs: dict[str, Tensor], training: bool = False) -> dict[str, Tensor]:
        """Energy and forces."""
        return model(inputs, training=training, compute_force=True)

    def products(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The `conv_tp` of the interaction blocks."""
        return [block.conv_tp for block in model.interactions]

    def convolve(self, product: torch.nn.Module, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """Gather, tensor product and scatter, as in the interaction blocks."""
        if isinstance(product, Replacement):
            return product(x, y, w, edge_index)
        messages = product(x[edge_index[0]], y, w)
        return scatter_sum(src=messages, index=edge_index[1], dim=0, dim_size=x.shape[0])
