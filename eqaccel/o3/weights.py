"""What e3nn's modules with weights have in common: weights of their own or given, and views of them by instruction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eqaccel.errors import OperandError, SpecError


def weight_rules(internal_weights: bool | None, shared_weights: bool | None, has_weights: bool) -> tuple[bool, bool]:
    """e3nn's defaults of `internal_weights` and `shared_weights`.

    Raises:
        SpecError: If weights of its own are not to be shared.
    """
    shared = True if shared_weights is None else bool(shared_weights)
    internal = (shared and has_weights) if internal_weights is None else bool(internal_weights)
    if internal and not shared:
        raise SpecError("internal_weights: expected False where shared_weights is False, got True")
    return internal, shared


class Weighted(nn.Module):
    """A module with the attributes `instructions`, `weight`, `weight_numel`, `internal_weights`, `shared_weights`."""

    if TYPE_CHECKING:  # TorchScript does not understand these
        instructions: Sequence[Any]
        weight: Tensor
        weight_numel: int

    def weight_views(self, weight: Tensor | None = None, yield_instruction: bool = False) -> Iterator[Any]:
        """Views of the weights of each instruction that has some.

        Args:
            weight: (..., weight_numel) in the place of the module's own.
            yield_instruction: Whether to give its number and the instruction as well.

        Yields:
            (..., *path_shape); or number, instruction, and this.

        Raises:
            OperandError: If the module has no weights of its own and none are given.
        """
        given = self.weight if weight is None else weight
        if given.shape[-1:] != (self.weight_numel,):
            raise OperandError(f"weight: expected shape (..., {self.weight_numel}), got {list(given.shape)}")
        start = 0
        for number, item in enumerate(self.instructions):
            if self._has_weight(item):
                size = math.prod(item.path_shape)
                view = given.narrow(-1, start, size).view(*given.shape[:-1], *item.path_shape)
                yield (number, item, view) if yield_instruction else view
                start += size

    def weight_view_for_instruction(self, instruction: int, weight: Tensor | None = None) -> Tensor:
        """The view of the weights of one instruction, by its number; see `weight_views`.

        Raises:
            SpecError: If the instruction has no weights.
            OperandError: As for `weight_views`.
        """
        for number, _, view in self.weight_views(weight, yield_instruction=True):
            if number == instruction:
                return view
        raise SpecError(f"instruction: expected the number of one with weights, got {instruction}")

    def _has_weight(self, item: Any) -> bool:
        return bool(item.has_weight)

    def _set_weight(
        self,
        name: str,
        value: Tensor | None,
        shape: tuple[int, ...] | None,
        fill: Callable[[tuple[int, ...]], Tensor] = torch.randn,
    ) -> None:
        """Sets a parameter: a given one, or a new one of a shape; or an empty buffer, as e3nn has it, if neither is."""
        if value is None and shape is not None:
            value = nn.Parameter(fill(shape))
        if isinstance(value, nn.Parameter):
            setattr(self, name, value)
        else:
            self.register_buffer(name, torch.empty(0) if value is None else value)


def output_mask(irreps_out: Any, reached: set[int]) -> Tensor:
    """(irreps_out.dim,): ones in the blocks that something is written to, zeros in the others."""
    parts = [torch.full((block.dim,), float(index in reached)) for index, block in enumerate(irreps_out)]
    return torch.cat(parts) if parts else torch.ones(0)
