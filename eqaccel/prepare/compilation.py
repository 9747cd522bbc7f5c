"""Compiling ahead of time every kernel that a model needs, side by side."""

from __future__ import annotations

import itertools
import operator
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eqaccel import runtime, settings
from eqaccel.codegen import COMMON, Direction
from eqaccel.errors import SharedMemoryError, WarmupError
from eqaccel.families import FAMILIES
from eqaccel.ops import KernelModule
from eqaccel.prepare.compilers import CompilerPool, settled
from eqaccel.prepare.held import held_modules, model_dtype
from eqaccel.prepare.task import Device, Task, scalar_name
from eqaccel.prepare.tuning import TASKS, Choice, choose_plans, tuned_kernel
from eqaccel.targets import gpu_backend


@dataclass(frozen=True)
class WarmKernel:
    """One kernel that `warmup` made ready.

    Attributes:
        name: Path in the model of each module that uses it.
        direction: "forward", "backward", "double_backward" or "triple_backward".
        dtype: torch.float32 or torch.float64.
        device: Device, or architecture such as "sm_90", that it runs on.
        seconds: Time that it took to compile, or to find.
        cached: Whether the disk cache had it.
        choice: Which plan it follows and what that brings, if it was tuned.
    """

    name: str
    direction: str
    dtype: torch.dtype
    device: str
    seconds: float
    cached: bool
    choice: Choice | None = None


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
        table: list[tuple[str, ...]] = [("kernel", "direction", "dtype", "device", "seconds", "", "plan")]
        for k in self.kernels:
            dtype, plan = scalar_name(k.dtype), "" if k.choice is None else str(k.choice)
            compiled = "cached" if k.cached else "compiled"
            table.append((k.name, k.direction, dtype, k.device, f"{k.seconds:.2f}", compiled, plan))
        if not any(k.choice for k in self.kernels):
            table = [row[:-1] for row in table]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join([f"{self.compiled} of {len(self.kernels)} kernels compiled in {self.seconds:.2f} s", *lines])


@dataclass(frozen=True)
class _Wanted:
    """A kernel of one module, and what to compile it for so that the device runs it."""

    name: str
    module: Any
    program: runtime.Program
    device: Device
    compile_arch: str
    dtype: torch.dtype
    direction: Direction

    @property
    def scalar(self) -> str:
        return scalar_name(self.dtype)


def warmup(
    model: Any,
    *,
    directions: Iterable[str] | str = ("forward", "backward"),
    dtypes: Iterable[torch.dtype] | torch.dtype | None = None,
    devices: Iterable[torch.device | str] | torch.device | str | None = None,
    tune: bool | None = None,
) -> Warmup:
    """Compiles every kernel that a model needs, or finds it in the disk cache, so that no later step waits for that.

    Kernels are compiled in parallel and loaded. What takes longer than some seconds is told on the logger "eqaccel", at
    level INFO; Ctrl-C ends the compilers too. For an architecture such as "sm_90", which takes no GPU, they are only
    put into the disk cache: a login node can prepare the compute nodes.

    Tuning compiles a handful of plans of each kernel, times them on the device with made-up data, 60 neighbours a node,
    and gives the modules of the model the fastest one where that is more than 3 % faster than the default. The choice
    is kept in the disk cache for the same kind of device, so that it takes minutes once and no time again. Only a call
    that asks for tuning searches or uses what was found: without one, results follow from the model alone. Sums may be
    taken in another order under another plan, so results differ by rounding, and stay bitwise reproducible. Tune
    before scripting, compiling, exporting or capturing: what is made of a tuned model keeps its kernels.

    Args:
        model: A patched model, an ASE calculator with such models, or any module that is or holds `TensorProduct` or
            `TensorProductConv`, scripted ones too unless they are to be tuned; or a list of these.
        directions: What will be computed: "forward", "backward" for gradients and forces, "double_backward" for
            training on forces and for Hessians, "triple_backward" for training on Hessians. Kernels of the last are
            never tuned; where there are none, those that they are composed of are prepared in their place.
        dtypes: torch.float32, torch.float64 or both; default: the one of the model's parameters, or torch's default
            dtype if it has none.
        devices: Devices ("cpu", "cuda:1") or GPU architectures ("sm_90", "gfx90a"); default: where the model is.
        tune: Whether to tune; default: whether EQACCEL_TUNE is 1.

    Returns:
        The kernels, each with its time and whether it was in the cache, and with its plan if it was tuned.

    Raises:
        WarmupError: If there is nothing to warm up, or a direction, dtype or device is not one that kernels run on; or
            if a kernel cannot be tuned, because its device is not here or its module is scripted.
        CompileError: If a kernel does not compile, or computes wrong results.
        MissingCompilerError: If there is no compiler for a device.
        SettingsError: If EQACCEL_TUNE is neither a yes nor a no.
    """
    start = time.perf_counter()
    wanted_directions = [_direction(value) for value in _listed(directions)]
    wanted_dtypes = None if dtypes is None else [_dtype(value) for value in _listed(dtypes)]
    wanted_devices = None if devices is None else [_device(value) for value in _listed(devices)]

    wanted = []
    for held, root in held_modules(model, WarmupError):
        prefix = f"{held}." if held else ""
        own = [_dtype(model_dtype(root))] if wanted_dtypes is None else wanted_dtypes
        for path, module in _kernel_modules(root):
            name = prefix + path or type(module).__name__
            places = [_device(module.payload.device)] if wanted_devices is None else wanted_devices
            wanted += _kernels_of(name, module, places, own, wanted_directions)
    if not wanted:
        raise WarmupError(
            f"model: expected at least one eqaccel module in it, and a direction, dtype and device, got none in "
            f"{type(model).__name__}; eqaccel.patch(model) puts them into a model"
        )

    with CompilerPool() as pool:
        choices = _tune(wanted, pool) if (settings.current().tune if tune is None else tune) else {}
        groups: dict[tuple[Any, ...], list[_Wanted]] = {}
        for one in wanted:
            groups.setdefault((one.module.key, one.device, one.dtype, one.direction), []).append(one)
        making = [pool.submit(_prepare, group, choices.get(group[0])) for group in groups.values()]
        kernels = tuple(settled(future).result() for future in making)
    return Warmup(kernels, time.perf_counter() - start)


