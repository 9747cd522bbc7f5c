"""How a product of any mode is computed: paths of the same shape share code, couplings are the same for all pairs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from eqaccel.codegen import Direction
from eqaccel.errors import UnsupportedError
from eqaccel.families.tensor_product.pairs.mixing import (
    WARP,
    DenseMixing,
    dense_mixing,
    lanes_of_all,
    share_code,
    whole_pairs,
)
from eqaccel.families.tensor_product.plan.matrices import edge_matrix
from eqaccel.families.tensor_product.plan.model import EdgeMatrix
from eqaccel.families.tensor_product.spec import ConnectionMode, Mixing, Path, TensorProductSpec
from eqaccel.targets import Target

_NUMBER_BYTES = 12  # of an edge, its sender and its receiver
_PLACE_BYTES = 24  # of the first elements of its rows that are copied
_MOST_EDGES = 8  # that a warp takes at a time
_GOOD_SPAN = 96  # of the couplings of an edge: as much as most paths have
_MULTIPROCESSOR_BYTES, _OWN_BYTES = 228 * 1024, 1024  # of shared memory, and what each block takes for itself
_MANY_WARPS, _MOST_HELD_BYTES = 24, 180  # where lanes hold no more: of the components of a coupling, as many times
_HELD = {Direction.FORWARD: 1.5, Direction.BACKWARD: 2, Direction.DOUBLE_BACKWARD: 3}
_MOST_ROWS_BYTES = 28 * 1024  # of sums of an edge in shared memory, so that all fits 64 KiB
_STAGES = 2  # of weights on their way: one is there, or soon
_MOST_COPIED_BYTES = 8 * 1024  # of the rows of an edge and its sums, so that there are some warps
_MOST_WEIGHT_BYTES = 6 * 1024  # of an edge that come as a whole, and above which they are most of what is moved
# Of weights of all edges that come together otherwise, with their tangents. Forward more warps have room with fewer; in
# double backward a warp has room for two edges.
_CHUNK_BYTES = {Direction.FORWARD: 4 * 1024, Direction.BACKWARD: 6 * 1024, Direction.DOUBLE_BACKWARD: 3 * 1024}
_CHUNK_BYTES_FLOAT64 = _CHUNK_BYTES | {Direction.BACKWARD: 10 * 1024}
_WHOLE_ROW_BYTES = 256  # of the row of an output that a lane has in registers


class WeightCopies(Enum):
    """How weights of edges reach the lanes that need them."""

    NONE = "none"  # by loads from device memory
    ROWS = "rows"  # all of an edge together, in shared memory
    CHUNKS = "chunks"  # those of some pairs together, a few copies ahead


@dataclass(frozen=True)
class Coupling:
    """A coupling tensor, as the matrix A(y)[i, k] that a pair's y makes of it.

    Attributes:
        label: Readable form, as in "1o (x) 2e -> 3o".
        dims: Components of in1, in2 and out.
        matrix: Linear forms of the components of y, and where they are in the matrix.
    """

    label: str
    dims: tuple[int, int, int]
    matrix: EdgeMatrix

    @property
    def terms(self) -> int:
        """Multiply-adds of a pair."""
        return len(self.matrix.elements) + sum(len(entry) for entry in self.matrix.entries)


@dataclass(frozen=True)
class Shape:
    """What paths have in common that differ in where their blocks begin, and share code.

    Attributes:
        coupling: Position in `PairPlan.couplings`.
        mode: How channels connect.
        muls: Channels of in1, in2 and out.
        weighted: Whether there are weights.
    """

    coupling: int
    mode: ConnectionMode
    muls: tuple[int, int, int]
    weighted: bool

    @property
    def pairs(self) -> int:
        """Pairs of channels that are coupled."""
        return self.mode.pairs.count(*self.muls[:2])

    @property
    def is_own(self) -> bool:
        """Whether pairs are channels of the output, whose couplings stay with the lanes that make them."""
        return self.mode.mixing is Mixing.OWN

    @property
    def has_matrix(self) -> bool:
        """Whether its weights are a dense matrix, which may be copied in chunks."""
        return self.weighted and self.mode.mixing is Mixing.DENSE

    @property
    def mixed(self) -> int:
        """Multiply-adds that mix one component of all pairs."""
        return self.pairs * (self.muls[2] if self.mode.mixing is Mixing.DENSE else 1)


@dataclass(frozen=True)
class PairPlan:
    """One direction of a product on a target.

    Attributes:
        couplings: The distinct ones.
        shapes: Those of the paths, and for each the positions of its paths in `spec.paths`.
    """

    spec: TensorProductSpec
    direction: Direction
    target: Target
    scalar_bytes: int
    couplings: tuple[Coupling, ...]
    shapes: tuple[tuple[Shape, tuple[int, ...]], ...]

    @property
    def most_pairs(self) -> int:
        """Pairs of the path that has most."""
        return max(shape.pairs for shape, _ in self.shapes)

    @property
    def components(self) -> tuple[int, int, int]:
        """Components of in1, in2 and out of the couplings that have most."""
        dims = [coupling.dims for coupling in self.couplings]
        return max(d[0] for d in dims), max(d[1] for d in dims), max(d[2] for d in dims)

    # ---- on a GPU; the layout of `preludes/gpu_pair_rows.h`

    @cached_property
    def span(self) -> int:
        """Elements of the couplings of an edge that are in shared memory at a time."""
        kept = [shape for shape, _ in self.shapes if not shape.is_own]
        most = max((shape.pairs * self._output(shape)[1] for shape in kept), default=0)
        staged = WARP * self.components[2] if self.stores_z else 0
        return _odd_quads(max(min(most, max(_GOOD_SPAN, self.components[2])), staged))

    @property
    def warps(self) -> int:
        """Warps of a multiprocessor that leave each lane the registers that its code takes."""
        held = _HELD[self.direction] * sum(self.components) * self.scalar_bytes
        if self._all_own and held <= _MOST_HELD_BYTES:
            return _MANY_WARPS
        few = self.direction is Direction.DOUBLE_BACKWARD or self.weight_copies is not WeightCopies.NONE
        if self.scalar_bytes == 4:
            return 12 if few else 16
        return 8 if few and self.direction is not Direction.BACKWARD else 12

    @cached_property
    def edges(self) -> int:
        """Edges that a warp takes at a time: more than one if all that they have fits shared memory of as many warps.

        With weights in chunks, no more than leave each as many lanes as its channels of the output take; where all
        pairs are channels of the output, as many as there are pairs.
        """
        edges = _MOST_EDGES if self.rows_shared else 1
        if self._all_own:
            edges = min(edges, self._own_edges)
        if self.weight_copies is WeightCopies.CHUNKS:
            edges = WARP // max(lanes_of_all(*numbers) for numbers in self._matrix_outputs)
        while edges > 1 and (self._bytes(edges) + _OWN_BYTES) * self.warps > _MULTIPROCESSOR_BYTES:
            edges //= 2
        return edges

    @property
    def _row_elements(self) -> int:
        """Sums of an edge."""
        spec = self.spec
        gradients = 0 if self.direction is Direction.FORWARD else spec.x_dim + spec.y_dim
        return gradients + (0 if self.direction is Direction.BACKWARD or self.stores_z else spec.z_dim)

    @property
    def rows_shared(self) -> bool:
        """Whether these sums are kept in shared memory; if not, in device memory."""
        return self._row_elements * self.scalar_bytes <= _MOST_ROWS_BYTES

    @property
    def _all_own(self) -> bool:
        return all(shape.is_own for shape, _ in self.shapes)

    @property
    def _own_edges(self) -> int:
        """Edges of a warp that leave each as many lanes as the path that has most has pairs."""
        return max(WARP >> (self.most_pairs - 1).bit_length(), 1)

    @cached_property
    def stores_z(self) -> bool:
        """Whether each element of z is of one pair, whose lane stores it or adds to it; others have sums beside z."""
        spec = self.spec
        if self.direction is Direction.BACKWARD or not self._all_own or self._own_edges > 1:
            return False
        blocks = {path.z_offset: path.mul3 * path.ir3.dim for path in spec.paths}
        return len(blocks) == len(spec.paths) and sum(blocks.values()) == spec.z_dim

    # ---- what is copied to shared memory

    @cached_property
    def weight_copies(self) -> WeightCopies:
        """How weights reach the lanes, and with them the rows of x, y and gz and of tangents.

        Few weights are copied forward alone: with gradients a lane has more to do with them than to wait for them, and
        a warp had better take more edges.
        """
        spec = self.spec
        elements = self._row_elements + self._operand_elements
        if not self.target.copies_in_bulk or elements * self.scalar_bytes > _MOST_COPIED_BYTES:
            return WeightCopies.NONE
        if spec.shared_weights or not self._matrix_outputs:
            return WeightCopies.NONE
        if spec.weight_numel * self.scalar_bytes <= _MOST_WEIGHT_BYTES:
            return WeightCopies.ROWS if self.direction is Direction.FORWARD else WeightCopies.NONE
        is_narrow = all(lanes_of_all(*numbers) <= WARP for numbers in self._matrix_outputs)
        return WeightCopies.CHUNKS if is_narrow else WeightCopies.NONE

    @property
    def streams_weights(self) -> bool:
        """Whether an edge has so many weights that they are most of what is moved."""
        weights = 0 if self.spec.shared_weights else self.spec.weight_numel
        return weights > self.spec.z_dim and weights * self.scalar_bytes > _MOST_WEIGHT_BYTES

    @property
    def copies_operands(self) -> bool:
        """Whether rows of edges are copied to shared memory, and their weights with them."""
        return self.weight_copies is not WeightCopies.NONE

    @property
    def stages(self) -> int:
        """Chunks of weights that there is room for."""
        return _STAGES if self.weight_copies is WeightCopies.CHUNKS else 0

    @cached_property
    def mixings(self) -> tuple[DenseMixing, ...]:
        """How shapes are mixed; of those that are not dense the tile of pairs counts, or nothing."""
        found = [self._mixing(shape, self.edges) for shape, _ in self.shapes]
        return share_code(found, [self._output(shape) for shape, _ in self.shapes])

    @property
    def chunk_elements(self) -> int:
        """Room for the weights of an edge that are copied together, without tangents."""
        return self._chunk_elements(self.edges)

    def _mixing(self, shape: Shape, edges: int) -> DenseMixing:
        in_chunks = self.weight_copies is WeightCopies.CHUNKS and shape.has_matrix
        chunk_bytes = (_CHUNK_BYTES_FLOAT64 if self.scalar_bytes == 8 else _CHUNK_BYTES)[self.direction]
        most = max(chunk_bytes // (edges * self._tangents * self.scalar_bytes), 1)
        lanes, (mul3, d3) = WARP // edges, self._output(shape)
        is_narrow = mul3 < lanes and mul3 * d3 * self.scalar_bytes <= _WHOLE_ROW_BYTES
        if in_chunks and is_narrow and self.direction is Direction.BACKWARD:
            return whole_pairs(shape.pairs, mul3, d3, lanes=lanes, span=self.span, chunk_weights=most)
        return dense_mixing(
            shape.pairs,
            mul3,
            d3,
            least=lanes,
            span=self.span,
            tangents=self._tangents > 1,
            chunk_weights=most if in_chunks else 0,
        )

    def _chunk_elements(self, edges: int) -> int:
        if self.weight_copies is not WeightCopies.CHUNKS:
            return 0
        most = max(self._mixing(shape, edges).chunk * shape.muls[2] for shape, _ in self.shapes if shape.has_matrix)
        # Edges begin where the lanes of the one before end in banks of shared memory.
        room, lanes = self._room(most), WARP // edges
        return room + (lanes - room) % WARP

    @property
    def _matrix_outputs(self) -> list[tuple[int, int]]:
        """Channels and components of the outputs of shapes that have a matrix."""
        return [self._output(shape) for shape, _ in self.shapes if shape.has_matrix]

    def _output(self, shape: Shape) -> tuple[int, int]:
        """Its channels and components."""
        return shape.muls[2], self.couplings[shape.coupling].dims[2]

    @property
    def _tangents(self) -> int:
        return 2 if self.direction is Direction.DOUBLE_BACKWARD else 1

    def _room(self, elements: int) -> int:
        """For elements with all that shares 16 bytes with them."""
        quad = 16 // self.scalar_bytes
        return -(-elements // quad) * quad + quad

    @property
    def _operand_elements(self) -> int:
        """Room for the rows of x, y and gz of an edge, and for tangents."""
        spec = self.spec
        gradient = 0 if self.direction is Direction.FORWARD else self._room(spec.z_dim)
        return self._tangents * (self._room(spec.x_dim) + self._room(spec.y_dim)) + gradient

    def _bytes(self, edges: int) -> int:
        arrays = {Direction.FORWARD: 1, Direction.BACKWARD: 2, Direction.DOUBLE_BACKWARD: 4}[self.direction]
        sums = _odd_quads(self._row_elements) if self.rows_shared else 0
        weights = self.stages * self._tangents * self._chunk_elements(edges)
        if self.weight_copies is WeightCopies.ROWS:
            weights = self._room(self.spec.weight_numel)
        barriers = 8 * (1 + self.stages) if self.copies_operands else 0
        elements = arrays * self.span + sums + (self._operand_elements if self.copies_operands else 0) + weights
        numbers = _NUMBER_BYTES + (_PLACE_BYTES if self.copies_operands else 0)
        return (elements * self.scalar_bytes + numbers) * edges + barriers

    def shared_bytes(self) -> int:
        """Shared memory of a GPU block."""
        return self._bytes(self.edges)

    def multiply_adds(self) -> int:
        """Multiply-adds per edge: the arithmetic of the roofline."""
        couplings, mixings = {Direction.FORWARD: (1, 1), Direction.BACKWARD: (3, 2), Direction.DOUBLE_BACKWARD: (7, 5)}[
            self.direction
        ]
        total = 0
        for shape, paths in self.shapes:
            coupling = self.couplings[shape.coupling]
            work = couplings * shape.pairs * coupling.terms + mixings * shape.mixed * coupling.dims[2]
            total += work * len(paths)
        return total

    def explain(self) -> str:
        """A readable account of the plan."""
        lines = [
            f"{self.direction.value} on {self.target.name}, {8 * self.scalar_bytes}-bit, pairs of channels",
            f"  couplings: {len(self.couplings)}; multiply-adds: {self.multiply_adds()} an edge",
        ]
        if self.target.is_gpu:
            kept = "shared" if self.rows_shared else "device"
            stored = "; z is stored by pairs" if self.stores_z else ""
            lines.append(
                f"  a warp takes {self.edges} edges at a time; {self.span} elements of the couplings of each in shared "
                f"memory, sums in {kept} memory{stored}; {self.shared_bytes()} bytes of shared memory"
            )
            if self.copies_operands:
                lines.append(f"  rows of edges are copied to shared memory; of weights: {self.weight_copies.value}")
        elif self.spec.rows_share_weights:
            lines.append("  where rows share their weights, blocks of them are SIMD lanes")
        for shape, paths in self.shapes:
            lines.append(f"  {shape.pairs} pairs, {shape.mode.mixing.value}")
            lines += [f"    path {number}: {self.spec.paths[number]}" for number in paths]
        return "\n".join(lines)


def _odd_quads(elements: int) -> int:
    """At least so many, an odd multiple of 4: rows that begin in different banks of shared memory."""
    return (elements + 3) // 8 * 8 + 4


def plan_pairs(spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> PairPlan:
    """The plan of a direction of any product.

    Args:
        spec: What to compute; it has paths.
        direction: Which derivative.
        target: The processor.
        scalar_bytes: 4 for float32, 8 for float64.

    Raises:
        UnsupportedError: If a coupling of one warp takes more shared memory than a block may take.
    """
    couplings: dict[tuple[int, int, int, float], int] = {}
    found: list[Coupling] = []
    shapes: dict[Shape, list[int]] = {}
    for number, path in enumerate(spec.paths):
        key = (path.l1, path.l2, path.l3, path.coefficient)
        if key not in couplings:
            couplings[key] = len(found)
            found.append(_coupling(path))
        shape = Shape(couplings[key], path.mode, (path.mul1, path.mul2, path.mul3), path.weight_offset is not None)
        shapes.setdefault(shape, []).append(number)
    grouped = tuple((shape, tuple(paths)) for shape, paths in shapes.items())
    plan = PairPlan(spec, direction, target, scalar_bytes, tuple(found), grouped)
    if target.is_gpu and plan.shared_bytes() > target.shared_bytes:
        raise UnsupportedError(
            f"spec: expected couplings that fit the {target.shared_bytes} bytes of shared memory of {target.name}, got "
            f"{plan.shared_bytes()} bytes: use lower degrees"
        )
    return plan


def _coupling(path: Path) -> Coupling:
    # Components of y are counted from the channel of a pair, not from the row.
    matrix = edge_matrix(replace(path, y_offset=0), distinct=True)
    return Coupling(f"{path.ir1} (x) {path.ir2} -> {path.ir3}", (path.ir1.dim, path.ir2.dim, path.ir3.dim), matrix)
