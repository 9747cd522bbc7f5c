"""Times the steps of a simulation as its user waits for them, and where the time of eqaccel's own goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eqaccel.benchmarks.timing import Timing, measure
from eqaccel.patches.calculator import step_state
from eqaccel.step import Step

if TYPE_CHECKING:  # the command line has to answer without it
    import ase

TIMESTEP = 1.0  # fs
_NS_PER_DAY = 86.4 * TIMESTEP  # at a millisecond a step


@dataclass(frozen=True)
class Run:
    """What the steps of one simulation took.

    Attributes:
        atoms: Number of atoms.
        first_s: Seconds until the first forces are there: compiling, neighbours and recording included.
        samples: Milliseconds of each step after those that warm up.
        rebuilt: For each of them, whether eqaccel found neighbours anew; all False for others.
        peak_bytes: The most GPU memory that torch had in use, from the first forces on; None on a CPU.
    """

    atoms: int
    first_s: float
    samples: tuple[float, ...]
    rebuilt: tuple[bool, ...]
    peak_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Times of a step, their spread, and what they come to."""
        mean = statistics.fmean(self.samples)
        timing = Timing(self.samples, self.peak_bytes)
        return {
            "step": timing.to_json() | {"mean_ms": mean} | timing.spread(),
            "first_s": self.first_s,
            "ns_per_day": _NS_PER_DAY / mean,
            "atoms_per_s": 1e3 * self.atoms / mean,
        }


def simulate(atoms: ase.Atoms, warm_up: int, steps: int, budget: float) -> Run:
    """Runs steps of constant energy, and times each from the end of the one before it.

    Forces are NumPy arrays: when a step ends, the device has finished.

    Args:
        atoms: The structure, with velocities and a calculator.
        warm_up: Steps before the clock is looked at.
        steps: Steps to time.
        budget: Seconds after which no step is begun, once three are timed.
    """
    from ase import units
    from ase.md.verlet import VelocityVerlet

    on_gpu = torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    dynamics = VelocityVerlet(atoms, timestep=TIMESTEP * units.fs)
    count = _counter(atoms.calc)
    marks: list[float] = []
    counts: list[int] = []
    start = time.perf_counter()
    for done, _ in enumerate(dynamics.irun(warm_up + steps)):
        marks.append(time.perf_counter())
        counts.append(count())
        if done >= warm_up + 3 and marks[-1] - marks[warm_up] > budget:
            break
    marks_kept, counts_kept = marks[warm_up:], counts[warm_up:]
    return Run(
        atoms=len(atoms),
        first_s=marks[0] - start,
        samples=tuple(1e3 * float(taken) for taken in np.diff(marks_kept)),
        rebuilt=tuple(bool(more) for more in np.diff(counts_kept)),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def own_step(calculator: Any) -> Step | None:
    """The step of a patched calculator; None for others, and where the calculator has gone its ordinary way."""
    state = step_state(calculator)
    return None if state is None else state.step


def _counter(calculator: Any) -> Callable[[], int]:
    """How often neighbours were found, at any time."""

    def count() -> int:
        step = own_step(calculator)
        return 0 if step is None else step.rebuilds

    return count


def parts(run: Run, step: Step) -> dict[str, float] | None:
    """Milliseconds of a mean step: on the device, on the host, and for lists of neighbours. None without a recording.

    The device's part is a step of its own as recorded, replayed alone. The host's is what a median step takes beyond
    it, of those that keep their neighbours; that of neighbours is what the others take beyond such a step.
    """
    if step._capture is None:
        return None
    replay = measure({"replay": lambda: step._capture.replay}, "cuda", repetitions=20, budget=2.0)["replay"]
    if isinstance(replay, str):
        raise RuntimeError(replay)
    return split(run.samples, run.rebuilt, replay.median)


def split(samples: Sequence[float], rebuilt: Sequence[bool], device_ms: float) -> dict[str, float]:
    """The parts of a mean step, in milliseconds, of the times of steps and of the device's part in each of them."""
    kept = [taken for taken, anew in zip(samples, rebuilt, strict=True) if not anew]
    usual = statistics.median(kept or samples)
    beyond = sum(taken - usual for taken, anew in zip(samples, rebuilt, strict=True) if anew)
    return {
        "device_ms": device_ms,
        "host_ms": max(usual - device_ms, 0.0),
        "neighbours_ms": max(beyond / len(samples), 0.0),
    }
