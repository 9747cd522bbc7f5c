"""TorchScript of modules that are built on e3nn, without importing it: what is traced, scripted, mended, left out."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from eqaccel.errors import ExportError

_MODE = "__e3nn_compile_mode__"
"""Attribute by which e3nn and MACE say how a class is compiled: "script", "trace" or "unsupported"."""


def script(module: nn.Module) -> torch.jit.ScriptModule:
    """Scripts a module and everything in it; its sub-modules are replaced in place, so pass a copy.

    Args:
        module: A module whose parts are ordinary torch modules, or say in the manner of e3nn how they are compiled.

    Raises:
        ExportError: If a part cannot be scripted; the message names it.
    """
    with warnings.catch_warnings(), _own_functions():
        # torch.jit is deprecated in favour of torch.export, which programs without Python can not extend yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Said of constructors of the libraries' classes, which TorchScript reads and does not compile.
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support", UserWarning)
        scripted: Any = _compile(module, "", "script")
        return scripted


@contextmanager
def _own_functions() -> Iterator[None]:
    """Torch's own functions, where torch_geometric, which SevenNet imports, has put some that do not compile."""
    found = {name: getattr(torch, name) for name in ("index_select", "select")}
    for name in found:
        setattr(torch, name, getattr(torch._C._VariableFunctions, name))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(torch, name, function)


def run_as_python(model: nn.Module) -> None:
    """Has the modules of a model call the Python of which their scripted functions were made, in place.

    torch specialises a scripted function once for a whole process, and `torch.jit.optimized_execution(False)` does not
    keep it from running what there is. That may give wrong derivatives: of e3nn's spherical harmonics from their second
    call on, if several gradients of one result are differentiated once more (torch 2.13).
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        vars(module).update(_sources(vars(module)))
        forward = type(module).forward
        if not isinstance(forward, types.FunctionType) or "forward" in vars(module):
            continue
        names = forward.__globals__
        if sources := _sources({name: names[name] for name in forward.__code__.co_names if name in names}):
            module.forward = types.MethodType(like(forward, others=sources), module)


def like(
    function: types.FunctionType, *, name: str = "", others: Mapping[str, Any] = MappingProxyType({})
) -> types.FunctionType:
    """A function with the same code.

    Args:
        function: The function; it stays as it is.
        name: What it is called, which TorchScript takes from the function and not from the class; default as before.
        others: What it is to find by some of the names that it looks up in its file.
    """
    names = {**function.__globals__, **others} if others else function.__globals__
    parts = (function.__code__, names, name or function.__name__, function.__defaults__, function.__closure__)
    own: Any = functools.update_wrapper(types.FunctionType(*parts), function, assigned=("__module__", "__doc__"))
    own.__kwdefaults__, own.__annotations__ = function.__kwdefaults__, dict(function.__annotations__)
    del own.__wrapped__
    return own  # type: ignore[no-any-return]


def _sources(named: Mapping[str, Any]) -> dict[str, Any]:
    """The Python of those that are scripted functions."""
    scripted = {name: value for name, value in named.items() if isinstance(value, torch.jit.ScriptFunction)}
    return {name: getattr(value, "_torchdynamo_inline", value) for name, value in scripted.items()}


def _compile(module: nn.Module, path: str, mode: str | None) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    if mode != "trace":  # tracing runs through the children as they are
        _check_weights(module, path)
        for name, child in module.named_children():
            compiled = _compile(child, f"{path}.{name}" if path else name, _mode(child))
            if compiled is not child:
                setattr(module, name, compiled)
    try:
        if mode == "trace":
            return torch.jit.trace_module(module, {"forward": _example(module)}, check_trace=False)
        if mode == "script":
            return torch.jit.script(_mend(module) if isinstance(module, fx.GraphModule) else module)
    except Exception as error:
        raise ExportError(
            f"model: {path or 'the model'} ({type(module).__name__}) cannot be scripted: {_reason(error)}. Replace the "
            "module by one that torch.jit.script accepts, or use the model from Python"
        ) from error
    if mode is None:
        return module  # torch.jit.script takes it along with its parent
    raise ExportError(
        f"model: {path or 'the model'} ({type(module).__name__}) says that it cannot be compiled ({_MODE} is "
        f"{mode!r}); use the model from Python"
    )


def _check_weights(module: Any, path: str) -> None:
    """Raises `ExportError` for weights that torch would script, and then refuse to compute."""
    if parametrize.is_parametrized(module):
        raise ExportError(
            f"model: {path or 'the model'} ({type(module).__name__}) cannot be scripted: parametrizations make its "
            f"{', '.join(module.parametrizations)}. Fix them with torch.nn.utils.parametrize.remove_parametrizations, "
            "or use the model from Python"
        )


def _mode(module: nn.Module) -> str | None:
    return "script" if isinstance(module, fx.GraphModule) else getattr(module, _MODE, None)


def _example(module: Any) -> tuple[torch.Tensor, ...]:
    """Input to trace a module with: its own suggestion, or features of its irreps."""
    tensor = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.empty(0))
    if hasattr(module, "_make_tracing_inputs"):
        return tuple(given.to(tensor.device) for given in module._make_tracing_inputs(1)[0]["forward"])
    return (torch.zeros(3, module.irreps_in.dim, dtype=tensor.dtype, device=tensor.device),)


def _mend(module: fx.GraphModule) -> fx.GraphModule:
    """Spells calls that fx records in Python's way as TorchScript wants them."""
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target == "permute" and not isinstance(node.args[1], (list, tuple)):
            node.args = (node.args[0], list(node.args[1:]))
        if node.op == "call_function" and node.target in (torch.tensordot, torch.functional.tensordot):
            options = dict(node.kwargs)
            if "dims" in options:
                left, right = options.pop("dims")
                node.args, node.kwargs = (*node.args, (list(left), list(right))), options
    module.recompile()
    return module


def _reason(error: Exception) -> str:
    """The first line of an error that says something: TorchScript starts with an empty one."""
    return next((line.strip().rstrip(":.") for line in str(error).splitlines() if line.strip()), type(error).__name__)
