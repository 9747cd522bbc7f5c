"""The tensor products that the convolution benchmarks run, by the name of the model that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eqaccel import TensorProductSpec


def _both_parities(mul: int, degrees: int) -> str:
    return "+".join(f"{mul}x{degree}{parity}" for degree in range(degrees) for parity in "oe")


@dataclass(frozen=True)
class Problem:
    """A channelwise tensor product in which every path has an output block of its own.

    Attributes:
        name: What the command line calls it.
        in1: Irreps of the node features.
        in2: Irreps of the edge attributes.
        out: The irreps wanted in the output.
    """

    name: str
    in1: str
    in2: str
    out: str

    @cached_property
    def spec(self) -> TensorProductSpec:
        """The paths, in the order of MACE and NequIP."""
        return TensorProductSpec.channelwise(self.in1, self.in2, self.out)


_HARMONICS = "0e+1o+2e+3o"
_UP_TO_3 = "128x0e+128x1o+128x2e+128x3o"
_NEQUIP_L = "128x0e+64x1o+32x2e+32x3o"

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("mace-large", "128x0e+128x1o+128x2e", _HARMONICS, _UP_TO_3),
        Problem("mace-medium", "128x0e+128x1o", _HARMONICS, "128x0e+128x1o+128x2e"),
        Problem("mp0-first", "128x0e", _HARMONICS, _UP_TO_3),
        Problem("mp0-second", "128x0e+128x1o", _HARMONICS, _UP_TO_3),
        Problem("nequip-water", _both_parities(32, 2), "0e+1o", _both_parities(32, 2)),
        Problem("nequip-toluene", _both_parities(64, 3), "0e+1o+2e", _both_parities(64, 3)),
        Problem("nequip-benzene", _both_parities(64, 4), _HARMONICS, _both_parities(64, 4)),
        Problem("nequip-l", _NEQUIP_L, _HARMONICS, _NEQUIP_L),
        Problem("tiny", "4x0e+4x1o", "0e+1o", "4x0e+4x1o"),
    )
}
"""All problems; "tiny" is there to try the harness itself."""
