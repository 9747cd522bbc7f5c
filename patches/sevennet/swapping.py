"""Which modules of SevenNet models eqaccel replaces.

A layer of SevenNet gathers, multiplies, scatters and divides in one module, its `IrrepsConvolution`, which is replaced;
so are the radial network in it, the embedding of edges, and the node-wise modules around it (`eqaccel.patches.nodes`).
Modules are told by their class names (`class_names`), never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Dict  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor

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
from eqaccel.patches.nodes import E3NN_FORMS, NodeForms, node_rows, node_swaps
from eqaccel.patches.precision import Options
from eqaccel.patches.radial import RadialForms, radial_rows, radial_swaps
from eqaccel.patches.radial_e3nn import E3NN_LAYERS, E3NN_NETWORK
from eqaccel.patches.replacement import Replacement, Swap, refuse_patched
from eqaccel.patches.report import ReportRow
from eqaccel.patches.sevennet.embedding import EMBEDDING_FORM
from eqaccel.patches.sevennet.parts import CONVOLUTION, convolutions

_OTHER_ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {
        "uvu_TP": "FlashTP (enable_flash)",
        "OEQConvolution": "OpenEquivariance (enable_oeq)",
        "ChannelWiseTensorProduct": "cuEquivariance (enable_cueq)",
        "cueq_fused_scatter_channelwise_conv": "cuEquivariance (enable_cueq)",
    }
)
"""What SevenNet multiplies with where another library accelerates it, and how users ask for it."""

FORMS: NodeForms = MappingProxyType({**E3NN_FORMS, "EdgeEmbedding": EMBEDDING_FORM})
"""The row-wise modules of SevenNet models that have another form."""

RADIAL_FORMS = RadialForms(frozenset({E3NN_NETWORK}), E3NN_LAYERS)
"""How networks of SevenNet models are read."""


class SevennetConvolution(Replacement):
    """The `IrrepsConvolution` of a layer: gather, product and scatter in one operation."""

    calls = frozenset({"weight_nn"})
    receiver_row: int = 0

    def forward(self, data: Dict[str, Tensor]) -> Dict[str, Tensor]:  # noqa: UP006 (TorchScript)
        """Puts the messages summed over the edges of each receiver, over the denominator, in place of the features."""
        weight = self.weight_nn(data[self.key_weight_input])
        x = data[self.key_x]
        receiver, sender = data[self.key_edge_idx][0], data[self.key_edge_idx][1]
        num_nodes = x.size(0)
        if torch.jit.is_scripting():
            index = torch.ops.eqaccel.graph(receiver, sender, num_nodes, num_nodes)
        else:
            index = packed_rows(receiver, sender, num_nodes, num_nodes)
        data[self.key_x] = self.eqaccel(x, data[self.key_filter], weight, index, num_nodes).div(self.denominator)
        return data

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return rebuilt_convolution(self.convolution, self.eqaccel)


class SevennetSwapping(Swapping):
    """The convolutions of the layers, their radial networks, and modules of edges and nodes."""

    def swaps(self, model: torch.nn.Module, options: Options) -> list[Swap]:
        """See `Swapping.swaps`; checks every layer, then builds the convolution of each."""
        refuse_patched(model)
        found = list(convolutions(model))
        if not found:
            raise PatchError(f"model: {_nothing_to_replace(model)}")
        layers = convolution_swaps(model, found, SevennetConvolution, "convolution", _check, options)
        networks = chain.from_iterable(
            radial_swaps(network, RADIAL_FORMS, options.products) for _, network in _networks(model)
        )
        # A replacement looks after what is in it, so what is in it comes first.
        return [*networks, *reversed(list(node_swaps(model, FORMS))), *layers]

    def rows(self, model: torch.nn.Module) -> list[ReportRow]:
        """The convolutions layer by layer, the networks, then the modules of edges and nodes."""
        rows = []
        for path, _, module in convolutions(model):
            product = getattr(module, "convolution", None)
            rows.append(convolution_row(path, module, product, partial(_check, path, module)))
        if not rows:
            return [ReportRow("", type(model).__name__, False, f"left: {_nothing_to_replace(model)}")]
        for path, network in _networks(model):
            rows += radial_rows(path, model, network, RADIAL_FORMS)
        return [*rows, *node_rows(model, FORMS)]


def _networks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The radial networks, and a network that reads energies out."""
    for path, module in model.named_modules():
        if E3NN_NETWORK in class_names(module):
            yield path, module


def _check(path: str, module: Any) -> None:
    """Refuses a layer that eqaccel cannot accelerate; says what is wrong with it and what to do."""
    product: Any = getattr(module, "convolution", None)
    for kind in class_names(product) & _OTHER_ACCELERATORS.keys():
        raise AlreadyPatchedError(
            f"{path}: {_OTHER_ACCELERATORS[kind]} accelerates this model already; load it again without that, and with "
            f"SEVENNET_ENABLE_CUEQ, SEVENNET_ENABLE_FLASH and SEVENNET_ENABLE_OEQ unset"
        )
    check_forward(path, type(module), "sevenn", CONVOLUTION)
    if module.is_parallel:
        raise PatchError(
            f"{path}: expected a whole model, got a part of one that was deployed for several processes of LAMMPS; "
            f"patch the model that it is made of, and export that with eqaccel.export"
        )
    check_product(f"{path}.convolution", product)
    width = getattr(module.weight_nn, "hs", [product.weight_numel])[-1]
    if width != product.weight_numel:
        raise PatchError(
            f"{path}.weight_nn: expected {product.weight_numel} weights per edge (weight_numel of the convolution), "
            f"got {width}; the checkpoint and its configuration do not belong together"
        )


def _nothing_to_replace(model: torch.nn.Module) -> str:
    return f"{type(model).__name__} has no {CONVOLUTION}, so there is nothing to replace"
