"""The payload: every source of a tensor product in one string of bytes, as `csrc/runtime/program.h` defines it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Mapping

from eqaccel import _runtime
from eqaccel.codegen import check
from eqaccel.codegen.body import print_body, print_code, print_launch
from eqaccel.codegen.preludes import flatten_prelude, read_prelude
from eqaccel.errors import UnsupportedError
from eqaccel.plan import MACHINE_CLASSES, TARGETS, Direction, Plan, Target, TunedKernel, host_target, make_plan
from eqaccel.spec import TensorProductSpec

_SCALAR_BYTES = {"float32": 4, "float64": 8}
_SCALARS = {number: name for name, number in _SCALAR_BYTES.items()}


@functools.lru_cache(maxsize=256)
def payload(spec: TensorProductSpec, tuned: tuple[TunedKernel, ...] = ()) -> tuple[bytes, int]:
    """The payload of a spec and the integer key that names it.

    Args:
        spec: The tensor product.
        tuned: Kernels that one kind of processor runs instead of those which the cost model plans for all.

    Returns:
        The bytes, and a key of 63 bits derived from them.

    Raises:
        TuningError: A processor cannot run what was tuned for it.
    """
    entries: dict[str, str] = {f"prelude/{backend}": prelude(backend) for backend in ("cpu", "cuda", "hip")}
    meta = {"abi": abi_number(), "x_dim": spec.x_dim, "y_dim": spec.y_dim, "z_dim": spec.z_dim}
    meta["w_dim"] = spec.weight_numel
    meta["covers_all"] = int(_covers_all(spec))
    meta |= {f"shared_bytes/{target.name}": target.shared_bytes for target in TARGETS.values() if target.is_gpu}
    entries["check/blocks"] = check.blocks(spec)
    codes: dict[str, int] = {}
    for direction in Direction:
        plan = make_plan(spec, direction, host_target(), 4)
        _add_body(entries, f"cpu/{direction.value}", plan, print_body(plan))
        entries[f"check/{direction.value}"] = check.checksums(plan)
        for scalar, scalar_bytes in _SCALAR_BYTES.items():
            for plan in gpu_plans(spec, direction, scalar_bytes):
                name = f"{plan.target.name}/{direction.value}/{scalar}"
                _add_body(entries, name, plan, print_launch(plan))
                meta |= _launch_numbers(name, plan)
                # Machines, and the two scalars, differ in launches more often than in code, which is long.
                meta[f"{name}/code"] = codes.setdefault(print_code(plan), len(codes))
    entries |= {f"code/{number}": text for text, number in codes.items()}
    for kernel in tuned:
        plan = make_plan(spec, kernel.direction, kernel.target, kernel.scalar_bytes, kernel.tuning)
        name = f"tuned/{kernel.target.name}/{kernel.direction.value}/{_SCALARS[kernel.scalar_bytes]}"
        _add_body(entries, name, plan, print_body(plan))
        if kernel.target.is_gpu:
            meta |= _launch_numbers(name, plan)
    entries["meta"] = "".join(f"{key}={value}\n" for key, value in meta.items())
    return pack(entries)


def _add_body(entries: dict[str, str], name: str, plan: Plan, text: str) -> None:
    entries[name] = text
    # What EQACCEL_DUMP writes beside a source, also where no Python is: some kilobytes, where a body has tens of them.
    entries[f"plan/{name}"] = plan.explain() + "\n"


def gpu_plans(spec: TensorProductSpec, direction: Direction, scalar_bytes: int) -> list[Plan]:
    """The plans of a kernel that travel in its payload, the one that takes most shared memory first.

    A device runs the first one that fits it; a class of machines has a plan of its own only where those of larger ones
    do not fit it.
    """
    plans: list[Plan] = []
    for target in MACHINE_CLASSES:
        if any(plan.shared_bytes() <= target.shared_bytes for plan in plans):
            continue
        with contextlib.suppress(UnsupportedError):  # the runtime says so where it is asked for a kernel
            plans.append(make_plan(spec, direction, target, scalar_bytes))
    return plans


def travelling_plan(spec: TensorProductSpec, direction: Direction, target: Target, scalar_bytes: int) -> Plan:
    """The plan of the kernel that a target runs: on a GPU the one in its payload for machines of the target's class.

    Raises:
        UnsupportedError: If there is none, because the target has too little shared memory.
    """
    if target.is_gpu:
        for plan in gpu_plans(spec, direction, scalar_bytes):
            if plan.shared_bytes() <= target.shared_bytes:
                return plan
    return make_plan(spec, direction, target, scalar_bytes)


def pack(entries: Mapping[str, str]) -> tuple[bytes, int]:
    """The payload of named texts, and the integer key that names it."""
    packed = [b"EQACCEL-PAYLOAD 1\n"]
    for name, text in entries.items():
        data = text.encode()
        packed += [f"{name} {len(data)}\n".encode(), data, b"\n"]
    content = b"".join(packed)
    return content, payload_key(content)


def payload_key(content: bytes) -> int:
    """The integer key that names a payload, 63 bits derived from its bytes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def _launch_numbers(name: str, plan: Plan) -> dict[str, int]:
    numbers = {f"{name}/kernels": len(plan.kernels)}
    for kernel in plan.kernels:
        numbers[f"{name}/{kernel.number}/threads"] = kernel.threads
        numbers[f"{name}/{kernel.number}/shared_bytes"] = kernel.shared_bytes()
        numbers[f"{name}/{kernel.number}/edges_held"] = kernel.stages * kernel.edges_per_stage
    return numbers


def abi_number() -> int:
    """Number of the interface between kernels and the runtime, which stands in abi.h."""
    return int(re.search(r"#define EQ_ABI (\d+)", read_prelude("abi.h"))[1])


def prelude(backend: str) -> str:
    """The text in front of every body of a backend: "cpu", "cuda" or "hip"."""
    return flatten_prelude("cpu.h" if backend == "cpu" else "gpu.h", backend)


def source(plan: Plan) -> str:
    """The whole translation unit of a plan."""
    backend = "cpu" if not plan.target.is_gpu else "hip" if plan.target.name.startswith("gfx") else "cuda"
    scalar = _SCALARS[plan.scalar_bytes]
    return _runtime.translation_unit(scalar, plan.direction.value, prelude(backend), print_body(plan))


def _covers_all(spec: TensorProductSpec) -> bool:
    """Whether every element of x and z belongs to a path; a GPU kernel leaves the others to be zeroed beforehand."""
    x = {path.x_offset: path.mul * (2 * path.l1 + 1) for path in spec.paths}
    z = {path.z_offset: path.mul * (2 * path.l3 + 1) for path in spec.paths}
    return sum(x.values()) == spec.x_dim and sum(z.values()) == spec.z_dim
