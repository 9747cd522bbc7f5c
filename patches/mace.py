"""MACE models: which of their modules eqaccel replaces, and how to run one on a structure.

Every MACE interaction block calls `conv_tp(node_feats, edge_attrs, tp_weights, edge_index)` on the nodes if it has an
attribute `conv_fusion`, and otherwise gathers to the edges, multiplies there and scatters the messages. So the whole
patch is two attributes per block. Blocks and models are told by their class names (`class_names`), never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Optional

import torch
from eqaccel.patches.convolution import build_convolution, check_product, convolution_row, rebuilt_convolution
from eqaccel.patches.core import Row, Swap, class_names, refuse_patched
from eqaccel.patches.nodes import node_rows, node_swaps
from eqaccel.patches.radial import radial_rows, radial_swaps
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.structures import Structure
from eqaccel.patches.torch_state import model_device, model_dtype

from eqaccel.errors import AlreadyPatchedError, PatchError

_SWITCH = "conv_fusion"
"""Attribute by whose presence an interaction block hands the whole convolution to `conv_tp`."""

_MODELS = frozenset({"MACE", "AtomicDipolesMACE", "AtomicDielectricMACE", "EnergyDipolesMACE"})
_LONG_RANGE = frozenset({"MACELES", "PolarMACE"})

_SHORT_RANGE_PARTS = frozenset(
    {
        "atomic_energies_fn",
        "embedding_readout",
        "interactions",
        "joint_embedding",
        "node_embedding",
        "pair_repulsion_fn",
        "products",
        "radial_embedding",
        "readouts",
        "scale_shift",
        "spherical_harmonics",
    }
)


class MaceConvolution(Replacement):
    """The `conv_tp` of an interaction block, an e3nn `TensorProduct`: gather, product and scatter in one operation."""

    switches = MappingProxyType({_SWITCH: True})

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: Optional[torch.Tensor] = None,  # noqa: UP045 (TorchScript)
        edge_index: Optional[torch.Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> torch.Tensor:
        """Computes the messages summed over the edges of each receiver; without edges, the product of rows.

        Args:
            x: (num_nodes, irreps_in1.dim).
            y: (num_edges, irreps_in2.dim).
            weight: (num_edges, weight_numel).
            edge_index: (2, num_edges), senders then receivers.

        Returns:
            (num_nodes, irreps_out.dim)
        """
        if edge_index is None:
            return self.plain_forward(x, y, weight)
        return self.eqaccel(x, y, weight, edge_index, x.size(0))

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return rebuilt_convolution(self, self.eqaccel)


class MaceFamily:
    """The models of mace-torch, and subclasses of them; implements `ModelFamily`."""

    name = "MACE"
    ranks: Mapping[str, int] = MappingProxyType(
        {
            "energy": 0,
            "interaction_energy": 0,
            "node_energy": 0,
            "forces": 1,
            "virials": 2,
            "stress": 2,
            "atomic_virials": 2,
            "atomic_stresses": 2,
            "charges": 0,
            "dipole": 1,
            "atomic_dipoles": 1,
            "polarizability": 2,
        }
    )
    _COMPARED = (*ranks, "polarizability_sh", "dmu_dr", "dalpha_dr")

    def recognises(self, model: torch.nn.Module) -> bool:
        """Whether the model is one of MACE's classes, or derives from one."""
        return bool(class_names(model) & _MODELS) and isinstance(getattr(model, "interactions", None), torch.nn.Module)

    def swaps(self, model: torch.nn.Module, deterministic: bool) -> list[Swap]:
        """Checks every interaction, then builds the convolution of each; the model is not changed.

        Raises:
            AlreadyPatchedError: If the model is accelerated already.
            PatchError: If an interaction cannot be accelerated.
        """
        refuse_patched(model)
        interactions = list(_interactions(model))
        if not interactions:
            raise PatchError(f"model: {type(model).__name__} has no interaction blocks, so there is nothing to replace")
        for path, interaction in interactions:
            _check(path, interaction)
        device = model_device(model)
        convolutions = [
            Swap(
                parent=interaction,
                name="conv_tp",
                kind=MaceConvolution,
                added=build_convolution(f"{path}.conv_tp", interaction.conv_tp, deterministic, device),
            )
            for path, interaction in interactions
        ]
        networks = [getattr(interaction, "conv_tp_weights", None) for _, interaction in interactions]
        return [*convolutions, *chain.from_iterable(map(radial_swaps, networks)), *node_swaps(model)]

    def rows(self, model: torch.nn.Module) -> list[Row]:
        """The convolutions, the other costly modules around them, node-wise modules, what long-range models add."""
        rows = []
        for path, interaction in _interactions(model):
            product = interaction.conv_tp
            rows.append(convolution_row(f"{path}.conv_tp", product, product, partial(_check, path, interaction)))
            rows += radial_rows(f"{path}.conv_tp_weights", model, getattr(interaction, "conv_tp_weights", None))
        rows += node_rows(model)
        for kind in sorted(class_names(model) & _LONG_RANGE):
            for name, part in model.named_children():
                if name not in _SHORT_RANGE_PARTS:
                    rows.append(Row(name, type(part).__name__, False, f"left: {kind} adds it, eqaccel has no kernel"))
        return rows

    def extent(self, model: torch.nn.Module) -> tuple[float, int]:
        """The cutoff, and the number of elements."""
        return float(model.r_max), _num_elements(model)

    def evaluate(self, model: torch.nn.Module, structure: Structure) -> dict[str, torch.Tensor]:
        """Runs the model for everything it predicts, with first derivatives."""
        outputs = model(_inputs(model, structure), **_requests(model), **_per_atom(model))
        return {name: output.detach().to("cpu", torch.float64) for name, output in self._compared(outputs).items()}

    def train(self, model: torch.nn.Module, structure: Structure) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Runs the model so that its outputs can be differentiated once more."""
        inputs = _inputs(model, structure)
        positions = inputs["positions"].requires_grad_()
        return self._compared(model(inputs, training=True, **_requests(model))), positions

    def _compared(self, outputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: outputs[name] for name in self._COMPARED if isinstance(outputs.get(name), torch.Tensor)}


def _interactions(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    # Only these: long-range models own tensor products elsewhere, which are not convolutions.
    for name, interaction in model.interactions.named_children():
        yield f"interactions.{name}", interaction


def _check(path: str, interaction: Any) -> None:
    """Refuses a block that eqaccel cannot accelerate; says what is wrong with it and what to do."""
    layout = getattr(getattr(interaction, "cueq_config", None), "layout_str", "mul_ir")
    for name, library in (("cueq_config", "cuEquivariance"), ("oeq_config", "OpenEquivariance")):
        if getattr(getattr(interaction, name, None), "enabled", False):
            if layout != "mul_ir":
                raise PatchError(
                    f"{path}: expected features in mul_ir layout, got {layout}; convert the model back with "
                    f"mace_cueq_to_e3nn, or load it without enable_cueq"
                )
            raise AlreadyPatchedError(
                f"{path}: {library} accelerates this model already; load it without enable_cueq and enable_oeq, or "
                f"convert it back with mace.cli"
            )
    if hasattr(interaction, _SWITCH):
        raise AlreadyPatchedError(
            f"{path}: the block fuses its convolution already (it has `{_SWITCH}`); load the model without another "
            f"accelerator"
        )
    product = getattr(interaction, "conv_tp", None)
    check_product(f"{path}.conv_tp", product)
    if not _honours_switch(interaction):
        raise PatchError(
            f"{path}: the forward method of {type(interaction).__name__} never looks for `{_SWITCH}`, so it cannot "
            f"call a fused convolution; use a newer mace-torch (0.3.16 will do), or write a custom block as it does"
        )
    radial = getattr(interaction, "conv_tp_weights", None)
    width = getattr(radial, "hs", [product.weight_numel])[-1]
    if width != product.weight_numel:
        raise PatchError(
            f"{path}.conv_tp_weights: expected {product.weight_numel} weights per edge (weight_numel of conv_tp), got "
            f"{width}; the checkpoint and its configuration do not belong together"
        )


def _honours_switch(interaction: Any) -> bool:
    """Whether a `forward` among the block's classes asks for the switch; a name in `hasattr` is a constant of it."""
    forwards = [vars(cls).get("forward") for cls in type(interaction).__mro__]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards if callable(forward)]
    return any(code is not None and _SWITCH in (*code.co_consts, *code.co_names) for code in codes)


