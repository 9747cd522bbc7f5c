"""Models on graphs whose edges count several times, at the price of the distinct ones.

Equal edges give equal messages, so a model need compute only one of them, if every sum over edges takes it as often as
it counts. Sums of gradients need no care: what is differentiated counts each edge already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SUMS: Mapping[Callable[..., Tensor], str] = MappingProxyType(
    {
        torch.scatter_add: "src",
        Tensor.scatter_add: "src",
        Tensor.scatter_add_: "src",
        torch.index_add: "source",
        Tensor.index_add: "source",
        Tensor.index_add_: "source",
        torch.scatter_reduce: "src",
        Tensor.scatter_reduce: "src",
        Tensor.scatter_reduce_: "src",
    }
)
"""Functions that may sum over edges, and what each calls its fourth argument, which it sums."""


class CountedEdges(TorchFunctionMode):
    """Lets a model that runs inside of it take each edge as often as it counts.

    It knows the functions of torch that libraries of models sum over edges with. A model that sums otherwise gives
    another result than for edges that are written out.

    Args:
        counts: (num_edges,), how often each edge counts; no other tensor that is summed has as many rows.
    """

    def __init__(self, counts: Tensor) -> None:
        super().__init__()
        self._counts = counts
        self._differentiated = False

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls a function of torch's, with rows multiplied if it is such a sum."""
        named = dict(kwargs or {})
        if func is torch.autograd.grad:
            self._differentiated = True
        elif func in _SUMS and not self._differentiated:
            name = _SUMS[func]
            if name in named:
                named[name] = self._multiplied(named[name])
            else:
                args = (*args[:3], self._multiplied(args[3]), *args[4:])
        return func(*args, **named)

    def _multiplied(self, rows: Tensor) -> Tensor:
        """Rows that stand for edges, as often as these count; others as they are."""
        if len(rows) != len(self._counts):
            return rows
        return rows * self._counts.to(rows).view(-1, *[1] * (rows.dim() - 1))
