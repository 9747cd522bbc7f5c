"""The cost model: which paths share a segment, what a lane owns, how deep the pipeline is.

The GPU numbers follow measurements on an H200: an edge loop of more than about 2000 instructions leaves the instruction
cache, more than about 160 accumulators a thread spill, and only register classes of 128, 168 and 255 change the number
of resident warps (16, 12 and 8 a multiprocessor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqaccel.plan.matrices import edge_matrices
from eqaccel.plan.model import (
    Block,
    Direction,
    EdgeMatrix,
    KernelPlan,
    PlannedPath,
    Segment,
    multiply_adds,
    round_up,
)
from eqaccel.plan.passes import Fits, group, one_row, registers
from eqaccel.plan.target import Target
from eqaccel.spec import Path, TensorProductSpec

_LOOP_INSTRUCTIONS = 2000
_ACCUMULATORS = {Direction.FORWARD: 76, Direction.BACKWARD: 160, Direction.DOUBLE_BACKWARD: 80}
_WARPS_OF_REGISTERS = ((128, 16), (168, 12), (255, 8))


def make_plan(spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> KernelPlan:
    """Plans one direction of a tensor product.

    Args:
        spec: What to compute.
        direction: Forward, backward or double backward.
        target: The processor to plan for.
        scalar_bytes: 4 for float32, 8 for float64.

    Returns:
        The plan; the same arguments always give the same plan.
    """
    cpu_forward = not target.is_gpu and direction is Direction.FORWARD
    matrices, matrix_of = edge_matrices(spec, distinct=target.is_gpu or cpu_forward, by_entry=cpu_forward)
    build = _gpu_segments if target.is_gpu else _cpu_segments
    segments = build(spec, matrices, matrix_of, direction, target, scalar_bytes)
    edges, stages, resident = _pipeline(spec, matrices, segments, direction, target, scalar_bytes)
    return KernelPlan(spec, direction, target, scalar_bytes, matrices, segments, edges, stages, resident)


def _cpu_segments(
    spec: TensorProductSpec,
    matrices: tuple[EdgeMatrix, ...],
    matrix_of: tuple[int, ...],
    direction: Direction,
    target: Target,
    scalar_bytes: int,
) -> tuple[Segment, ...]:
    # Forward: outputs stay in registers over a block of edges. Otherwise the loop over channels is innermost and what
    # stays in registers are the sums over channels; a segment is an in1 block, so that the gradients of its outputs are
    # few enough for the first-level cache, where several edges use them.
    outputs = target.registers - 8
    segments = []
    for mul, numbers in _by_multiplicity(spec):
        groups: list[list[int]] = [[]]
        for number in numbers:
            if direction is Direction.FORWARD:
                full = _width(spec, [*groups[-1], number]) > outputs
            else:
                full = any(spec.paths[n].in1 != spec.paths[number].in1 for n in groups[-1])
            if groups[-1] and full:
                groups.append([])
            groups[-1].append(number)
        fits = registers(direction, target.registers - 5)
        segments += [_segment(spec, chosen, matrices, matrix_of, mul, 1, 1, fits) for chosen in groups]
    return tuple(segments)


def _gpu_segments(
    spec: TensorProductSpec,
    matrices: tuple[EdgeMatrix, ...],
    matrix_of: tuple[int, ...],
    direction: Direction,
    target: Target,
    scalar_bytes: int,
) -> tuple[Segment, ...]:
    def cost(number: int) -> int:
        path = spec.paths[number]
        return multiply_adds(direction, len(matrices[matrix_of[number]].elements), 2 * path.l1 + 1, 2 * path.l3 + 1)

    segments = []
    for mul, numbers in _by_multiplicity(spec):
        channels = _channels_per_lane(spec, numbers, mul, sum(map(cost, numbers)), direction, scalar_bytes)
        limit = max(_ACCUMULATORS[direction] * 4 // scalar_bytes // channels, 1)
        # The code of one multiplicity runs on every chunk of its channels.
        warps = -(-mul // (32 * channels))
        units = _units(spec, numbers, direction)
        # Forward kernels are bound by registers and memory, the others by arithmetic: balance that.
        forward = direction is Direction.FORWARD
        balance = (lambda u: _width(spec, u)) if forward else (lambda u: sum(map(cost, u)))
        for chosen in _split(units, limit, lambda unit: _width(spec, unit), balance):
            segments.append(_segment(spec, chosen, matrices, matrix_of, mul, channels, warps, one_row))
    return tuple(segments)


def _channels_per_lane(
    spec: TensorProductSpec, numbers: Sequence[int], mul: int, cost: int, direction: Direction, scalar_bytes: int
) -> int:
    """The most channels a lane can own with aligned vector loads, full warps and a loop that fits the cache."""
    offsets = [mul] + [offset for n in numbers for offset in _offsets(spec.paths[n])]
    # Rows are read as vectors, so every row length has to be a multiple of the vector too.
    offsets += [spec.x_dim, spec.z_dim, spec.weight_numel]
    outputs = _width(spec, numbers)
    for channels in (2, 1):
        fits_vector = all(offset % channels == 0 for offset in offsets)
        fits_warp = channels == 1 or mul >= 32 * channels
        fits_cache = channels == 1 or 1.3 * channels * cost <= _LOOP_INSTRUCTIONS
        # A double takes two registers, and so does everything computed from it: it counts four times.
        fits_registers = channels == 1 or channels * outputs * (scalar_bytes // 4) ** 2 <= 160
        if fits_vector and fits_warp and fits_cache and fits_registers:
            return channels
    return 1


def _pipeline(
    spec: TensorProductSpec,
    matrices: tuple[EdgeMatrix, ...],
    segments: tuple[Segment, ...],
    direction: Direction,
    target: Target,
    scalar_bytes: int,
) -> tuple[int, int, int]:
    """Edges a stage, stages, and blocks that a multiprocessor should hold."""
    if not target.is_gpu or not segments:
        return 32, 1, 1
    twice = 2 if direction is Direction.DOUBLE_BACKWARD else 1
    words = scalar_bytes // 4
    registers = max(
        words * (twice * len(s.z_offsets) * s.channels_per_lane + 8 * s.channels_per_lane)
        + (32 if direction is Direction.FORWARD else 40 + words * spec.y_dim)
        for s in segments
    )
    resident_warps = next((warps for limit, warps in _WARPS_OF_REGISTERS if registers <= limit), 8)
    warps = sum(segment.warps for segment in segments)
    row_bytes = (round_up(spec.x_dim, 4) + round_up(spec.weight_numel, 4)) * scalar_bytes * twice
    smallest = min(segment.mul for segment in segments)
    wanted = 4 if row_bytes <= 3 * 1024 else 2 if row_bytes <= 8 * 1024 * twice or smallest <= 64 else 1
    resident = max(resident_warps // warps, 1)
    while True:
        for edges, stages in ((wanted, 3), (wanted, 2), (1, 3), (1, 2)):
            plan = KernelPlan(spec, direction, target, scalar_bytes, matrices, segments, edges, stages, resident)
            if (plan.shared_bytes() + 1024) * resident <= target.shared_bytes:
                return edges, stages, resident
        if resident == 1:
            return 1, 2, 1
        resident -= 1


def _by_multiplicity(spec: TensorProductSpec) -> list[tuple[int, list[int]]]:
    """Path numbers of each multiplicity, ordered by the x block that they read."""
    numbers = sorted(range(len(spec.paths)), key=lambda n: (spec.paths[n].in1, n))
    muls = sorted({path.mul for path in spec.paths}, reverse=True)
    return [(mul, [n for n in numbers if spec.paths[n].mul == mul]) for mul in muls]


def _offsets(path: Path) -> tuple[int, ...]:
    return (path.x_offset, path.z_offset) + (() if path.weight_offset is None else (path.weight_offset,))


def _width(spec: TensorProductSpec, numbers: Sequence[int]) -> int:
    """Output components that these paths write."""
    blocks = {spec.paths[n].z_offset: 2 * spec.paths[n].l3 + 1 for n in numbers}
    return sum(blocks.values())


def _units(spec: TensorProductSpec, numbers: Sequence[int], direction: Direction) -> list[list[int]]:
    """Paths that one warp has to run together: an output is stored once, and so is the gradient of an x block."""
    units: list[list[int]] = []
    for number in numbers:
        keys = _unit_keys(spec.paths[number], direction)
        touching = [u for u in units if any(_unit_keys(spec.paths[m], direction) & keys for m in u)]
        merged = [m for u in touching for m in u] + [number]
        units = [u for u in units if u not in touching] + [merged]
    return sorted((sorted(u, key=numbers.index) for u in units), key=lambda u: numbers.index(u[0]))


def _unit_keys(path: Path, direction: Direction) -> set[tuple[str, int]]:
    keys = set()
    if direction is not Direction.BACKWARD:
        keys.add(("out", path.out))
    if direction is not Direction.FORWARD:
        keys.add(("in1", path.in1))
    return keys


def _split(
    units: list[list[int]], limit: int, width: Callable[[list[int]], int], cost: Callable[[list[int]], int]
) -> list[list[int]]:
    """Contiguous groups of units, as few as the limit on output components allows, of nearly equal cost."""
    total = sum(map(cost, units))
    for count in range(max(1, -(-sum(map(width, units)) // limit)), len(units) + 1):
        groups: list[list[int]] = [[]]
        spent = 0
        for unit in units:
            share = total * len(groups) / count
            full = width(groups[-1] + unit) > limit or spent + cost(unit) / 2 > share
            if groups[-1] and full:
                groups.append([])
            groups[-1] = groups[-1] + unit
            spent += cost(unit)
        if len(groups) <= count:
            return groups
    return units


def _segment(
    spec: TensorProductSpec,
    numbers: Sequence[int],
    matrices: tuple[EdgeMatrix, ...],
    matrix_of: tuple[int, ...],
    mul: int,
    channels: int,
    warps: int,
    fits: Fits,
) -> Segment:
    z_offsets: list[int] = []
    position: dict[int, int] = {}
    blocks: dict[int, list[PlannedPath]] = {}
    for number in numbers:
        path = spec.paths[number]
        d1, d3 = 2 * path.l1 + 1, 2 * path.l3 + 1
        if path.z_offset not in position:
            position[path.z_offset] = len(z_offsets)
            z_offsets += [path.z_offset + k * mul for k in range(d3)]
        start = position[path.z_offset]
        planned = PlannedPath(
            number=number,
            label=str(path),
            matrix=matrix_of[number],
            d1=d1,
            d3=d3,
            z_offset=path.z_offset,
            accumulators=tuple(range(start, start + d3)),
            weight_offset=path.weight_offset,
            weight_first=d1 <= d3,
        )
        blocks.setdefault(path.in1, []).append(planned)
    return Segment(
        mul=mul,
        blocks=tuple(
            Block(
                label=f"{spec.irreps_in1[in1].mul}x{spec.irreps_in1[in1].ir}",
                x_offset=spec.paths[paths[0].number].x_offset,
                d1=paths[0].d1,
                paths=tuple(paths),
                passes=group(paths, matrices, fits),
            )
            for in1, paths in blocks.items()
        ),
        z_offsets=tuple(z_offsets),
        channels_per_lane=channels,
        warps=warps,
    )
