"""The handful of tunings that are worth timing."""

from __future__ import annotations

from collections.abc import Iterator

from eqaccel.codegen import Direction
from eqaccel.errors import TuningError
from eqaccel.families.tensor_product.plan.build import make_plan
from eqaccel.families.tensor_product.plan.model import Plan
from eqaccel.families.tensor_product.plan.tuning import UNTUNED, Tuning
from eqaccel.families.tensor_product.spec import TensorProductSpec
from eqaccel.targets import Target

MAX_CANDIDATES = 8
"""Plans of a kernel that are worth timing: all of them are compiled, which takes seconds each."""


def candidates(spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> tuple[Tuning, ...]:
    """Legal tunings of a kernel whose plans all differ.

    Args:
        spec: What to compute.
        direction: Forward, backward or double backward.
        target: The processor to plan for.
        scalar_bytes: 4 for float32, 8 for float64.

    Returns:
        At most `MAX_CANDIDATES` tunings; the first one leaves everything to the cost model.
    """
    default = make_plan(spec, direction, target, scalar_bytes)
    plans = {UNTUNED: default}
    for tuning in _gpu_proposals(default) if target.is_gpu else _cpu_proposals(target):
        try:
            plan = make_plan(spec, direction, target, scalar_bytes, tuning)
        except TuningError:
            continue
        if plan not in plans.values():
            plans[tuning] = plan
    return tuple(plans)[:MAX_CANDIDATES]


def _cpu_proposals(target: Target) -> Iterator[Tuning]:
    # Fewer registers mean more passes over x, more than there are mean spills, which caches make cheap.
    for eighths in (5, 7, 10, 3):
        yield Tuning(accumulators=target.registers * eighths // 8)


def _gpu_proposals(plan: Plan) -> Iterator[Tuning]:
    """Steps away from the cost model's plan, one choice at a time; what is most often worth it comes first."""
    if not plan.segments:
        return
    channels = max(segment.channels_per_lane for segment in plan.segments)
    outputs = max(len(segment.z_offsets) * segment.channels_per_lane for segment in plan.segments)
    # A tuning gives all kernels of a plan the same numbers: the largest ones stand for them, and the least number of
    # blocks is what all of them have room for.
    blocks = max(kernel.blocks_per_sm for kernel in plan.kernels)
    least = min(kernel.blocks_per_sm for kernel in plan.kernels)
    edges = max(kernel.edges_per_stage for kernel in plan.kernels)
    stages = max(kernel.stages for kernel in plan.kernels)
    # A block that takes more shared memory leaves room for fewer.
    for count in dict.fromkeys((blocks, blocks - 1, least)):
        if count:
            yield Tuning(edges_per_stage=2 * edges, blocks_per_sm=count)
    yield Tuning(stages=2 if stages > 2 else 3)
    yield Tuning(blocks_per_sm=blocks + 1)
    for count in dict.fromkeys((blocks - 1, least)):
        if 0 < count < blocks:
            yield Tuning(blocks_per_sm=count)
    for width in (1, 2, 4):
        if width != channels:
            yield Tuning(channels_per_lane=width)
    for share in (2.0, 0.75):
        yield Tuning(accumulators=max(int(share * outputs * plan.scalar_bytes / 4), 1))
    if edges > 1:
        yield Tuning(edges_per_stage=edges // 2)
