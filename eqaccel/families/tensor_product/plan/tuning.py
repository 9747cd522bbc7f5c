"""Tunings: what may be chosen otherwise than the cost model chooses, and which choices are legal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from eqaccel.errors import TuningError
from eqaccel.families.tensor_product.plan.model import KernelPlan, Plan, alignment

_WIDEST_LOAD = 16  # bytes that a GPU lane loads or stores at once
_LANES = 32  # one warp copies the rows of a stage, a lane each
_WARPS_OF_BLOCK, _WARPS_OF_MULTIPROCESSOR = 32, 64  # that CUDA allows at most


@dataclass(frozen=True)
class Tuning:
    """Choices that take the place of the cost model's; None leaves a choice to it.

    Attributes:
        accumulators: What a segment may keep in registers: on a GPU, 32-bit registers of a thread for outputs; on a
            CPU, vector registers for outputs (forward) or for sums over channels (gradients).
        channels_per_lane: Channels that a GPU lane owns, in every segment.
        edges_per_stage: Edges that one stage of a GPU block's pipeline holds.
        stages: Stages of that pipeline, at least 2.
        blocks_per_sm: Blocks that a multiprocessor should hold, which limits the registers of a thread.

    Raises:
        TuningError: If a choice is not a positive whole number.
    """

    accumulators: int | None = None
    channels_per_lane: int | None = None
    edges_per_stage: int | None = None
    stages: int | None = None
    blocks_per_sm: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.choices().items():
            if type(value) is not int or value < 1:
                raise TuningError(f"{name}: expected a whole number of at least 1, or None, got {value!r}")

    def choices(self) -> dict[str, int]:
        """What is not left to the cost model, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def pipeline(self, kernel: KernelPlan) -> KernelPlan:
        """A kernel with what is chosen here of its pipeline."""
        names = ("edges_per_stage", "stages", "blocks_per_sm")
        chosen: dict[str, Any] = {name: value for name, value in self.choices().items() if name in names}
        return replace(kernel, **chosen)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.choices().items()) or "cost model"


UNTUNED = Tuning()
"""Leaves everything to the cost model."""


def check_tuning(plan: Plan, tuning: Tuning) -> None:
    """Refuses a plan that a tuning led to and that its target cannot run.

    Raises:
        TuningError: Naming the choice that does not fit.
    """
    if plan.target.is_gpu:
        for kernel in plan.kernels:
            _check_kernel(kernel)
        return
    foreign = [name for name in tuning.choices() if name != "accumulators"]
    if foreign:
        raise TuningError(f"{foreign[0]}: expected None on {plan.target.name}, got {getattr(tuning, foreign[0])}")


def _check_kernel(plan: KernelPlan) -> None:
    for segment in plan.segments:
        _check_channels(plan, segment.channels_per_lane)
        if segment.warps_per_group > plan.edges_per_stage:
            raise TuningError(
                f"edges_per_stage: expected at least {segment.warps_per_group}, one for each warp of a group, got "
                f"{plan.edges_per_stage}"
            )
    if plan.edges_per_stage > _LANES:
        raise TuningError(
            f"edges_per_stage: expected at most {_LANES}, one for each lane of a warp, got {plan.edges_per_stage}"
        )
    if plan.stages < 2:
        raise TuningError(f"stages: expected at least 2, got {plan.stages}")
    if plan.warps > _WARPS_OF_BLOCK:
        raise TuningError(
            f"accumulators, channels_per_lane: expected at most {_WARPS_OF_BLOCK} warps a block, got {plan.warps}"
        )
    if plan.warps * plan.blocks_per_sm > _WARPS_OF_MULTIPROCESSOR:
        raise TuningError(
            f"blocks_per_sm: expected at most {_WARPS_OF_MULTIPROCESSOR // plan.warps} blocks of {plan.warps} warps, "
            f"got {plan.blocks_per_sm}"
        )
    # Each block takes 1 KiB beside its own, of which a multiprocessor has as much more than a block may take.
    wanted = plan.blocks_per_sm * (plan.shared_bytes() + 1024)
    if wanted > plan.target.shared_bytes + 1024:
        raise TuningError(
            f"edges_per_stage, stages, blocks_per_sm: expected at most {plan.target.shared_bytes} bytes of shared "
            f"memory on {plan.target.name}, got {plan.shared_bytes()} in each of {plan.blocks_per_sm} blocks"
        )


def _check_channels(plan: KernelPlan, channels: int) -> None:
    widest, aligned = _WIDEST_LOAD // plan.scalar_bytes, alignment(plan.spec, plan.spec.paths)
    fitting = [width for width in (1, 2, 4) if width <= widest and aligned % width == 0]
    if channels not in fitting:
        raise TuningError(
            f"channels_per_lane: expected one of {', '.join(map(str, fitting))}, to which the rows of this tensor "
            f"product are aligned in {8 * plan.scalar_bytes} bits, got {channels}"
        )
