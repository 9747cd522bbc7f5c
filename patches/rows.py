"""Indices, sums, lengths and columns in a model's own code: in one order, and by few kernels of a GPU.

Models add rows by their numbers: what edges give an atom, and atoms a structure. A GPU adds these in whatever order its
threads come, so that the last bits differ from call to call; here it adds in the order of the edges, and of the atoms.

Models take positions of both ends of edges, and the energy of one head for each atom, by `x[numbers]`. The gradient of
that puts rows into zeros after it has sorted the numbers, in some fifteen kernels, in each backward pass. But edges are
sorted for the convolutions anyway, and a column of each row needs no sort. The gradient of a length is the direction,
which spherical harmonics are computed of. And gradients of columns that `torch.cat` has put side by side are slices,
each with a whole row of zeros for its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from eqaccel.ops.graph import identity, packed_rows, told_by_number

_OF_ROWS: dict[str, Any] = {"dim": -1, "keepdim": True}

_SUMS = frozenset({Tensor.scatter_add_, Tensor.scatter_reduce_})
"""How libraries add rows: in place, to zeros."""

_SELECTIONS = frozenset({torch._C._VariableFunctions.index_select, Tensor.index_select})
"""Those of torch, also where torch_geometric has put another one in its place, which calls it."""

_WIDEST = 9
"""Numbers in a row of sums: those of a virial. Wider ones are left to torch, as they are copied to be in order."""


def own_rows(model: torch.nn.Module, receiver_row: int = 1) -> AbstractContextManager[Any]:
    """Inside of it rows are added in one order and have derivatives of few kernels, on a GPU.

    Args:
        model: What is called inside.
        receiver_row: Row of its edge index that holds the receivers, by which its layers sort.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cuda or torch.jit.is_tracing():
        return nullcontext()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return nullcontext() if transformed else OwnRows(receiver_row)


class OwnRows(TorchFunctionMode):
    """Computes some functions of rows in another order, or with other derivatives.

    These are sums by numbers (`_SUMS`), and, where gradients are recorded, `x[edge_index[n]]` and `torch.index_select`,
    `x[torch.arange(len(x)), columns]`, lengths, and `torch.cat` of columns.

    Values of the latter are the same to the last bit, and gradients but for rounding; sums are in the order of the
    edges. What else is called is torch's.
    """

    def __init__(self, receiver_row: int = 1) -> None:
        super().__init__()
        self._receiver_row = receiver_row
        self._ranges: list[tuple[Tensor, int]] = []  # all are held, so that no others can come to be the same
        self._sorted: dict[Hashable, tuple[Tensor, tuple[Tensor, Tensor]]] = {}  # numbers, and what sorts them
        self._directions: list[tuple[Tensor, int, Any]] = []  # of rows whose lengths were taken

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchFunctionMode`."""
        if func in _SUMS:
            added = self._added(*args, **(kwargs or {}))
            if added is not None:
                return added
        if func in _SELECTIONS:
            selected = self._selected(*args, **(kwargs or {}))
            if selected is not None:
                return selected
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
        if func is torch.arange and len(args) == 1 and not result.is_inference():
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
        order = self._order_of_edges(key, len(x))
        return None if order is None else torch.ops.eqaccel.take_rows(x, key, *order)

    def _added(
        self, out: Any, dim: Any, index: Any, src: Any, reduce: Any = "sum", *, include_self: bool = True
    ) -> Tensor | None:
        """`out.scatter_add_(dim, index, src)` or the like, or nothing if that is left to torch."""
        if reduce != "sum" or not include_self or not _are_sums(out, dim, index, src):
            return None
        numbers = index[(slice(None), *[0] * (index.dim() - 1))]
        order = self._order(numbers, len(out))
        sums = torch.ops.eqaccel.add_rows(src.reshape(len(src), -1), numbers, len(out), *order)
        return out.add_(sums.view_as(out))

    def _selected(self, input: Any, dim: Any, index: Any, *, out: Any = None) -> Tensor | None:
        """`torch.index_select`, whose gradients are such sums, or nothing if that is left to torch."""
        x = input  # as torch names it
        if out is not None or dim != 0 or type(x) is not Tensor or not _is_trained(x) or not _are_numbers(index, x):
            return None
        if x.dim() == 0 or not 0 < x.numel() <= _WIDEST * len(x):
            return None
        rows = torch.ops.eqaccel.take_rows(x.reshape(len(x), -1), index, *self._order(index, len(x)))
        return rows.view(len(index), *x.shape[1:])

    def _order(self, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """What sorts numbers from zero to `count`, and where each begins in that."""
        of_edges = self._order_of_edges(numbers, count)
        if of_edges is not None:
            return of_edges
        if numbers.is_inference():  # nobody would tell that others were written there
            return torch.ops.eqaccel.sort_rows(numbers, count)  # type: ignore[no-any-return]
        key = identity(numbers), count
        if key not in self._sorted:
            self._sorted[key] = numbers, torch.ops.eqaccel.sort_rows(numbers, count)
        return self._sorted[key][1]

    def _order_of_edges(self, numbers: Tensor, nodes: int) -> tuple[Tensor, Tensor] | None:
        """The same of one row of an edge index, sorted as layers do; None of other numbers."""
        edges, count = numbers._base, len(numbers)
        if edges is None or edges.shape != (2, count) or edges.dtype != numbers.dtype or not edges.is_contiguous():
            return None
        row, rest = divmod(int(numbers.storage_offset() - edges.storage_offset()), count)
        if rest != 0 or numbers.stride() != (1,) or told_by_number(edges):
            return None
        packed = packed_rows(edges[self._receiver_row], edges[1 - self._receiver_row], nodes, nodes)
        _, starts, order, _, t_starts, t_slot = packed.split([2, nodes + 1, count, count, nodes + 1, count])
        return (order, starts) if row == self._receiver_row else (order.index_select(0, t_slot), t_starts)

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
    return type(x) is Tensor and _is_trained(x) and x.dim() == 2


def _is_trained(x: Tensor) -> bool:
    return x.requires_grad and x.is_floating_point()


def _are_numbers(key: Any, x: Tensor) -> bool:
    return (
        type(key) is Tensor
        and key.dtype == torch.int64
        and key.dim() == 1
        and key.device == x.device
        and key.numel() > 0
    )


def _are_sums(out: Any, dim: Any, index: Any, src: Any) -> bool:
    """Whether rows of `src` are to be added to those of `out`, each to one."""
    if not all(type(part) is Tensor for part in (out, index, src)) or dim not in (0, -src.dim()) or src.numel() == 0:
        return False
    if src.numel() > _WIDEST * len(src) or not out.device == index.device == src.device:
        return False
    fits = src.dtype == out.dtype and out.is_floating_point() and index.dtype == torch.int64 and out.is_contiguous()
    one_number = all(step == 0 or width == 1 for step, width in zip(index.stride()[1:], index.shape[1:], strict=True))
    return fits and one_number and index.shape == src.shape and out.shape[1:] == src.shape[1:]
