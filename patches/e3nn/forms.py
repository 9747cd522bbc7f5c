"""What e3nn's products and linear maps become in any network: whatever their weights, biases and leading dimensions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Optional

import torch
from torch import Tensor

from eqaccel.errors import PatchError, SpecError
from eqaccel.families.tensor_product import TensorProductSpec
from eqaccel.irreps import Irreps
from eqaccel.o3.linear_rows import LinearInstruction, LinearRows
from eqaccel.o3.rows import ProductRows
from eqaccel.patches.nodes import E3NN_FORMS, Form, NodeForm, NodeForms, random_rows
from eqaccel.patches.replacement import Replacement


class _OfProductRows(Replacement):
    """What computes with `ProductRows`."""

    note = "replaced by eqaccel.TensorProduct"
    gains_on_cpu = True

    def remake(self) -> torch.nn.Module:
        """See `Replacement`."""
        made = _rows(self)
        same: torch.nn.Module = self.eqaccel
        return same if made.kernel.spec == self.eqaccel.kernel.spec else made


class Product(_OfProductRows):
    """An `e3nn.o3.TensorProduct`, or one of the classes that derive from it."""

    def forward(self, x: Tensor, y: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Computes the product.

        Args:
            x: (..., irreps_in1.dim).
            y: (..., irreps_in2.dim).
            weight: As e3nn takes it: (weight_numel,) if weights are shared, else (..., weight_numel).

        Returns:
            (..., irreps_out.dim)
        """
        return self.dense(x, y, weight)

    def dense(self, x: Tensor, y: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """`forward`."""
        return self.eqaccel(x, y, self._get_weights(weight))


class ScalarProduct(Product):
    """A `Product` with scalars, such as one-hot species; those that are zero cost nothing."""

    note = "replaced by eqaccel.Linear"


class Square(_OfProductRows):
    """An `e3nn.o3.TensorSquare`."""

    def forward(self, x: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Computes the product of (..., irreps_in.dim) with itself; `weight` as for `Product`."""
        return self.dense(x, weight)

    def dense(self, x: Tensor, weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """`forward`."""
        return self.eqaccel(x, x, self._get_weights(weight))


class LinearOfRows(Replacement):
    """An `e3nn.o3.Linear`, whatever its weights, biases and leading dimensions."""

    note = "replaced by eqaccel.Linear"
    gains_on_cpu = True

    def forward(
        self,
        features: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        bias: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Maps (..., irreps_in.dim) to (..., irreps_out.dim); weights and biases as e3nn takes them."""
        return self.dense(features, weight, bias)

    def dense(
        self,
        features: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        bias: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """`forward`."""
        w = self.weight if weight is None else weight
        b = self.bias if bias is None else bias
        return self.eqaccel(features, w, b)

    def remake(self) -> torch.nn.Module:
        """See `Replacement`; nothing in a linear map is made from buffers."""
        return self.eqaccel


def _rows(product: Any) -> ProductRows:
    """What computes a product of e3nn.

    Raises:
        PatchError: If eqaccel has no kernel for it.
    """
    try:
        return ProductRows(TensorProductSpec.from_e3nn(product)).to(product.output_mask.device)
    except SpecError as error:
        raise PatchError(str(error)) from error


def _product(_: torch.nn.Module, product: Any) -> Form:
    like = product.output_mask
    operands = [random_rows(3, product.irreps_in1.dim, like), random_rows(3, product.irreps_in2.dim, like, operand=1)]
    rows = _rows(product)
    return ScalarProduct if rows.is_linear else Product, rows, (*operands, *_given_weights(product))


def _square(_: torch.nn.Module, square: Any) -> Form:
    operand = random_rows(3, square.irreps_in1.dim, square.output_mask)
    return Square, _rows(square), (operand, *_given_weights(square))


def _given_weights(module: Any) -> tuple[Tensor, ...]:
    """Weights to compare both forms with, where the module has none of its own."""
    if module.internal_weights or not module.weight_numel:
        return ()
    weights = random_rows(3, module.weight_numel, module.output_mask, operand=2)
    return (weights[0] if module.shared_weights else weights,)


def _linear(_: torch.nn.Module, linear: Any) -> Form:
    if linear.weight.dim() > 1 or not linear.weight_numel:
        raise PatchError("it has further channels, or no weights")
    found = [LinearInstruction(i.i_in, i.i_out, i.path_shape, float(i.path_weight)) for i in linear.instructions]
    rows = LinearRows(Irreps(linear.irreps_in), Irreps(linear.irreps_out), found, linear.shared_weights)
    operands = [random_rows(3, linear.irreps_in.dim, linear.output_mask), *_given_weights(linear)]
    if not linear.internal_weights and linear.bias_numel:
        operands.append(random_rows(1, linear.bias_numel, linear.output_mask, operand=3)[0])
    return LinearOfRows, rows.to(linear.output_mask.device), tuple(operands)


FORMS: NodeForms = MappingProxyType(
    {
        **E3NN_FORMS,
        "Linear": NodeForm("irreps_in", _linear),
        "FullyConnectedTensorProduct": NodeForm("irreps_in1", _product),
        "TensorSquare": NodeForm("irreps_in1", _square),
        "TensorProduct": NodeForm("irreps_in1", _product),
    }
)
"""The modules of e3nn that are replaced in any network."""
