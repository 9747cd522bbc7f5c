"""A computation on a GPU as a CUDA graph: recorded once, and then run without its launches from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

_WARM_UPS = 3
"""Runs before recording: kernels compile in the first, and TorchScript specialises its programs in the next two."""


Output = TypeVar("Output")


class Recording(Protocol):
    """What can be run again."""

    def replay(self) -> Tensor:
        """Runs it on the current stream; the result is overwritten by the next run."""


class Capture(Generic[Output]):
    """A function without arguments, recorded.

    Args:
        body: What to record; takes a flag, whether this is a run before, and works on tensors that stay where they are.
        device: The GPU.
    """

    def __init__(self, body: Callable[[bool], Output], device: torch.device) -> None:
        stream = warmed_stream(lambda: body(True), device)
        self._graph = torch.cuda.CUDAGraph()
        with recorded(self._graph, stream, device):
            self._output = body(False)

    def replay(self) -> Output:
        """Runs it on the current stream; the result is overwritten by the next run."""
        self._graph.replay()
        return self._output


def warmed_stream(run: Callable[[], object], device: torch.device) -> torch.cuda.Stream:
    """A stream on which something has run as often as it takes until it can be recorded."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # what is kept for other streams is of no use to this one
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return stream


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, device: torch.device, pool: Any = None
) -> Iterator[None]:
    """What a GPU is told inside of it becomes a graph, in memory of a pool or of its own; it is not done yet."""
    # Other threads may use the device meanwhile: only what this one does is recorded.
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except BaseException:
        _end_recording(device)
        raise


def _end_recording(device: torch.device) -> None:
    """Puts torch's random numbers back to work: after a recording that failed, they wait for its end for ever.

    They are set up when a recording begins, and set free when one ends well. So this makes one of nothing much.
    """
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
        torch.empty(1, device=device).zero_()
