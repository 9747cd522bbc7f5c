"""What libraries do again for each module that they compile or copy, with the same result, done once in tests."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

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


def trace_programs_once() -> None:
    """Makes e3nn remember programs of modules that are copied: it pickles them, and torch traces what is unpickled.

    Models are copied without that (`eqaccel.patches.torch_state.duplicated`), but replacements in them, and what tests
    give to deepcopy, are not. Versions before 0.6 have TorchScript instead, which `load_programs_once` is for.
    """
    from e3nn.util.codegen import _mixin

    @functools.cache
    def traced(content: bytes, _: torch.dtype) -> torch.nn.Module:
        return pickle.loads(content)

    def loads(content: bytes) -> torch.nn.Module:
        return copy.deepcopy(traced(content, torch.get_default_dtype()))

    _mixin.pickle = SimpleNamespace(dumps=pickle.dumps, loads=loads)


def load_programs_once() -> None:
    """The same for e3nn before 0.6, which saves and loads TorchScript for a copy: two thirds of its time."""
    from e3nn.util.codegen import _mixin

    if hasattr(_mixin, "pickle"):  # of e3nn 0.6
        return
    jit = torch.jit
    saved: WeakKeyDictionary[jit.ScriptModule, dict[bool, bytes]] = WeakKeyDictionary()  # in training, and not

    @functools.cache
    def loaded(content: bytes) -> jit.ScriptModule:
        return jit.load(io.BytesIO(content))

    def load(file: io.BytesIO) -> jit.ScriptModule:
        module = copy.deepcopy(loaded(file.getvalue()))
        saved[module] = {module.training: file.getvalue()}
        return module

    def save(module: jit.ScriptModule, file: io.BytesIO) -> None:
        contents = saved.setdefault(module, {})
        if module.training in contents and not [*module.parameters(), *module.buffers()]:  # which may have changed
            file.write(contents[module.training])
        else:
            jit.save(module, file)
            contents[module.training] = file.getvalue()

    _mixin.torch = SimpleNamespace(
        jit=SimpleNamespace(script=jit.script, ScriptModule=jit.ScriptModule, save=save, load=load)
    )


def compute_moments_once() -> None:
    """Makes e3nn remember the moments of activations: it averages a million numbers for each module that has one."""
    from e3nn.math import _normalize_activation

    _normalize_activation.moment = functools.cache(_normalize_activation.moment)
