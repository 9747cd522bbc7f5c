"""The clock: how long functions take on a device, side by side."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_SECONDS = 2.0  # of timing, for each comparison


def medians(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Median times of functions that take turns, so that other load on the machine hits all of them alike.

    Args:
        runs: What to time; each is called twice beforehand.
        device: Where the functions work.

    Returns:
        A time for each, in seconds.
    """
    clock = _cpu_time if device.type == "cpu" else functools.partial(_gpu_time, device=device)
    once = 0.0
    for run in runs:
        run()
        start = time.perf_counter()
        clock(run)
        once += time.perf_counter() - start
    rounds = max(min(int(_SECONDS / once), 30), 5)
    samples = [[clock(run) for run in runs] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def _cpu_time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _gpu_time(run: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        run()
        events[1].record()
        events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1000  # which is in milliseconds
