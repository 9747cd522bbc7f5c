"""Kernels one by one, in the dtype of a model: what is wrong with one is not lost in the rounding of the whole network.

The products, convolutions, polynomials, radial functions, activations and linear maps of a patched model are called
with random operands, and so are their first and second derivatives. Each entry of each result may differ from that in
float64 by `ERROR_CONSTANT` units of rounding of the sum of the absolute values of its terms; twice as many where
functions have roundings of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eqaccel.codegen import COMMON, OUTPUTS, Direction
from eqaccel.families.linear import LinearSpec
from eqaccel.families.polynomial import MAX_POWER, PolynomialSpec
from eqaccel.ops import (
    Gate,
    Linear,
    Polynomial,
    RadialBasis,
    RadialLayer,
    RadialNetwork,
    ScaledSilu,
    TensorProduct,
    TensorProductConv,
)
from eqaccel.testing import ERROR_CONSTANT, derivatives, random_operands, reference

_NODES, _EDGES = 12, 768
_ROWS = 1100  # of a polynomial: more than a block of threads takes, and no multiple of a vector
_PRODUCT_ROWS = 300  # of a product: more than a block takes
_LINEAR_ROWS = 140  # of a linear map: more than a block takes

_Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Excess:
    """An entry of a result that differs by more than rounding.

    Attributes:
        what: Which result of which module.
        error: The difference.
        bound: What rounding may come to.
        scale: The sum of the absolute values of its terms.
    """

    what: str
    error: float
    bound: float
    scale: float


def excesses(model: nn.Module, wide: nn.Module, dtype: torch.dtype) -> Iterator[Excess]:
    """Compares the kernels of a patched model with those of its copy in float64; each of several equal ones once.

    Args:
        model: The patched model.
        wide: The copy, which has been verified, on any device.
        dtype: What the model computes in.

    Yields:
        For each result of a kernel that is wrong, its worst entry.
    """
    twins, known = dict(wide.named_modules()), set()
    kinds: Any = tuple(_CASES)
    for path, module in model.named_modules():
        if not isinstance(module, kinds):
            continue
        kind = (type(module), module.key, getattr(module, "deterministic", True))
        if kind not in known:
            known.add(kind)
            yield from _excesses(path, module, twins[path], dtype)


def _excesses(path: str, module: Any, twin: Any, dtype: torch.dtype) -> Iterator[Excess]:
    case = next(make for kind, make in _CASES.items() if isinstance(module, kind))(module, dtype)
    generator = torch.Generator().manual_seed(1)
    z = torch.empty(case.num_rows, case.num_columns)
    directions = [
        [torch.randn(like.shape, generator=generator, dtype=dtype) for like in order] for order in ((z,), case.operands)
    ]

    def results(function: _Function, prepare: Callable[[Tensor], Tensor]) -> list[Tensor]:
        operands, *orders = ([prepare(tensor) for tensor in some] for some in (case.operands, *directions))
        return [result.to("cpu", torch.float64) for result in derivatives(function, operands, orders)]

    device, wide = module.payload.device, twin.payload.device
    found = results(lambda *operands: module(*operands, *case.rest(operands[0])), lambda t: t.to(device))
    right = results(lambda *operands: twin(*operands, *case.rest(operands[0])), lambda t: t.to(wide, torch.float64))
    if case.absolute is None:
        scales = _reference_scales(module, case, directions)
    else:
        scales = results(case.absolute, lambda t: t.abs().to(device))
    names = ["z", *(f"g{name}" for name in case.names), "second gz", *(f"second g{name}" for name in case.names)]
    for name, value, expected, scale in zip(names, found, right, scales, strict=True):
        bound = ERROR_CONSTANT * torch.finfo(dtype).eps * scale
        error = (value - expected).abs()
        wrong = ~(error <= bound)  # written so that NaN is wrong
        if bool(wrong.any()):
            worst = int(torch.where(wrong, error / bound, 0.0).nan_to_num(nan=torch.inf).argmax())
            entry = (float(tensor.flatten()[worst]) for tensor in (error, bound, scale))
            yield Excess(f"{name} of the kernels of {path}", *entry)


@dataclass(frozen=True)
class _Case:
    """How to call a module.

    Attributes:
        names: Of the operands that it is differentiated by.
        operands: These, on the CPU.
        num_rows: Rows of the result.
        num_columns: Columns of the result.
        rest: The arguments behind the operands, for one of these.
        absolute: The sum of the absolute values of all terms, of operands that are not negative; None for functions of
            which the reference of their family knows it.
    """

    names: str
    operands: tuple[Tensor, ...]
    num_rows: int
    num_columns: int
    rest: Callable[[Tensor], tuple[Any, ...]]
    absolute: _Function | None


def _reference_scales(module: Any, case: _Case, directions: list[list[Tensor]]) -> list[Tensor]:
    """The sums of absolute values of all results, in their order, by the reference executor of the module's family."""
    (gz,), tangents = directions
    operands = {name: tensor.double().numpy() for name, tensor in zip(case.names, case.operands, strict=True)}
    along = {name: tensor.double().numpy() for name, tensor in zip("ac", tangents, strict=False)}
    if "c" in along:
        along["c"] = np.broadcast_to(along["c"], (case.num_rows, len(along["c"])))
    scales = []
    for direction in COMMON:
        given = operands | ({} if direction is Direction.FORWARD else {"gz": gz.double().numpy()})
        given |= along if direction is Direction.DOUBLE_BACKWARD else {}
        found = module.family.reference(module.spec, direction, absolute=True, **given)
        sums = [(name, getattr(found, name)) for name in OUTPUTS[direction]]
        # The gradient with respect to what all rows share is a sum over them.
        scales += [total.sum(0) if name == "gw" else total for name, total in sums if total is not None]
    return [2 * torch.from_numpy(np.ascontiguousarray(scale)) for scale in scales]


