"""Times of functions: CUDA events on a GPU, interleaved repetitions on a CPU that others may be using too."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

Setup = Callable[[], Callable[[], object]]
_CYCLES_PER_SECOND, _LONGEST_WAIT = 2e9, 0.01


@dataclass(frozen=True)
class Timing:
    """What repeating one function gave.

    Attributes:
        samples: Milliseconds of the repetitions.
        peak_bytes: The most GPU memory in use during a call, operands and results included; None on a CPU.
    """

    samples: tuple[float, ...]
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, float | int]:
        """Median, minimum and number of the repetitions, and the peak of memory where it is known."""
        found = {"median_ms": self.median, "min_ms": min(self.samples), "repetitions": len(self.samples)}
        return found if self.peak_bytes is None else found | {"peak_bytes": self.peak_bytes}

    def spread(self) -> dict[str, float]:
        """The first and the last decile."""
        low, high = np.percentile(self.samples, [10, 90])
        return {"p10_ms": float(low), "p90_ms": float(high)}


def measure(
    setups: Mapping[str, Setup],
    device: str,
    repetitions: int = 20,
    budget: float = 20.0,
    occupied: int = 0,
    device_time: bool = False,
) -> dict[str, Timing | str]:
    """Times several functions that do the same work.

    Args:
        setups: For each name a function that prepares the work, outside of the clock, and returns what to time.
        device: "cpu" or "cuda". On a GPU one function runs after the other, and what it prepared is freed before the
            next; on a CPU all of them take turns, so that other load on the machine hits all of them alike.
        repetitions: Calls of each function.
        budget: Seconds after which a function is not called again, once it has been called three times, or once if
            that call alone takes longer.
        occupied: Bytes of GPU memory that do not belong to the work, to be left out of its peak.
        device_time: Keep a GPU busy while the host queues a call, so that the time is the device's alone.

    Returns:
        A timing for each name, or the first line of the error that it died with.
    """
    if device == "cpu":
        return _interleaved(setups, repetitions, budget)
    return {name: _by_events(setup, repetitions, budget, occupied, device_time) for name, setup in setups.items()}


def describe(error: BaseException) -> str:
    """An error on one line; of a package that cannot be imported, that it is not installed."""
    lines = str(error).strip().splitlines()
    kind = "not installed" if isinstance(error, ImportError) else type(error).__name__
    return f"{kind}: {lines[0][:160] if lines else ''}"


def free_memory() -> None:
    """Gives back what nobody uses any more; graphs of derivatives may hold themselves in cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated_peak(call: Callable[[], object]) -> int:
    """The most bytes of a CPU's memory that torch has in use during a call, beyond those before it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    # The profiler's tables show what operators allocate, and not what is there at a time.
    changes = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


class LateError(BaseException):
    """The time is up; no library may take it for an error of its own."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Ends what is done inside after so many seconds, whatever it is, and goes on behind it."""
    if math.isinf(seconds):
        yield
        return

    def stop(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with contextlib.suppress(LateError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def allowed(repetitions: int, budget: float, seconds: float) -> int:
    """Repetitions that fit the budget, if one takes so many seconds."""
    fitting = int(budget / max(seconds, 1e-9))
    return max(min(repetitions, fitting), min(repetitions, 3 if fitting else 1))


def _by_events(setup: Setup, repetitions: int, budget: float, occupied: int, device_time: bool) -> Timing | str:
    try:
        run = setup()
        for _ in range(2):  # compiles; TorchScript optimises in its second call
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        torch.cuda.reset_peak_memory_stats()
        run()
        events = []
        for _ in range(allowed(repetitions, budget, seconds)):
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            if device_time:
                torch.cuda._sleep(int(_CYCLES_PER_SECOND * min(2 * seconds, _LONGEST_WAIT)))
            events[-1][0].record()
            run()
            events[-1][1].record()
        torch.cuda.synchronize()
        samples = tuple(start.elapsed_time(stop) for start, stop in events)
        return Timing(samples, torch.cuda.max_memory_allocated() - occupied)
    except Exception as error:  # a peer may fail in ways of its own, and the others are still to be timed
        return describe(error)


def _interleaved(setups: Mapping[str, Setup], repetitions: int, budget: float) -> dict[str, Timing | str]:
    results: dict[str, Timing | str] = {}
    ready: dict[str, Callable[[], object]] = {}
    counts: dict[str, int] = {}
    for name, setup in setups.items():
        try:
            run = setup()
            for _ in range(2):
                start = time.perf_counter()
                run()
                seconds = time.perf_counter() - start
            ready[name], counts[name] = run, allowed(repetitions, budget, seconds)
        except Exception as error:
            results[name] = describe(error)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(repetitions):
        for name, run in ready.items():
            if number >= counts[name]:
                continue
            if not samples[name] or samples[name][-1] < 100:  # a short run would pay for the caches the last one left
                run()
            start = time.perf_counter()
            run()
            samples[name].append(1000 * (time.perf_counter() - start))
    return results | {name: Timing(tuple(values)) for name, values in samples.items()}
