"""Copies of models, in their own dtype and in others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from eqaccel.patches.replacement import Replacement
from eqaccel.prepare import model_dtype

_WAYS_OF_COPYING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
_KNOWN_WAYS = (
    None,  # of Python
    torch.nn.Module.__module__,
    torch.fx.GraphModule.__module__,
    "e3nn.util.codegen._mixin",
    Replacement.__module__,
)
"""Modules in which these methods stand."""


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
    up to ten times as long as to copy all that is trained. A class that says itself how it is copied is left to that.
    """
    ways = (getattr(type(module), name, None) for name in _WAYS_OF_COPYING)
    if any(getattr(way, "__module__", None) not in _KNOWN_WAYS for way in ways):
        return False
    programs = [getattr(module, name, None) for name in vars(module).get("__codegen__", ())]
    kinds = (torch.fx.GraphModule, torch.jit.ScriptModule)
    return isinstance(module, torch.fx.GraphModule) or (bool(programs) and all(isinstance(p, kinds) for p in programs))


def _copy_with_program(module: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Copies a module but for its graph and its code, which nobody changes, into the memo of a deepcopy."""
    if isinstance(module, Replacement):
        module.update()  # as it does where it says itself how it is copied
    other = memo[id(module)] = object.__new__(type(module))
    if isinstance(module, torch.fx.GraphModule):
        memo[id(module._graph)] = module._graph
    other.__dict__.update(copy.deepcopy(module.__dict__, memo))
    if isinstance(other, Replacement):
        other._made_from = other.snapshot()


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
