"""The order of path weights, beside e3nn's: it is the same, so that a trained radial network fits as it is."""

from __future__ import annotations

from torch import Tensor

from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import TensorProductSpec


def reorder_weights_from_e3nn(spec: TensorProductSpec, w: Tensor) -> Tensor:
    """Brings path weights from e3nn's order into that of eqaccel's kernels, which read e3nn's order.

    Args:
        spec: The tensor product.
        w: (..., spec.weight_numel), in the order of the weighted instructions, in the shapes of their modes.

    Returns:
        The same tensor.

    Raises:
        OperandError: If the last dimension is not spec.weight_numel.
    """
    return _checked(spec, w)


def reorder_weights_to_e3nn(spec: TensorProductSpec, w: Tensor) -> Tensor:
    """The inverse of `reorder_weights_from_e3nn`; see there."""
    return _checked(spec, w)


def _checked(spec: TensorProductSpec, w: Tensor) -> Tensor:
    if w.dim() == 0 or w.shape[-1] != spec.weight_numel:
        raise OperandError(
            f"w: expected shape (..., {spec.weight_numel}), the weight_numel of the spec, got {tuple(w.shape)}. Check "
            "that the weights and the spec belong together."
        )
    return w