def _radial(basis: RadialBasis, dtype: torch.dtype) -> _Case:
    """Lengths of edges up to beyond the cutoff, and frequencies like those of a basis."""
    generator = torch.Generator().manual_seed(0)
    lengths = basis.r_max * (0.05 + 1.05 * torch.rand(_ROWS, 1, generator=generator, dtype=torch.float64))
    w = torch.arange(1, basis.spec.num_basis + 1) * torch.pi / (basis.r_max * basis.unit)
    return _Case("xw", (lengths.to(dtype), w.to(dtype)), _ROWS, basis.spec.num_outputs, lambda _: (), None)


def _activation(_: ScaledSilu, dtype: torch.dtype) -> _Case:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(_ROWS, 5, generator=generator, dtype=torch.float64)
    return _Case("x", (x.to(dtype),), _ROWS, 5, lambda _: (), None)


def _gate(gate: Gate, dtype: torch.dtype) -> _Case:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(_ROWS, gate.spec.num_inputs, generator=generator, dtype=torch.float64)
    return _Case("x", (x.to(dtype),), _ROWS, gate.spec.num_outputs, lambda _: (), None)


def _radial_layer(layer: RadialLayer, dtype: torch.dtype) -> _Case:
    spec = layer.spec
    generator = torch.Generator().manual_seed(0)
    shapes = ((_ROWS, spec.num_inputs), (spec.num_inputs, spec.num_outputs))
    x, w = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)

    def absolute(x: Tensor, w: Tensor) -> Tensor:
        # Not below the sums of absolute values of SiLU, of its derivatives, and of what they are off by with their
        # argument.
        y = abs(spec.scale) * (x @ w)
        return abs(spec.factor) * (y + y**2 + y**3 / 6)

    return _Case("xw", (x, w), _ROWS, spec.num_outputs, lambda _: (), absolute)


def _radial_network(network: RadialNetwork, dtype: torch.dtype) -> _Case:
    spec = network.spec
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, spec.widths[0], generator=generator, dtype=torch.float64)
    w = torch.randn(spec.num_weights, generator=generator, dtype=torch.float64)
    # So small that what bounds a layer stays near its features.
    for part, (inputs, _), scale in zip(w.split(spec.sizes), spec.shapes, spec.scales, strict=True):
        part *= 0.5 / (inputs * max(abs(scale), 1e-3))

    def absolute(x: Tensor, w: Tensor) -> Tensor:
        # As for a layer, of which there are several.
        for part, shape, factor, scale in zip(w.split(spec.sizes), spec.shapes, spec.factors, spec.scales, strict=True):
            y = abs(scale) * (x @ part.view(shape))
            x = abs(factor) * (y + y**2 + y**3 / 6)
        return x

    return _Case("xw", (x.to(dtype), w.to(dtype)), _ROWS, spec.widths[-1], lambda _: (), absolute)


