"""What libraries do again for each module that they make or compile, with the same result, done once in tests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def read_sources_once() -> None:
    """Makes TorchScript remember sources of functions, whose parsing takes a third of the time of scripting a model."""
    inspect.getsourcelines = _remembered(inspect.getsourcelines)
    parse = _remembered(torch._sources.parse_def)
    for module in (torch._jit_internal, torch.jit.frontend):
        module.parse_def = parse
    torch._jit_internal.get_type_hint_captures = _remembered(torch._jit_internal.get_type_hint_captures)


def _remembered(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same of a function for the methods that it is of all objects."""
    known = functools.cache(read)
    return functools.wraps(read)(lambda function: known(getattr(function, "__func__", function)))


def compute_moments_once() -> None:
    """Makes e3nn remember the moments of activations: it averages a million numbers for each module that has one."""
    from e3nn.math import _normalize_activation

    _normalize_activation.moment = functools.cache(_normalize_activation.moment)
