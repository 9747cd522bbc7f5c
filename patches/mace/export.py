"""MACE models as exported potentials.

The blocks of the model stay MACE's own. Its `forward` is not used, because it wants positions and a batch of graphs;
`MacePotential.node_energies` calls the blocks in the same order on edge vectors. Blocks take `lammps_natoms`, and with
it cut what they computed for ghosts before the costly part; `first_layer=True` keeps them from exchanging by their own
means.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, List, Optional  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor, nn

from eqaccel.errors import ExportError
from eqaccel.ops import EdgeWeights, depend_on_lengths
from eqaccel.patches.elements import SYMBOLS
from eqaccel.patches.kind import Exporting, check_own_methods, check_replaced, class_names
from eqaccel.patches.mace.reshaping import PermutedIrreps
from eqaccel.patches.mace.swapping import LONG_RANGE
from eqaccel.patches.potential import Convolution, PiecewiseConvolution, Potential
from eqaccel.patches.radial import DeferredNetwork, FirstLayers, last_layer
from eqaccel.patches.sums import add_in_order
from eqaccel.patches.torch_state import model_device
from eqaccel.prepare import model_dtype

_MODELS = frozenset({"MACE", "ScaleShiftMACE"})
"""Classes of the models in whose place a potential has something of its own."""

_PARTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "atomic_energies_fn": frozenset({"AtomicEnergiesBlock"}),
        "pair_repulsion_fn": frozenset({"ZBLBasis"}),
        "scale_shift": frozenset({"ScaleShiftBlock"}),
    }
)
"""The same of parts of them, by their names."""


class ExportedConvolution(Convolution):
    """The convolution of an interaction block."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: Tensor, edge_index: Tensor) -> Tensor:
        """As a block calls it: `edge_index` (2, num_edges) holds senders and receivers."""
        return self.convolve(node_feats, edge_attrs, tp_weights, edge_index[1], edge_index[0])


class DeferredConvolution(PiecewiseConvolution):
    """The convolution of an interaction block whose weights are to be made yet."""

    def forward(self, node_feats: Tensor, edge_attrs: Tensor, tp_weights: EdgeWeights, edge_index: Tensor) -> Tensor:
        """As a block calls it: `edge_index` (2, num_edges) holds senders and receivers."""
        return self.convolve(node_feats, edge_attrs, tp_weights, edge_index[1], edge_index[0])


class Gate(nn.Module):
    """MACE's `GatedEquivariantBlock` in a form that TorchScript reads, with the same numbers.

    Args:
        gate: The block to stand in for.
    """

    def __init__(self, gate: Any) -> None:
        super().__init__()
        if gate._layout_is_ir_mul:
            raise ExportError("model: expected features in mul_ir layout, got ir_mul; convert the model back first")
        self.scalars, self.gates = (gate._s_start, gate._s_len), (gate._g_start, gate._g_len)
        self.gated = torch.jit.Attribute(list(gate._gated_info), list[tuple[int, int, int, int, int]])
        self.act_scalar = gate._act_scalar or _identity
        self.act_gate = gate._act_gate or _identity
        self.scalar_factor = float(gate._scalar_cst)
        self.gate_factor = float(gate._gate_cst)

    def forward(self, x: Tensor) -> Tensor:
        """(num_nodes, irreps_in.dim) -> (num_nodes, irreps_out.dim): scalars, then the irreps times their gates."""
        parts = [self.act_scalar(x.narrow(1, self.scalars[0], self.scalars[1])) * self.scalar_factor]
        gates = self.act_gate(x.narrow(1, self.gates[0], self.gates[1])) * self.gate_factor
        for start, length, dim, mul, gate in self.gated:
            irreps = x.narrow(1, start, length).reshape(-1, mul, dim)
            parts.append((irreps * gates.narrow(1, gate, mul).unsqueeze(-1)).reshape(-1, length))
        return torch.cat(parts, dim=1)


def _identity(x: Tensor) -> Tensor:
    return x


