"""Times variants of a model: whole calls, their kernels, their replay as CUDA graphs, and the convolutions alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eqaccel.benchmarks.families import ModelCase
from eqaccel.benchmarks.timing import Timing, measure
from eqaccel.ops.graph import sorting_scope

Call = Callable[[], object]


def time_variants(
    case: ModelCase, models: Mapping[str, torch.nn.Module], options: argparse.Namespace
) -> dict[str, Timing | str]:
    """Times of the calls, of the convolutions alone and, on a GPU, of the calls replayed from CUDA graphs.

    Args:
        case: What the models are run on.
        models: Variants of a model that compute the same; "eqaccel" is among them.
        options: Those of the command line.

    Returns:
        What `measure` gives, under "NAME call", "NAME replayed" and, for eqaccel and e3nn, "NAME forward" and "NAME
        backward".
    """
    device, limits = options.device, (options.device, options.repetitions, options.budget)
    work = {f"{name} call": lambda model=model: lambda: case.call(model) for name, model in models.items()}
    timings = measure(work, *limits, torch.cuda.memory_allocated() if device == "cuda" else 0)
    operands = _operands(case, models["eqaccel"])
    parts = {
        f"{name} {part}": setup
        for name in ("e3nn", "eqaccel")
        if name in models
        for part, setup in _replays(case, models[name], operands).items()
    }
    timings |= measure(parts, *limits)
    operands.clear()
    if device == "cuda":
        # Last, and the plain model after the others: a failed capture may leave torch's generators confused.
        captures = {f"{name} replayed": lambda model=models[name]: _captured(case, model) for name in [*models][::-1]}
        timings |= measure(captures, *limits)
    return timings


def device_kernels(call: Call) -> tuple[int, float] | None:
    """How many kernels and copies a call launches, and the sum of their milliseconds; None if they cannot be seen."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
    except (AssertionError, RuntimeError):
        return None
    return len(kernels), sum(event.time_range.elapsed_us() for event in kernels) / 1e3


def _captured(case: ModelCase, model: torch.nn.Module) -> Call:
    """The call as a CUDA graph, as one that replays it for every step would have it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            case.call(model)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.call(model)
    return graph.replay


def _operands(case: ModelCase, patched: torch.nn.Module) -> list[tuple[Tensor, ...]]:
    """What the convolution of each layer is called with besides edges: node features, edge attributes and weights."""
    operands: list[tuple[Tensor, ...]] = []

    def keep(product: torch.nn.Module, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given = case.operands(product, *positional, *named.values())
        operands.append(tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in given))

    hooks = [product.register_forward_pre_hook(keep, with_kwargs=True) for product in case.products(patched)]
    case.call(patched)
    for hook in hooks:
        hook.remove()
    return operands


def _replays(
    case: ModelCase, model: torch.nn.Module, operands: Sequence[tuple[Tensor, ...]]
) -> dict[str, Callable[[], Call]]:
    """What to time of the convolutions of all layers: forward, and backward for what the model needs gradients of."""

    def convolve() -> list[Tensor]:
        edges = case.inputs["edge_index"].clone()  # new ones for every step, and the same for all layers, as in a call
        layers = zip(case.products(model), operands, strict=True)
        with sorting_scope():
            return [case.convolve(product, *given, edges) for product, given in layers]

    def forward() -> Call:
        return torch.no_grad()(convolve)

    def backward() -> Call:
        wanted = [[a for a in given if a.requires_grad] for given in operands]
        work = [(z, variables, torch.randn_like(z)) for z, variables in zip(convolve(), wanted, strict=True)]
        return lambda: [torch.autograd.grad(z, v, g, retain_graph=True) for z, v, g in work]

    return {"forward": forward, "backward": backward}
