"""MACE's symmetric contraction, a polynomial in the features of an atom, by eqaccel's kernel of polynomials.

With x the features of an atom in one channel and W the weights of its element, it is the sum over degrees n of
U_n[m, i.., l, k] x_i .. x_l W_n[k]. MACE multiplies U_3 by one x after the other and keeps a matrix of all pairs of the
other two. But U_n is a sparse tensor, whose terms are the same in every order of the features, and the paths k give
linearly dependent polynomials: what is left are some hundred terms for a row.
"""

from __future__ import annotations

import math
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eqaccel.errors import PatchError, VerificationError
from eqaccel.families.polynomial import MAX_POWER, PolynomialSpec, Term
from eqaccel.ops import Polynomial
from eqaccel.patches.coefficients import write
from eqaccel.patches.nodes import Form, NodeForm, random_rows
from eqaccel.patches.replacement import Replacement


class PolynomialContraction(Replacement):
    """A `Contraction` of MACE: one output irrep of a symmetric contraction, computed by `ContractionPolynomial`."""

    note = "replaced by eqaccel.Polynomial"
    gains_on_cpu = True

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
        """`forward`, under the name that all replacements of node-wise modules have it."""
        weights = [self.weights_max]
        for weight in self.weights:
            weights.append(weight)
        return self.eqaccel(x, y, torch.cat(weights, 1))

    def remake(self) -> torch.nn.Module:
        """See `Replacement`: the polynomial of the coefficients that the module has now."""
        return ContractionPolynomial(self)

    def share_coefficients(self, module: Any, stored: torch.dtype) -> None:
        """See `Replacement`: puts the tensors that the polynomial stands for into a contraction."""
        for degree, (tensor, magnitude) in self.polynomial_tensors().items():
            buffer = module.U_tensors(degree)
            value = tensor.to(buffer)
            error = (value - symmetric(buffer.view(tensor.shape))).flatten(0, -2).norm(dim=0)
            # Paths that are zero are sums that cancel, of products like the others, whose factors have norm one.
            size = max(1.0, float(magnitude.max()))
            bound = _roundings(degree, tensor.shape[-2]) * torch.finfo(stored).eps / 2 * size
            if not bool((error <= bound).all()):
                worst = int(error.argmax())
                raise VerificationError(
                    f"the polynomial of the contraction has other coefficients: those of degree {degree}, path {worst} "
                    f"differ by {float(error[worst]):.3e} where at most {bound:.3e} is rounding"
                )
            write(buffer, value.view(buffer.shape))

    def polynomial_tensors(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The tensors U_n that the polynomial and its mix stand for, for verification.

        Returns:
            For each degree n the tensor, (num_outputs, num_ell, ..., num_paths) float64 on the CPU, symmetric in the
            features; and for each path (num_paths,) the sizes (root of the sum of squares) of all that it is made of.
        """
        num_paths = [self.U_tensors(degree).size(-1) for degree in range(self.correlation, 0, -1)]
        return _tensors(self.eqaccel.polynomial.spec, self.eqaccel.mix, num_paths)


class ContractionPolynomial(torch.nn.Module):
    """The polynomial of a symmetric contraction, and how its weights follow from those of the contraction.

    Args:
        contraction: A `Contraction` of MACE, whose coefficients are read and not kept.

    Raises:
        PatchError: If its polynomial is zero.
    """

    if TYPE_CHECKING:  # buffers
        mix: Tensor

    def __init__(self, contraction: Any) -> None:
        super().__init__()
        correlation = contraction.correlation
        largest = contraction.U_tensors(correlation)
        terms: list[Term] = []
        mixes: list[Tensor] = []
        self.num_weights = 0
        for degree in range(correlation, 0, -1):
            tensor = contraction.U_tensors(degree).detach()
            # (num_outputs, num_ell, ..., num_weights); a scalar has no first dimension.
            tensor = tensor if tensor.dim() == degree + 2 else tensor.unsqueeze(0)
            features, coefficients = _by_features(tensor.double().cpu().numpy(), degree)
            rounding = torch.finfo(tensor.dtype).eps * float(tensor.abs().max())
            kept, mix = _independent(coefficients, rounding)
            for output, number, weight in np.argwhere(kept).tolist():
                coefficient = float(kept[output, number, weight])
                terms.append(Term(output, self.num_weights + weight, features[number], coefficient))
            mixes.append(torch.from_numpy(mix))
            self.num_weights += kept.shape[2]
        if not terms:
            raise PatchError("its outputs are zero, whatever the features are")
        self.num_ell, self.num_outputs = largest.size(-2), kept.shape[0]
        spec = PolynomialSpec(self.num_ell, self.num_weights, self.num_outputs, tuple(terms))
        self.polynomial = Polynomial(spec).to(largest.device)
        self.register_buffer("mix", torch.block_diag(*mixes).to(largest), persistent=False)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The contraction of `x` and `y`, as there, with (num_elements, num_paths, num_channels) weights."""
        num_nodes, channels = x.size(0), x.size(1)
        by_element = weights.transpose(1, 2) @ self.mix
        of_row = (y @ by_element.flatten(1)).view(num_nodes * channels, self.num_weights)
        z = self.polynomial(x.reshape(num_nodes * channels, self.num_ell), of_row)
        return z.view(num_nodes, channels * self.num_outputs)


def _tensors(polynomial: PolynomialSpec, mix: Tensor, num_paths: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """See `PolynomialContraction.polynomial_tensors`."""
    rows, columns, tensors = 0, 0, {}
    for degree, paths in zip(range(len(num_paths), 0, -1), num_paths, strict=True):
        of_degree = [term for term in polynomial.terms if len(term.features) == degree]
        kept = len({term.weight for term in of_degree})
        tensor = np.zeros((polynomial.num_outputs, *[polynomial.num_features] * degree, kept))
        for term in of_degree:
            orders = set(permutations(term.features))
            for order in orders:
                tensor[(term.output, *order, term.weight - columns)] = term.coefficient / len(orders)
        made_of = mix[rows : rows + paths, columns : columns + kept].double().cpu()
        sizes = torch.from_numpy(tensor).flatten(0, -2).norm(dim=0)
        whole = torch.from_numpy(tensor) @ made_of.T
        tensors[degree] = whole, whole.flatten(0, -2).norm(dim=0) + made_of.abs() @ sizes
        rows, columns = rows + paths, columns + kept
    return tensors


def _by_features(tensor: NDArray, degree: int) -> tuple[list[tuple[int, ...]], NDArray]:
    """Sums over all orders of the features: their sorted indices, and (num_outputs, num_products, num_weights)."""
    total: Any = sum(tensor.transpose(0, *order, degree + 1) for order in permutations(range(1, degree + 1)))
    features = [f for f in np.ndindex(*total.shape[1:-1]) if f == tuple(sorted(f))]
    # The sum has an order once for each permutation that gives it, and the polynomial has each order once.
    repeats = np.array([sum(1 for order in permutations(f) if order == f) for f in features])
    return features, np.stack([total[(slice(None), *f)] for f in features], 1) / repeats[:, None]


def _independent(coefficients: NDArray, rounding: float) -> tuple[NDArray, NDArray]:
    """Of linearly dependent polynomials those with the fewest terms, and how the others are made of them.

    Args:
        coefficients: (num_outputs, num_products, num_weights).
        rounding: Error that a coefficient may have.

    Returns:
        (num_outputs, num_products, num_kept), and the (num_weights, num_kept) matrix that takes weights to those of the
        polynomials that were kept.
    """
    rows = coefficients.reshape(-1, coefficients.shape[2]).T
    rows = np.where(np.abs(rows) > 10 * rounding, rows, 0.0)
    # Gram-Schmidt, twice for what rounding left. Sums are correctly rounded, so that the same model gives the same bits
    # on every machine; a library of linear algebra does not promise that.
    basis: list[NDArray] = []
    kept: list[int] = []
    coordinates: dict[int, list[float]] = {}
    for number in np.argsort((rows != 0).sum(1), kind="stable").tolist():
        rest, found = rows[number], [0.0] * len(basis)
        for n in [*range(len(basis)), *range(len(basis))]:
            part = _dot(basis[n], rest)
            rest, found[n] = rest - part * basis[n], found[n] + part
        size = math.sqrt(_dot(rest, rest))
        if size > 100 * rounding:
            basis.append(rest / size)
            kept.append(number)
            found.append(size)
        coordinates[number] = found
    mix = np.zeros((len(rows), len(kept)))
    for number, left in coordinates.items():
        for n in reversed(range(len(left))):
            polynomial = coordinates[kept[n]]  # of which the last coordinate is the n-th
            mix[number, n] = left[n] / polynomial[n]
            left = [a - mix[number, n] * b for a, b in zip(left, polynomial, strict=False)]
    return rows[kept].T.reshape(*coefficients.shape[:2], len(kept)), mix


def _dot(a: NDArray, b: NDArray) -> float:
    return math.fsum((a * b).tolist())


def symmetric(tensor: torch.Tensor) -> torch.Tensor:
    """The mean over all orders of the features of a contraction's tensor (num_outputs, num_ell, ..., num_paths)."""
    # Adding one feature after the other: the mean over the places that it may take among those before it.
    for last in range(2, tensor.dim() - 1):
        swapped = [tensor.transpose(place, last) for place in range(1, last)]
        tensor = torch.stack([tensor, *swapped]).mean(0)
    return tensor


def _roundings(degree: int, num_ell: int) -> int:
    """How often a coefficient of a contraction was rounded when the model was made.

    Each feature is coupled by a tensor, whose entries are rounded and scaled, in sums over the components of what came
    before it, at most 2l + 1 products.
    """
    components = 2 * math.isqrt(num_ell) - 1
    return degree * (components + 3)


def _contraction(_: torch.nn.Module, contraction: Any) -> Form:
    if contraction.correlation > MAX_POWER:
        raise PatchError(f"no kernel for a correlation of {contraction.correlation}, above {MAX_POWER}")
    num_elements, _, channels = contraction.weights_max.shape
    polynomial = ContractionPolynomial(contraction)
    features = random_rows(2 * channels, polynomial.num_ell, contraction.weights_max).view(2, channels, -1)
    elements = torch.nn.functional.one_hot(torch.tensor([0, num_elements - 1]), num_elements)
    return PolynomialContraction, polynomial, (features, elements.to(features))


CONTRACTION_FORM = NodeForm("coupling_irreps", _contraction)
"""How a `Contraction` is replaced."""
