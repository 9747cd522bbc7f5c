"""Indices in a model's own code, with derivatives that take few kernels of a GPU.

Models take positions of both ends of edges, and the energy of one head for each atom, by `x[numbers]`. The gradient of
that puts rows into zeros after it has sorted the numbers, in some fifteen kernels, in each backward pass. But edges are
sorted for the convolutions anyway, and a column of each row needs no sort.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from eqaccel.ops.graph import packed_index


def few_kernels(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Inside of it indices have derivatives of few kernels, if the model is on a GPU and gradients are recorded."""
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cuda or not torch.is_grad_enabled() or torch.jit.is_tracing():
        return nullcontext()
    return nullcontext() if torch._C._functorch.peek_interpreter_stack() is not None else FewKernels()


class FewKernels(TorchFunctionMode):
    """Computes `x[edge_index[n]]`, and `x[torch.arange(len(x)), columns]`, by operators of eqaccel.

    Values are the same to the last bit, and gradients but for the order of sums, which the edges fix. Whatever else
    is called is torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: list[tuple[Tensor, int]] = []  # held, so that no other can come to be the same object

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is Tensor.__getitem__:
            taken = self._taken(*args)
            if taken is not None:
                return taken
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and len(args) == 1:
            self._ranges.append((result, result._version))
        return result

    def _taken(self, x: Tensor, key: Any) -> Tensor | None:
        """`x[key]`, or nothing if that is left to torch."""
        if type(x) is not Tensor or not (x.requires_grad and x.dim() == 2 and x.is_floating_point()):
            return None
        if isinstance(key, tuple):
            fits = len(key) == 2 and all(_are_numbers(part, x) and len(part) == len(x) for part in key)
            return torch.ops.eqaccel.take_columns(x, *key) if fits and self._counts(key[0]) else None
        if not _are_numbers(key, x):
            return None
        edges = key._base
        if edges is None or edges.shape != (2, len(key)) or edges.dtype != key.dtype or not edges.is_contiguous():
            return None
        row, rest = divmod(key.storage_offset() - edges.storage_offset(), len(key))
        if rest != 0 or key.stride() != (1,):
            return None
        return torch.ops.eqaccel.take_rows(x, key, *_order(edges, row, len(x)))

    def _counts(self, numbers: Tensor) -> bool:
        return any(numbers is known and numbers._version == version for known, version in self._ranges)


def _are_numbers(key: Any, x: Tensor) -> bool:
    return (
        type(key) is Tensor
        and key.dtype == torch.int64
        and key.dim() == 1
        and key.device == x.device
        and key.numel() > 0
    )


def _order(edges: Tensor, row: int, nodes: int) -> tuple[Tensor, Tensor]:
    """What sorts one row of an edge index, and where each node begins in that."""
    count = edges.size(1)
    _, starts, order, _, t_starts, t_slot = packed_index(edges, nodes, nodes).split(
        [2, nodes + 1, count, count, nodes + 1, count]
    )
    return (order, starts) if row == 1 else (order.index_select(0, t_slot), t_starts)
