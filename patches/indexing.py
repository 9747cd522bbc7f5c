"""Indices, lengths and columns in a model's own code, with derivatives that take few kernels of a GPU.

Models take positions of both ends of edges, and the energy of one head for each atom, by `x[numbers]`. The gradient of
that puts rows into zeros after it has sorted the numbers, in some fifteen kernels, in each backward pass. But edges are
sorted for the convolutions anyway, and a column of each row needs no sort. The gradient of a length is the direction,
which spherical harmonics are computed of. And gradients of columns that `torch.cat` has put side by side are slices,
each with a whole row of zeros for its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from eqaccel.ops.graph import packed_index

_OF_ROWS: dict[str, Any] = {"dim": -1, "keepdim": True}


def few_kernels(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Inside of it rows have derivatives of few kernels, on a GPU and where gradients are recorded."""
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cuda or not torch.is_grad_enabled() or torch.jit.is_tracing():
        return nullcontext()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return nullcontext() if transformed else FewKernels()


class FewKernels(TorchFunctionMode):
    """Computes some functions of rows with other derivatives.

    These are `x[edge_index[n]]`, `x[torch.arange(len(x)), columns]`, lengths, and `torch.cat` of columns.

    Values are the same to the last bit, and gradients but for rounding; sums are in the order of the edges. What else
    is called is torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: list[tuple[Tensor, int]] = []  # held, so that no other can come to be the same object
        self._directions: list[tuple[Tensor, int, Any]] = []  # of rows whose lengths were taken

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func is Tensor.__getitem__:
            taken = self._taken(*args)
            if taken is not None:
                return taken
        if func is torch.linalg.norm and len(args) == 1 and kwargs == _OF_ROWS and _are_trained_rows(args[0]):
            return self._lengths(args[0])
        if func is torch.cat and _are_columns(*args, **(kwargs or {})):
            return _joined(args[0])
        if func is torch.ops.eqaccel.unit_vectors:
            known = [found for x, version, found in self._directions if x is args[0] and x._version == version]
            if known:
                return known[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and len(args) == 1:
            self._ranges.append((result, result._version))
        return result

    def _taken(self, x: Tensor, key: Any) -> Tensor | None:
        """`x[key]`, or nothing if that is left to torch."""
        if not _are_trained_rows(x):
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

    def _lengths(self, x: Tensor) -> Tensor:
        found = torch.ops.eqaccel.unit_vectors(x)
        self._directions.append((x, x._version, found))
        length: Tensor = found[1]
        return length

    def _counts(self, numbers: Tensor) -> bool:
        return any(numbers is known and numbers._version == version for known, version in self._ranges)


class _Columns(torch.autograd.Function):
    """Columns side by side; their gradients are parts of one split, whose own gradient is a concatenation."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.widths = [part.size(1) for part in parts]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.split(ctx.widths, 1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].clone(memory_format=torch.contiguous_format)
    columns: Tensor = _Columns.apply(*parts)
    return columns


def _are_columns(parts: Any = None, dim: Any = 0, **others: Any) -> bool:
    """Whether `torch.cat` of these arguments puts columns of rows side by side."""
    return (
        not others
        and dim in (1, -1)
        and isinstance(parts, (list, tuple))
        and all(_are_trained_rows(part) and part.dtype == parts[0].dtype for part in parts)
        and len(parts) > 0
    )


def _are_trained_rows(x: Any) -> bool:
    return type(x) is Tensor and x.requires_grad and x.dim() == 2 and x.is_floating_point()


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
