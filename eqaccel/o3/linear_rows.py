"""Linear maps as `e3nn.o3.Linear` calls them: leading dimensions, further channels, biases, weights of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor, nn

from eqaccel import ops
from eqaccel.families.linear import LinearPath, LinearSpec
from eqaccel.families.tensor_product import ConnectionMode, Instruction, TensorProductSpec
from eqaccel.irreps import Irreps
from eqaccel.o3.rows import as_rows
from eqaccel.ops.kernel_module import loses_values


class LinearInstruction(NamedTuple):
    """An entry of `instructions` of a `Linear`, as e3nn has it.

    Attributes:
        i_in: Index of the block that is read; -1 for a bias.
        i_out: Index of the block that is added to.
        path_shape: Shape of its weights, or of its bias.
        path_weight: The factor of its weights.
    """

    i_in: int
    i_out: int
    path_shape: tuple[int, ...]
    path_weight: float


class LinearRows(nn.Module):
    """What `Linear` computes, without weights of its own.

    Args:
        irreps_in: Irreps of the input.
        irreps_out: Irreps of the output.
        instructions: The connections and the biases.
        shared: Whether all rows have the same weights.
        f_in: Number of further channels of the input; None for none.
        f_out: Number of further channels of the output.

    Attributes:
        weight_numel: Last dimension of the weights.
        bias_numel: Last dimension of the biases.
    """

    if TYPE_CHECKING:  # TorchScript does not understand this
        biased: Tensor

    def __init__(
        self,
        irreps_in: Irreps,
        irreps_out: Irreps,
        instructions: Sequence[LinearInstruction],
        shared: bool = True,
        f_in: int | None = None,
        f_out: int | None = None,
    ) -> None:
        super().__init__()
        self.f_in, self.f_out = f_in or 0, f_out or 0
        paths = [item for item in instructions if item.i_in >= 0 and 0 not in item.path_shape]
        # No list is empty, because TorchScript could not tell what it is a list of.
        self.in_sizes, self.out_sizes = ([block.dim for block in side] or [0] for side in (irreps_in, irreps_out))
        self.muls_in, self.muls_out = ([item.path_shape[side] for item in paths] or [0] for side in (0, 1))
        self.path_sizes = [a * b for a, b in zip(self.muls_in, self.muls_out, strict=True)]
        self.weight_numel = sum(self.path_sizes)
        slices = [irreps_out.slices()[item.i_out] for item in instructions if item.i_in < 0]
        self.biased_places = [place for part in slices for place in range(part.start, part.stop)] or [0]
        self.bias_numel = sum(part.stop - part.start for part in slices)
        self.register_buffer("biased", torch.tensor(self.biased_places), persistent=False)
        self.has_rows_of_weights = bool(paths) and not shared
        source = Irreps((mul * (f_in or 1), ir) for mul, ir in irreps_in)
        target = Irreps((mul * (f_out or 1), ir) for mul, ir in irreps_out)
        self.kernel = _kernel(source, target, paths, shared) if paths else _Zeros(target.dim)

    def forward(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """Maps (..., irreps_in.dim), or (..., f_in, irreps_in.dim), by weights and biases as `Linear` takes them."""
        if self.f_in > 0:
            z = self._unfolded(self._mapped(self._folded(x), self._folded_weight(w)))
        else:
            z = self._mapped(x, w)
        if self.bias_numel > 0:
            z = z.index_add(-1, self.biased, b.expand(z.size()[:-1] + b.size()[-1:]))
        return z

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        lost = loses_values(fn, self.biased.device)
        super()._apply(fn, recurse)
        if lost:
            self.biased = torch.tensor(self.biased_places, device=self.biased.device)
        return self

    def _mapped(self, x: Tensor, w: Tensor) -> Tensor:
        """The map of (..., in) to (..., out) by weights in one row, or as many rows of them as x has."""
        shape = list(x.size()[:-1])
        rows = as_rows(x, shape)
        if self.has_rows_of_weights:
            weights = as_rows(w, list(w.size()[:-1]))
            if weights.size(0) == 1:
                weights = weights.expand(rows.size(0), weights.size(1))
            z = self.kernel(rows, torch.ones_like(rows[:, :1]), weights)
        else:
            z = self.kernel(rows, w.reshape(-1))
        return z.view(shape + [z.size(-1)])  # noqa: RUF005 (TorchScript)

    def _folded(self, x: Tensor) -> Tensor:
        """(..., f_in, in) with the further channels beside those of each block, (..., f_in * in)."""
        return torch.cat([part.flatten(-2) for part in x.split(self.in_sizes, -1)], -1)

    def _unfolded(self, z: Tensor) -> Tensor:
        """(..., f_out * out) as (..., f_out, out): the inverse of what `_folded` does, for the output."""
        parts = z.split([self.f_out * size for size in self.out_sizes], -1)
        return torch.cat([part.unflatten(-1, [self.f_out, -1]) for part in parts], -1)

    def _folded_weight(self, w: Tensor) -> Tensor:
        """Weights (..., f_in, f_out, numel) in the order of the map between all channels, in one dimension."""
        if self.weight_numel == 0:
            return w
        parts: list[Tensor] = []
        for part, mul_in, mul_out in zip(w.split(self.path_sizes, -1), self.muls_in, self.muls_out):  # noqa: B905 (TorchScript)
            parts.append(part.unflatten(-1, [mul_in, mul_out]).transpose(-3, -2).flatten(-4))
        return torch.cat(parts, -1)


class _Zeros(nn.Module):
    """The map that has no paths."""

    def __init__(self, out_dim: int) -> None:
        super().__init__()
        self.out_dim = out_dim

    def forward(self, x: Tensor, w: Tensor, y: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """(rows, out_dim) of zeros."""
        return x.new_zeros([x.size(0), self.out_dim])


def _kernel(irreps_in: Irreps, irreps_out: Irreps, paths: list[LinearInstruction], shared: bool) -> nn.Module:
    """What maps rows: a linear map, or where rows have weights of their own a product with a scalar that is one."""
    if shared:
        found = tuple(LinearPath(item.i_in, item.i_out, item.path_weight) for item in paths)
        return ops.Linear(LinearSpec(irreps_in, irreps_out, found))
    # Normalised by components, the product is with the unit, so the variance of a path is the square of its weight.
    couplings = [Instruction(item.i_in, 0, item.i_out, ConnectionMode.UVW, True, item.path_weight**2) for item in paths]
    return ops.TensorProduct(TensorProductSpec(irreps_in, "0e", irreps_out, couplings, path_normalization="none"))
