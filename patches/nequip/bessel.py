"""NequIP's encoding of the lengths of edges, in one kernel, and its cutoff in another."""

from __future__ import annotations

import math
from typing import Any, Dict  # noqa: UP035 (TorchScript)

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.ops import RadialBasis
from eqaccel.patches.cutoff import polynomial_power
from eqaccel.patches.nodes import Form, NodeForm
from eqaccel.patches.replacement import Replacement

_Data = Dict[str, Tensor]  # noqa: UP006 (TorchScript)


class BesselEncoding(Replacement):
    """A `BesselEdgeLengthEncoding`."""

    note = "replaced by eqaccel.RadialBasis"
    gains_on_cpu = True

    def forward(self, data: _Data) -> _Data:
        """Adds the functions (num_edges, num_bessels) of each edge to the data, and the cutoff (num_edges, 1)."""
        return self.dense(data)

    def dense(self, data: _Data) -> _Data:
        """`forward` with eqaccel's kernels."""
        weights = self.bessel_weights.view(-1)
        x = data[self.norm_length_field].to(weights.dtype)  # the type that NequIP has positions in, if they are in it
        data["edge_cutoff"] = self.eqaccel.cutoff(x, weights[:0]).to(self._output_dtype)
        data[self.edge_invariant_field] = self.eqaccel.functions(x, weights).to(self._output_dtype)
        return data

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        return _Kernels(self).to(self.eqaccel.cutoff.payload.device)


class _Kernels(torch.nn.Module):
    """The functions with their cutoff, and the cutoff alone.

    Args:
        encoding: What they are of.
    """

    def __init__(self, encoding: Any) -> None:
        super().__init__()
        cutoff = encoding.cutoff
        known = getattr(cutoff, "original_name", type(cutoff).__name__)  # NequIP may have scripted it
        if known != "PolynomialCutoff":
            raise PatchError(f"no kernel for its {known}")
        power = polynomial_power(cutoff)
        # w sinc(w x) = sin(pi w x) / (pi x), of lengths over the cutoff.
        functions = RadialBasisSpec(encoding.bessel_weights.numel(), 1.0, power, 1 / math.pi, math.pi)
        self.functions = RadialBasis(functions)
        self.cutoff = RadialBasis(RadialBasisSpec(0, 1.0, power))


def _encoding(_: torch.nn.Module, encoding: Any) -> Form:
    weights = encoding.bessel_weights
    lengths = torch.linspace(0.0, 1.1, 23).to(weights).view(-1, 1)
    return BesselEncoding, _Kernels(encoding).to(weights.device), ({encoding.norm_length_field: lengths},)


ENCODING_FORM = NodeForm("bessel_weights", _encoding)
"""How a `BesselEdgeLengthEncoding` is replaced."""