class PairRepulsion(nn.Module):
    """MACE's `ZBLBasis`; that one multiplies nuclear charges in torch's default dtype, whatever the model's is.

    Args:
        zbl: The module to stand in for.
        charges: (num_types,) nuclear charge of each type, in the dtype of the model.
    """

    if TYPE_CHECKING:  # buffers
        coefficients: Tensor
        charges: Tensor
        exponent: Tensor
        radii: Tensor
        prefactor: Tensor

    def __init__(self, zbl: Any, charges: Tensor) -> None:
        super().__init__()
        numbers = charges.long()
        self.register_buffer("coefficients", zbl.c)
        self.register_buffer("charges", charges)
        self.register_buffer("exponent", zbl.a_exp.detach())
        self.register_buffer("radii", zbl.covalent_radii[numbers])
        self.register_buffer("prefactor", zbl.a_prefactor.detach())
        self.power = float(zbl.p)

    def forward(self, lengths: Tensor, sender: Tensor, receiver: Tensor) -> Tensor:
        """Half the repulsion of each edge, (num_edges,) eV, from lengths (num_edges,) and the types at both ends."""
        powers = torch.pow(self.charges, self.exponent)
        x = lengths * (powers[sender] + powers[receiver]) / (0.529 * self.prefactor)
        screening = self.coefficients[0] * torch.exp(-3.2 * x) + self.coefficients[1] * torch.exp(-0.9423 * x)
        screening = (
            screening + self.coefficients[2] * torch.exp(-0.4028 * x) + self.coefficients[3] * torch.exp(-0.2016 * x)
        )
        energy = 14.3996 * self.charges[sender] * self.charges[receiver] / lengths * screening
        p, r = self.power, lengths / (self.radii[sender] + self.radii[receiver])
        envelope = 1 - (p + 1) * (p + 2) / 2 * r**p + p * (p + 2) * r ** (p + 1) - p * (p + 1) / 2 * r ** (p + 2)
        return 0.5 * energy * torch.where(r < 1, envelope, torch.zeros_like(r))


