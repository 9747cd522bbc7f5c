"""The products of e3nn whose instructions follow from their irreps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from torch import Tensor

from eqaccel.irreps import IrrepLike, IrrepsLike
from eqaccel.o3 import instructions
from eqaccel.o3.tensor_product import TensorProduct
from eqaccel.wigner import WignerConvention


class FullyConnectedTensorProduct(TensorProduct):
    """All couplings into the irreps wanted, each with weights for all triples of multiplicities.

    Args:
        irreps_in1: Irreps of x.
        irreps_in2: Irreps of y.
        irreps_out: Irreps of the output.
        irrep_normalization: As for `TensorProduct`.
        path_normalization: As for `TensorProduct`.
        **options: Further keyword arguments of `TensorProduct`.

    Raises:
        EqaccelError: As for `TensorProduct`.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        **options: Any,
    ) -> None:
        definition = instructions.fully_connected(irreps_in1, irreps_in2, irreps_out)
        options |= {"irrep_normalization": irrep_normalization, "path_normalization": path_normalization}
        super().__init__(*definition, **options)


class ElementwiseTensorProduct(TensorProduct):
    """The product of each irrep of x with the one at its place in y, without weights.

    Args:
        irreps_in1: Irreps of x.
        irreps_in2: Irreps of y, as many as x has, counted with their multiplicities.
        filter_ir_out: The irreps of the output that are kept; all by default.
        irrep_normalization: As for `TensorProduct`.
        **options: Further keyword arguments of `TensorProduct`.

    Raises:
        EqaccelError: As for `TensorProduct`; SpecError also if the operands have other numbers of irreps.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: Iterable[IrrepLike] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        definition = instructions.elementwise(irreps_in1, irreps_in2, filter_ir_out)
        super().__init__(*definition, irrep_normalization=irrep_normalization, **options)


class FullTensorProduct(TensorProduct):
    """The product of each irrep of x with each of y, without weights; the output is sorted by irrep.

    Args:
        irreps_in1: Irreps of x.
        irreps_in2: Irreps of y.
        filter_ir_out: The irreps of the output that are kept; all by default.
        irrep_normalization: As for `TensorProduct`.
        **options: Further keyword arguments of `TensorProduct`.

    Raises:
        EqaccelError: As for `TensorProduct`.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: Iterable[IrrepLike] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        definition = instructions.full(irreps_in1, irreps_in2, filter_ir_out)
        super().__init__(*definition, irrep_normalization=irrep_normalization, **options)


class TensorSquare(TensorProduct):
    """The product of x with itself, each pair of irreps once.

    Args:
        irreps_in: Irreps of x.
        irreps_out: Irreps of the output, which then has weights for all pairs; by default it consists of the pairs.
        filter_ir_out: The irreps of the output that are kept, if `irreps_out` is not given.
        irrep_normalization: ``component`` (default), ``norm`` or ``none``.
        **options: Further keyword arguments of `TensorProduct`.

    Raises:
        EqaccelError: As for `TensorProduct`; SpecError also if there are both `irreps_out` and `filter_ir_out`.
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike | None = None,
        filter_ir_out: Iterable[IrrepLike] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        definition = instructions.square(irreps_in, irreps_out, filter_ir_out, irrep_normalization or "component")
        super().__init__(*definition, irrep_normalization="none", **options)
        self.irreps_in = self.irreps_in1

    @classmethod
    def from_e3nn(cls, module: Any, convention: WignerConvention | str | None = None) -> Any:
        """See `TensorProduct.from_e3nn`."""
        product = super().from_e3nn(module, convention)
        product.irreps_in = product.irreps_in1
        return product

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Multiplies (..., irreps_in.dim) by itself; see `TensorProduct.forward`."""
        return self.kernel(x, x, self._get_weights(weight))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.irreps_in} -> {self._result()})"
