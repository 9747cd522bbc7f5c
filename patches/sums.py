"""Sums of rows by numbers in a model's own code, such as those over the edges of each atom, in one order on a GPU too.

torch adds there in whatever order threads come, so the last bits differ from call to call. `eqaccel::add_rows` adds in
the order of the edges.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from eqaccel.patches.scripting import like

Sum = Callable[..., Tensor]


def add_in_order(model: nn.Module, name: str) -> None:
    """Has the forward methods of modules add in order, in place; TorchScript reads them as before.

    Args:
        model: A model of its own, whose modules nobody else has.
        name: What the methods call, a `scatter(src, index, dim, out, dim_size, reduce)` as MACE and NequIP have one.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        forward = type(module).forward
        if isinstance(forward, types.FunctionType) and name in forward.__code__.co_names:
            cls: Any = type(module)  # as a key of a cache, for which mypy does not take classes of modules
            module.__class__ = _adding_in_order(cls, name)


@functools.lru_cache(maxsize=64)
def _adding_in_order(cls: Any, name: str) -> type:
    # A class of its own, by which TorchScript tells it from that of the library.
    scatter = _in_order(cls.forward.__globals__[name])
    contents = {attribute: getattr(cls, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), contents | {"forward": like(cls.forward, others={name: scatter})})


def _in_order(scatter: Sum) -> Sum:
    """A library's sum that adds rows in order."""

    def add(
        src: Tensor,
        index: Tensor,
        dim: int = -1,
        out: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        dim_size: Optional[int] = None,  # noqa: UP045 (TorchScript)
        reduce: str = "sum",
    ) -> Tensor:
        if (
            dim == 0
            and out is None
            and dim_size is not None
            and reduce == "sum"
            and src.dim() == 2
            and index.dim() == 1
        ):
            return torch.ops.eqaccel.add_rows(src, index, dim_size)
        return scatter(src, index, dim, out, dim_size, reduce)

    return add