def _kernels_of(
    name: str, module: Any, devices: Iterable[Device], dtypes: list[torch.dtype], directions: list[Direction]
) -> list[_Wanted]:
    """The kernels of a module that its family has for these purposes."""
    own = _program(module)
    serving = FAMILIES[own.family].serving(directions)
    kernels = []
    for device, dtype in itertools.product(devices, dtypes):
        for direction in _served(module, serving, device, scalar_name(dtype)):
            program = _program_of(module, direction) or own
            arch = program.compile_arch(device.backend, scalar_name(dtype), direction.value, device.arch)
            if arch is not None:
                kernels.append(_Wanted(name, module, program, device, arch, dtype, direction))
    return kernels


def _served(module: Any, directions: list[Direction], device: Device, scalar: str) -> list[Direction]:
    """The kernels that a device runs for these: third derivatives without one are composed of those below them."""
    if Direction.TRIPLE_BACKWARD not in directions or _has_third(module, device, scalar):
        return directions
    composed = (*directions, Direction.BACKWARD, Direction.DOUBLE_BACKWARD)
    return [direction for direction in Direction if direction in composed and direction in COMMON]


def _has_third(module: Any, device: Device, scalar: str) -> bool:
    program = _program_of(module, Direction.TRIPLE_BACKWARD)
    if program is None:
        return False
    try:
        program.body(device.backend, scalar, Direction.TRIPLE_BACKWARD.value, device.arch)
    except SharedMemoryError:
        return False
    return True


def _prepare(group: list[_Wanted], choice: Choice | None) -> WarmKernel:
    """Compiles and loads the kernel that all of a group share."""
    one = group[0]
    backend, direction = one.device.backend, one.direction.value
    program = _program_of(one.module, one.direction) or one.program  # which tuning may have changed
    found = runtime.compile_program(program, backend, one.scalar, direction, one.compile_arch)
    if one.device.number is not None:
        program.load(backend, one.scalar, direction, one.device.number)
    names = ", ".join(member.name for member in group)
    return WarmKernel(names, direction, one.dtype, one.device.label, found["seconds"], found["cached"], choice)


def _tune(wanted: list[_Wanted], pool: CompilerPool) -> dict[_Wanted, Choice]:
    """Gives every module the kernels that are fastest where they are wanted; tells which these are."""
    tasks = {one: _task(one) for one in wanted if one.program.family in TASKS and one.direction in COMMON}
    choices = choose_plans(tasks.values(), pool)
    for module, members in itertools.groupby(tasks, operator.attrgetter("module")):
        module.retune([tuned_kernel(tasks[one], choices[tasks[one]].tuning) for one in members])
    return {one: choices[task] for one, task in tasks.items()}


def _task(one: _Wanted) -> Task:
    module = one.module
    if not isinstance(module, KernelModule):
        raise WarmupError(
            f"model: expected Python modules to tune, got a {type(module).__name__} at {one.name}; tune the model that "
            f"it was made from, or pass tune=False"
        )
    if one.device.number is None:
        raise WarmupError(
            f"devices: expected devices of this machine to tune on, got the architecture '{one.device.label}'; tune "
            f"where the model will run, or pass tune=False"
        )
    return TASKS[one.program.family].of(module, one.direction, one.dtype, one.device)


def _listed(values: Any) -> list[Any]:
    """One value or several as a list, each once."""
    several = isinstance(values, Iterable) and not isinstance(values, str)
    return list(dict.fromkeys(values if several else [values]))


def _kernel_modules(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules with a payload and its key; by attribute, because scripting changes their class."""
    for path, module in root.named_modules():
        if "_orig_mod" in dict(module.named_children()):
            continue  # the wrapper of torch.compile shows the attributes of the module inside, which comes next
        if isinstance(getattr(module, "payload", None), torch.Tensor) and isinstance(getattr(module, "key", None), int):
            yield path, module


def _program(module: Any) -> runtime.Program:
    known = runtime.find_program(module.key)
    return runtime.register_program(module.key, module.payload.cpu().numpy().tobytes()) if known is None else known


def _program_of(module: Any, direction: Direction) -> runtime.Program | None:
    """The program that has the kernels of a direction."""
    own = _program(module)
    return runtime.third_program(module.key) if direction is Direction.TRIPLE_BACKWARD else own


def _direction(value: Any) -> Direction:
    known = [direction.value for direction in Direction]
    if value not in known:
        raise WarmupError(f"directions: expected some of {', '.join(known)}, got {value!r}")
    return Direction(value)


def _dtype(value: Any) -> torch.dtype:
    if value not in (torch.float32, torch.float64):
        raise WarmupError(f"dtypes: expected torch.float32 or torch.float64, got {value!r}")
    return value


def _device(value: Any) -> Device:
    if isinstance(value, str) and re.fullmatch(r"sm_\d+[af]?|gfx[0-9a-f]+", value):
        return Device(value, gpu_backend(value), value, None)
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type == "cpu":
        return Device("cpu", "cpu", None, 0)
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
    return Device(f"cuda:{number}", backend, found[number]["arch"], number)
