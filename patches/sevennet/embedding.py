"""SevenNet's embedding of edges: functions of their lengths in one kernel, with a cutoff that is a polynomial."""

from __future__ import annotations

from typing import Any, Dict  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.ops import RadialBasis
from eqaccel.patches.cutoff import polynomial_power
from eqaccel.patches.nodes import Form, NodeForm
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.sevennet import keys

_Data = Dict[str, Tensor]  # noqa: UP006 (TorchScript)


class FusedEdgeEmbedding(Replacement):
    """An `EdgeEmbedding` of Bessel functions with the polynomial cutoff, for edges no longer than that."""

    note = "replaced by eqaccel.RadialBasis"
    gains_on_cpu = True
    calls = frozenset({"spherical"})

    def forward(self, data: _Data) -> _Data:
        """Adds lengths (num_edges,), functions (num_edges, num_basis) and spherical harmonics of edges to the data."""
        return self.dense(data)

    def dense(self, data: _Data) -> _Data:
        """`forward` with eqaccel's kernel."""
        vectors = data[keys.EDGE_VECTORS]
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        data[keys.EDGE_LENGTHS] = lengths
        data[keys.EDGE_EMBEDDING] = self.functions(lengths)
        data[keys.EDGE_ATTRIBUTES] = self.spherical(vectors)
        return data

    def functions(self, lengths: Tensor) -> Tensor:
        """What the kernel gives, (num_edges, num_basis)."""
        # Coefficients that are not trained are no buffer, and stay where and what they are when a model is moved.
        return self.eqaccel(lengths.unsqueeze(1), self.basis_function.coeffs.to(lengths))

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; another cutoff than a polynomial has no kernel."""
        return RadialBasis(self.spec_of(self)).to(self.eqaccel.payload.device)

    @staticmethod
    def spec_of(embedding: Any) -> RadialBasisSpec:
        """The functions of an embedding that the kernel computes; raises `PatchError` if there is none for them."""
        cutoff = embedding.cutoff_function
        if not _is_polynomial(cutoff):
            raise PatchError(f"no kernel for its {type(cutoff).__name__}")
        power = polynomial_power(cutoff)
        coefficients = (power + 1) * (power + 2) / 2, power * (power + 2), power * (power + 1) / 2
        if (cutoff.coeff_p0, cutoff.coeff_p1, cutoff.coeff_p2) != coefficients:
            raise PatchError("no kernel for a cutoff whose coefficients do not follow from its power")
        return _spec(embedding, power)


class SplitEdgeEmbedding(FusedEdgeEmbedding):
    """An `EdgeEmbedding` of Bessel functions with any cutoff, which stays SevenNet's."""

    note = "replaced by eqaccel.RadialBasis, but for its cutoff"
    calls = frozenset({"spherical", "cutoff_function"})

    def dense(self, data: _Data) -> _Data:
        """`forward` with eqaccel's kernel."""
        vectors = data[keys.EDGE_VECTORS]
        lengths = torch.linalg.vector_norm(vectors, dim=1)
        data[keys.EDGE_LENGTHS] = lengths
        data[keys.EDGE_EMBEDDING] = self.functions(lengths) * self.cutoff_function(lengths).unsqueeze(1)
        data[keys.EDGE_ATTRIBUTES] = self.spherical(vectors)
        return data

    @staticmethod
    def spec_of(embedding: Any) -> RadialBasisSpec:
        """See `FusedEdgeEmbedding`; the functions have no cutoff."""
        return _spec(embedding, 0)


def _is_polynomial(cutoff: Any) -> bool:
    return type(cutoff).__name__ == "PolynomialCutoff"


def _spec(embedding: Any, power: int) -> RadialBasisSpec:
    """The functions of an embedding, with its cutoff if that is a polynomial of such a power; 0 leaves it out."""
    basis = embedding.basis_function
    if type(basis).__name__ != "BesselBasis":
        raise PatchError(f"no kernel for its {type(basis).__name__}")
    factor = float(basis.prefactor)
    r_max = float(embedding.cutoff_function.cutoff_length) if power else 2.0 / factor
    # SevenNet divides by lengths: two atoms in one place give NaN, which tells that something is wrong.
    return RadialBasisSpec(basis.num_basis, r_max, power, factor, is_undefined_at_zero=True)


def _embedding(_: torch.nn.Module, embedding: Any) -> Form:
    form = FusedEdgeEmbedding if _is_polynomial(embedding.cutoff_function) else SplitEdgeEmbedding
    spec, like = form.spec_of(embedding), embedding.basis_function.coeffs
    # Beyond the cutoff, where no edges are, the polynomial of SevenNet is not zero.
    lengths = spec.r_max * torch.linspace(0.05, 0.999, 22).to(like)
    directions = torch.stack([torch.cos(lengths), torch.sin(lengths), torch.sin(3 * lengths)], 1)
    vectors = torch.nn.functional.normalize(directions) * lengths.unsqueeze(1)
    return form, RadialBasis(spec).to(like.device), ({keys.EDGE_VECTORS: vectors},)


EMBEDDING_FORM = NodeForm("basis_function", _embedding)
"""How an `EdgeEmbedding` is replaced."""
