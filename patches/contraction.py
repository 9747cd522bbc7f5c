"""MACE's symmetric contraction, a polynomial of degree three in the features of an atom, as matrix products.

With x the features of an atom in one channel and W the weights of its element, it is the sum over degrees n of
U_n[m, i.., l, k] x_i .. x_l W_n[k]. MACE multiplies U_3 by one x after the other and keeps a matrix of all pairs of the
other two. Here each pair x_i x_j is formed once, what irreps of different parity have no common coefficients with is
left out, and paths that give the same polynomial share a weight: a tenth of the operations is left.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
from eqaccel.patches.core import Replacement
from torch import Tensor

_SMALLEST = 4096
"""Multiplications for a row below which a product is not worth its launch."""


class _Part(torch.nn.Module):
    """Pairs of features, and the features and weights that have coefficients with them.

    Args:
        cubes: (num_outputs, num_pairs, num_factors, num_weights) of degree three.
        squares: (num_outputs, num_pairs, num_lower) of degree two.
    """

    def __init__(self, cubes: Tensor, squares: Tensor) -> None:
        super().__init__()
        self.outputs, self.pairs, factors, weights = cubes.shape
        self.products, columns = factors * weights, self.outputs * self.pairs
        flat = cubes.permute(2, 3, 0, 1).reshape(self.products, columns)
        self.register_buffer("cubes", flat, persistent=False)
        self.has_squares = bool(squares.any())
        self.register_buffer("squares", squares.permute(2, 0, 1).reshape(-1, columns), persistent=False)

    def forward(self, pairs: Tensor, factors: Tensor, cubic: Tensor, square: Tensor) -> Tensor:
        """The part of the polynomial, (num_rows, num_outputs), from rows of pairs, of factors and of weights."""
        rows = pairs.size(0)
        products = (factors.unsqueeze(2) * cubic.unsqueeze(1)).view(rows, self.products)
        if self.has_squares:
            of_pairs = torch.addmm(square @ self.squares, products, self.cubes)
        else:
            of_pairs = products @ self.cubes
        return (of_pairs.view(rows, self.outputs, self.pairs) * pairs.unsqueeze(1)).sum(2)


class PairContraction(Replacement):
    """Stands in for a `Contraction` of MACE: one output irrep of a symmetric contraction, of correlation three.

    All of it is matrix products and elementwise, so that derivatives of any order are added in a fixed order.

    Args:
        original: The module that the model came with.
    """

    note = "replaced by matrix products over pairs of features"
    gains_on_cpu = True

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self._take_coefficients()

    def share_parameters(self) -> None:
        """See `Replacement`; the coefficients are in the state dict of the original too."""
        super().share_parameters()
        self._take_coefficients()

    def _take_coefficients(self) -> None:
        tensors = [self.original.U_tensors(degree).detach() for degree in (1, 2, 3)]
        # (num_outputs, num_ell, ..., num_weights); a scalar has no first dimension.
        linear, squares, cubes = (tensor.unsqueeze(0) if tensors[0].dim() == 2 else tensor for tensor in tensors)
        self.outputs, self.num_ell = linear.shape[:2]
        self.degrees = [cubes.size(-1), squares.size(-1), linear.size(-1)]
        self.num_weights = sum(self.degrees)
        row, column = torch.triu_indices(self.num_ell, self.num_ell, device=cubes.device).unbind()
        # x_i x_j is x_j x_i: both orders go into one coefficient.
        twice = (row != column).to(cubes)[:, None]
        squares = squares[:, row, column] + twice * squares[:, column, row]
        cubes, mix = _fewest_weights(sum(cubes.permute(0, *order, 4) for order in permutations((1, 2, 3))) / 6)
        cubes = (1 + twice[:, None]) * cubes[:, row, column]
        parts, picked = [], []
        for pairs, factors in _parts(cubes, squares):
            parts.append(_Part(cubes[:, pairs][:, :, factors], squares[:, pairs]))
            picked += [row[pairs], column[pairs], factors]
        self.parts = torch.nn.ModuleList(parts).train(self.training)
        self.cuts = [len(columns) for columns in picked]
        # Features are picked by a product with ones and zeros, because an index would add gradients in no fixed order.
        pick = torch.nn.functional.one_hot(torch.cat(picked), self.num_ell).T.to(cubes)
        self.register_buffer("pick", pick, persistent=False)
        self.register_buffer("mix", mix, persistent=False)
        flat = linear.permute(2, 0, 1).reshape(-1, self.outputs * self.num_ell)
        self.register_buffer("linear", flat, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The contraction.

        Args:
            x: (num_nodes, num_channels, num_ell).
            y: (num_nodes, num_elements), one-hot.

        Returns:
            (num_nodes, num_channels * num_outputs)
        """
        return self.dense(x, y)

    def dense(self, x: Tensor, y: Tensor) -> Tensor:
        """`forward` as matrix products."""
        num_nodes, channels = x.size(0), x.size(1)
        num_rows = num_nodes * channels
        weights = [self.original.weights_max]
        for weight in self.original.weights:
            weights.append(weight)
        by_element = torch.cat(weights, 1).transpose(1, 2).reshape(y.size(1), channels * self.num_weights)
        of_degree = (y @ by_element).view(num_rows, self.num_weights).split(self.degrees, 1)
        cubic = of_degree[0] @ self.mix
        rows = x.reshape(num_rows, self.num_ell)
        total = ((of_degree[2] @ self.linear).view(num_rows, self.outputs, self.num_ell) * rows.unsqueeze(1)).sum(2)
        picked = (rows @ self.pick).split(self.cuts, 1)
        for number, part in enumerate(self.parts):
            pairs = picked[3 * number] * picked[3 * number + 1]
            total = total + part(pairs, picked[3 * number + 2], cubic, of_degree[1])
        return total.view(num_nodes, channels * self.outputs)


