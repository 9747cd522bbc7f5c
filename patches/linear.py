"""Linear maps of e3nn, and its products with scalar attributes of nodes, by eqaccel's kernel of linear maps.

e3nn multiplies block by block, by slices, an einsum and a concatenation per irrep; and a product with one-hot species
by the matrices of all of them.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from eqaccel.errors import PatchError
from eqaccel.families.linear import LinearPath, LinearSpec
from eqaccel.ops import Linear
from eqaccel.patches.replacement import Replacement


def are_rows(x: Tensor) -> bool:
    """Whether a tensor has the shape that the kernel takes, and is where there is one."""
    return x.dim() == 2 and (x.is_cuda or x.is_cpu)


class LinearMap(Replacement):
    """An `e3nn.o3.Linear` with weights of its own and no bias."""

    note = "replaced by eqaccel.Linear"
    gains_on_cpu = True

    def forward(
        self,
        features: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
        bias: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Maps (num_nodes, irreps_in.dim) to (num_nodes, irreps_out.dim); given weights and biases are e3nn's."""
        if weight is None and bias is None and are_rows(features):
            return self.dense(features)
        return self.plain_forward(features, weight, bias)

    def dense(self, features: Tensor) -> Tensor:
        """`forward` by the kernel."""
        return self.eqaccel(features, self.weight)


class AttributeProduct(Replacement):
    """A `FullyConnectedTensorProduct` with scalars, such as one-hot species; those that are zero cost nothing."""

    note = "replaced by eqaccel.Linear"
    gains_on_cpu = True

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        weight: Optional[Tensor] = None,  # noqa: UP045 (TorchScript)
    ) -> Tensor:
        """Computes the product.

        Args:
            x: (num_nodes, irreps_in1.dim).
            y: (num_nodes, num_attributes).
            weight: Weights in the place of its own, as e3nn takes them.

        Returns:
            (num_nodes, irreps_out.dim)
        """
        if weight is None and self.fits(x, y):
            return self.dense(x, y)
        return self.plain_forward(x, y, weight)

    def fits(self, x: Tensor, y: Tensor) -> bool:
        """Whether the kernel takes these operands."""
        return are_rows(x) and are_rows(y) and x.size(0) == y.size(0)

    def dense(self, x: Tensor, y: Tensor) -> Tensor:
        """`forward` by the kernel."""
        return self.eqaccel(x, self.weight, y)


def check_weights(module: Any) -> None:
    """Raises `PatchError` unless a module of e3nn has weights of its own, the same for all rows."""
    if not (module.internal_weights and module.shared_weights) or module.weight.dim() != 1:
        raise PatchError("its weights are not a vector of its own")


def linear_map(linear: Any) -> Linear:
    """The kernel of an `e3nn.o3.Linear`.

    Raises:
        PatchError: If it has biases, or no weights.
    """
    check_weights(linear)
    if any(item.i_in < 0 for item in linear.instructions):
        raise PatchError("it has biases")
    paths = [LinearPath(item.i_in, item.i_out, float(item.path_weight)) for item in linear.instructions]
    return _kernel(linear, linear.irreps_in, linear.irreps_out, paths)


def attribute_product(product: Any, num_attributes: int | None = None) -> Linear:
    """The kernel of a `FullyConnectedTensorProduct` with scalars.

    Args:
        product: The module.
        num_attributes: How many attributes the kernel is to have; those of the module by default.

    Raises:
        PatchError: If the second operand is not one block of scalars, or a path is none of a fully connected product.
    """
    check_weights(product)
    if len(product.irreps_in2) != 1 or product.irreps_in2[0].ir.dim != 1:
        raise PatchError(f"its second operand is {product.irreps_in2}, not scalars of one kind")
    paths = []
    for item in product.instructions:
        if item.connection_mode != "uvw" or not item.has_weight:
            raise PatchError(f"it has a path of mode {item.connection_mode}")
        # e3nn normalises by the components of the output, which a product with a scalar does not sum over.
        scale = float(item.path_weight) / product.irreps_in1[item.i_in1].ir.dim ** 0.5
        paths.append(LinearPath(item.i_in1, item.i_out, scale))
    attributes = product.irreps_in2.dim if num_attributes is None else num_attributes
    return _kernel(product, product.irreps_in1, product.irreps_out, paths, attributes)


def _kernel(module: Any, irreps_in: Any, irreps_out: Any, paths: list[LinearPath], attributes: int = 0) -> Linear:
    if module.weight.numel() == 0:
        raise PatchError("it has no paths")
    return Linear(LinearSpec(str(irreps_in), str(irreps_out), tuple(paths), attributes)).to(module.weight.device)
