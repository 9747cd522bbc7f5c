"""Compiling ahead of time every kernel that a model needs, side by side."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eqaccel import runtime
from eqaccel.errors import WarmupError
from eqaccel.plan import Direction


@dataclass(frozen=True)
class WarmKernel:
    """One kernel that `warmup` made ready.

    Attributes:
        name: Path in the model of each module that uses it.
        direction: "forward", "backward" or "double_backward".
        dtype: torch.float32 or torch.float64.
        device: Device, or architecture such as "sm_90", that it runs on.
        seconds: Time that it took to compile, or to find.
        cached: Whether the disk cache had it.
    """

    name: str
    direction: str
    dtype: torch.dtype
    device: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class Warmup:
    """What `warmup` did; `str()` gives a table.

    Attributes:
        kernels: The kernels, in the order of the model's modules.
        seconds: Time that all of it took; less than the sum over kernels, which are compiled side by side.
    """

    kernels: tuple[WarmKernel, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """Number of kernels that were compiled, because the disk cache did not have them."""
        return sum(not kernel.cached for kernel in self.kernels)

    def __str__(self) -> str:
        table = [("kernel", "direction", "dtype", "device", "seconds", "")]
        for k in self.kernels:
            dtype = str(k.dtype).removeprefix("torch.")
            table.append(
                (k.name, k.direction, dtype, k.device, f"{k.seconds:.2f}", "cached" if k.cached else "compiled")
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([f"{self.compiled} of {len(self.kernels)} kernels compiled in {self.seconds:.2f} s", *lines])


@dataclass(frozen=True)
class _Target:
    label: str
    backend: str
    arch: str | None
    device: int | None  # to load kernels on; None if only the architecture is known


def warmup(
    model: Any,
    *,
    directions: Iterable[str] | str = ("forward", "backward"),
    dtypes: Iterable[torch.dtype] | torch.dtype | None = None,
    devices: Iterable[torch.device | str] | torch.device | str | None = None,
) -> Warmup:
    """Compiles every kernel that a model needs, or finds it in the disk cache, so that no later step waits for that.

    Kernels are compiled in parallel and loaded. For an architecture such as "sm_90", which takes no GPU, they are only
    put into the disk cache: a login node can prepare the compute nodes.

    Args:
        model: A patched model, an ASE calculator with such models in its `models`, or any module that is or holds
            `TensorProduct` or `TensorProductConv`, scripted ones too.
        directions: What will be computed: "forward", "backward" for gradients and forces, "double_backward" for
            training on forces and for Hessians.
        dtypes: torch.float32, torch.float64 or both; default: the one of the model's parameters, or torch's default
            dtype if it has none.
        devices: Devices ("cpu", "cuda:1") or GPU architectures ("sm_90", "gfx90a"); default: where the model is.

    Returns:
        The kernels, each with its time and whether it was in the cache.

    Raises:
        WarmupError: If there is nothing to warm up, or a direction, dtype or device is not one that kernels run on.
        CompileError: If a kernel does not compile, or computes wrong results.
        MissingCompilerError: If there is no compiler for a device.
    """
    start = time.perf_counter()
    wanted_directions = [_direction(value) for value in _listed(directions)]
    wanted_dtypes = None if dtypes is None else [_dtype(value) for value in _listed(dtypes)]
    targets = None if devices is None else [_target(value) for value in _listed(devices)]

    tasks: dict[tuple[Any, ...], list[str]] = {}
    programs: dict[int, runtime.Program] = {}
    for root, prefix in _roots(model):
        own = [_dtype(_own_dtype(root))] if wanted_dtypes is None else wanted_dtypes
        for path, module in _products(root):
            programs[module.key] = _program(module)
            for target in [_target(module.payload.device)] if targets is None else targets:
                for dtype in own:
                    for direction in wanted_directions:
                        paths = tasks.setdefault((module.key, direction, dtype, target), [])
                        paths.append(prefix + path or type(module).__name__)
    if not tasks:
        raise WarmupError(
            f"model: expected at least one eqaccel module in it, and a direction, dtype and device, got none in "
            f"{type(model).__name__}; eqaccel.patch(model) puts them into a model"
        )

    def prepare(task: tuple[Any, ...]) -> WarmKernel:
        key, direction, dtype, target = task
        scalar = str(dtype).removeprefix("torch.")
        found = runtime.compile_program(programs[key], target.backend, scalar, direction, target.arch)
        if target.device is not None:
            programs[key].workspace_bytes(target.backend, scalar, direction, {}, target.device)  # loads it
        return WarmKernel(", ".join(tasks[task]), direction, dtype, target.label, found["seconds"], found["cached"])

    # Threads, because compilers are processes or release the interpreter lock.
    with ThreadPoolExecutor(min(len(tasks), len(os.sched_getaffinity(0)))) as pool:
        kernels = tuple(pool.map(prepare, tasks))
    return Warmup(kernels, time.perf_counter() - start)


def _listed(values: Any) -> list[Any]:
    """One value or several as a list, each once."""
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return list(dict.fromkeys(values if several else [values]))


def _roots(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """The modules in what the user handed over, and how their paths start."""
    if isinstance(model, nn.Module):
        yield model, ""
        return
    members = getattr(model, "models", None)
    if not isinstance(members, (list, tuple)) or not all(isinstance(member, nn.Module) for member in members):
        raise WarmupError(
            f"model: expected a torch.nn.Module or an ASE calculator with a list of them in `models`, got "
            f"{type(model).__name__}"
        )
    for number, member in enumerate(members):
        yield member, f"models.{number}."


def _products(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with a payload and its key; by attribute, because scripting changes their class."""
    for path, module in root.named_modules():
        if isinstance(getattr(module, "payload", None), torch.Tensor) and isinstance(getattr(module, "key", None), int):
            yield path, module


def _program(module: Any) -> runtime.Program:
    known = runtime.find_program(module.key)
    return runtime.register_program(module.key, module.payload.cpu().numpy().tobytes()) if known is None else known


def _own_dtype(root: nn.Module) -> torch.dtype:
    return next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.get_default_dtype())


def _direction(value: Any) -> str:
    known = [direction.value for direction in Direction]
    if value not in known:
        raise WarmupError(f"directions: expected some of {', '.join(known)}, got {value!r}")
    return value


def _dtype(value: Any) -> torch.dtype:
    if value not in (torch.float32, torch.float64):
        raise WarmupError(f"dtypes: expected torch.float32 or torch.float64, got {value!r}")
    return value


def _target(value: Any) -> _Target:
    if isinstance(value, str) and re.fullmatch(r"sm_\d+[af]?|gfx[0-9a-f]+", value):
        return _Target(value, "cuda" if value.startswith("sm_") else "hip", value, None)
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type == "cpu":
        return _Target("cpu", "cpu", None, 0)
    if device.type != "cuda":
        raise WarmupError(
            f"devices: expected 'cpu', a device such as 'cuda:0', or an architecture such as 'sm_90', got {value!r}"
        )
    backend, query = ("hip", runtime.hip_devices) if torch.version.hip else ("cuda", runtime.cuda_devices)
    found = query()
    number = device.index
    if number is None:
        number = torch.cuda.current_device() if found else 0
    if number >= len(found):
        raise WarmupError(
            f"devices: expected one of {len(found)} GPUs of this machine, got {value!r}; name an architecture such as "
            f"'sm_90' to compile without it"
        )
    return _Target(f"cuda:{number}", backend, found[number]["arch"], number)
