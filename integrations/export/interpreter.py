"""Runs a TorchScript graph from Python, an operator at a time, so that torch's tracers see what is in it.

TorchScript itself cannot run on symbolic sizes, and the parts of e3nn's modules exist as TorchScript only. Sizes are
ordinary Python numbers here, or the symbols that a tracer puts in their place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

_NUMBERED = "uint8 int8 int16 int32 int64 float16 float32 float64"
_DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {number: getattr(torch, name) for number, name in enumerate(_NUMBERED.split())} | {11: torch.bool}
)
"""TorchScript's numbers of dtypes (c10/core/ScalarType.h)."""


def _set_item(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


_PYTHON: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten::Delete": operator.delitem,
        "aten::Int": int,
        "aten::__contains__": operator.contains,
        "aten::__getitem__": operator.getitem,
        "aten::__is__": operator.is_,
        "aten::__isnot__": operator.is_not,
        "aten::__not__": operator.not_,
        "aten::__range_length": lambda low, high, step: len(range(low, high, step)),
        "aten::_set_item": _set_item,
        "aten::add.int": operator.add,
        "aten::add.t": operator.add,
        "aten::append": _append,
        "aten::dim": lambda tensor: tensor.dim(),
        "aten::eq.int": operator.eq,
        "aten::floordiv.int": operator.floordiv,
        "aten::format": lambda text, *values: text.format(*values),
        "aten::ge.int": operator.ge,
        "aten::gt.int": operator.gt,
        "aten::le.int": operator.le,
        "aten::len": len,
        "aten::len.Tensor": lambda tensor: tensor.size(0),  # Python's len would make a number of a symbol
        "aten::list": list,
        "aten::lt.int": operator.lt,
        "aten::mul.int": operator.mul,
        "aten::ne.int": operator.ne,
        "aten::neg.int": operator.neg,
        "aten::size": lambda tensor, *dim: tensor.size(*dim) if dim else list(tensor.size()),
        "aten::slice.t": lambda items, start, stop, step: items[start:stop:step],
        "aten::sub.int": operator.sub,
        "aten::tensor": lambda data, dtype, device, _: torch.tensor(
            data, dtype=_DTYPES.get(dtype, dtype), device=device
        ),
        "prim::ListConstruct": lambda *items: list(items),
        "prim::TupleConstruct": lambda *items: items,
        "prim::device": lambda tensor: tensor.device,
        "prim::dtype": lambda tensor: tensor.dtype,
        "prim::is_cpu": lambda tensor: tensor.is_cpu,
        "prim::is_cuda": lambda tensor: tensor.is_cuda,
        "prim::min.self_int": min,
        "prim::requires_grad": lambda tensor: tensor.requires_grad,
        "prim::unchecked_cast": lambda value: value,
    }
)
"""Operators on other things than tensors, by full name, or by kind if all overloads are the same in Python."""


def run(graph: torch._C.Graph, arguments: Sequence[Any]) -> Any:
    """Runs a graph without sub-modules (a frozen and inlined one).

    Args:
        graph: The graph of a TorchScript method.
        arguments: Its inputs, `self` included.

    Returns:
        The output, or a tuple of outputs.

    Raises:
        NotImplementedError: If the graph holds an operation that is not known here.
        RuntimeError: If the program raises.
    """
    values = {value.debugName(): argument for value, argument in zip(graph.inputs(), arguments, strict=True)}
    outputs = _run_block(graph, values)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _run_block(block: Any, values: dict[str, Any]) -> list[Any]:
    for node in block.nodes():
        results = _run_node(node, [values[value.debugName()] for value in node.inputs()], values)
        values.update((value.debugName(), result) for value, result in zip(node.outputs(), results, strict=True))
    return [values[value.debugName()] for value in block.outputs()]


def _run_node(node: Any, inputs: list[Any], values: dict[str, Any]) -> Sequence[Any]:
    kind = node.kind()
    if kind == "prim::Uninitialized":  # the value of a branch that raises
        return [None]
    if kind == "prim::Constant":
        return [node.output().toIValue()]
    if kind == "prim::GetAttr":
        return [getattr(inputs[0], node.s("name"))]
    if kind == "prim::DictConstruct":
        return [dict(zip(inputs[::2], inputs[1::2], strict=True))]
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return inputs[0]
    if kind == "prim::If":
        taken, other = node.blocks()
        return _run_block(taken if inputs[0] else other, values)
    if kind == "prim::Loop":
        return _run_loop(node, inputs, values)
    if kind == "prim::RaiseException":
        raise RuntimeError(inputs[0])
    name = node.schema().partition("(")[0] or kind
    function = _PYTHON.get(name) or _PYTHON.get(kind)
    if function is not None:
        return [function(*inputs)] if node.outputsSize() else (function(*inputs), [])[1]
    result = _call(_operator(name), inputs)
    return [result] if node.outputsSize() == 1 else result


def _run_loop(node: Any, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    (body,) = node.blocks()
    trips, goes_on, *carried = inputs
    trip = 0
    while goes_on and trip < trips:
        for value, item in zip(body.inputs(), [trip, *carried], strict=True):
            values[value.debugName()] = item
        goes_on, *carried = _run_block(body, values)
        trip += 1
    return carried


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = None if namespace == "prim" else getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        raise NotImplementedError(f"TorchScript operation '{name}'")
    return getattr(packet, overload or "default")


def _call(function: Any, inputs: list[Any]) -> Any:
    arguments, options = [], {}
    for argument, value in zip(function._schema.arguments, inputs, strict=True):
        if argument.kwarg_only:
            options[argument.name] = _python_value(argument.name, value)
        else:
            arguments.append(_python_value(argument.name, value))
    return function(*arguments, **options)


def _python_value(name: str, value: Any) -> Any:
    """TorchScript has numbers for dtypes and layouts, Python's operators and tracers want the objects."""
    if name == "dtype" and isinstance(value, int):
        return _DTYPES[value]
    if name == "layout" and value is not None:
        return torch.strided
    if name == "memory_format" and value is not None:
        return (torch.contiguous_format, torch.preserve_format)[value]
    return value
