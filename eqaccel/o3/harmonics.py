"""Spherical harmonics as polynomials, which they are: one kernel in place of some hundred small operators."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from eqaccel.errors import SpecError, UnsupportedError
from eqaccel.families.polynomial import MAX_POWER, PolynomialSpec, Term
from eqaccel.irreps import Irreps
from eqaccel.o3.origins import check_class
from eqaccel.ops import Polynomial
from eqaccel.ops.library import is_traced
from eqaccel.roots import add, root
from eqaccel.wigner import wigner_3j_squares

MAX_DEGREE = 11
"""Largest degree of spherical harmonics, which is that of couplings too."""

_NORMALIZATIONS = ("integral", "component", "norm")

_Squares = dict[tuple[int, ...], Fraction]
"""A polynomial: signed squares of coefficients, as of `eqaccel.roots`, by the features that a term multiplies."""


class SphericalHarmonics(nn.Module):
    """The harmonics of e3nn's `SphericalHarmonics`: the same arguments and numbers.

    Args:
        irreps_out: A degree, degrees, or irreps, whose parities fit the input.
        normalize: Whether vectors are made unit vectors first; a vector of zeros stays one.
        normalization: ``integral`` (on the sphere, squares integrate to one), ``component`` (squares of the components
            of a degree add up to 2l+1) or ``norm`` (to one).
        irreps_in: ``1o`` for vectors or ``1e`` for pseudovectors; by default what `irreps_out` asks for, or ``1o``.

    Attributes:
        irreps_in: Of the input.
        irreps_out: Of the output, equal neighbours joined.

    Raises:
        IrrepsError: If irreps cannot be read.
        SpecError: If degrees, parities or the normalisation make no sense.
        UnsupportedError: If a degree is above `MAX_DEGREE`.
    """

    def __init__(
        self, irreps_out: Any, normalize: bool, normalization: str = "integral", irreps_in: Any = None
    ) -> None:
        super().__init__()
        parity, degrees = _input_parity(irreps_out, irreps_in), _degrees(irreps_out)
        if _are_irreps(irreps_out):
            for mul, ir in Irreps(irreps_out):
                if mul and ir.p != parity**ir.l:
                    raise SpecError(f"irreps_out: expected parity {parity**ir.l} of degree {ir.l}, got {ir}")
        self.normalize = bool(normalize)
        self.normalization = normalization
        self.irreps_in = Irreps([(1, (1, parity))])
        self.irreps_out = Irreps((1, (degree, parity**degree)) for degree in degrees).simplify()
        self.kernel = harmonics_polynomial(degrees, normalization)

    @classmethod
    def from_e3nn(cls, module: Any) -> SphericalHarmonics:
        """The same harmonics as those of an `e3nn.o3.SphericalHarmonics`, of any version of e3nn.

        Raises:
            SpecError: If it is something else.
            UnsupportedError: As for the class.
        """
        names = ("_ls_list", "normalize", "normalization", "irreps_in")
        check_class(cls, module, (cls.__name__,))
        degrees, normalize, normalization, irreps_in = (getattr(module, name) for name in names)
        return cls(list(degrees), normalize, normalization, irreps_in).train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """Evaluates, differentiable any number of times.

        Args:
            x: (..., 3) float32 or float64.

        Returns:
            (..., irreps_out.dim)

        Raises:
            OperandError: If the last dimension is not 3 (in scripted programs: RuntimeError).
            CompileError: If a kernel does not compile.
        """
        rows = x.reshape(-1, x.size(-1))
        if self.normalize:
            rows = torch.ops.eqaccel.unit_vectors(rows)[0]
        z = self.kernel(rows, rows.new_ones([rows.size(0), 1]))
        return z.view(list(x.size()[:-1]) + [z.size(-1)])  # noqa: RUF005 (TorchScript)

    def extra_repr(self) -> str:
        """The irreps, for print(module)."""
        return f"{self.irreps_in} -> {self.irreps_out}, normalize={self.normalize}, {self.normalization}"


def spherical_harmonics(l: Any, x: Tensor, normalize: bool, normalization: str = "integral") -> Tensor:  # noqa: E741
    """Spherical harmonics of vectors; those of the same degrees share one module.

    Args:
        l: A degree, degrees, or irreps.
        x: (..., 3) float32 or float64.
        normalize: As for `SphericalHarmonics`.
        normalization: As for `SphericalHarmonics`.

    Returns:
        (..., sum of 2l+1)

    Raises:
        EqaccelError: As for `SphericalHarmonics`.
    """
    wanted = str(Irreps(l)) if _are_irreps(l) else tuple(_degrees(l))
    # Tensors that are made while a program is traced are stand-ins, which must not be kept.
    made = (_made if is_traced() else _kept)(wanted, bool(normalize), normalization, x.device)
    return made(x)  # type: ignore[no-any-return]


def _made(wanted: Any, normalize: bool, normalization: str, device: torch.device) -> SphericalHarmonics:
    with torch.inference_mode(False):
        return SphericalHarmonics(wanted, normalize, normalization).to(device)


_kept = lru_cache(maxsize=64)(_made)


def _are_irreps(wanted: Any) -> bool:
    return isinstance(wanted, str) or hasattr(wanted, "num_irreps")


def _degrees(wanted: Any) -> list[int]:
    """The degrees that a user asks for, in order."""
    if _are_irreps(wanted):
        degrees = [ir.l for mul, ir in Irreps(wanted) for _ in range(mul)]
    else:
        degrees = [wanted] if isinstance(wanted, int) else [int(degree) for degree in wanted]
    if not degrees or min(degrees) < 0:
        raise SpecError(f"irreps_out: expected degrees >= 0, at least one, got {wanted!r}")
    return degrees


def _input_parity(wanted: Any, irreps_in: Any) -> int:
    """The parity of the vectors."""
    if irreps_in is None:
        odd_degrees = [ir.p for _, ir in Irreps(wanted) if ir.l % 2] if _are_irreps(wanted) else []
        return 1 if 1 in odd_degrees else -1
    irreps = Irreps(irreps_in)
    if [(mul, ir.l) for mul, ir in irreps] != [(1, 1)]:
        raise SpecError(f"irreps_in: expected '1o' (vectors) or '1e' (pseudovectors), got {irreps}")
    return irreps[0].ir.p


class HighHarmonics(torch.nn.Module):
    """Spherical harmonics of high degrees: polynomials in those of degrees up to three, or four, which are such too.

    Args:
        degrees: Of the outputs, in order.
        normalization: That of e3nn's harmonics.
    """

    def __init__(self, degrees: list[int], normalization: str) -> None:
        super().__init__()
        most = MAX_POWER if max(degrees) <= MAX_POWER**2 else MAX_POWER + 1
        self.lower = harmonics_polynomial(range(1, most + 1), "norm")
        self.higher = Polynomial(_harmonics_of_harmonics(degrees, normalization, most))
        self.num_outputs = self.higher.num_outputs

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """The harmonics (rows, num_outputs) of `x` (rows, 3), times `w` (rows, 1), which are ones."""
        return self.higher(self.lower(x, w), w)


def harmonics_polynomial(degrees: Iterable[int], normalization: str) -> Polynomial | HighHarmonics:
    """What evaluates harmonics of unit vectors, or of the vectors as they are.

    Args:
        degrees: Of the outputs, in order.
        normalization: As for `SphericalHarmonics`.

    Raises:
        SpecError: If the normalisation is unknown.
        UnsupportedError: If a degree is above `MAX_DEGREE`.
    """
    if normalization not in _NORMALIZATIONS:
        raise SpecError(f"normalization: expected one of {list(_NORMALIZATIONS)}, got {normalization!r}")
    wanted = list(degrees)
    if max(wanted) > MAX_DEGREE:
        raise UnsupportedError(f"no kernel for spherical harmonics of degree {max(wanted)}, above {MAX_DEGREE}")
    if max(wanted) > MAX_POWER:
        return HighHarmonics(wanted, normalization)
    return Polynomial(_harmonics(wanted, normalization))


def _harmonics(degrees: list[int], normalization: str) -> PolynomialSpec:
    """The polynomials of some degrees, in closed form: the same bits on every machine.

    Those of degree l + 1 are those of degree l coupled with the vector. Coefficients are rounded once; only the area of
    the sphere, whose root is irrational, divides them afterwards.
    """
    of_degree: list[list[_Squares]] = [[{(): Fraction(1)}]]
    for degree in range(max(degrees)):
        of_degree.append(_couple(of_degree[-1], wigner_3j_squares(degree, 1, degree + 1)))
    terms, output = [], 0
    for degree in degrees:
        norm, area = _norm(degree, normalization)
        for polynomial in of_degree[degree]:
            terms += [Term(output, 0, f, root(norm * square) / math.sqrt(area)) for f, square in polynomial.items()]
            output += 1
    return PolynomialSpec(3, 1, output, tuple(terms))


def _norm(degree: int, normalization: str) -> tuple[int, float]:
    """The squares of components of a degree add up to the first number over the second."""
    size = 2 * degree + 1
    return {"norm": (1, 1.0), "component": (size, 1.0), "integral": (size, 4 * math.pi)}[normalization]


def _harmonics_of_harmonics(degrees: list[int], normalization: str, most: int) -> PolynomialSpec:
    """Harmonics as polynomials in those of degrees one to `most`, whose squares add up to one.

    A degree is the sum of at most three such degrees, the highest ones that are, coupled one after the other. On the
    axis that the middle component belongs to, all others are zero and it is one, which gives factor and sign.
    """
    terms, output = [], 0
    for degree in degrees:
        parts = [most] * (degree // most) + [degree % most] * (degree % most > 0)
        polynomials: list[dict[tuple[int, ...], float]] = [{(): 1.0}]
        total = 0
        for part in parts:
            coupled: list[dict[tuple[int, ...], float]] = [{} for _ in range(2 * (total + part) + 1)]
            coupling = wigner_3j_squares(total, part, total + part)
            axis = root(coupling[total, part, total + part])
            for (i, j, k), square in coupling.items():
                for features, coefficient in polynomials[i].items():
                    key = tuple(sorted((*features, part**2 - 1 + j)))
                    coupled[k][key] = coupled[k].get(key, 0.0) + root(square) / axis * coefficient
            polynomials, total = coupled, total + part
        norm, area = _norm(degree, normalization)
        for polynomial in polynomials:
            terms += [Term(output, 0, f, math.sqrt(norm / area) * c) for f, c in polynomial.items()]
            output += 1
    return PolynomialSpec((most + 1) ** 2 - 1, 1, output, tuple(terms))


def _couple(lower: list[_Squares], coupling: Mapping[tuple[int, int, int], Fraction]) -> list[_Squares]:
    """Polynomials of the next degree, whose squares add up to one on the sphere."""
    higher: list[_Squares] = [{} for _ in range(len(lower) + 2)]
    for (i, j, k), factor in coupling.items():
        for features, square in lower[i].items():
            key = tuple(sorted((*features, j)))
            higher[k][key] = add(higher[k].get(key, Fraction(0)), factor * square)
    power = (0,) * (len(lower) // 2 + 1)  # the only product of features that is not zero at (1, 0, 0)
    size = sum(abs(polynomial.get(power, Fraction(0))) for polynomial in higher)
    return [{features: square / size for features, square in p.items() if square} for p in higher]
