"""Less precision than a model's own, for those who ask for it: what there is, and what it may do to results.

Rounding to nearest with a unit roundoff u makes of each number w some w (1 + d) with |d| <= u. What that may come to is
seen where each has an error of that size, of random sign: the largest that rounding makes, in directions that nothing
correlates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eqaccel.errors import PatchError
from eqaccel.families.matrix_product import Factors, MatrixProductSpec
from eqaccel.ops import MatrixProduct, TensorProductConv
from eqaccel.prepare import scalar_name

LowPrecision = Literal["weights", "products"]
"""What may be less precise."""

WEIGHTS: LowPrecision = "weights"
PRODUCTS: LowPrecision = "products"

_MEANING: Mapping[LowPrecision, str] = MappingProxyType(
    {
        WEIGHTS: "weights of edges are rounded to bfloat16, to 8 significant bits in place of 24",
        PRODUCTS: "GPUs round the factors of matrix products of radial networks to half precision, to 11 bits",
    }
)
"""What reports say, by what is asked for."""

_BFLOAT16_UNIT = torch.finfo(torch.bfloat16).eps / 2
_TENSOR_FLOAT_UNIT = 2.0**-11


@dataclass(frozen=True)
class Options:
    """How modules of a model are to be replaced.

    Attributes:
        deterministic: Whether sums over edges are bitwise reproducible.
        low_precision: What is to be less precise than the model.
    """

    deterministic: bool = True
    low_precision: frozenset[LowPrecision] = frozenset()

    @property
    def products(self) -> MatrixProductSpec:
        """What matrix products of radial networks make of their factors."""
        return MatrixProductSpec(Factors.ROUNDED if PRODUCTS in self.low_precision else Factors.SPLIT)


def chosen_precision(low_precision: Collection[LowPrecision]) -> frozenset[LowPrecision]:
    """What users have asked for, checked.

    Raises:
        PatchError: If it is something else than a collection of the names that there are.
    """
    expected = "expected some of " + ", ".join(f"{name!r} ({meaning})" for name, meaning in _MEANING.items())
    if isinstance(low_precision, str) or not isinstance(low_precision, Collection):
        raise PatchError(
            f"low_precision: {expected}, in a set, list or tuple, got {low_precision!r}; pass "
            f"{{{WEIGHTS!r}}} for example"
        )
    unknown = [name for name in low_precision if name not in _MEANING]
    if unknown:
        raise PatchError(f"low_precision: {expected}, got {unknown[0]!r}; leave it out")
    return frozenset(low_precision)


def refuse_other_dtypes(model: nn.Module, dtype: torch.dtype, low_precision: Collection[LowPrecision]) -> None:
    """Raises `PatchError` if a model is to be less precise that is not in float32."""
    if low_precision and dtype != torch.float32:
        raise PatchError(
            f"low_precision: expected a model in float32, got {type(model).__name__} in {scalar_name(dtype)}, which "
            f"one takes for the sake of its digits; convert it with model.float(), or leave low_precision out"
        )


def precision_of(model: nn.Module) -> tuple[LowPrecision, ...]:
    """What is less precise in a patched model."""
    kinds = {WEIGHTS: _rounding_weights(model), PRODUCTS: _rounding_factors(model)}
    return tuple(name for name, modules in kinds.items() if any(True for _ in modules))


def rounding_of(model: nn.Module) -> float:
    """The largest unit roundoff of what is less precise in a patched model; zero if nothing is."""
    units = {WEIGHTS: _BFLOAT16_UNIT, PRODUCTS: _TENSOR_FLOAT_UNIT}
    return max((units[name] for name in precision_of(model)), default=0.0)


def precision_note(low_precision: Collection[LowPrecision]) -> str:
    """What a report says of it."""
    return "; ".join(meaning for name, meaning in _MEANING.items() if name in low_precision)


@contextlib.contextmanager
def rounded_at_random(model: nn.Module, seed: int) -> Iterator[None]:
    """Gives what a patched model, a copy in float64, would round an error of the size that rounding may have.

    Derivatives are those at the numbers with errors, as they are of numbers that are rounded.
    """
    generator = torch.Generator().manual_seed(seed)

    def of_weights(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, y, w, *rest = arguments
        return x, y, _with_errors(w, _BFLOAT16_UNIT, generator), *rest

    def of_factors(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_with_errors(factor, _TENSOR_FLOAT_UNIT, generator) for factor in arguments)

    def of_gradient(_: nn.Module, __: tuple[Any, ...], product: Tensor) -> None:
        if product.requires_grad:
            product.register_hook(lambda gradient: _with_errors(gradient, _TENSOR_FLOAT_UNIT, generator))

    handles = [conv.register_forward_pre_hook(of_weights) for conv in _rounding_weights(model)]
    for product in _rounding_factors(model):
        handles += [product.register_forward_pre_hook(of_factors), product.register_forward_hook(of_gradient)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_errors(values: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    signs = torch.randint(2, values.shape, generator=generator, dtype=torch.int8).to(values) * 2 - 1
    return values + (values * signs * unit).detach()


def _rounding_weights(model: nn.Module) -> Iterator[TensorProductConv]:
    """The convolutions that round their weights."""
    for module in model.modules():
        if isinstance(module, TensorProductConv) and module.spec.bfloat16_weights:
            yield module


def _rounding_factors(model: nn.Module) -> Iterator[MatrixProduct]:
    """The matrix products that round their factors."""
    for module in model.modules():
        if isinstance(module, MatrixProduct) and module.spec.factors is Factors.ROUNDED:
            yield module
