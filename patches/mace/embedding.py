"""MACE's embedding of the lengths of edges, in one kernel."""

from __future__ import annotations

from typing import Any, Optional, Tuple  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.ops import RadialBasis
from eqaccel.patches.cutoff import polynomial_power
from eqaccel.patches.nodes import Form, NodeForm
from eqaccel.patches.replacement import Replacement

_Embedding = Tuple[Tensor, Optional[Tensor]]  # noqa: UP006, UP045 (TorchScript)


class FusedEmbedding(Replacement):
    """A `RadialEmbeddingBlock` of Bessel functions that are multiplied by the cutoff."""

    note = "replaced by eqaccel.RadialBasis"
    gains_on_cpu = True

    def forward(
        self, edge_lengths: Tensor, node_attrs: Tensor, edge_index: Tensor, atomic_numbers: Tensor
    ) -> _Embedding:
        """Embeds lengths (num_edges, 1): the functions (num_edges, num_basis), and the cutoff if it is apart."""
        return self.dense(edge_lengths, node_attrs, edge_index, atomic_numbers)

    def dense(self, edge_lengths: Tensor, node_attrs: Tensor, edge_index: Tensor, atomic_numbers: Tensor) -> _Embedding:
        """`forward` with eqaccel's kernel."""
        return self.eqaccel(edge_lengths, self.bessel_fn.bessel_weights), None

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; what the kernel makes of lengths, it makes of those of edges, and with their cutoff."""
        if _is_split(self):
            raise PatchError("its cutoff is apart, or it changes lengths, which it did not when it was patched")
        return RadialBasis(_spec(self)).to(self.eqaccel.payload.device)


class SplitEmbedding(FusedEmbedding):
    """A `RadialEmbeddingBlock` that gives the cutoff apart, or changes the lengths that its functions see."""

    calls = frozenset({"distance_transform"})

    def dense(self, edge_lengths: Tensor, node_attrs: Tensor, edge_index: Tensor, atomic_numbers: Tensor) -> _Embedding:
        """`forward` with eqaccel's kernels."""
        cutoff = self.eqaccel.cutoff(edge_lengths, self.bessel_fn.bessel_weights[:0])
        lengths = edge_lengths
        if hasattr(self, "distance_transform"):
            lengths = self.distance_transform(lengths, node_attrs, edge_index, atomic_numbers)
        radial = self.eqaccel.functions(lengths, self.bessel_fn.bessel_weights)
        if hasattr(self, "apply_cutoff"):  # noqa: SIM102 (TorchScript)
            if not self.apply_cutoff:
                return radial, cutoff
        return radial * cutoff, None

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return _Parts(_spec(self)).to(self.eqaccel.cutoff.payload.device)


class _Parts(torch.nn.Module):
    """Bessel functions without their cutoff, and the cutoff."""

    def __init__(self, spec: RadialBasisSpec) -> None:
        super().__init__()
        functions = RadialBasisSpec(spec.num_basis, spec.r_max, 0, spec.factor, is_undefined_at_zero=True)
        self.functions = RadialBasis(functions)
        self.cutoff = RadialBasis(RadialBasisSpec(0, spec.r_max, spec.power))


def _spec(block: Any) -> RadialBasisSpec:
    """The functions of a block, with their cutoff."""
    functions, cutoff = block.bessel_fn, block.cutoff_fn
    for module, known in ((functions, "BesselBasis"), (cutoff, "PolynomialCutoff")):
        if type(module).__name__ != known:
            raise PatchError(f"no kernel for its {type(module).__name__}")
    r_max, power, factor = float(cutoff.r_max), polynomial_power(cutoff), float(functions.prefactor)
    # MACE divides by lengths: two atoms in one place give NaN, which tells that something is wrong.
    return RadialBasisSpec(len(functions.bessel_weights), r_max, power, factor, is_undefined_at_zero=True)


def _is_split(block: Any) -> bool:
    """Whether a block gives the cutoff apart, or changes lengths."""
    return hasattr(block, "distance_transform") or not getattr(block, "apply_cutoff", True)


def _embedding(_: torch.nn.Module, block: Any) -> Form:
    spec, like = _spec(block), block.bessel_fn.bessel_weights
    is_split = _is_split(block)
    added = _Parts(spec) if is_split else RadialBasis(spec)
    lengths = spec.r_max * torch.linspace(0.05, 1.1, 22).to(like).view(-1, 1)
    edges = torch.arange(2 * len(lengths), device=like.device).view(2, -1) % 2
    species = torch.eye(2).to(like)
    numbers = torch.tensor([1, 8], device=like.device)
    return (SplitEmbedding if is_split else FusedEmbedding), added.to(like.device), (lengths, species, edges, numbers)


EMBEDDING_FORM = NodeForm("bessel_fn", _embedding)
"""How a `RadialEmbeddingBlock` is replaced."""
