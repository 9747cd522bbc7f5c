"""The data of a plan: frozen dataclasses, nothing that computes more than a count."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from eqaccel.plan.target import Target
from eqaccel.spec import TensorProductSpec


class Direction(enum.Enum):
    """Which derivative a kernel computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    DOUBLE_BACKWARD = "double_backward"


@dataclass(frozen=True)
class Element:
    """One nonzero element (i, k) of an edge matrix: `sign` times entry number `entry` of that matrix."""

    i: int
    k: int
    entry: int
    sign: int


@dataclass(frozen=True)
class EdgeMatrix:
    """The matrix A(y)[i, k] of a path: linear forms of y that are the same for every channel.

    Attributes:
        first: Position of its first entry in the array of all entries of an edge; a multiple of four, so that a GPU
            lane reads four entries with one instruction.
        entries: Linear forms; each is a tuple of (index into the y row, factor).
        elements: The nonzero elements, each naming an entry.
    """

    first: int
    entries: tuple[tuple[tuple[int, float], ...], ...]
    elements: tuple[Element, ...]


@dataclass(frozen=True)
class PlannedPath:
    """A path with everything that its lines of code need.

    Attributes:
        number: Position in `spec.paths`.
        label: Readable form, as in "128x1o (x) 1x2e -> 128x3o".
        matrix: Position in `KernelPlan.matrices`.
        accumulators: Positions, in the segment's output components, of its 2*l3+1 outputs.
        weight_offset: Offset of its weights in a w row, or None when the path has no weights.
        weight_first: Multiply x by w before the matrix (2*l1+1 products) rather than after it (2*l3+1).
    """

    number: int
    label: str
    matrix: int
    d1: int
    d3: int
    z_offset: int
    accumulators: tuple[int, ...]
    weight_offset: int | None
    weight_first: bool


@dataclass(frozen=True)
class Part:
    """Whole rows of a path's edge matrix, as one pass over the channels handles them."""

    path: PlannedPath
    elements: tuple[Element, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows i, in order."""
        return tuple(sorted({element.i for element in self.elements}))


@dataclass(frozen=True)
class Block:
    """An in1 block and the paths of a segment that read it.

    Attributes:
        passes: For gradients: the rows of all paths' edge matrices, in groups whose sums over channels are held in
            registers together.
    """

    label: str
    x_offset: int
    d1: int
    paths: tuple[PlannedPath, ...]
    passes: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Segment:
    """Paths of one multiplicity whose output components live in registers together.

    Attributes:
        mul: Channels of every block in the segment.
        z_offsets: Offset in a (2l+1, mul) z row of each output component.
        channels_per_lane: Channels that a GPU lane owns; 1 on a CPU, where a lane value is a SIMD vector.
        warps: Warps that share the segment's channels on a GPU.
    """

    mul: int
    blocks: tuple[Block, ...]
    z_offsets: tuple[int, ...]
    channels_per_lane: int
    warps: int

    @property
    def paths(self) -> tuple[PlannedPath, ...]:
        """The paths of all blocks, in the order in which they run."""
        return tuple(path for block in self.blocks for path in block.paths)


@dataclass(frozen=True)
class KernelPlan:
    """One direction of one tensor product for one target and scalar type."""

    spec: TensorProductSpec
    direction: Direction
    target: Target
    scalar_bytes: int
    matrices: tuple[EdgeMatrix, ...]
    segments: tuple[Segment, ...]
    edges_per_stage: int
    stages: int
    blocks_per_sm: int

    @cached_property
    def num_entries(self) -> int:
        """Entries of all edge matrices of an edge, padding included."""
        return max((matrix.first + round_up(len(matrix.entries), 4) for matrix in self.matrices), default=4)

    @property
    def terms(self) -> int:
        """Terms of the longest entry of an edge matrix."""
        return max((len(terms) for matrix in self.matrices for terms in matrix.entries), default=1)

    @property
    def warps(self) -> int:
        """Warps of a GPU block."""
        return sum(segment.warps for segment in self.segments)

    @property
    def threads(self) -> int:
        """Threads of a GPU block."""
        return 32 * max(self.warps, 1)

    def multiply_adds(self) -> int:
        """Multiply-adds per edge over all channels, edge matrices excluded: the arithmetic of the roofline."""
        total = 0
        for segment in self.segments:
            for path in segment.paths:
                elements = len(self.matrices[path.matrix].elements)
                total += multiply_adds(self.direction, elements, path.d1, path.d3) * segment.mul
        return total

    def explain(self) -> str:
        """A readable account of the plan: segments, paths, registers and shared memory."""
        lines = [
            f"{self.direction.value} on {self.target.name}, {8 * self.scalar_bytes}-bit",
            f"  edge matrices: {len(self.matrices)} with {self.num_entries} entries an edge",
            f"  multiply-adds: {self.multiply_adds()} an edge",
        ]
        if self.target.is_gpu:
            lines.append(
                f"  a block of {self.threads} threads owns a receiver; {self.edges_per_stage} edges a stage, "
                f"{self.stages} stages, {self.shared_bytes()} bytes of shared memory, "
                f"at least {self.blocks_per_sm} blocks a multiprocessor"
            )
        for number, segment in enumerate(self.segments):
            lines.append(
                f"  segment {number}: {segment.mul} channels, {len(segment.z_offsets)} output components in registers"
                + (
                    f", {segment.channels_per_lane} channels a lane, {segment.warps} warps"
                    if self.target.is_gpu
                    else ""
                )
            )
            lines += [f"    path {path.number}: {path.label}" for path in segment.paths]
        return "\n".join(lines)

    def shared_bytes(self) -> int:
        """Shared memory of a GPU block; the layout of `preludes/gpu.h`, in the same order."""
        spec, scalar = self.spec, self.scalar_bytes
        twice = 2 if self.direction is Direction.DOUBLE_BACKWARD else 1
        edges = self.edges_per_stage
        row = round_up(spec.x_dim, 4) + round_up(spec.weight_numel, 4)
        rows = self.stages * edges * row * twice
        matrices = 2 * edges * self.num_entries * twice
        attributes = round_up((self.stages + 1) * edges * spec.y_dim * twice, 4)
        sums = 0 if self.direction is Direction.FORWARD else round_up(2 * edges * self.warps * spec.y_dim, 4)
        barriers = 8 * round_up(self.stages, 2)
        ids = 8 * round_up(edges * (self.stages + 3), 2)
        table = self.terms * self.num_entries * (scalar + 4)
        return (rows + matrices + attributes + sums) * scalar + barriers + ids + table


def multiply_adds(direction: Direction, elements: int, d1: int, d3: int) -> int:
    """Multiply-adds of a path for one channel of one edge, from the nonzero elements of its edge matrix."""
    if direction is Direction.FORWARD:
        return elements + min(d1, d3)
    return 2 * elements + 3 * d1 if direction is Direction.BACKWARD else 5 * elements + 7 * d1


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
