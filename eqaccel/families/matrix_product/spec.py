"""What matrix products make of their factors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eqaccel.errors import SpecError


class Factors(Enum):
    """What the tensor cores of a GPU, which multiply numbers of half precision, 11 bits, get of a factor in float32."""

    SPLIT = "split"
    """Two numbers, whose sum has 22 bits: three products, with the accuracy of float32."""
    ROUNDED = "rounded"
    """The nearest one: a single product."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class MatrixProductSpec:
    """A product of matrices.

    Args:
        factors: What the tensor cores of a GPU get of factors, also by its name, "split" or "rounded". It is of no
            consequence where there is no kernel for tensor cores, on a CPU and in float64: these have all of a factor.

    Raises:
        SpecError: If there are no such factors.
    """

    factors: Factors = Factors.SPLIT

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "factors", Factors(self.factors))
        except ValueError as error:
            expected = ", ".join(repr(factors.value) for factors in Factors)
            raise SpecError(f"factors: expected one of {expected}, got {self.factors!r}") from error

    @property
    def parts(self) -> int:
        """Numbers that a factor becomes."""
        return 2 if self.factors is Factors.SPLIT else 1

    @property
    def products(self) -> int:
        """Products of such numbers that make one of factors."""
        return 2 * self.parts - 1
