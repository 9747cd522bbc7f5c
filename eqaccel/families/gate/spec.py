"""Gates, the nonlinearity of equivariant networks, as e3nn has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from eqaccel.errors import SpecError
from eqaccel.irreps import Irreps

KINDS = ("silu", "tanh", "sigmoid", "ssp", "abs")
"""Functions of activations: SiLU, hyperbolic tangent, logistic function, softplus less log 2, and absolute value."""


class Activation(NamedTuple):
    """factor * f(x), where `kind` names f, one of `KINDS`."""

    kind: str
    factor: float = 1.0


class Scalars(NamedTuple):
    """Columns `column`, `column` + 1, ..., `mul` of them, that go through an activation."""

    column: int
    mul: int
    activation: Activation

    @property
    def first(self) -> int:
        """Column of the first number that goes through the activation."""
        return self.column

    @property
    def num_outputs(self) -> int:
        """Columns of the output."""
        return self.mul


class GatedChannels(NamedTuple):
    """Channels that are multiplied by the activation of a scalar each, their gate.

    Attributes:
        gate: Column of the first gate; those of the other channels follow it.
        mul: Channels.
        activation: Of the gates.
        column: First column of the channels, whose components lie beside each other (e3nn's layout).
        dim: Components of a channel.
    """

    gate: int
    mul: int
    activation: Activation
    column: int
    dim: int

    @property
    def first(self) -> int:
        """Column of the first number that goes through the activation."""
        return self.gate

    @property
    def num_outputs(self) -> int:
        """Columns of the output."""
        return self.mul * self.dim


@dataclass(frozen=True)
class GateSpec:
    """A gate: rows of scalars, gates and channels to rows of activated scalars and, behind them, of gated channels.

    Args:
        scalars: Scalars, in the order of the output.
        gated: Channels, in the order of the output.

    Raises:
        SpecError: If columns of the input are not each in one of these, an activation is none of those known or has a
            factor that is not finite, or there is nothing to compute.
    """

    scalars: tuple[Scalars, ...]
    gated: tuple[GatedChannels, ...] = ()

    def __post_init__(self) -> None:
        parts = [*((s.column, s.mul) for s in self.scalars), *((g.gate, g.mul) for g in self.gated)]
        parts += [(g.column, g.mul * g.dim) for g in self.gated]
        end = 0
        for column, count in sorted(parts):
            if count < 1 or column != end:
                raise SpecError(f"columns: expected each to be read once, got {count} from {column} on after {end}")
            end = column + count
        if end == 0:
            raise SpecError("scalars: expected at least one, or gated channels, got none: there is nothing to compute")
        for kind, factor in (part.activation for part in self.parts):
            if kind not in KINDS:
                raise SpecError(f"activation: expected one of {', '.join(KINDS)}, got '{kind}'")
            if not math.isfinite(factor):
                raise SpecError(f"factor: expected a finite number, got {factor}")

    @classmethod
    def of_irreps(cls, num_scalars: int, gated: Irreps | str, activation: Activation) -> GateSpec:
        """Scalars, then the gates of irreps, then these, all with one activation.

        Raises:
            IrrepsError: If the irreps cannot be read.
            SpecError: If there is nothing to compute.
        """
        blocks = [(mul, ir.dim) for mul, ir in Irreps(gated) if mul > 0]
        gate, column = num_scalars, num_scalars + sum(mul for mul, _ in blocks)
        channels = []
        for mul, dim in blocks:
            channels.append(GatedChannels(gate, mul, activation, column, dim))
            gate, column = gate + mul, column + mul * dim
        return cls((Scalars(0, num_scalars, activation),) if num_scalars else (), tuple(channels))

    @property
    def parts(self) -> tuple[Scalars | GatedChannels, ...]:
        """Scalars and gated channels, in the order of the output."""
        return (*self.scalars, *self.gated)

    @property
    def num_inputs(self) -> int:
        """Columns of x."""
        return self.num_outputs + sum(part.mul for part in self.gated)

    @property
    def num_outputs(self) -> int:
        """Columns of z."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_activations(self) -> int:
        """Scalars and gates of a row."""
        return sum(part.mul for part in self.parts)

    def text(self) -> str:
        """A line for each part: kind, factor, first scalar or gate, how many, components, first channel, first output.

        Scalars have 0 components. The runtime reads it where derivatives have no kernel (`csrc/torch/gate.cpp`).
        """
        lines, output = [], 0
        for part in self.parts:
            channels = (part.dim, part.column) if isinstance(part, GatedChannels) else (0, 0)
            kind, factor = part.activation
            lines.append(
                " ".join(map(str, (kind, repr(float(factor)), part.first, part.mul, *channels, output))) + "\n"
            )
            output += part.num_outputs
        return "".join(lines)
