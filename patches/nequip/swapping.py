"""Which modules of NequIP models eqaccel replaces.

Every NequIP interaction block gathers, multiplies and scatters in one module, its `TensorProductScatter`, which is
replaced; so are the node-wise modules around it (`eqaccel.patches.nodes`). A packaged model brings renamed copies of
nequip and e3nn, so modules are told by their class names (`class_names`), never imported; a class counts as nequip's if
it is from there, or from such a copy (`eqaccel.o3.origins`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from eqaccel.errors import AlreadyPatchedError, PatchError
from eqaccel.ops.graph import packed_rows
from eqaccel.patches.convolution import (
    check_forward,
    check_product,
    convolution_row,
    convolution_swaps,
    rebuilt_convolution,
)
from eqaccel.patches.kind import Swapping, class_names
from eqaccel.patches.nequip.bessel import ENCODING_FORM
from eqaccel.patches.nequip.radial import RADIAL_FORMS
from eqaccel.patches.nequip.typed_product import TYPED_FORM
from eqaccel.patches.nodes import E3NN_FORMS, NodeForms, node_rows, node_swaps
from eqaccel.patches.precision import Options
from eqaccel.patches.radial import radial_rows, radial_swaps
from eqaccel.patches.replacement import Replacement, Swap, refuse_patched
from eqaccel.patches.report import ReportRow

_SCATTER = "TensorProductScatter"
_OTHER_ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {
        "OpenEquivarianceTensorProductScatter": "OpenEquivariance",
        "CuEquivarianceTensorProductScatter": "cuEquivariance",
    }
)
_ALLEGRO = "Contracter"

FORMS: NodeForms = MappingProxyType(
    {**E3NN_FORMS, "FullyConnectedTensorProduct": TYPED_FORM, "BesselEdgeLengthEncoding": ENCODING_FORM}
)
"""The row-wise modules of NequIP models that have another form."""


class NequipConvolution(Replacement):
    """The `TensorProductScatter` of an interaction block."""

    receiver_row: int = 0
    _nequip_custom_ops_libs = ("eqaccel.ops",)  # nequip-compile writes it into the .pt2, whose loader imports it

    def forward(
        self,
        x: torch.Tensor,
        edge_attr: torch.Tensor,
        edge_weight: torch.Tensor,
        edge_dst: torch.Tensor,
        edge_src: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the messages summed over the edges of each receiver.

        Args:
            x: (num_nodes, feature_irreps_in.dim).
            edge_attr: (num_edges, irreps_edge_attr.dim).
            edge_weight: (num_edges, weight_numel).
            edge_dst: (num_edges,), the receivers: row 0 of NequIP's edge index.
            edge_src: (num_edges,), the senders: row 1.

        Returns:
            (num_nodes, irreps_mid.dim)
        """
        num_nodes = x.size(0)
        if torch.jit.is_scripting():
            index = torch.ops.eqaccel.graph(edge_dst, edge_src, num_nodes, num_nodes)
        else:
            index = packed_rows(edge_dst, edge_src, num_nodes, num_nodes)
        return self.eqaccel(x, edge_attr, edge_weight, index, num_nodes)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return rebuilt_convolution(self.tp, self.eqaccel)


class NequipSwapping(Swapping):
    """The scatters of the layers, their radial networks, and node-wise modules."""

    def swaps(self, model: torch.nn.Module, options: Options) -> list[Swap]:
        """See `Swapping.swaps`; checks every layer, then builds the convolution of each."""
        refuse_patched(model)
        scatters = list(_scatters(model))
        if not scatters:
            raise PatchError(f"model: {_nothing_to_replace(model)}")
        convolutions = convolution_swaps(model, scatters, NequipConvolution, "tp", _check, options)
        networks = [getattr(parent, "edge_mlp", None) for _, parent, _ in scatters]
        layers = chain.from_iterable(radial_swaps(network, RADIAL_FORMS, options.products) for network in networks)
        return [*convolutions, *layers, *node_swaps(model, FORMS)]

    def rows(self, model: torch.nn.Module) -> list[ReportRow]:
        """The convolutions and the costly modules of edges layer by layer, then the node-wise modules."""
        rows = []
        for path, parent, scatter in _scatters(model):
            product = getattr(scatter, "tp", None)
            rows.append(convolution_row(path, scatter, product, partial(_check, path, scatter)))
            network = getattr(parent, "edge_mlp", None)
            rows += radial_rows(f"{path.rpartition('.')[0]}.edge_mlp", model, network, RADIAL_FORMS)
        if rows:
            rows += node_rows(model, FORMS)
        else:
            rows.append(ReportRow("", type(model).__name__, False, f"left: {_nothing_to_replace(model)}"))
        return rows


def _scatters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """The scatters of a model, replaced or not: path, owner, and module."""
    for prefix, parent in model.named_modules():
        for name, scatter in parent.named_children():
            if _SCATTER in class_names(scatter):
                yield f"{prefix}.{name}".lstrip("."), parent, scatter


def _check(path: str, scatter: Any) -> None:
    """Refuses a layer that eqaccel cannot accelerate; says what is wrong with it and what to do."""
    for kind in class_names(scatter) & _OTHER_ACCELERATORS.keys():
        raise AlreadyPatchedError(
            f"{path}: {_OTHER_ACCELERATORS[kind]} accelerates this model already; load it again, without the modifier "
            f"that enables it"
        )
    check_forward(path, type(scatter), "nequip", _SCATTER)
    check_product(f"{path}.tp", getattr(scatter, "tp", None))


def _nothing_to_replace(model: torch.nn.Module) -> str:
    """Why a model of the framework has no layer that eqaccel could replace, and what to do."""
    if "DictInputOutputWrapper" in class_names(model):
        return (
            "nequip-compile has compiled this model, so that it cannot be changed; patch the model it was made from, "
            "or compile it again with `nequip-compile --modifiers enable_eqaccel`"
        )
    if any(_ALLEGRO in class_names(module) for module in model.modules()):
        return (
            f"{type(model).__name__} is an Allegro model, which has no convolution over node features: its "
            f"{_ALLEGRO} multiplies features of edges in a layout of its own, and eqaccel has no kernel for that; use "
            f"it unpatched, or with Allegro's own modifiers"
        )
    return f"{type(model).__name__} has no {_SCATTER}, so there is nothing to replace"
