"""The implementations that are compared: eqaccel, e3nn, cuEquivariance and OpenEquivariance, behind one signature.

Each is used as MACE uses it, and is given its operands in its own layout and order, so no conversion is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import eqaccel
from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec, WignerConvention
from eqaccel.benchmarks.contender import Contender, Factory, Product, instructions
from eqaccel.benchmarks.graphs import EdgeList
from eqaccel.patches.torch_state import default_dtype


def _eqaccel(
    spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str, deterministic: bool = True
) -> Contender:
    conv = TensorProductConv(spec, deterministic=deterministic, layout=layout).to(device)

    def bind(edges: EdgeList) -> Product:
        graph = eqaccel.Graph(edges.receiver, edges.sender, edges.num_nodes)
        return lambda x, y, w: conv.convolve(x, y, w, graph)

    return Contender(bind, layout)


def _eqaccel_batch(spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str) -> Contender:
    product = TensorProduct(spec, layout=layout).to(device)
    return Contender(lambda _: product, layout)


def o3_of_e3nn() -> Any:
    """The module `e3nn.o3`.

    Raises:
        ImportError: If it is not installed.
    """
    # e3nn 0.4 loads its constants with torch.load, which under a recent torch refuses slices.
    torch.serialization.add_safe_globals([slice])
    from e3nn import o3

    return o3


def _e3nn_product(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> torch.nn.Module:
    o3 = o3_of_e3nn()
    with default_dtype(dtype):
        irreps = map(str, (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
        product = o3.TensorProduct(*irreps, instructions(spec), shared_weights=False, internal_weights=False)
    return product.to(device)


def _e3nn(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    return Contender(_scattered(_e3nn_product(spec, dtype, device)), "mul_ir")


def _e3nn_batch(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    product = _e3nn_product(spec, dtype, device)
    return Contender(lambda _: product, "mul_ir")


def _scattered(product: Product) -> Any:
    """A convolution without fusion: gather, product, and sum over the edges of each receiver."""

    def bind(edges: EdgeList) -> Product:
        def convolve(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            messages = product(x[edges.sender], y, w)
            return messages.new_zeros(edges.num_nodes, messages.shape[1]).index_add(0, edges.receiver, messages)

        return convolve

    return bind


def _cuequivariance_module(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> torch.nn.Module:
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    if not all(path.is_channelwise for path in spec.paths):
        raise NotImplementedError("no fused kernel for this connection mode")

    group = _e3nn_group(cue)
    irreps = (cue.Irreps(group, str(i)) for i in (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
    product = cue.descriptors.channelwise_tensor_product(*irreps)
    polynomial = product.flatten_coefficient_modes().squeeze_modes().polynomial
    module = cuet.SegmentedPolynomial(polynomial, math_dtype=dtype, method="uniform_1d").to(device)
    if module.method != "uniform_1d":  # it only warns, and would be timed as something that it is not
        raise NotImplementedError(f"no fused kernel: it falls back to {module.method}")
    return module


def _cuequivariance(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    module = _cuequivariance_module(spec, dtype, device)

    def bind(edges: EdgeList) -> Product:
        rows = torch.empty(edges.num_nodes, 1, dtype=dtype, device=device)
        return lambda x, y, w: module([w, x, y], {1: edges.sender}, {0: rows}, {0: edges.receiver})[0]

    return Contender(bind, "ir_mul")


def _cuequivariance_scatter(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    module = _cuequivariance_module(spec, dtype, device)
    return Contender(_scattered(lambda x, y, w: module([w, x, y])[0]), "ir_mul")


def _cuequivariance_batch(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    module = _cuequivariance_module(spec, dtype, device)
    return Contender(lambda _: lambda x, y, w: module([w, x, y])[0], "ir_mul")


def _e3nn_group(cue: Any) -> type:
    """O(3) with e3nn's basis, signs and order of irreps, as `O3_e3nn` in `mace.tools.cg`."""

    class O3(cue.O3):
        def __mul__(self, other: O3) -> list[O3]:
            return [O3(l=ir.l, p=ir.p) for ir in cue.O3.__mul__(self, other)]

        def __lt__(self, other: O3) -> bool:
            return (self.l, self.p) < (other.l, other.p)

        @classmethod
        def iterator(cls) -> Iterator[O3]:
            return (O3(l=ir.l, p=ir.p) for ir in cue.O3.iterator())

        @classmethod
        def clebsch_gordan(cls, first: O3, second: O3, third: O3) -> Any:
            return eqaccel.wigner_3j(first.l, second.l, third.l)[None] * third.dim**0.5

    return O3


