"""Times of functions: CUDA events on a GPU, interleaved repetitions on a CPU that others may be using too."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Setup = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the repetitions of one function."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.samples)

    def to_json(self) -> dict[str, float | int]:
        """Median, minimum and number of the repetitions."""
        return {"median_ms": self.median, "min_ms": min(self.samples), "repetitions": len(self.samples)}


def measure(
    setups: Mapping[str, Setup], device: str, repetitions: int = 20, budget: float = 20.0
) -> dict[str, Timing | str]:
    """Times several functions that do the same work.

    Args:
        setups: For each name a function that prepares the work, outside of the clock, and returns what to time.
        device: "cpu" or "cuda". On a GPU one function runs after the other, and what it prepared is freed before the
            next; on a CPU all of them take turns, so that other load on the machine hits all of them alike.
        repetitions: Calls of each function.
        budget: Seconds after which a function is not called again, once it has been called three times.

    Returns:
        A timing for each name, or the first line of the error that it died with.
    """
    if device == "cpu":
        return _interleaved(setups, repetitions, budget)
    return {name: _by_events(setup, repetitions, budget) for name, setup in setups.items()}


def describe(error: BaseException) -> str:
    """An error on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def _by_events(setup: Setup, repetitions: int, budget: float) -> Timing | str:
    try:
        run = setup()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        events = []
        end = time.perf_counter() + budget
        for number in range(repetitions):
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            events[-1][0].record()
            run()
            events[-1][1].record()
            if number >= 2 and time.perf_counter() > end:
                break
        torch.cuda.synchronize()
        return Timing(tuple(start.elapsed_time(stop) for start, stop in events))
    except Exception as error:  # a peer may fail in ways of its own, and the others are still to be timed
        return describe(error)
    finally:
        run = None  # frees the graph of derivatives before the cache is emptied
        gc.collect()
        torch.cuda.empty_cache()


def _interleaved(setups: Mapping[str, Setup], repetitions: int, budget: float) -> dict[str, Timing | str]:
    results: dict[str, Timing | str] = {}
    ready: dict[str, Callable[[], object]] = {}
    for name, setup in setups.items():
        try:
            run = setup()
            for _ in range(2):  # TorchScript optimises in its second call
                run()
            ready[name] = run
        except Exception as error:
            results[name] = describe(error)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(repetitions):
        for name, run in ready.items():
            if number >= 3 and sum(samples[name]) > 1000 * budget:
                continue
            if not samples[name] or samples[name][-1] < 100:  # a short run would pay for the caches the last one left
                run()
            start = time.perf_counter()
            run()
            samples[name].append(1000 * (time.perf_counter() - start))
    return results | {name: Timing(tuple(values)) for name, values in samples.items()}
