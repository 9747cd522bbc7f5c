"""The payload of a tensor product: the sources of all of its kernels, for every class of machines."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from eqaccel.codegen import COMMON, SCALAR_BYTES, SCALARS, Direction, pack, translation_unit
from eqaccel.errors import UnsupportedError
from eqaccel.families.family import TunedKernel
from eqaccel.families.tensor_product import check
from eqaccel.families.tensor_product.generators import AnyPlan, body_of, generator, plan_of
from eqaccel.families.tensor_product.spec import TensorProductSpec, read_spec_text, spec_text
from eqaccel.targets import MACHINE_CLASSES, TARGETS, Target, host_target

NAME = "tensor_product"
"""Of the family."""


@functools.lru_cache(maxsize=256)
def payload(spec: TensorProductSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
    """The payload of a spec and the integer key that names it: all kernels but those of third derivatives.

    Args:
        spec: The tensor product.
        tuned: Kernels that one kind of processor runs instead of those which the cost model plans for all.

    Returns:
        The bytes, and a key of 63 bits derived from them.

    Raises:
        TuningError: A processor cannot run what was tuned for it.
    """
    return _packed(spec, COMMON, tuned)


@functools.lru_cache(maxsize=64)
def third_payload(spec: TensorProductSpec) -> tuple[bytes, int] | None:
    """The kernels of third derivatives, which few models take, as a payload of their own with its key.

    Returns:
        As `payload`; None for a product that is not channel by channel, whose third derivatives are composed.
    """
    return _packed(spec, (Direction.TRIPLE_BACKWARD,), ()) if spec.is_channelwise else None


def third_payload_of(text: str) -> bytes | None:
    """The same from entry "spec" of another payload: what the runtime asks for where third derivatives are taken."""
    made = third_payload(read_spec_text(text))
    return None if made is None else made[0]


def _packed(
    spec: TensorProductSpec, directions: tuple[Direction, ...], tuned: tuple[TunedKernel, ...]
) -> tuple[bytes, int]:
    way = generator(spec)
    entries: dict[str, str] = {f"prelude/{backend}": way.prelude(backend, spec) for backend in ("cpu", "cuda", "hip")}
    meta = {"x_dim": spec.x_dim, "y_dim": spec.y_dim, "z_dim": spec.z_dim}
    meta["w_dim"] = spec.weight_numel
    meta["covers_all"] = int(_covers_all(spec))
    if spec.bfloat16_weights:
        meta["bfloat16_weights"] = 1
    # What kernels for a GPU take: 1 for the first, 2 for the second, 3 for both.
    meta["layouts"] = 3 if not spec.is_channelwise else 1 if spec.layout == "mul_ir" else 2
    meta["rows_or_graphs"] = 3 if not spec.is_channelwise else 1 if spec.by_rows else 2
    meta["shares_weights"] = int(spec.is_channelwise)  # kernels take rows of weights that edges share
    meta["sums_weights"] = int(spec.rows_share_weights)
    meta |= {f"shared_bytes/{target.name}": target.shared_bytes for target in TARGETS.values() if target.is_gpu}
    entries["spec"] = spec_text(spec)
    entries["check/blocks"] = check.blocks(spec)
    codes: dict[str, int] = {}
    for direction in directions:
        plan = way.plan(spec, direction, host_target(), 4)
        _add_body(entries, f"cpu/{direction.value}", plan, body_of(plan))
        entries[f"check/{direction.value}"] = check.checksums(plan)
        if spec.rows_share_weights:
            entries[f"check/{direction.value}/summed"] = check.checksums(plan, summed=True)
        for scalar, scalar_bytes in SCALAR_BYTES.items():
            for plan in gpu_plans(spec, direction, scalar_bytes):
                name = f"{plan.target.name}/{direction.value}/{scalar}"
                _add_body(entries, name, plan, way.launch(plan))
                meta |= way.launch_numbers(name, plan)
                # Machines, and the two scalars, differ in launches more often than in code, which is long.
                meta[f"{name}/code"] = codes.setdefault(way.code(plan), len(codes))
    entries |= {f"code/{number}": text for text, number in codes.items()}
    for kernel in tuned:
        plan = way.plan(spec, kernel.direction, kernel.target, kernel.scalar_bytes, kernel.tuning)
        name = f"tuned/{kernel.target.name}/{kernel.direction.value}/{SCALARS[kernel.scalar_bytes]}"
        _add_body(entries, name, plan, body_of(plan))
        meta |= way.launch_numbers(name, plan)
    return pack(NAME, meta, entries)


def _add_body(entries: dict[str, str], name: str, plan: AnyPlan, text: str) -> None:
    entries[name] = text
    # What EQACCEL_DUMP writes beside a source, also where no Python is: some kilobytes, where a body has tens of them.
    entries[f"plan/{name}"] = plan.explain() + "\n"


def gpu_plans(spec: TensorProductSpec, direction: Direction, scalar_bytes: int) -> list[Any]:
    """The plans of a kernel that travel in its payload, the one that takes most shared memory first.

    A class of machines has a plan of its own only where those of larger ones do not suit it.
    """
    suits, plans = generator(spec).suits, list[Any]()
    for target in MACHINE_CLASSES:
        if any(suits(plan, target) for plan in plans):
            continue
        with contextlib.suppress(UnsupportedError):  # the runtime says so where it is asked for a kernel
            plans.append(plan_of(spec, direction, target, scalar_bytes))
    return plans


def travelling_plan(spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> Any:
    """The plan of the kernel that a target runs.

    On a GPU it is the one in the payload for machines of the target's class or, if there is none, that which takes most
    of the shared memory there is.

    Raises:
        UnsupportedError: If there is none, because the target has too little shared memory.
    """
    if target.is_gpu:
        plans = gpu_plans(spec, direction, scalar_bytes)
        fitting = [plan for plan in plans if plan.shared_bytes() <= target.shared_bytes]
        if fitting:
            own = (plan for plan in fitting if plan.target.shared_bytes == target.shared_bytes)
            return next(own, max(fitting, key=lambda plan: plan.shared_bytes()))
    return plan_of(spec, direction, target, scalar_bytes)


def source(plan: AnyPlan) -> str:
    """The whole translation unit of a plan."""
    prelude = generator(plan.spec).prelude(plan.target.backend, plan.spec)
    return translation_unit(plan.direction, plan.scalar_bytes, prelude, body_of(plan))


def _covers_all(spec: TensorProductSpec) -> bool:
    """Whether kernels for a GPU write every element of x and z; if not, rows are zeroed beforehand."""
    if not spec.is_channelwise:
        return True  # they add up whole rows
    x = {path.x_offset: path.mul * (2 * path.l1 + 1) for path in spec.paths}
    z = {path.z_offset: path.mul * (2 * path.l3 + 1) for path in spec.paths}
    return sum(x.values()) == spec.x_dim and sum(z.values()) == spec.z_dim
