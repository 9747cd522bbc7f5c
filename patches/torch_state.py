"""What a model runs in: its dtype, its device, torch's global state, and whether its numbers are numbers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from eqaccel.prepare import model_dtype


def model_device(model: torch.nn.Module) -> torch.device:
    """The device a model is on, read from its parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def rounding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Relative rounding of a dtype: that of TensorFloat-32 where torch may round the factors of products to it."""
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-10
    return torch.finfo(dtype).eps


def first_not_finite(model: torch.nn.Module) -> str | None:
    """Says which parameter or buffer is the first with a NaN or an infinite entry; None if there is none."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"{kind} {name}"
    return None


_one_at_a_time = threading.RLock()
"""All threads have one default dtype: another would find that of the first, and put it back when it is long gone."""


def cpu_by_default() -> contextlib.AbstractContextManager[Any]:
    """Puts tensors that are made without a device on the CPU, even if `torch.set_default_device` has named another."""
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, in which MACE and e3nn build their constants; other threads wait to set theirs.

    They build them on the CPU, whatever the default device is.
    """
    with _one_at_a_time, cpu_by_default():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def untouched_state(model: torch.nn.Module) -> Iterator[None]:
    """Runs a model with gradients on and its own dtype as the default, and leaves no trace in torch's global state."""
    device = model_device(model)
    cuda = [device.index or 0] if device.type == "cuda" else []
    unprofiled = torch.jit.optimized_execution(False)  # e3nn scripts its parts; specialising them here would be slow
    own = default_dtype(model_dtype(model))  # models create small constants in the default dtype
    with torch.random.fork_rng(devices=cuda), torch.inference_mode(False), torch.enable_grad(), unprofiled, own:
        yield


class InFloat64(TorchDispatchMode):
    """Gives a model's own code float64 where it asks for float32, as `one_hot(species).float()` does.

    A copy of a network in float64 would otherwise get factors of both types, of which few products can be taken.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator of torch's."""
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class KeepingGraphs(TorchFunctionMode):
    """Keeps what results are differentiated through, which a network that computes its own forces would free."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch's."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            kwargs = {**kwargs, "retain_graph": True}
        return func(*args, **kwargs)


@contextlib.contextmanager
def all_trainable(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Switches on the gradients of all parameters, which calculators switch off; gives the parameters by name.

    Without those that stay off, as the zeros that MACE has where a contraction is to have no weights.
    """
    parameters: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    before = {name: p.requires_grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_()
    try:
        yield {name: p for name, p in parameters.items() if p.requires_grad}
    finally:
        for name, parameter in parameters.items():
            if not before[name]:
                _freeze(parameter)


def frozen(model: torch.nn.Module) -> Any:
    """The same model, with the gradients of all parameters switched off."""
    for parameter in model.parameters():
        _freeze(parameter)
    return model


def _freeze(parameter: torch.Tensor) -> None:
    if parameter.requires_grad:  # zeros of MACE 0.3.14 never do, and refuse to be told so
        parameter.requires_grad_(False)


@contextlib.contextmanager
def training_mode(model: torch.nn.Module) -> Iterator[None]:
    """Puts all modules of a model into training mode, and each back into its own."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