class MacePotential(Potential):
    """A `MACE` or `ScaleShiftMACE` with patched interactions, for one head.

    Args:
        model: A copy of the model, whose modules are taken over.
        head: Index of the head.
        constants: See `Potential`.
    """

    def __init__(self, model: Any, head: int, constants: Tensor) -> None:
        widths = [block.node_feats_irreps.dim for block in list(model.interactions)[1:]]
        super().__init__(model_dtype(model), widths, constants)
        self.head = head
        self.node_embedding = model.node_embedding
        self.spherical_harmonics = model.spherical_harmonics
        self.radial_embedding = model.radial_embedding
        if hasattr(model, "pair_repulsion"):
            self.pair_repulsion = PairRepulsion(model.pair_repulsion_fn, model.atomic_numbers.to(model.r_max.dtype))
        # Lengths of edges are needed anyway.
        self.has_unit_vectors = bool(model.spherical_harmonics.normalize)
        model.spherical_harmonics.normalize = False
        self.interactions = model.interactions
        add_in_order(self.interactions, "scatter_sum")  # densities
        for block in self.interactions:
            if "reshape_irreps" in class_names(getattr(block, "reshape", None)):
                block.reshape = PermutedIrreps(block.reshape, model_device(model))
        self.products = model.products
        self.readouts = model.readouts
        # A single read-out reads the last layer.
        layers = range(len(model.readouts)) if len(model.readouts) > 1 else [len(model.products) - 1]
        self.readout_layers = list(layers)
        self.register_buffer("atomic_numbers", model.atomic_numbers)
        self.register_buffer("one_hot", torch.eye(len(model.atomic_numbers)).to(model.r_max))
        self.register_buffer("head_number", torch.tensor([head], device=model.r_max.device))
        scale_shift = getattr(model, "scale_shift", None)
        one = model.r_max.new_ones(())
        self.register_buffer("scale", one if scale_shift is None else torch.atleast_1d(scale_shift.scale)[head])
        self.register_buffer("shift", 0 * one if scale_shift is None else torch.atleast_1d(scale_shift.shift)[head])

    def make_piecewise(self) -> None:
        """See `Potential.make_piecewise`."""
        for block in self.interactions:
            block.conv_tp_weights = DeferredNetwork(block.conv_tp_weights)
            block.conv_tp = DeferredConvolution(block.conv_tp.eqaccel)

    def make_scriptable(self) -> None:
        """See `Potential.make_scriptable`."""
        for block in self.interactions:
            last = last_layer(block.conv_tp_weights)
            block.conv_tp = ExportedConvolution(block.conv_tp.eqaccel, last)
            if last is not None:
                block.conv_tp_weights = FirstLayers(block.conv_tp_weights)
        for parent in list(self.modules()):
            for name, child in parent.named_children():
                if "GatedEquivariantBlock" in class_names(child) and hasattr(child, "_gated_info"):
                    setattr(parent, name, Gate(child))

    def node_energies(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tensor:
        """See `Potential.node_energies`."""
        num_nodes = types.size(0)
        counts = (num_local, num_nodes - num_local)
        node_attrs = self.one_hot.index_select(0, types)
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        edge_attrs = self.spherical_harmonics(vectors / lengths if self.has_unit_vectors else vectors)
        edge_feats, cutoff = self.radial_embedding(lengths, node_attrs, edge_index, self.atomic_numbers)
        # The types of both ends matter too, which do not move. What is multiplied by a cutoff has a row for each edge.
        if not torch.jit.is_scripting():
            depend_on_lengths(edge_feats)
        elif cutoff is None:
            edge_feats = torch.ops.eqaccel.of_lengths(edge_feats)
        x = self.node_embedding(node_attrs)
        has_ghosts = exchange != 0 or num_local < num_nodes
        ghosts: Optional[int] = exchange if has_ghosts else None  # noqa: UP045 (TorchScript)
        layers: List[Tensor] = []  # noqa: UP006 (TorchScript)
        for i, (interaction, product) in enumerate(zip(self.interactions, self.products)):  # noqa: B905 (TorchScript)
            if i > 0 and has_ghosts:
                x = torch.ops.eqaccel.exchange(x, exchange, num_nodes)
            messages, skip = interaction(
                node_attrs,
                x,
                edge_attrs,
                edge_feats,
                edge_index,
                cutoff,
                lammps_class=ghosts,  # without them nothing is cut, which would have a gradient
                lammps_natoms=counts,
                first_layer=True,
            )
            x = product(messages, skip, node_attrs[:num_local])
            layers.append(x)

        heads = self.head_number.expand(num_local)
        terms: List[Tensor] = []  # noqa: UP006 (TorchScript)
        if hasattr(self, "pair_repulsion"):
            pairs = self.pair_repulsion(lengths.squeeze(1), types[edge_index[0]], types[edge_index[1]])
            of_nodes = torch.ops.eqaccel.add_rows(pairs.unsqueeze(1), edge_index[1], num_nodes)
            terms.append(of_nodes[:num_local, 0])
        for i, readout in enumerate(self.readouts):
            energies = readout(layers[self.readout_layers[i]], heads)
            terms.append(energies.squeeze(1) if energies.size(1) == 1 and self.head == 0 else energies[:, self.head])
        interaction_energy = terms[0]
        for term in terms[1:]:
            interaction_energy = interaction_energy + term
        return self.scale * interaction_energy + self.shift


class MaceExporting(Exporting):
    """The energy models of mace-torch as potentials."""

    def accepts(self, model: nn.Module) -> bool:
        """Whether the model is a `MACE`, or derives from it: others predict dipoles alone."""
        return "MACE" in class_names(model)

    def check(self, model: Any) -> None:
        """See `Exporting.check`."""
        long_range = class_names(model) & LONG_RANGE
        if long_range or getattr(model, "embedding_specs", None):
            reason = "has long-range parts" if long_range else "takes inputs besides the structure (embedding_specs)"
            raise ExportError(
                f"model: expected a model whose energy depends on the structure alone, within the cutoff; "
                f"{type(model).__name__} {reason}, so use it from Python"
            )
        check_own_methods("the model", model, "mace", _MODELS)
        for name, known in _PARTS.items():
            if hasattr(model, name):
                check_own_methods(name, getattr(model, name), "mace", known)
        for i, block in enumerate(model.interactions):
            check_replaced(f"interactions.{i}.conv_tp", block.conv_tp)

    def heads(self, model: Any) -> list[str]:
        """See `Exporting.heads`."""
        return [str(head) for head in getattr(model, "heads", None) or ["Default"]]

    def type_names(self, model: Any) -> list[str]:
        """The chemical symbols of the model's elements."""
        return [SYMBOLS[number] for number in model.atomic_numbers.tolist()]

    def constants(self, model: Any, head: int) -> Tensor:
        """See `Exporting.constants`."""
        return torch.atleast_2d(model.atomic_energies_fn.atomic_energies)[head].detach()

    def potential(self, model: Any, head: int, constants: Tensor) -> Potential:
        """See `Exporting.potential`."""
        return MacePotential(model, head, constants)
