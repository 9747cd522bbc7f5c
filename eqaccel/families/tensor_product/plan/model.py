"""The data of a plan: frozen dataclasses, nothing that computes more than a count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from eqaccel.codegen import Direction
from eqaccel.families.tensor_product.spec import Path, TensorProductSpec
from eqaccel.targets import Target


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
        entries: Linear forms; each is a tuple of (index into the y row, factor).
        elements: The nonzero elements, each naming an entry.
    """

    entries: tuple[tuple[tuple[int, float], ...], ...]
    elements: tuple[Element, ...]


@dataclass(frozen=True)
class PlannedPath:
    """A path with everything that its lines of code need.

    Attributes:
        number: Position in `spec.paths`.
        label: Readable form, as in "128x1o (x) 1x2e -> 128x3o".
        matrix: Position in `Plan.matrices`.
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
        adds: Whether an earlier kernel has written gradients of the block, so that these are added to them.
    """

    label: str
    x_offset: int
    d1: int
    paths: tuple[PlannedPath, ...]
    passes: tuple[tuple[Part, ...], ...]
    adds: bool = False


@dataclass(frozen=True)
class ZBlock:
    """A block of z that a segment writes.

    Attributes:
        offset: Of the block in a row of z.
        first: Position of its first component among the output components of the segment.
        d: Number of its components.
    """

    offset: int
    first: int
    d: int


@dataclass(frozen=True)
class Segment:
    """Paths of one multiplicity whose output components live in registers together.

    Attributes:
        mul: Channels of every block in the segment.
        z_offsets: Offset in a (2l+1, mul) z row of each output component.
        channels_per_lane: Channels that a GPU lane owns; 1 on a CPU, where a lane value is a SIMD vector.
        warp_groups: Parts of the segment's channels, each the work of a group of warps on a GPU.
        warps_per_group: Warps of a group, which take turns at the edges.
        unit: Translation unit of the segment's code on a CPU: 0 together with the rest; in the others it is a function
            of its own.
    """

    mul: int
    blocks: tuple[Block, ...]
    z_offsets: tuple[int, ...]
    channels_per_lane: int
    warp_groups: int
    warps_per_group: int = 1
    unit: int = 0

    @property
    def warps(self) -> int:
        """Warps that run the segment on a GPU."""
        return self.warp_groups * self.warps_per_group

    @property
    def z_blocks(self) -> tuple[ZBlock, ...]:
        """The blocks that `z_offsets` are components of, in their order."""
        blocks = {path.accumulators[0]: ZBlock(path.z_offset, path.accumulators[0], path.d3) for path in self.paths}
        return tuple(block for _, block in sorted(blocks.items()))

    @property
    def paths(self) -> tuple[PlannedPath, ...]:
        """The paths of all blocks, in the order in which they run."""
        return tuple(path for block in self.blocks for path in block.paths)


@dataclass(frozen=True)
class CopySpan:
    """Elements of a row of x or w that a GPU kernel copies to shared memory.

    Attributes:
        offset: Of the first in the row.
        staged: Of the first in the copy.
        length: Number of elements.
    """

    offset: int
    staged: int
    length: int


