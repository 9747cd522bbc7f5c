"""The gate of e3nn in one kernel a derivative, for GPUs.

e3nn takes its irreps apart: slices, multiplications and a concatenation, forward and backward, which take a GPU longer
to launch than to run. On a CPU they cost little, so there the plain form of the module goes on doing the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.gate import Activation, GatedChannels, GateSpec, Scalars
from eqaccel.ops import Gate
from eqaccel.patches.activation_e3nn import activation_of
from eqaccel.patches.dense import prefers_dense
from eqaccel.patches.replacement import Replacement


class FusedGate(Replacement):
    """An `e3nn.nn.Gate`, computed by `eqaccel.Gate`."""

    note = "replaced by eqaccel.Gate on a GPU"
    gains_on_cpu = False

    def forward(self, features: Tensor) -> Tensor:
        """Maps (num_nodes, irreps_in.dim) to (num_nodes, irreps_out.dim)."""
        if features.dim() == 2 and prefers_dense(features):
            return self.dense(features)
        return self.plain_forward(features)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` by the kernel."""
        return self.eqaccel(features)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; an activation may have been exchanged."""
        return Gate(gate_spec(self)).to(self.eqaccel.payload.device)


def gate_spec(gate: Any) -> GateSpec:
    """What a gate of e3nn computes.

    Raises:
        PatchError: If an activation is none that kernels know, or the columns of a channel do not lie side by side.
    """
    # The module that takes the input apart says itself which column goes where.
    numbers = torch.arange(gate.irreps_in.dim, dtype=torch.float64)[None]
    device = next((buffer.device for buffer in gate.buffers()), numbers.device)
    scalars, gates, gated = (columns[0].long().tolist() for columns in gate.sc(numbers.to(device)))
    of_scalars, of_gates = _activations(gate.act_scalars, scalars), _activations(gate.act_gates, gates)
    parts = tuple(Scalars(column, 1, activation) for column, activation in zip(scalars, of_scalars, strict=True))
    channels, begin = [], 0
    dims = [ir.dim for mul, ir in gate.irreps_gated for _ in range(mul)]
    for column, activation, dim in zip(gates, of_gates, dims, strict=True):
        if gated[begin : begin + dim] != list(range(gated[begin], gated[begin] + dim)):
            raise PatchError("components of its gated channels do not lie side by side")
        channels.append(GatedChannels(column, 1, activation, gated[begin], dim))
        begin += dim
    return GateSpec(_merged(parts), _merged(channels))


def _merged(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Parts of a gate, with one in place of each run of neighbours that differ in their columns only."""
    merged: list[Any] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and part == _behind(last)._replace(mul=part.mul):
            merged[-1] = last._replace(mul=last.mul + part.mul)
        else:
            merged.append(part)
    return tuple(merged)


def _behind(part: Any) -> Any:
    """The part of one column whose columns follow those of another."""
    if isinstance(part, GatedChannels):
        return part._replace(gate=part.gate + part.mul, column=part.column + part.mul * part.dim)
    return part._replace(column=part.column + part.mul)


def _activations(module: Any, columns: Sequence[int]) -> list[Activation]:
    """The activations of the columns that an `e3nn.nn.Activation` takes."""
    if not columns:
        return []
    acts = [act for (mul, _), act in zip(module.irreps_in, module.acts, strict=True) for _ in range(mul)]
    if None in acts or len(acts) != len(columns):
        raise PatchError("not all of its scalars have an activation")
    known = {act: activation_of(act) for act in dict.fromkeys(acts)}
    return [known[act] for act in acts]
