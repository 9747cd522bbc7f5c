"""Layers of a radial network, each z = factor * SiLU(scale * x w), where SiLU(y) = y / (1 + exp(-y))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from eqaccel.errors import SpecError

MOST_INPUTS = 16
MOST_FEATURES = 128
"""Of a layer: those of sixteen rows are in the registers of a warp."""

_TERMS = 16
"""Of a multiplication of a tensor core."""

_MOST_SHARED = 47 * 1024
"""Bytes of weights, which a block keeps in the shared memory that every GPU gives it."""


@dataclass(frozen=True)
class RadialNetworkSpec:
    """Layers whose features stay in registers from the first to the last.

    Args:
        widths: Columns of x, up to 16, then features of each layer, multiples of 8 up to 128.
        factors: What the activation of each layer is multiplied by; ones by default.
        scales: What its argument is multiplied by; ones by default.

    Raises:
        SpecError: If a number is out of range, or weights take more than 47 KiB of shared memory.
    """

    widths: tuple[int, ...]
    factors: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))
        if len(self.widths) < 2:
            raise SpecError(f"widths: expected columns of x and features of at least one layer, got {self.widths}")
        if not 1 <= self.widths[0] <= MOST_INPUTS:
            raise SpecError(f"widths: expected 1 to {MOST_INPUTS} columns of x, got {self.widths[0]}")
        for width in self.widths[1:]:
            if not 8 <= width <= MOST_FEATURES or width % 8:
                raise SpecError(f"widths: expected multiples of 8 up to {MOST_FEATURES}, got {width}")
        if self.shared_bytes > _MOST_SHARED:
            raise SpecError(f"widths: expected weights of at most {_MOST_SHARED} bytes, got {self.shared_bytes}")
        for name in ("factors", "scales"):
            numbers = tuple(getattr(self, name)) or (1.0,) * self.num_layers
            object.__setattr__(self, name, numbers)
            if len(numbers) != self.num_layers or not all(map(math.isfinite, numbers)):
                raise SpecError(f"{name}: expected {self.num_layers} finite numbers, got {numbers}")

    @property
    def num_layers(self) -> int:
        """Layers, each with weights of its own."""
        return len(self.widths) - 1

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the weights of each layer: inputs and outputs."""
        return list(pairwise(self.widths))

    @property
    def sizes(self) -> list[int]:
        """How many weights each layer has."""
        return [inputs * outputs for inputs, outputs in self.shapes]

    @property
    def num_weights(self) -> int:
        """Weights of all layers."""
        return sum(self.sizes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, see `gpu_radial_network.h`."""
        padded = [-(-width // _TERMS) * _TERMS for width in self.widths]
        return 4 * sum(inputs * (outputs + 8) for inputs, outputs in pairwise(padded))
