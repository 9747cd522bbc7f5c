"""Choosing between the plans of a kernel by timing them on the device that is to run them."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import eqaccel
from eqaccel import runtime
from eqaccel.errors import CacheWarning, MissingCompilerError, TuningError, TuningWarning
from eqaccel.families import TunedKernel
from eqaccel.families.tensor_product import TENSOR_PRODUCT
from eqaccel.prepare.compilers import CompilerPool, settled
from eqaccel.prepare.task import Device, Task
from eqaccel.prepare.tensor_product import TensorProductTask
from eqaccel.prepare.timing import medians
from eqaccel.targets import Target, host_target
from eqaccel.testing import ERROR_CONSTANT

TASKS: dict[str, type[Task]] = {TENSOR_PRODUCT.name: TensorProductTask}
"""The families whose plans can be tuned, by name."""

_NEEDED_GAIN = 1.03
"""A plan replaces the default only if that takes so many times as long: less may be noise."""


@dataclass(frozen=True)
class Choice:
    """What timing the plans of a kernel came to.

    Attributes:
        tuning: The fastest plan's difference from the cost model's; None if the kernel stays what it is by default.
        gain: Time of the default kernel over that of the chosen one; 1 if that stays.
        stored: Whether an earlier search found it, so that nothing was timed.
    """

    tuning: Any
    gain: float
    stored: bool

    def __str__(self) -> str:
        found = "default" if self.tuning is None else f"{self.tuning}: {self.gain:.2f}x"
        return f"{found} ({'stored' if self.stored else 'timed'})"


def choose_plans(tasks: Iterable[Task], pool: CompilerPool) -> dict[Task, Choice]:
    """Chooses a plan for each kernel: the one that an earlier search stored, or else the fastest.

    All plans are compiled first, side by side; then they are timed, one kernel after the other.

    Args:
        tasks: The kernels; their devices must be there.
        pool: Compiles.

    Returns:
        The choices. They are in the disk cache too, for the same eqaccel, compiler and kind of device; where there is
        no compiler, those found with another one count.

    Raises:
        CompileError: If a default kernel does not compile.
        MissingCompilerError: If there is no compiler for a device, and the cache has not all that one would make.
    """
    races = {task: _PlanRace(task) for task in dict.fromkeys(tasks)}
    found = {task: race.stored() for task, race in races.items()}
    compiled = {
        (task, tuning): pool.submit(races[task].compile, tuning)
        for task, choice in found.items()
        if choice is None
        for tuning in races[task].contenders
    }
    for (task, tuning), future in compiled.items():
        error = settled(future).exception()
        if error is not None and tuning is None:
            raise error
        if error is not None:
            races[task].drop(tuning, error)
    return {task: choice or races[task].run() for task, choice in found.items()}


def tuned_kernel(task: Task, tuning: Any) -> TunedKernel:
    """What modules are told of a kernel that was tuned."""
    return TunedKernel(_processor(task.device)[0], task.direction, task.dtype.itemsize, tuning)


class _PlanRace:
    """The contenders for a task: the default kernel, under None, and those of other plans."""

    def __init__(self, task: Task) -> None:
        self.task = task
        target, self.kind = _processor(task.device)
        arguments = (task.spec, task.direction, target, task.dtype.itemsize)
        default = runtime.Program(task.family.payload(task.spec)[0])
        sources: dict[Any, str] = {
            None: default.source(task.device.backend, task.scalar, task.direction.value, task.device.arch)
        }
        for tuning in task.family.tunings(*arguments):
            text = task.family.source(*arguments, tuning)
            if text not in sources.values():  # the cost model's choice for this processor is the default as a rule
                sources[tuning] = text
        self.contenders = list(sources)
        # All that the outcome hangs on is in the name, so that what a change makes stale is not found any more.
        of_kernel = f"tuned-{_digest(eqaccel.__version__, self.kind, task.usage, *sources.values())}-"
        try:
            self.name = of_kernel + _digest(_compiler(task.device.backend))
        except MissingCompilerError:
            # A compute node without a compiler takes what was found with any, as it takes the kernels.
            found = runtime.newest_record(of_kernel)
            if found is None:
                raise
            self.name = found

    def stored(self) -> Choice | None:
        record = runtime.read_record(self.name)
        if record is None:
            return None
        try:
            choices, gain = record["tuning"], float(record["gain"])
            fitting = [tuning for tuning in self.contenders if _choices(tuning) == choices]
            if not fitting:
                raise TuningError(f"expected one of {len(self.contenders)} plans, got {choices}")
        except (KeyError, TypeError, ValueError) as error:
            message = f"'{self.name}' in the cache is ignored, because it makes no sense ({error!r})"
            warnings.warn(message, CacheWarning, stacklevel=2)
            return None
        return Choice(fitting[0], gain, stored=True)

    def compile(self, tuning: Any) -> None:
        task, device = self.task, self.task.device
        program = self._program(tuning)[0]
        runtime.compile_program(program, device.backend, task.scalar, task.direction.value, device.arch)

    def drop(self, tuning: Any, reason: object) -> None:
        self.contenders.remove(tuning)
        message = f"the {self.task.direction.value} kernel with {tuning} is left out: {reason}"
        warnings.warn(message, TuningWarning, stacklevel=2)

    def run(self) -> Choice:
        self._check()
        runs = self._runs(self.task.typical_problem())
        times = medians([runs[tuning] for tuning in self.contenders], self.task.device.torch_device)
        best = self.contenders[times.index(min(times))]
        choice = Choice(None, 1.0, stored=False)
        if best is not None:
            # Against the default alone once more: the best of several noisy times looks better than it is.
            default, fastest = medians([runs[None], runs[best]], self.task.device.torch_device)
            if default > _NEEDED_GAIN * fastest:
                choice = Choice(best, default / fastest, stored=False)
        record = {
            "kernel": f"{self.task.spec!r}, {self.task.direction.value}, {self.task.usage}",
            "device": self.kind,
            "tuning": _choices(choice.tuning),
            "gain": round(choice.gain, 4),
        }
        runtime.write_record(self.name, record)
        return choice

    def _program(self, tuning: Any) -> tuple[runtime.Program, int]:
        tuned = () if tuning is None else (tuned_kernel(self.task, tuning),)
        content, key = self.task.family.payload(self.task.spec, tuned)
        return runtime.register_program(key, content), key

    def _runs(self, problem: Any) -> dict[Any, Callable[[], tuple[Tensor, ...]]]:
        keys = {tuning: self._program(tuning)[1] for tuning in self.contenders}
        return {tuning: functools.partial(self.task.call, key, problem) for tuning, key in keys.items()}

    def _check(self) -> None:
        """Drops every contender whose results differ from the default's by more than twice the bound of rounding."""
        problem = self.task.small_problem()
        bound = 2 * ERROR_CONSTANT * torch.finfo(self.task.dtype).eps
        bounds = [bound * scale for scale in self.task.scales(problem)]
        runs = self._runs(problem)
        expected = runs.pop(None)()
        for tuning, run in runs.items():
            try:
                errors = [(result - wanted).abs() for result, wanted in zip(run(), expected, strict=True)]
            except RuntimeError as error:
                self.drop(tuning, error)
                continue
            # Written so that NaN fails.
            if not all(bool((error <= most).all()) for error, most in zip(errors, bounds, strict=True)):
                self.drop(tuning, "its results differ from those of the default kernel; please report this")


def _digest(*parts: str) -> str:
    return hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]


def _choices(tuning: Any) -> dict[str, int] | None:
    """What a tuning chooses, as records have it; None stands for the default kernel there too."""
    return None if tuning is None else tuning.choices()


@functools.lru_cache(maxsize=16)
def _processor(device: Device) -> tuple[Target, str]:
    """What the cost model has to know of a device, and the name of its kind: others may run another plan faster."""
    if device.backend == "cpu":
        return host_target(), f"{host_target().name} {runtime.instruction_sets()}"
    assert device.number is not None, "tasks are for devices of this machine"
    found = (runtime.hip_devices if device.backend == "hip" else runtime.cuda_devices)()[device.number]
    target = Target(found["arch"], True, shared_bytes=found["shared_bytes_per_block"])
    return target, f"{found['arch']} {found['name']} {found['shared_bytes_per_block']}"


def _compiler(backend: str) -> str:
    if backend == "cpu":
        return runtime.host_compiler()["version"]
    return runtime.hiprtc_version() if backend == "hip" else runtime.nvrtc_version()