@dataclass(frozen=True)
class Purpose:
    """What is planned: one direction of one tensor product for one target and scalar type.

    Attributes:
        matrices: The edge matrices of all paths of the tensor product.
    """

    spec: TensorProductSpec
    direction: Direction
    target: Target
    scalar_bytes: int
    matrices: tuple[EdgeMatrix, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in memory. Double backward kernels read rounded weights at full width."""
        rounded = self.spec.bfloat16_weights and self.scalar_bytes == 4 and self.direction.tangents == 1
        return 2 if rounded else self.scalar_bytes


@dataclass(frozen=True)
class KernelPlan(Purpose):
    """One kernel: some paths of a tensor product, how they are spread over segments, and the numbers of its launch.

    Attributes:
        number: Position among the kernels of a plan; those after the first add to the gradients of y.
        segments: The paths of this kernel.
        edges_per_stage: Edges whose rows a GPU block copies to shared memory together.
        stages: Stages that are in shared memory at a time.
        blocks_per_sm: Blocks that a multiprocessor should hold.
        turned_lanes: Lanes of a warp that have room in shared memory at a time for the elements of a block that they
            are to write.
    """

    number: int
    segments: tuple[Segment, ...]
    edges_per_stage: int = 1
    stages: int = 1
    blocks_per_sm: int = 1
    turned_lanes: int = 32

    @cached_property
    def first_entry(self) -> dict[int, int]:
        """Position, in the array of all entries of an edge, of the first entry of each matrix that the kernel needs.

        A multiple of four, so that a GPU lane reads four entries with one instruction.
        """
        first: dict[int, int] = {}
        end = 0
        for number in sorted({path.matrix for segment in self.segments for path in segment.paths}):
            first[number] = end
            end += round_up(len(self.matrices[number].entries), 4)
        return first

    @cached_property
    def num_entries(self) -> int:
        """Entries of all edge matrices of an edge, padding included."""
        return max((at + round_up(len(self.matrices[n].entries), 4) for n, at in self.first_entry.items()), default=4)

    @cached_property
    def single_terms(self) -> tuple[tuple[int, tuple[int, float]], ...]:
        """The entries of one term, each with its position."""
        return tuple((at, terms[0]) for at, terms in self._entries() if len(terms) == 1)

    @cached_property
    def several_terms(self) -> tuple[tuple[int, tuple[tuple[int, float], ...]], ...]:
        """The other entries, each with its position; padded with zeros to the same number of terms."""
        entries = [(at, terms) for at, terms in self._entries() if len(terms) > 1]
        longest = max((len(terms) for _, terms in entries), default=0)
        return tuple((at, terms + ((0, 0.0),) * (longest - len(terms))) for at, terms in entries)

    @property
    def holds_single_terms(self) -> bool:
        """Whether each thread of a GPU block holds the term of at most one entry of one term: forward, where it can."""
        return self.direction is Direction.FORWARD and len(self.single_terms) <= self.threads

    def _entries(self) -> Iterator[tuple[int, tuple[tuple[int, float], ...]]]:
        for number, first in self.first_entry.items():
            yield from enumerate(self.matrices[number].entries, first)

    @cached_property
    def x_spans(self) -> tuple[CopySpan, ...]:
        """What the kernel reads of a row of x."""
        blocks = {(b.x_offset, b.d1 * s.mul) for s in self.segments for b in s.blocks}
        return _spans(blocks, self.scalar_bytes)

    @cached_property
    def w_spans(self) -> tuple[CopySpan, ...]:
        """What the kernel reads of a row of w."""
        blocks = {(p.weight_offset, s.mul) for s in self.segments for p in s.paths if p.weight_offset is not None}
        return _spans(blocks, self.weight_bytes)

    @property
    def w_staged(self) -> int:
        """Weights of a row in shared memory."""
        return staged(self.w_spans, self.weight_bytes)

    @property
    def row_bytes(self) -> int:
        """Shared memory of the rows of x and w of an edge, and of their tangents."""
        row = staged(self.x_spans) * self.scalar_bytes + self.w_staged * self.weight_bytes
        return row * self.direction.tangents

    @property
    def warps(self) -> int:
        """Warps of a GPU block."""
        return sum(segment.warps for segment in self.segments)

    @property
    def warp_groups(self) -> int:
        """Groups of warps of a GPU block."""
        return sum(segment.warp_groups for segment in self.segments)

    @property
    def threads(self) -> int:
        """Threads of a GPU block."""
        return 32 * max(self.warps, 1)

    def sums(self, segment: Segment) -> int:
        """Elements of shared memory in which a group adds up the outputs of its warps."""
        if self.direction is Direction.BACKWARD or segment.warps_per_group == 1:
            return 0
        return segment.warps_per_group * len(segment.z_offsets) * 32 * segment.channels_per_lane

    @property
    def all_sums(self) -> int:
        """The same for all groups of a block."""
        return round_up(sum(segment.warp_groups * self.sums(segment) for segment in self.segments), 4)

    def turned(self, segment: Segment) -> int:
        """Elements of shared memory in which lanes of a warp change those of a block, to write it as (mul, 2l+1).

        None where gradients are of a graph: those of x have another layout, there are few rows of z, and no registers.
        """
        if self.spec.layout == "ir_mul" or (self.direction is not Direction.FORWARD and not self.spec.by_rows):
            return 0
        x = () if self.direction is Direction.FORWARD else (block.d1 for block in segment.blocks)
        z = () if self.direction is Direction.BACKWARD else (block.d for block in segment.z_blocks)
        most = max((*z, *x), default=1)
        has_room = self.sums(segment) > 0 and len(segment.z_offsets) >= most  # that of the outputs of a warp
        return 0 if most == 1 or has_room else self.turned_lanes * segment.channels_per_lane * most

    def room(self, segment: Segment) -> int:
        """Elements of shared memory in which a warp may change those of a block: its own, or those of its outputs."""
        own = self.turned(segment)
        return own or (self.sums(segment) // segment.warps_per_group if self.spec.by_rows else 0)

    @property
    def all_turned(self) -> int:
        """The same for all warps of a block."""
        return sum(segment.warps * self.turned(segment) for segment in self.segments)

    def shared_bytes(self) -> int:
        """Shared memory of a GPU block; the layout of `preludes/gpu_pipeline.h`, in the same order."""
        y_dim, scalar = self.spec.y_dim, self.scalar_bytes
        tangents, edges = self.direction.tangents, self.edges_per_stage
        rows = self.stages * edges * self.row_bytes
        matrices = 2 * edges * self.num_entries * tangents
        attributes = round_up((self.stages + 1) * edges * y_dim * tangents, 4)
        gradients = round_up(2 * edges * self.warp_groups * y_dim * self.direction.gradients, 4)
        barriers = 8 * round_up(self.stages, 2)
        ids = 8 * round_up(edges * (self.stages + 3), 2)
        single = 0 if self.holds_single_terms else len(self.single_terms)
        table = 2 * scalar * (single + sum(len(terms) for _, terms in self.several_terms))
        turned = self.all_sums + self.all_turned
        return rows + (matrices + attributes + gradients + turned) * scalar + barriers + ids + table


@dataclass(frozen=True)
class Plan(Purpose):
    """Kernels that run one after another."""

    kernels: tuple[KernelPlan, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of all kernels."""
        return tuple(segment for kernel in self.kernels for segment in kernel.segments)

    def shared_bytes(self) -> int:
        """Shared memory of a GPU block of the kernel that takes most."""
        return max((kernel.shared_bytes() for kernel in self.kernels), default=0)

    def multiply_adds(self) -> int:
        """Multiply-adds per edge over all channels, edge matrices excluded: the arithmetic of the roofline."""
        return sum(segment_work(self.direction, self.matrices, segment) * segment.mul for segment in self.segments)

    def explain(self) -> str:
        """A readable account of the plan: kernels, segments, paths, registers and shared memory."""
        lines = [
            f"{self.direction.value} on {self.target.name}, {8 * self.scalar_bytes}-bit",
            f"  edge matrices: {len(self.matrices)}; multiply-adds: {self.multiply_adds()} an edge",
        ]
        for kernel in self.kernels:
            if self.target.is_gpu:
                lines.append(
                    f"  kernel {kernel.number}: blocks of {kernel.threads} threads share the edges; "
                    f"{kernel.edges_per_stage} edges a stage, {kernel.stages} stages, {kernel.shared_bytes()} bytes of "
                    f"shared memory, at least {kernel.blocks_per_sm} blocks a multiprocessor"
                )
            for segment in kernel.segments:
                warps = f", {segment.channels_per_lane} channels a lane, {segment.warp_groups} groups of "
                warps += f"{segment.warps_per_group} warps"
                lines.append(
                    f"  segment: {segment.mul} channels, {len(segment.z_offsets)} output components in registers"
                    + (warps if self.target.is_gpu else "")
                )
                lines += [f"    path {path.number}: {path.label}" for path in segment.paths]
        return "\n".join(lines)


def staged(spans: Sequence[CopySpan], element_bytes: int = 4) -> int:
    """Elements of shared memory for a row, in whole units of 16 bytes."""
    return round_up(max((span.staged + span.length for span in spans), default=0), 8 if element_bytes == 2 else 4)


def place(spans: Sequence[CopySpan], offset: int) -> int:
    """Where the element at an offset of a row lies in the copy."""
    span = next(p for p in spans if p.offset <= offset < p.offset + p.length)
    return span.staged + offset - span.offset


def _spans(blocks: Iterable[tuple[int, int]], element_bytes: int) -> tuple[CopySpan, ...]:
    """Blocks of (offset, length), neighbours made one."""
    merged: list[list[int]] = []
    for offset, length in sorted(blocks):
        if merged and sum(merged[-1]) == offset:
            merged[-1][1] += length
        else:
            merged.append([offset, length])
    spans: list[CopySpan] = []
    for offset, length in merged:
        spans.append(CopySpan(offset, staged(spans, element_bytes), length))
    return tuple(spans)


def segment_work(direction: Direction, matrices: Sequence[EdgeMatrix], segment: Segment) -> int:
    """Multiply-adds of a segment for one channel of one edge."""
    return sum(multiply_adds(direction, len(matrices[p.matrix].elements), p.d1, p.d3) for p in segment.paths)


def multiply_adds(direction: Direction, elements: int, d1: int, d3: int) -> int:
    """Multiply-adds of a path for one channel of one edge, from the nonzero elements of its edge matrix."""
    if direction is Direction.FORWARD:
        return elements + min(d1, d3)
    of_element, of_row = {1: (2, 3), 2: (5, 7), 3: (12, 17)}[direction.order]
    return of_element * elements + of_row * d1


def alignment(spec: TensorProductSpec, paths: Iterable[Path]) -> int:
    """What divides the lengths of all rows, and where the blocks of these paths begin and how many channels they have.

    Rows are read as vectors, whose width has to divide it.
    """
    blocks = (n for p in paths for n in (p.mul, p.x_offset, p.z_offset, p.weight_offset or 0))
    return math.gcd(spec.x_dim, spec.z_dim, spec.weight_numel, *blocks)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