def _convolution(conv: TensorProductConv, dtype: torch.dtype) -> _Case:
    """A convolution on a graph in which one node receives most edges, one sends most, and some receive none."""
    operands = random_operands(conv.spec, _NODES, _EDGES, dtype=dtype)
    assert operands.edge_index is not None
    senders, receivers = operands.edge_index
    receivers = receivers % (_NODES // 2)
    receivers[: 3 * _EDGES // 4] = 0
    senders[_EDGES // 4 :] = 1
    edges = torch.stack([senders, receivers])
    layout = "mul_ir" if conv.mul_ir else "ir_mul"

    def absolute(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return reference(conv.spec, x, y, w, edges.to(x.device), _NODES, layout=layout, absolute=True)

    # Weights that are exact as kernels read them.
    w = operands.w.bfloat16().to(dtype) if conv.spec.bfloat16_weights else operands.w
    inputs = (operands.x, operands.y, w)
    return _Case("xyw", inputs, _NODES, conv.spec.z_dim, lambda like: (edges.to(like.device), _NODES), absolute)


def _product(product: TensorProduct, dtype: torch.dtype) -> _Case:
    spec = product.spec
    operands = random_operands(spec, _PRODUCT_ROWS, _PRODUCT_ROWS, batch=True, shared=spec.shared_weights, dtype=dtype)
    layout = "mul_ir" if product.mul_ir else "ir_mul"

    def absolute(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return reference(spec, x, y, w, layout=layout, absolute=True)

    inputs = (operands.x, operands.y, operands.w)
    return _Case("xyw", inputs, _PRODUCT_ROWS, spec.z_dim, lambda _: (), absolute)


def _polynomial(polynomial: Polynomial, dtype: torch.dtype) -> _Case:
    spec = polynomial.spec
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(_ROWS, columns, generator=generator, dtype=torch.float64).to(dtype)
        for columns in (spec.num_features, spec.num_weights)
    )

    def absolute(x: Tensor, w: Tensor) -> Tensor:
        return _sum_of_terms(spec, x, w)

    return _Case("xw", (x, w), _ROWS, spec.num_outputs, lambda _: (), absolute)


def _linear(linear: Linear, dtype: torch.dtype) -> _Case:
    """A linear map of rows with one attribute each, in turn."""
    spec = linear.spec
    generator = torch.Generator().manual_seed(0)
    shapes = ((_LINEAR_ROWS, spec.irreps_in.dim), (spec.weight_numel,))
    x, w = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    one_hot = None
    if spec.num_attributes:
        one_hot = torch.eye(spec.num_attributes)[torch.arange(_LINEAR_ROWS) % spec.num_attributes]

    def rest(like: Tensor) -> tuple[Any, ...]:
        return () if one_hot is None else (one_hot.to(like),)

    def absolute(x: Tensor, w: Tensor) -> Tensor:
        return _sum_of_maps(spec, x, w, one_hot)

    return _Case("xw", (x, w), _LINEAR_ROWS, spec.irreps_out.dim, rest, absolute)


def _sum_of_maps(spec: LinearSpec, x: Tensor, w: Tensor, attributes: Tensor | None) -> Tensor:
    """A linear map with the absolute values of its coefficients."""
    outputs = [x.new_zeros(len(x), block.mul, block.ir.dim) for block in spec.irreps_out]
    shapes = [spec.weight_shape(path) for path in spec.paths]
    for path, shape, part in zip(spec.paths, shapes, w.split([math.prod(shape) for shape in shapes]), strict=True):
        source = spec.irreps_in[path.source]
        rows = x[:, spec.irreps_in.slices()[path.source]].unflatten(1, (source.mul, source.ir.dim))
        matrices = part.view(shape) * abs(path.coefficient)
        if attributes is None:
            product = torch.einsum("nuc,uzw->nwc", rows, matrices)
        else:  # one attribute each
            product = torch.einsum("nuc,unw->nwc", rows, matrices[:, attributes.argmax(1).to(x.device)])
        outputs[path.target] = outputs[path.target] + product
    return torch.cat([output.flatten(1) for output in outputs], 1)


def _sum_of_terms(spec: PolynomialSpec, x: Tensor, w: Tensor) -> Tensor:
    """A polynomial with the absolute values of its coefficients."""
    factors = torch.nn.functional.pad(x, (0, 1), value=1.0)  # the last column stands for features that are not there
    product = w[:, [term.weight for term in spec.terms]] * x.new_tensor([abs(term.coefficient) for term in spec.terms])
    for number in range(MAX_POWER):
        columns = [(*term.features, *[spec.num_features] * MAX_POWER)[number] for term in spec.terms]
        product = product * factors[:, columns]
    outputs = torch.tensor([term.output for term in spec.terms], device=x.device)
    return x.new_zeros(len(x), spec.num_outputs).index_add(1, outputs, product)


_CASES: Mapping[type[nn.Module], Callable[[Any, torch.dtype], _Case]] = MappingProxyType(
    {
        TensorProductConv: _convolution,
        TensorProduct: _product,
        Polynomial: _polynomial,
        RadialBasis: _radial,
        RadialLayer: _radial_layer,
        RadialNetwork: _radial_network,
        ScaledSilu: _activation,
        Gate: _gate,
        Linear: _linear,
    }
)
"""What kinds of kernels are called with."""
