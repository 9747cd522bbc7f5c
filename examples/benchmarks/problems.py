"""The tensor products that are timed, by the name of the model that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from eqaccel import Irreps, TensorProductSpec


def _both_parities(mul: int, degrees: int) -> str:
    return "+".join(f"{mul}x{degree}{parity}" for degree in range(degrees) for parity in "oe")


@dataclass(frozen=True)
class Problem:
    """A tensor product.

    Attributes:
        name: What the command line calls it.
        in1: Irreps of the node features.
        in2: Irreps of the edge attributes.
        out: The irreps wanted in the output.
        mode: "uvu", channel by channel, with an output block for every path, as in MACE and NequIP; or "uvw", fully
            connected with weights of its own for each row, as in DiffDock.
    """

    name: str
    in1: str
    in2: str
    out: str
    mode: str = "uvu"

    @cached_property
    def spec(self) -> TensorProductSpec:
        """Its paths, in the order of MACE and NequIP."""
        if self.mode == "uvu":
            return TensorProductSpec.channelwise(self.in1, self.in2, self.out)
        sides = [Irreps(side) for side in (self.in1, self.in2, self.out)]
        couplings = [
            (i, j, k, self.mode, True)
            for i, (_, first) in enumerate(sides[0])
            for j, (_, second) in enumerate(sides[1])
            for k, (_, third) in enumerate(sides[2])
            if third in first * second
        ]
        return TensorProductSpec(*sides, couplings)


_HARMONICS = "0e+1o+2e+3o"
_UP_TO_3 = "128x0e+128x1o+128x2e+128x3o"
_MACE_LARGE = ("128x0e+128x1o+128x2e", _HARMONICS, _UP_TO_3)
_NEQUIP_L = "128x0e+64x1o+32x2e+32x3o"
_NEQUIP_XL = "320x0e+96x1o+64x2e+32x3o+32x4e"
_SEVENNET = "128x0e+64x1e+32x2e+32x3e"
_DIFFDOCK = "10x1o+10x1e+48x0e+48x0o"

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("mace-large", *_MACE_LARGE),
        Problem("mace-medium", "128x0e+128x1o", _HARMONICS, "128x0e+128x1o+128x2e"),
        Problem("mp0-first", "128x0e", _HARMONICS, _UP_TO_3),
        Problem("mp0-second", "128x0e+128x1o", _HARMONICS, _UP_TO_3),
        # The same tensor product as mace-large, under the name of the model that has it.
        Problem("mp0-large-second", *_MACE_LARGE),
        Problem("nequip-water", _both_parities(32, 2), "0e+1o", _both_parities(32, 2)),
        Problem("nequip-lips", _both_parities(32, 3), "0e+1o+2e", _both_parities(32, 3)),
        Problem("nequip-aspirin", _both_parities(64, 2), "0e+1o", _both_parities(64, 2)),
        Problem("nequip-toluene", _both_parities(64, 3), "0e+1o+2e", _both_parities(64, 3)),
        Problem("nequip-l", _NEQUIP_L, _HARMONICS, _NEQUIP_L),
        Problem("sevennet-l3i5", _SEVENNET, "0e+1e+2e+3e", _SEVENNET),
        # The two that take longest to build come last, where a limit of time may cut them off.
        Problem("nequip-benzene", _both_parities(64, 4), _HARMONICS, _both_parities(64, 4)),
        Problem("nequip-xl", _NEQUIP_XL, f"{_HARMONICS}+4e", _NEQUIP_XL),
        Problem("tetris-1", _HARMONICS, _HARMONICS, "64x0e+24x1e+24x1o+16x2e+16x2o", "uvw"),
        Problem("diffdock-l1", _DIFFDOCK, "0e+1o", _DIFFDOCK, "uvw"),
        Problem("diffdock-l2", _DIFFDOCK, "0e+1o+2e", _DIFFDOCK, "uvw"),
        Problem("tiny", "4x0e+4x1o", "0e+1o", "4x0e+4x1o"),
    )
}
"""All problems; "tiny" is there to try the harness itself."""

CONVOLUTIONS = tuple(
    name for name, problem in PROBLEMS.items() if problem.mode == "uvu" and name not in ("mp0-large-second", "tiny")
)
"""What "all" stands for where convolutions are timed."""

PRODUCTS = (
    "mace-large",
    "mace-medium",
    "nequip-lips",
    "nequip-aspirin",
    "nequip-toluene",
    "nequip-benzene",
    "nequip-water",
    "tetris-1",
    "diffdock-l1",
    "diffdock-l2",
)
"""What "all" stands for where batches are timed: the configurations of the paper."""
