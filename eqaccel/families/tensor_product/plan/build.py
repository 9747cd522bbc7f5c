"""The cost model: which paths share a segment, what a lane owns, how deep the pipeline is.

The GPU numbers follow measurements on an H200: an edge loop of more than about 2000 instructions leaves the instruction
cache, more than about 160 accumulators a thread spill, and only register classes of 128, 168 and 255 change the number
of resident warps (16, 12 and 8 a multiprocessor).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eqaccel.codegen import Direction
from eqaccel.errors import UnsupportedError
from eqaccel.families.tensor_product.plan.matrices import edge_matrices
from eqaccel.families.tensor_product.plan.model import (
    Block,
    KernelPlan,
    Plan,
    PlannedPath,
    Purpose,
    Segment,
    alignment,
    multiply_adds,
    segment_work,
)
from eqaccel.families.tensor_product.plan.passes import Fits, group, one_row, registers
from eqaccel.families.tensor_product.plan.tuning import UNTUNED, Tuning, check_tuning
from eqaccel.families.tensor_product.spec import TensorProductSpec
from eqaccel.targets import Target

_LOOP_INSTRUCTIONS = 2000
# Multiply-adds for one channel, which grow to twice as many instructions: what one kernel can hold, and how much the
# kernels of a larger tensor product get.
_WHOLE = dict(zip(Direction, (900, 950, 1400, 1400), strict=True))
_WORK = dict(zip(Direction, (900, 700, 1200, 1200), strict=True))
_ACCUMULATORS = dict(zip(Direction, (76, 160, 80, 36), strict=True))
_OTHER_REGISTERS = dict(zip(Direction, (32, 40, 64, 100), strict=True))
_WARPS_OF_REGISTERS = ((128, 16), (168, 12), (255, 8))
_FEWEST_WARPS = _WARPS_OF_REGISTERS[-1][1]
_PATH_OVERHEAD = 8  # instructions of a path beside its multiply-adds
# At most so many in a forward kernel of several multiplicities: each segment brings a copy of the pipeline's code.
_SEGMENTS, _WARPS = 3, 4
# Multiply-adds for one channel in gradients on a CPU: how many are compiled as one segment and, where there are more,
# as a function and a translation unit. Compilers take a millisecond for one or two, longer if the function is large.
_MOST_WORK, _FUNCTION_WORK, _UNIT_WORK = 2000, 500, 5000


def make_plan(
    spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int, tuning: Tuning = UNTUNED
) -> Plan:
    """Plans one direction of a tensor product.

    Args:
        spec: What to compute.
        direction: Forward, backward or double backward.
        target: The processor to plan for.
        scalar_bytes: 4 for float32, 8 for float64.
        tuning: Choices that take the place of the cost model's.

    Returns:
        The plan; the same arguments always give the same plan.

    Raises:
        TuningError: If the target cannot run what the tuning asks for.
        UnsupportedError: If the rows of a path do not fit the shared memory of the target.
    """
    cpu_forward = not target.is_gpu and direction is Direction.FORWARD
    matrices, matrix_of = edge_matrices(spec, distinct=target.is_gpu or cpu_forward, by_entry=cpu_forward)
    build = _Builder(spec, direction, target, scalar_bytes, matrices, matrix_of, tuning)
    kernels = build.gpu_kernels() if target.is_gpu else [build.kernel(0, build.cpu_segments())]
    plan = Plan(spec, direction, target, scalar_bytes, matrices, tuple(kernels))
    if tuning != UNTUNED:
        check_tuning(plan, tuning)
    return plan


@dataclass(frozen=True)
class _Builder(Purpose):
    matrix_of: tuple[int, ...]
    tuning: Tuning

    def kernel(self, number: int, segments: Sequence[Segment]) -> KernelPlan:
        return KernelPlan(
            self.spec, self.direction, self.target, self.scalar_bytes, self.matrices, number, tuple(segments)
        )

    def cpu_segments(self) -> list[Segment]:
        # Forward: outputs stay in registers over a block of edges. Otherwise the loop over channels is innermost and
        # what stays in registers are the sums over channels; a segment is an in1 block, so that the gradients of its
        # outputs are few enough for the first-level cache, where several edges use them.
        outputs = self.tuning.accumulators or self.target.registers - 8
        segments = []
        spent = 0  # on functions of their own
        for mul, numbers in _by_multiplicity(self.spec, range(len(self.spec.paths))):
            groups: list[list[int]] = [[]]
            for number in numbers:
                if self.direction is Direction.FORWARD:
                    full = self._width([*groups[-1], number]) > outputs
                else:
                    full = any(self.spec.paths[n].in1 != self.spec.paths[number].in1 for n in groups[-1])
                if groups[-1] and full:
                    groups.append([])
                groups[-1].append(number)
            fits = registers(self.direction, self.tuning.accumulators or self.target.registers - 5)
            for chosen in groups:
                if self.direction is Direction.FORWARD or self._cost(chosen) <= _MOST_WORK:
                    segments.append(self._segment(chosen, mul, 1, 1, fits))
                    continue
                for part in _split([[number] for number in chosen], _FUNCTION_WORK, self._cost, self._cost):
                    spent += self._cost(part)
                    unit = -(-spent // _UNIT_WORK)
                    segments.append(replace(self._segment(part, mul, 1, 1, fits), unit=unit))
        return segments

    def gpu_kernels(self) -> list[KernelPlan]:
        """As few kernels as the instruction cache and the shared memory allow; none where there are no paths.

        Raises:
            UnsupportedError: If a path on its own takes more shared memory than the target has.
        """
        kernels: list[KernelPlan] = []
        for numbers in self._code_of_kernels():
            self._add_fitting(kernels, numbers)
        return [self.tuning.pipeline(kernel) for kernel in kernels]

    def _gpu_kernel(self, numbers: Sequence[int], before: Sequence[KernelPlan]) -> KernelPlan:
        segments = [
            replace(segment, blocks=tuple(replace(b, adds=_reads(before, b.x_offset)) for b in segment.blocks))
            for segment in self._gpu_segments(numbers)
        ]
        return _with_pipeline(self.kernel(len(before), segments))

    def _add_fitting(self, kernels: list[KernelPlan], numbers: Sequence[int]) -> None:
        """Adds kernels of these paths whose rows fit the shared memory, which holds what the paths of a kernel read."""
        kernel = self._gpu_kernel(numbers, kernels)
        taken = kernel.shared_bytes()
        if taken <= self.target.shared_bytes:
            kernels.append(kernel)
            return
        units = self._units(numbers)
        if len(units) == 1:
            units = self._units(numbers, share_x=True)
        if len(units) == 1:
            limit = f"the {self.target.shared_bytes} bytes of shared memory of {self.target.name}"
            where = f"the {self.direction.value} kernel of {8 * self.scalar_bytes} bits"
            raise UnsupportedError(
                f"spec: expected rows that fit {limit}, got a path {self.spec.paths[numbers[0]]} that takes {taken} in "
                f"{where}: divide its channels among several tensor products"
            )
        for half in _split(units, -(-self._cost(numbers) // 2), self._cost, self._cost):
            self._add_fitting(kernels, half)

    def _code_of_kernels(self) -> list[list[int]]:
        """The paths of each kernel: all of them if their code fits, or else of one multiplicity, as far as it fits."""
        numbers = range(len(self.spec.paths))
        if not numbers:
            return []
        if self._cost(numbers) <= _WHOLE[self.direction] and self._suits_one_kernel(numbers):
            return [list(numbers)]
        most = _WORK[self.direction]
        parts: list[list[int]] = []
        for _, chosen in _by_multiplicity(self.spec, numbers):
            units = self._units(chosen)
            if max(map(self._cost, units)) > 1.5 * most:  # a block of x has too many paths for one kernel
                units = self._units(chosen, share_x=True)
            parts += _split(units, most, self._cost, self._cost)
        if self.direction.tangents > 1:  # groups would need more shared memory than leaves room for two
            return parts
        merged: list[list[int]] = []
        for part in parts:
            if merged and self._cost(merged[-1] + part) <= most and self._suits_one_kernel(merged[-1] + part):
                merged[-1] = merged[-1] + part
            else:
                merged.append(part)
        return merged

    def _suits_one_kernel(self, numbers: Sequence[int]) -> bool:
        """Whether these paths keep the warps of a block about as busy, and as many blocks at work, as on their own."""
        if self.direction is not Direction.FORWARD or len({self.spec.paths[n].mul for n in numbers}) == 1:
            return True
        segments = self._gpu_segments(numbers)
        return len(segments) <= _SEGMENTS and sum(segment.warp_groups for segment in segments) <= _WARPS

    def _gpu_segments(self, numbers: Sequence[int]) -> list[Segment]:
        segments = []
        for mul, chosen in _by_multiplicity(self.spec, numbers):
            channels = self.tuning.channels_per_lane or self._channels_per_lane(chosen, mul)
            accumulators = self.tuning.accumulators or _ACCUMULATORS[self.direction]
            limit = max(accumulators * 4 // self.scalar_bytes // channels, 1)
            # The code of one multiplicity runs on every chunk of its channels.
            warp_groups = -(-mul // (32 * channels))
            # Forward kernels are bound by registers and memory, the others by arithmetic: balance that.
            balance = self._width if self.direction is Direction.FORWARD else self._cost
            for paths in _split(self._units(chosen), limit, self._width, balance):
                segments.append(self._segment(paths, mul, channels, warp_groups, one_row))
        return segments

    def _cost(self, numbers: Sequence[int]) -> int:
        """Multiply-adds of paths for one channel."""
        total = 0
        for number in numbers:
            path = self.spec.paths[number]
            elements = len(self.matrices[self.matrix_of[number]].elements)
            total += multiply_adds(self.direction, elements, 2 * path.l1 + 1, 2 * path.l3 + 1)
        return total

    def _width(self, numbers: Sequence[int]) -> int:
        """Output components that these paths write."""
        blocks = {self.spec.paths[n].z_offset: 2 * self.spec.paths[n].l3 + 1 for n in numbers}
        return sum(blocks.values())

    def _channels_per_lane(self, numbers: Sequence[int], mul: int) -> int:
        """Two channels a lane with aligned vector loads, full warps and a loop that fits the cache, or else one."""
        fits_vector = alignment(self.spec, (self.spec.paths[n] for n in numbers)) % 2 == 0
        fits_warp = mul >= 64
        fits_cache = 2.6 * self._cost(numbers) <= _LOOP_INSTRUCTIONS
        # A double takes two registers, and so does everything computed from it: it counts four times.
        arrays = max(self.direction.order, 2)  # of an element for each output
        fits_registers = arrays * self._width(numbers) * (self.scalar_bytes // 4) ** 2 <= 160
        return 2 if fits_vector and fits_warp and fits_cache and fits_registers else 1

    def _units(self, numbers: Sequence[int], share_x: bool = False) -> list[list[int]]:
        """Paths that have to run together: an output is stored once, and so is the gradient of an x block.

        Args:
            numbers: The paths.
            share_x: Gradients of an x block may come in several parts, as from kernels one after another.
        """
        units: list[list[int]] = []
        for number in numbers:
            keys = self._keys(number, share_x)
            touching = [u for u in units if any(self._keys(m, share_x) & keys for m in u)]
            merged = [m for u in touching for m in u] + [number]
            units = [u for u in units if u not in touching] + [merged]
        return sorted((sorted(u, key=numbers.index) for u in units), key=lambda u: numbers.index(u[0]))

    def _keys(self, number: int, share_x: bool) -> set[tuple[str, int]]:
        path, keys = self.spec.paths[number], set()
        if self.direction is not Direction.BACKWARD:
            keys.add(("out", path.out))
        if self.direction is not Direction.FORWARD and not share_x:
            keys.add(("in1", path.in1))
        return keys

    def _segment(self, numbers: Sequence[int], mul: int, channels: int, warp_groups: int, fits: Fits) -> Segment:
        z_offsets: list[int] = []
        position: dict[int, int] = {}
        blocks: dict[int, list[PlannedPath]] = {}
        for number in numbers:
            path = self.spec.paths[number]
            d1, d3 = 2 * path.l1 + 1, 2 * path.l3 + 1
            if path.z_offset not in position:
                position[path.z_offset] = len(z_offsets)
                z_offsets += [path.z_offset + k * mul for k in range(d3)]
            start = position[path.z_offset]
            planned = PlannedPath(
                number=number,
                label=str(path),
                matrix=self.matrix_of[number],
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
                    label=f"{self.spec.irreps_in1[in1].mul}x{self.spec.irreps_in1[in1].ir}",
                    x_offset=self.spec.paths[paths[0].number].x_offset,
                    d1=paths[0].d1,
                    paths=tuple(paths),
                    passes=group(paths, self.matrices, fits),
                )
                for in1, paths in blocks.items()
            ),
            z_offsets=tuple(z_offsets),
            channels_per_lane=channels,
            warp_groups=warp_groups,
        )


def _with_pipeline(plan: KernelPlan) -> KernelPlan:
    """Warps of a block, edges a stage, stages, and blocks that a multiprocessor should hold."""
    if not plan.segments:
        return plan
    wanted_registers = _wanted_registers(plan)
    resident_warps = next((warps for limit, warps in _WARPS_OF_REGISTERS if wanted_registers <= limit), _FEWEST_WARPS)
    plan = _ordered(plan, plan.target)
    smallest = min(segment.mul for segment in plan.segments)
    wanted = (
        4
        if plan.row_bytes <= 3 * 1024
        else 2
        if plan.row_bytes <= 14 * 1024 * plan.direction.tangents or smallest <= 64
        else 1
    )
    for sizes in _group_sizes(plan, resident_warps):
        segments = tuple(replace(s, warps_per_group=size) for s, size in zip(plan.segments, sizes, strict=True))
        least = max(sizes)
        most_resident = max(resident_warps // sum(segment.warps for segment in segments), 1)
        # A block that is alone on its multiprocessor has more shared memory, and nobody else to work while it waits.
        most_edges = wanted if most_resident > 1 else 2 * wanted
        choices = sorted({max(edges, least) for edges in (most_edges, wanted, wanted // 2, 1)}, reverse=True)
        # Finding one of two stages takes fewer instructions than one of three, which counts where a block runs the code
        # of several segments at once: 8 % of the time of a gradient with three.
        depths = (2,) if plan.direction is Direction.BACKWARD and len(segments) > 2 else (3, 2)
        # Few rows are written on graphs, which is not worth fewer edges or blocks.
        turned_lanes = (32,) if plan.spec.by_rows else (32, 16, 0)
        shapes = itertools.product(range(most_resident, 0, -1), choices, depths, turned_lanes)
        for resident, edges, stages, lanes in shapes:
            chosen = replace(
                plan,
                segments=segments,
                edges_per_stage=edges,
                stages=stages,
                blocks_per_sm=resident,
                turned_lanes=lanes,
            )
            if (chosen.shared_bytes() + 1024) * resident <= plan.target.shared_bytes + 1024:
                return chosen
    return replace(plan, edges_per_stage=1, stages=2, blocks_per_sm=1)


def _wanted_registers(plan: KernelPlan) -> int:
    """Registers of a thread that a kernel has use for, which may be more than there are."""
    arrays = (1, 1, 2, 3)[plan.direction.order]  # of an element for each output
    words = plan.scalar_bytes // 4
    of_segments = (
        words * (arrays * len(s.z_offsets) * s.channels_per_lane + 8 * s.channels_per_lane)
        + _OTHER_REGISTERS[plan.direction]
        + words * plan.spec.y_dim * plan.direction.gradients
        for s in plan.segments
    )
    return max(of_segments, default=0)


def is_ordered_for(plan: Plan, target: Target) -> bool:
    """Whether a plan of larger machines has its blocks in the order that the registers of a target ask for."""
    return all(_ordered(kernel, target) == kernel for kernel in plan.kernels)


def _ordered(plan: KernelPlan, target: Target) -> KernelPlan:
    """A kernel with the blocks of its segments in the order that takes fewest registers, where a target has no more."""
    order, wanted = plan.direction.order, _wanted_registers(plan)
    longest_first = order == 1 and wanted > _WARPS_OF_REGISTERS[-2][0]
    if not target.spare_registers and plan.scalar_bytes == 4:  # doubles take so many that other things decide
        longest_first |= order == 2 and wanted > _WARPS_OF_REGISTERS[-1][0]
    return replace(plan, segments=tuple(map(_longest_first, plan.segments))) if longest_first else plan


def _longest_first(segment: Segment) -> Segment:
    """The blocks with most rows first: they need most registers beside the sums for y, few of which are begun then."""
    return replace(segment, blocks=tuple(sorted(segment.blocks, key=lambda block: -block.d1)))


def _group_sizes(plan: KernelPlan, most_warps: int) -> list[list[int]]:
    """Warps of each segment's groups, the best balance first and single warps last.

    The warps of a block meet after every stage, so that all of them wait for the one with the most work.
    """
    work = [
        s.channels_per_lane * (segment_work(plan.direction, plan.matrices, s) + _PATH_OVERHEAD * len(s.paths))
        for s in plan.segments
    ]
    total = sum(w * s.warp_groups for w, s in zip(work, plan.segments, strict=True))
    sizes = [1] * len(work)
    found = [(1.1 * _busy(plan, work, total, sizes), sizes)]  # a group of several warps costs a sum over them
    # Forward kernels wait for memory, and one segment alone keeps all warps as busy.
    while len(work) > 1 and plan.direction is not Direction.FORWARD:
        slowest = max(range(len(work)), key=lambda n: work[n] / sizes[n])
        sizes = [2 * m if n == slowest else m for n, m in enumerate(sizes)]
        warps = sum(m * s.warp_groups for m, s in zip(sizes, plan.segments, strict=True))
        if warps > most_warps or max(sizes) > 8:
            break
        found.append((_busy(plan, work, total, sizes), sizes))
    found.sort(key=lambda one: -one[0])
    return [sizes for _, sizes in found]


def _busy(plan: KernelPlan, work: list[int], total: int, sizes: list[int]) -> float:
    """The share of their time that the warps of a block work."""
    warps = sum(m * s.warp_groups for m, s in zip(sizes, plan.segments, strict=True))
    return total / (warps * max(w / m for w, m in zip(work, sizes, strict=True)))


def _reads(kernels: Sequence[KernelPlan], x_offset: int) -> bool:
    return any(block.x_offset == x_offset for k in kernels for segment in k.segments for block in segment.blocks)


def _by_multiplicity(spec: TensorProductSpec, numbers: Sequence[int]) -> list[tuple[int, list[int]]]:
    """These path numbers by multiplicity, ordered by the x block that they read."""
    numbers = sorted(numbers, key=lambda n: (spec.paths[n].in1, n))
    muls = sorted({spec.paths[n].mul for n in numbers}, reverse=True)
    return [(mul, [n for n in numbers if spec.paths[n].mul == mul]) for mul in muls]


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
