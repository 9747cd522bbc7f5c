"""e3nn's normalisations: the coefficient of each path, such that inputs of variance 1 give outputs of variance 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeVar

from eqaccel.errors import SpecError
from eqaccel.families.tensor_product.spec.instruction import Instruction
from eqaccel.irreps import Irreps


class IrrepNormalization(Enum):
    """What has norm 1 in an irrep: each `component`, the whole (`norm`), or nothing assumed (`none`)."""

    COMPONENT = "component"
    NORM = "norm"
    NONE = "none"


class PathNormalization(Enum):
    """What is shared equally among the paths of an out block: each `element`, each `path`, or nothing (`none`)."""

    ELEMENT = "element"
    PATH = "path"
    NONE = "none"


def path_coefficients(
    irreps: tuple[Irreps, Irreps, Irreps],
    instructions: Sequence[Instruction],
    irrep_normalization: str,
    path_normalization: str,
    variances: tuple[Iterable[float] | None, Iterable[float] | None, Iterable[float] | None],
) -> tuple[float, ...]:
    """The coefficient of each instruction, to the last bit as `e3nn.o3.TensorProduct` computes it.

    Args:
        irreps: in1, in2 and out.
        instructions: Checked against `irreps` already.
        irrep_normalization: A value of `IrrepNormalization`.
        path_normalization: A value of `PathNormalization`.
        variances: Variance of each block of in1, in2 and out; None means 1 for all.

    Raises:
        SpecError: If a normalisation is unknown, or variances are negative or not one for each block.
    """
    by_irrep = _choice(IrrepNormalization, "irrep_normalization", irrep_normalization)
    by_path = _choice(PathNormalization, "path_normalization", path_normalization)
    names = ("in1_var", "in2_var", "out_var")
    var1, var2, var3 = (_variances(*args) for args in zip(names, variances, irreps, strict=True))

    def variance(path: Instruction) -> float:
        summed = path.mode.summed(irreps[0][path.i_in1].mul, irreps[1][path.i_in2].mul)
        return var1[path.i_in1] * var2[path.i_in2] * summed

    coefficients = []
    for path in instructions:
        dim1, dim2, dim3 = (
            block[i].ir.dim for block, i in zip(irreps, (path.i_in1, path.i_in2, path.i_out), strict=True)
        )
        alpha = float(
            {IrrepNormalization.COMPONENT: dim3, IrrepNormalization.NORM: dim1 * dim2, IrrepNormalization.NONE: 1}[
                by_irrep
            ]
        )
        siblings = [other for other in instructions if other.i_out == path.i_out]
        total = 1.0
        if by_path is PathNormalization.ELEMENT:
            total = sum(map(variance, siblings))
        elif by_path is PathNormalization.PATH:
            total = variance(path) * len(siblings)
        if total > 0:
            alpha /= total
        coefficients.append(math.sqrt(alpha * var3[path.i_out] * path.path_weight))
    return tuple(coefficients)


_Options = TypeVar("_Options", bound=Enum)


def _choice(options: type[_Options], name: str, value: str) -> _Options:
    try:
        return options(value)
    except ValueError:
        raise SpecError(f"{name}: expected one of {[option.value for option in options]}, got {value!r}") from None


def _variances(name: str, values: Iterable[float] | None, irreps: Irreps) -> list[float]:
    if values is None:
        return [1.0] * len(irreps)
    result = [float(value) for value in values]
    if len(result) != len(irreps) or not all(math.isfinite(value) and value >= 0 for value in result):
        raise SpecError(f"{name}: expected {len(irreps)} finite numbers >= 0, one for each block, got {result}")
    return result
