"""Which modules of MACE models eqaccel replaces.

Every MACE interaction block calls `conv_tp(node_feats, edge_attrs, tp_weights, edge_index)` on the nodes if it has an
attribute `conv_fusion`, and otherwise gathers to the edges, multiplies there and scatters the messages. So the whole
patch is two attributes per block. Blocks are told by their class names (`class_names`), never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Optional

import torch

from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.patches.activation import ACTIVATION_FORM
from eqaccel.patches.convolution import build_convolution, check_product, convolution_row, rebuilt_convolution
from eqaccel.patches.kind import Swapping, class_names
from eqaccel.patches.mace.contraction import CONTRACTION_FORM
from eqaccel.patches.mace.embedding import EMBEDDING_FORM
from eqaccel.patches.mace.reshaping import RESHAPE_FORM
from eqaccel.patches.nodes import E3NN_FORMS, NodeForms, node_rows, node_swaps
from eqaccel.patches.precision import Options
from eqaccel.patches.radial import RadialForms, radial_rows, radial_swaps
from eqaccel.patches.radial_e3nn import E3NN_LAYERS, E3NN_NETWORK
from eqaccel.patches.replacement import Replacement, Swap, refuse_patched
from eqaccel.patches.report import ReportRow
from eqaccel.patches.torch_state import model_device

_SWITCH = "conv_fusion"
"""Attribute by whose presence an interaction block hands the whole convolution to `conv_tp`."""

LONG_RANGE = frozenset({"MACELES", "PolarMACE"})
"""Classes of the models that add long-range parts to a MACE."""

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


FORMS: NodeForms = MappingProxyType(
    {
        **E3NN_FORMS,
        "Activation": ACTIVATION_FORM,
        "Contraction": CONTRACTION_FORM,
        "RadialEmbeddingBlock": EMBEDDING_FORM,
        "reshape_irreps": RESHAPE_FORM,
    }
)
"""The row-wise modules of MACE models that have another form."""

RADIAL_FORMS = RadialForms(frozenset({E3NN_NETWORK, "RadialMLP"}), E3NN_LAYERS)
"""How radial networks of MACE models are read; `RadialMLP` has layers of torch's."""


class MaceConvolution(Replacement):
    """The `conv_tp` of an interaction block, an e3nn `TensorProduct`: gather, product and scatter in one operation."""

    switches = MappingProxyType({_SWITCH: True})
    receiver_row: int = 1

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


class MaceSwapping(Swapping):
    """The convolutions of the interaction blocks, their radial networks, and node-wise modules."""

    def swaps(self, model: torch.nn.Module, options: Options) -> list[Swap]:
        """See `Swapping.swaps`; checks every interaction, then builds the convolution of each."""
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
                added=build_convolution(f"{path}.conv_tp", interaction.conv_tp, options, device),
            )
            for path, interaction in interactions
        ]
        networks = [getattr(interaction, "conv_tp_weights", None) for _, interaction in interactions]
        layers = chain.from_iterable(radial_swaps(network, RADIAL_FORMS, options.products) for network in networks)
        return [*convolutions, *layers, *node_swaps(model, FORMS)]

    def rows(self, model: torch.nn.Module) -> list[ReportRow]:
        """The convolutions, the other costly modules around them, node-wise modules, what long-range models add."""
        rows = []
        for path, interaction in _interactions(model):
            product = interaction.conv_tp
            rows.append(convolution_row(f"{path}.conv_tp", product, product, partial(_check, path, interaction)))
            network = getattr(interaction, "conv_tp_weights", None)
            rows += radial_rows(f"{path}.conv_tp_weights", model, network, RADIAL_FORMS)
        rows += node_rows(model, FORMS)
        for kind in sorted(class_names(model) & LONG_RANGE):
            for name, part in model.named_children():
                if name not in _SHORT_RANGE_PARTS:
                    note = f"left: {kind} adds it, eqaccel has no kernel"
                    rows.append(ReportRow(name, type(part).__name__, False, note))
        return rows


def _interactions(model: Any) -> Iterator[tuple[str, Any]]:
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
    product: Any = getattr(interaction, "conv_tp", None)
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
