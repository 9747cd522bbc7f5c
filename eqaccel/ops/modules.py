"""Tensor products as modules: they work in eager mode, under TorchScript, torch.compile, torch.export and make_fx."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import TENSOR_PRODUCT, Layout, TensorProductSpec, TunedKernel, unmixed
from eqaccel.ops.graph import Graph, packed_index
from eqaccel.ops.kernel_module import KernelModule
from eqaccel.ops.library import call_operator, load_library
from eqaccel.ops.mixing import DenseMixing

load_library()


class _Product(KernelModule):
    """What both modules have in common.

    Attributes:
        batch: Whether rows are computed each for itself, without a graph.
    """

    family = TENSOR_PRODUCT
    batch: ClassVar[bool]

    def __init__(self, spec: TensorProductSpec, *, deterministic: bool, layout: Layout) -> None:
        super().__init__(spec.with_layout(layout, by_rows=self.batch))
        self.x_dim = spec.x_dim
        self.z_dim = spec.z_dim
        self.mul_ir = layout == "mul_ir"
        self.deterministic = deterministic
        # Weights that all rows share multiply what is added up already.
        product = unmixed(spec, by_rows=self.batch) if spec.shared_weights else None
        self.mixing = None if product is None else DenseMixing(spec, product, mul_ir=self.mul_ir)
        self.unmixed: _Product | None = None
        if product is not None and self.mixing is not None:
            self.unmixed = self._like(product.spec)

    def retune(self, kernels: Iterable[TunedKernel]) -> None:
        """Takes kernels of other plans, from the next call on; `warmup(tune=True)` finds out which ones.

        Args:
            kernels: What changes; a tuning of None takes a kernel back to the default. Others stay as they are.

        Raises:
            TuningError: If a processor cannot run what is asked for.
        """
        slots = {(k.target.name, k.direction.value, k.scalar_bytes): k for k in (*self.tuned, *kernels)}
        tuned = tuple(kernel for _, kernel in sorted(slots.items()) if kernel.tuning is not None)
        if tuned == self.tuned:
            return
        self.set_payload(*self.family.payload(self.spec, tuned))
        self.tuned = tuned

    def _like(self, spec: TensorProductSpec) -> _Product:
        """Another product of the same kind, in the layout (mul, 2l+1)."""
        raise NotImplementedError

    def _arguments(self, x: Tensor, y: Tensor, w: Tensor, graph: Tensor, num_receivers: int) -> tuple[Any, ...]:
        return self.payload, self.key, x, y, w, graph, num_receivers, self.z_dim, self.mul_ir, self.deterministic

    def extra_repr(self) -> str:
        """The irreps, the options and what was tuned, for print(module)."""
        layout = "mul_ir" if self.mul_ir else "ir_mul"
        tuned = "".join(f", {k.target.name} {k.direction.value}: {k.tuning}" for k in self.tuned)
        return f"{self.spec!r}, layout={layout!r}{tuned}"


class TensorProduct(_Product):
    """The tensor product of each row of x with the same row of y.

    Args:
        spec: Irreps and paths.
        layout: Order inside a block of x and z: "mul_ir" (mul, 2l+1) as in e3nn, or "ir_mul" (2l+1, mul). A block of y
            is (mul, 2l+1) in any case.
    """

    batch = True

    def __init__(self, spec: TensorProductSpec, *, layout: Layout = "mul_ir") -> None:
        super().__init__(spec, deterministic=True, layout=layout)

    def _like(self, spec: TensorProductSpec) -> TensorProduct:
        return TensorProduct(spec)

    def forward(self, x: Tensor, y: Tensor, w: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 (TorchScript)
        """Computes z = F(x, y, w), differentiable any number of times in x, y and w.

        Args:
            x: (batch, spec.x_dim) float32 or float64.
            y: (batch, spec.y_dim), same dtype and device.
            w: (batch, spec.weight_numel) path weights in path order, or (spec.weight_numel,) shared by all rows; None
                only if no path is weighted. Shared ones cost less where the spec says that they are.

        Returns:
            (batch, spec.z_dim), dtype of x.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
        """
        weights = x.new_empty([0]) if w is None else w
        if self.unmixed is not None and self.mixing is not None:
            # A CPU has a kernel for that.
            fits = not x.is_cpu and self.mixing.takes(x, y, weights) and x.size(0) == y.size(0)
            if fits and self.mixing.pays(x, y, weights):
                rows, attributes, own = self.mixing.operands(x, y, weights)
                return self.mixing(self.unmixed(rows, attributes, own), weights)
        graph = x.new_empty([0], dtype=torch.int32)
        if torch.jit.is_scripting():
            return torch.ops.eqaccel.tensor_product(
                self.payload, self.key, x, y, weights, graph, x.size(0), self.z_dim, self.mul_ir, True
            )
        elif torch.jit.is_tracing():
            product = _product_for_traces()
            return product(self.payload, self.key, x, y, weights, graph, self.z_dim, self.mul_ir)
        else:
            return call_operator(torch.ops.eqaccel.tensor_product, *self._arguments(x, y, weights, graph, x.size(0)))


@functools.cache
def _product_for_traces() -> Any:
    """The product of rows as a scripted function: a trace takes the sizes that an operator is given for constants."""

    def product(
        payload: Tensor, key: int, x: Tensor, y: Tensor, w: Tensor, graph: Tensor, z_dim: int, mul_ir: bool
    ) -> Tensor:
        return torch.ops.eqaccel.tensor_product(payload, key, x, y, w, graph, x.size(0), z_dim, mul_ir, True)

    return torch.jit.script(product)


class TensorProductConv(_Product):
    """The fused graph convolution: z[r] = sum of F(x[sender], y[edge], w[edge]) over the edges that r receives.

    Args:
        spec: Irreps and paths.
        deterministic: Add the gradient of x in a fixed order, so that results are bitwise reproducible. False uses
            atomic additions there, which need less memory. The output itself is always reproducible.
        layout: Order inside a block of x and z: "mul_ir" (mul, 2l+1) as in e3nn, or "ir_mul" (2l+1, mul). A block of y
            is (mul, 2l+1) in any case.
    """

    batch = False

    def __init__(self, spec: TensorProductSpec, *, deterministic: bool = True, layout: Layout = "mul_ir") -> None:
        super().__init__(spec, deterministic=deterministic, layout=layout)

    def _like(self, spec: TensorProductSpec) -> TensorProductConv:
        return TensorProductConv(spec, deterministic=self.deterministic)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        w: Optional[Tensor],  # noqa: UP045 (TorchScript)
        edge_index: Tensor,
        num_receivers: int = -1,
    ) -> Tensor:
        """Computes the convolution, differentiable any number of times in x, y and w.

        Args:
            x: (num_senders, spec.x_dim) float32 or float64, node features.
            y: (num_edges, spec.y_dim) edge attributes, same dtype and device.
            w: (num_edges, spec.weight_numel) path weights in path order, or (spec.weight_numel,) shared by all edges;
                None only if no path is weighted.
            edge_index: (2, num_edges) int32 or int64, senders in row 0 and receivers in row 1 as in MACE; or
                `Graph.index`, which saves sorting the edges again.
            num_receivers: Rows of the output; -1 for as many as x has.

        Returns:
            (num_receivers, spec.z_dim), dtype of x.

        Raises:
            OperandError: If an operand does not fit (in scripted or compiled programs: RuntimeError).
            CompileError: If the kernel, which is compiled when it is first needed, does not compile (in scripted or
                compiled programs, and from derivatives: RuntimeError with the same text).
            GraphError: If the edges do not fit.
        """
        if x.dim() != 2:  # before edges are held against the wrong number of senders
            raise OperandError(
                f"x: expected shape (num_senders, {self.x_dim}), got {list(x.shape)}. Flatten leading dimensions with "
                ".flatten(0, -2)."
            )
        weights = x.new_empty([0]) if w is None else w
        if self.unmixed is not None and self.mixing is not None:  # noqa: SIM102 (TorchScript leaves it out if not)
            if self.mixing.takes(x, y, weights):
                rows, attributes, own = self.mixing.operands(x, y, weights)
                return self.mixing(self.unmixed(rows, attributes, own, edge_index, num_receivers), weights)
        num_senders = x.size(0)
        receivers = num_senders if num_receivers < 0 else num_receivers
        if torch.jit.is_scripting():
            index = edge_index
            if edge_index.dim() == 2:
                index = torch.ops.eqaccel.graph(edge_index[1], edge_index[0], receivers, num_senders)
            return torch.ops.eqaccel.tensor_product(
                self.payload, self.key, x, y, weights, index, receivers, self.z_dim, self.mul_ir, self.deterministic
            )
        else:
            index = packed_index(edge_index, receivers, num_senders)
            return call_operator(torch.ops.eqaccel.tensor_product, *self._arguments(x, y, weights, index, receivers))

    @torch.jit.unused
    def convolve(self, x: Tensor, y: Tensor, w: Tensor | None, graph: Graph) -> Tensor:
        """`forward` on a `Graph`; see there."""
        return self(x, y, w, graph.index, graph.num_receivers)