def _openequivariance_problem(spec: TensorProductSpec, dtype: torch.dtype, device: str, layout: str) -> Any:
    import openequivariance as oeq

    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    scalar = oeq.torch_to_oeq_dtype(dtype)
    irreps = map(str, (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
    options = {"shared_weights": False, "irrep_dtype": scalar, "weight_dtype": scalar, "layout": layout}
    return oeq.TPProblem(*irreps, instructions(spec), **options)


def _openequivariance(
    spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str, deterministic: bool
) -> Contender:
    import openequivariance as oeq

    problem = _openequivariance_problem(spec, dtype, device, layout)
    conv = oeq.TensorProductConv(problem, deterministic=deterministic)

    def bind(edges: EdgeList) -> Product:
        receiver, sender = edges.receiver.contiguous(), edges.sender.contiguous()
        if not deterministic:
            return lambda x, y, w: conv(x, y, w, receiver, sender)
        transpose = torch.argsort(sender * edges.num_nodes + receiver)
        if not torch.equal(sender[transpose], receiver):
            raise NotImplementedError("its deterministic mode needs a symmetric graph")
        return lambda x, y, w: conv(x, y, w, receiver, sender, transpose)

    return _openequivariance_contender(bind, layout, conv, spec, dtype, device)


def _openequivariance_product(spec: TensorProductSpec, dtype: torch.dtype, device: str, layout: str) -> Any:
    import openequivariance as oeq

    return oeq.TensorProduct(_openequivariance_problem(spec, dtype, device, layout))


def _openequivariance_scatter(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    product = _openequivariance_product(spec, dtype, device, "mul_ir")
    return _openequivariance_contender(_scattered(product), "mul_ir", product, spec, dtype, device)


def _openequivariance_batch(spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str) -> Contender:
    product = _openequivariance_product(spec, dtype, device, layout)
    return _openequivariance_contender(lambda _: product, layout, product, spec, dtype, device)


def _openequivariance_contender(
    bind: Any, layout: str, product: Any, spec: TensorProductSpec, dtype: torch.dtype, device: str
) -> Contender:
    """With weights in an order of its own, and the signs of e3nn since 0.5, whichever is installed."""
    numbers = torch.arange(spec.weight_numel, dtype=dtype, device=device)[None]
    order = product.reorder_weights_from_e3nn(numbers)[0].long()
    return Contender(bind, layout, order, WignerConvention.E3NN_0_5)


def _openequivariance_variants(layouts: tuple[str, ...]) -> dict[str, Factory]:
    return {
        f"OpenEquivariance {mode} ({layout})": partial(_openequivariance, layout=layout, deterministic=deterministic)
        for mode, deterministic in (("atomic", False), ("deterministic", True))
        for layout in layouts
    }


CONVOLUTIONS: dict[str, dict[str, Factory]] = {
    "eqaccel": {
        "eqaccel (ir_mul)": partial(_eqaccel, layout="ir_mul"),
        "eqaccel (mul_ir)": partial(_eqaccel, layout="mul_ir"),
    },
    "eqaccel-atomic": {
        "eqaccel atomic (ir_mul)": partial(_eqaccel, layout="ir_mul", deterministic=False),
    },
    "e3nn": {"e3nn": _e3nn},
    "cue": {"cuEquivariance": _cuequivariance},
    "cue-scatter": {"cuEquivariance scatter": _cuequivariance_scatter},
    "oeq": _openequivariance_variants(("mul_ir", "ir_mul")),
    "oeq-ir_mul": _openequivariance_variants(("ir_mul",)),
    "oeq-scatter": {"OpenEquivariance scatter": _openequivariance_scatter},
}
"""What each word of the command line stands for, where convolutions are timed."""

PRODUCTS: dict[str, dict[str, Factory]] = {
    "eqaccel": {
        "eqaccel (ir_mul)": partial(_eqaccel_batch, layout="ir_mul"),
        "eqaccel (mul_ir)": partial(_eqaccel_batch, layout="mul_ir"),
    },
    "e3nn": {"e3nn": _e3nn_batch},
    "cue": {"cuEquivariance": _cuequivariance_batch},
    "oeq": {
        f"OpenEquivariance ({layout})": partial(_openequivariance_batch, layout=layout)
        for layout in ("mul_ir", "ir_mul")
    },
}
"""The same, where batches are timed."""
