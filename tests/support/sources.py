"""Sources of functions, which TorchScript reads and parses anew for each module that it compiles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def read_once() -> None:
    """Makes TorchScript remember them for this process: they take a third of the time of scripting a model."""
    inspect.getsourcelines = _remembered(inspect.getsourcelines)
    parse = _remembered(torch._sources.parse_def)
    captures = _remembered(torch._jit_internal.get_type_hint_captures)
    for module in (torch._jit_internal, torch.jit.frontend):
        module.parse_def = parse
    torch._jit_internal.get_type_hint_captures = captures


def _remembered(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same of a function for the methods that it is of all objects."""
    known = functools.cache(read)
    return functools.wraps(read)(lambda function: known(getattr(function, "__func__", function)))
