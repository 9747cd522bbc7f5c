"""The implementations that are compared: eqaccel, e3nn, cuEquivariance and OpenEquivariance, behind one signature.

Each is used as MACE uses it, and is given its operands in its own layout and order, so no conversion is timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from graphs import EdgeList
from torch import Tensor

import eqaccel
from eqaccel import Irreps, TensorProductConv, TensorProductSpec
from eqaccel.testing import derivatives, reference

Convolution = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """One implementation of one convolution.

    Attributes:
        bind: Prepares a graph and gives the convolution on it, a function of x, y and w.
        layout: Order inside the blocks of x and z: "mul_ir" or "ir_mul".
        weight_order: Its weight i is number `weight_order[i]` of e3nn's; None if they are the same.
    """

    bind: Callable[[EdgeList], Convolution]
    layout: str
    weight_order: Tensor | None = None


Factory = Callable[[TensorProductSpec, torch.dtype, str], Contender]


def feature_order(irreps: Irreps, layout: str) -> Tensor:
    """For each element of a row in the layout, its position in e3nn's layout mul_ir."""
    order = torch.arange(irreps.dim)
    if layout == "mul_ir":
        return order
    blocks = zip(irreps, irreps.slices(), strict=True)
    return torch.cat([order[part].view(block.mul, block.ir.dim).T.flatten() for block, part in blocks])


def relative_error(contender: Contender, spec: TensorProductSpec, edges: EdgeList, dtype: torch.dtype) -> float:
    """The largest error of the output and its first and second derivatives, against float64.

    Args:
        contender: What to check.
        spec: What it should compute.
        edges: A small graph, on the device to run on.
        dtype: float32 or float64.

    Returns:
        The maximum over all results of max|result - reference| / max|reference|.
    """
    generator = torch.Generator().manual_seed(0)
    device = edges.edge_index.device

    def normal(*shapes: tuple[int, int]) -> list[Tensor]:
        return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]

    shapes = [(edges.num_nodes, spec.x_dim), (edges.num_edges, spec.y_dim), (edges.num_edges, spec.weight_numel)]
    operands, directions = normal(*shapes), [normal((edges.num_nodes, spec.z_dim)), normal(*shapes)]
    on_x, on_z = (feature_order(irreps, contender.layout).to(device) for irreps in (spec.irreps_in1, spec.irreps_out))
    on_w = torch.arange(spec.weight_numel) if contender.weight_order is None else contender.weight_order
    convolve = contender.bind(edges)

    def in_e3nn_order(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return convolve(x[:, on_x].contiguous(), y, w[:, on_w.to(device)].contiguous())[:, on_z.argsort()]

    def move(tensors: list[Tensor], *where: Any) -> list[Tensor]:
        return [tensor.to(*where) for tensor in tensors]

    exact = partial(reference, spec, edge_index=edges.edge_index.cpu(), num_receivers=edges.num_nodes)
    expected = derivatives(exact, move(operands, torch.float64), [move(d, torch.float64) for d in directions])
    results = derivatives(in_e3nn_order, move(operands, device), [move(d, device) for d in directions])
    pairs = zip(move(results, "cpu", torch.float64), expected, strict=True)
    return max(float((result - exact).abs().max() / exact.abs().max()) for result, exact in pairs)


def _eqaccel(
    spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str, deterministic: bool = True
) -> Contender:
    conv = TensorProductConv(spec, deterministic=deterministic, layout=layout).to(device)

    def bind(edges: EdgeList) -> Convolution:
        graph = eqaccel.Graph(edges.receiver, edges.sender, edges.num_nodes)
        return lambda x, y, w: conv.convolve(x, y, w, graph)

    return Contender(bind, layout)


def _e3nn(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    # e3nn 0.4 loads its constants with torch.load, which under a recent torch refuses slices.
    torch.serialization.add_safe_globals([slice])
    from e3nn import o3

    with default_dtype(dtype):
        irreps = map(str, (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
        product = o3.TensorProduct(*irreps, _instructions(spec), shared_weights=False, internal_weights=False)
    product = product.to(device)

    def bind(edges: EdgeList) -> Convolution:
        def convolve(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            messages = product(x[edges.sender], y, w)
            return messages.new_zeros(edges.num_nodes, spec.z_dim).index_add(0, edges.receiver, messages)

        return convolve

    return Contender(bind, "mul_ir")


def _cuequivariance(spec: TensorProductSpec, dtype: torch.dtype, device: str) -> Contender:
    import cuequivariance as cue
    import cuequivariance_torch as cuet

    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")

    group = _e3nn_group(cue)
    irreps = (cue.Irreps(group, str(i)) for i in (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
    product = cue.descriptors.channelwise_tensor_product(*irreps)
    polynomial = product.flatten_coefficient_modes().squeeze_modes().polynomial
    module = cuet.SegmentedPolynomial(polynomial, math_dtype=dtype, method="uniform_1d").to(device)
    if module.method != "uniform_1d":  # it only warns, and would be timed as something that it is not
        raise NotImplementedError(f"no fused kernel: it falls back to {module.method}")

    def bind(edges: EdgeList) -> Convolution:
        rows = torch.empty(edges.num_nodes, 1, dtype=dtype, device=device)
        return lambda x, y, w: module([w, x, y], {1: edges.sender}, {0: rows}, {0: edges.receiver})[0]

    return Contender(bind, "ir_mul")


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


def _openequivariance(
    spec: TensorProductSpec, dtype: torch.dtype, device: str, *, layout: str, deterministic: bool
) -> Contender:
    import openequivariance as oeq

    if device == "cpu":
        raise NotImplementedError("no kernels for the CPU")
    scalar = oeq.torch_to_oeq_dtype(dtype)
    irreps = map(str, (spec.irreps_in1, spec.irreps_in2, spec.irreps_out))
    options = {"shared_weights": False, "irrep_dtype": scalar, "weight_dtype": scalar, "layout": layout}
    problem = oeq.TPProblem(*irreps, _instructions(spec), **options)
    conv = oeq.TensorProductConv(problem, deterministic=deterministic)
    numbers = torch.arange(spec.weight_numel, dtype=dtype, device=device)[None]

    def bind(edges: EdgeList) -> Convolution:
        receiver, sender = edges.receiver.contiguous(), edges.sender.contiguous()
        transpose = torch.argsort(sender * edges.num_nodes + receiver) if deterministic else None
        return lambda x, y, w: conv(x, y, w, receiver, sender, transpose)

    return Contender(bind, layout, conv.reorder_weights_from_e3nn(numbers)[0].long())


CONTENDERS: dict[str, dict[str, Factory]] = {
    "eqaccel": {
        "eqaccel (ir_mul)": partial(_eqaccel, layout="ir_mul"),
        "eqaccel (mul_ir)": partial(_eqaccel, layout="mul_ir"),
    },
    "eqaccel-atomic": {
        "eqaccel atomic (ir_mul)": partial(_eqaccel, layout="ir_mul", deterministic=False),
    },
    "e3nn": {"e3nn": _e3nn},
    "cue": {"cuEquivariance": _cuequivariance},
    "oeq": {
        f"OpenEquivariance {mode} ({layout})": partial(_openequivariance, layout=layout, deterministic=deterministic)
        for mode, deterministic in (("atomic", False), ("deterministic", True))
        for layout in ("mul_ir", "ir_mul")
    },
}
"""What each word of the command line stands for."""


def _instructions(spec: TensorProductSpec) -> list[tuple[int, int, int, str, bool]]:
    return [(path.in1, path.in2, path.out, "uvu", True) for path in spec.paths]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype, in which MACE and e3nn build their constants."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
