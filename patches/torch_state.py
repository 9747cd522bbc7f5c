"""What a model runs in: its dtype, its device, torch's global state, and whether its numbers are numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from eqaccel.prepare import model_dtype


def model_device(model: torch.nn.Module) -> torch.device:
    """The device a model is on, read from its parameters."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def rounding_unit(dtype: torch.dtype, device: torch.device) -> float:
    """Relative rounding of a dtype: that of TensorFloat-32 where torch may round the factors of products to it."""
    if dtype == torch.float32 and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-10
    return torch.finfo(dtype).eps


def duplicated(model: torch.nn.Module, known: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """A copy of a model, also of one with tensors and functions that deepcopy refuses.

    Args:
        model: The model.
        known: By the identity of what is in the model, what is to be in the copy.
    """
    memo = _copies(model) | dict(known)
    for module in reversed(list(model.modules())):  # what a module consists of comes first
        if id(module) not in memo and _has_program(module):
            _copy_with_program(module, memo)
    return copy.deepcopy(model, memo)


def _has_program(module: torch.nn.Module) -> bool:
    """Whether a module is a program of torch.fx, or one of e3nn's that consist of programs of torch.fx or TorchScript.

    Deepcopy makes the code of the former anew, and e3nn writes those of the latter to bytes and reads them, which takes
    up to ten times as long as to copy all that is trained. Replacements say themselves how they are copied.
    """
    if type(module).__reduce_ex__ is not object.__reduce_ex__:
        return False
    programs = [getattr(module, name, None) for name in vars(module).get("__codegen__", ())]
    kinds = (torch.fx.GraphModule, torch.jit.ScriptModule)
    return isinstance(module, torch.fx.GraphModule) or (bool(programs) and all(isinstance(p, kinds) for p in programs))


def _copy_with_program(module: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Copies a module but for its graph and its code, which nobody changes, into the memo of a deepcopy."""
    other = memo[id(module)] = object.__new__(type(module))
    if isinstance(module, torch.fx.GraphModule):
        memo[id(module._graph)] = module._graph
    other.__dict__.update(copy.deepcopy(module.__dict__, memo))


def widened(model: torch.nn.Module) -> Any:
    """A copy of a model that computes in float64."""
    return converted(model, torch.float64)


def converted(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    """A copy of a model that computes in a dtype; modules that remember which dtype they compute in are told so."""
    before = model_dtype(model)
    other = duplicated(model).to(dtype)
    for module in other.modules():
        for name, value in list(vars(module).items()):
            if value is before:
                setattr(module, name, dtype)
            elif isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(module, name, value.to(dtype))
    return other


def _copies(model: torch.nn.Module) -> dict[int, Any]:
    """Copies, by identity, of what is in a model and deepcopy refuses.

    These are parameters of a class whose constructor takes other arguments than torch's (MACE has such ones for weights
    that are zero), results of a computation, such as the weights that `weight_norm` leaves in a module, and scripted
    functions, such as an activation of SevenNet's, which may be shared.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if type(parameter) is not torch.nn.Parameter:
                values = parameter.detach().clone()
                copies[id(parameter)] = torch.Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
        for value in tree_leaves(vars(module)):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                copies[id(value)] = value.detach().clone()
            if isinstance(value, torch.jit.ScriptFunction):
                copies[id(value)] = value
    return copies


def first_not_finite(model: torch.nn.Module) -> str | None:
    """Says which parameter or buffer is the first with a NaN or an infinite entry; None if there is none."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"{kind} {name}"
    return None


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, in which MACE and e3nn build their constants."""
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


@contextlib.contextmanager
def all_trainable(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Switches on the gradients of all parameters, which calculators switch off; gives the parameters by name."""
    parameters: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    before = {name: p.requires_grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    try:
        yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


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