def _fewest_weights(cubes: Tensor) -> tuple[Tensor, Tensor]:
    """The same polynomials with fewer weights: coefficients, and the (num_weights, num_fewer) matrix of the weights.

    Paths that differ only in the order of their couplings may give the same polynomial.
    """
    basis, sizes, mix = torch.linalg.svd(cubes.double().flatten(0, 3), full_matrices=False)
    rank = max(int((sizes > 100 * torch.finfo(cubes.dtype).eps * sizes[0]).sum()), 1)
    fewer = (basis[:, :rank] * sizes[:rank]).view(*cubes.shape[:4], rank)
    fewer[~cubes.ne(0).any(4)] = 0  # what rounding left where there is no path
    return fewer.to(cubes), mix[:rank].T.to(cubes)


def _parts(cubes: Tensor, squares: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Numbers of pairs and of the features that they have coefficients with, in parts that have none with each other.

    Args:
        cubes: (num_outputs, num_pairs, num_ell, num_weights).
        squares: (num_outputs, num_pairs, num_lower).
    """
    meets = cubes.ne(0).any(3).any(0)
    left = meets.any(1) | squares.ne(0).any(2).any(0)
    found: list[tuple[Tensor, Tensor]] = []
    small = False
    while left.any():
        pairs = torch.zeros_like(left)
        pairs[left.nonzero()[0]] = True
        factors = meets[pairs].any(0)
        while (grown := meets[:, factors].any(1) | pairs).sum() > pairs.sum():
            pairs, factors = grown, meets[grown].any(0)
        left = left & ~pairs
        if small:
            pairs, factors = pairs | found[-1][0], factors | found[-1][1]
            found.pop()
        found.append((pairs, factors))
        small = int(pairs.sum() * factors.sum()) * cubes.size(0) * cubes.size(3) < _SMALLEST
    return [(pairs.nonzero().flatten(), factors.nonzero().flatten()) for pairs, factors in found]