def _requests(model: torch.nn.Module) -> dict[str, bool]:
    """Which outputs to ask a model's forward for: all that it can give with first derivatives."""
    kinds = class_names(model)
    if "AtomicDielectricMACE" in kinds:
        wanted = {"compute_dielectric_derivatives": True}
    elif "AtomicDipolesMACE" in kinds:
        wanted = {}
    else:
        wanted = {"compute_force": True, "compute_virials": True, "compute_stress": True}
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in wanted.items() if name in known}


def _per_atom(model: torch.nn.Module) -> dict[str, bool]:
    """The further request for virials and stresses of each atom, if the model's forward has it."""
    known = inspect.signature(model.forward).parameters
    asks_for_forces = "compute_force" in _requests(model)
    return {name: True for name in ("compute_atomic_stresses",) if asks_for_forces and name in known}


def _num_elements(model: torch.nn.Module) -> int:
    """Number of elements that a model embeds; some models are given a longer list of atomic numbers."""
    linear = getattr(getattr(model, "node_embedding", None), "linear", None)
    return linear.irreps_in.dim if hasattr(linear, "irreps_in") else len(model.atomic_numbers)


def _inputs(model: torch.nn.Module, structure: Structure) -> dict[str, torch.Tensor]:
    """The dictionary that `mace.data.AtomicData` batches would give for one structure: neutral, and in no field."""
    device, dtype = model_device(model), model_dtype(model)
    num_atoms = len(structure.positions)
    one_hot = torch.nn.functional.one_hot(structure.species, _num_elements(model))
    floating = {
        "positions": structure.positions,
        "cell": structure.cell,
        "rcell": 2 * torch.pi * torch.linalg.inv(structure.cell.T),
        "volume": torch.linalg.det(structure.cell).reshape(1),
        "unit_shifts": structure.unit_shifts,
        "shifts": structure.unit_shifts @ structure.cell,
        "node_attrs": one_hot,
        "charges": torch.zeros(num_atoms),
        "total_charge": torch.zeros(1),
        "total_spin": torch.ones(1),
        "fermi_level": torch.zeros(1),
        "external_field": torch.zeros(1, 3),
    }
    for name, spec in (getattr(model, "embedding_specs", None) or {}).items():
        if name not in floating:
            per_atom = (num_atoms, spec["in_dim"]) if spec["type"] == "continuous" else (num_atoms,)
            floating[name] = torch.zeros((1,) if spec["per"] == "graph" else per_atom)
    integral = {
        "edge_index": structure.edge_index,
        "batch": torch.zeros(num_atoms, dtype=torch.int64),
        "ptr": torch.tensor([0, num_atoms]),
        "head": torch.zeros(1, dtype=torch.int64),
        "pbc": torch.full((1, 3), structure.periodic),
    }
    # Copies, because models write into this dictionary and switch on gradients of what is in it.
    inputs = {name: tensor.to(device, dtype, copy=True) for name, tensor in floating.items()}
    return inputs | {name: tensor.to(device, copy=True) for name, tensor in integral.items()}
