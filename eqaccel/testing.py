"""Tools to test tensor products with: random operands, a float64 reference, and the error bound that belongs to it.

Public, so that other projects can test against the same reference. The reference follows the definition of `Path` with
plain torch operations, and is differentiable any number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from eqaccel.families.tensor_product import Mixing, Pairs, Path, TensorProductSpec

ERROR_CONSTANT = 8.0
"""C in |result - reference| <= C * eps(dtype) * scale, where scale is the same sum over absolute values.

Each term is a product of up to five factors, half an eps of rounding each, and a sum of n terms adds about sqrt(n)
roundings of partial sums that are much smaller than scale: 1 to 3 eps are seen, and 8 is the limit.
"""


@dataclass(frozen=True)
class Operands:
    """Operands of a tensor product and the edges that it runs on.

    Attributes:
        x: (num_senders, x_dim).
        y: (num_edges, y_dim).
        w: (num_edges, weight_numel), or (weight_numel,) if shared.
        edge_index: (2, num_edges), senders in row 0 and receivers in row 1; None for a batch.
        num_receivers: Rows of the output.
    """

    x: Tensor
    y: Tensor
    w: Tensor
    edge_index: Tensor | None
    num_receivers: int


def random_operands(
    spec: TensorProductSpec,
    num_receivers: int,
    num_edges: int,
    *,
    num_senders: int | None = None,
    batch: bool = False,
    shared: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Operands:
    """Signed random operands on a random graph whose edges all differ if there are enough pairs of nodes.

    Args:
        spec: The tensor product.
        num_receivers: Rows of the output.
        num_edges: Number of edges; num_receivers for a batch.
        num_senders: Rows of x, default num_receivers.
        batch: Whether to leave the graph out.
        shared: Whether all edges share one row of weights.
        seed: Of the random numbers, which do not depend on dtype or device.
        dtype: float32 or float64.
        device: Where to put them.
    """
    generator = torch.Generator().manual_seed(seed)
    senders = num_receivers if num_senders is None else num_senders

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    pairs = num_receivers * senders
    if 0 < num_edges <= pairs:
        chosen = torch.randperm(pairs, generator=generator)[:num_edges]
    else:
        chosen = torch.randint(max(pairs, 1), (num_edges,), generator=generator)
    edge_index = torch.stack([chosen % max(senders, 1), chosen // max(senders, 1)]).to(device)
    return Operands(
        x=normal(senders, spec.x_dim),
        y=normal(num_edges, spec.y_dim),
        w=normal(*(() if shared else (num_edges,)), spec.weight_numel),
        edge_index=None if batch else edge_index,
        num_receivers=num_receivers,
    )


def reference(
    spec: TensorProductSpec,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    edge_index: Tensor | None = None,
    num_receivers: int | None = None,
    *,
    layout: str = "mul_ir",
    absolute: bool = False,
) -> Tensor:
    """The tensor product, or its convolution, path by path.

    Args:
        spec: The tensor product.
        x: (num_senders, x_dim), any floating dtype, best float64.
        y: (num_edges, y_dim).
        w: (num_edges, weight_numel) or (weight_numel,).
        edge_index: (2, num_edges), senders in row 0; None for a batch.
        num_receivers: Rows of the output, default those of x.
        layout: "mul_ir" or "ir_mul".
        absolute: Take absolute values of the coupling tensors. Given absolute operands too, the result, and every
            derivative of it in absolute directions, is the sum of the absolute values of the terms.

    Returns:
        (num_receivers, z_dim).
    """
    rows = x if edge_index is None else x[edge_index[0]]
    weights = w.expand(len(rows), -1) if w.dim() == 1 else w
    blocks: dict[int, Tensor] = {}  # of the output, by where they begin
    sources = _cut(rows, [(path.x_offset, path.mul1 * (2 * path.l1 + 1)) for path in spec.paths])
    parts = _cut(weights, [(path.weight_offset or 0, path.weight_numel) for path in spec.paths])
    for path, block, w_path in zip(spec.paths, sources, parts, strict=True):
        coupling = torch.as_tensor(path.cg(), dtype=x.dtype, device=x.device)
        if absolute:
            coupling = coupling.abs()
        dim1, dim2, _ = coupling.shape
        ir_mul = layout == "ir_mul"
        block = block.unflatten(1, (dim1, path.mul1)).mT if ir_mul else block.unflatten(1, (path.mul1, dim1))
        attributes = y.narrow(1, path.y_offset, path.mul2 * dim2).unflatten(1, (path.mul2, dim2))
        # Attributes come first: they are few, so that what comes of them is small.
        out = _mixed(path, w_path, torch.einsum("ijk,nvj,nui->nuvk", coupling, attributes, block))
        out = (out.mT if ir_mul else out).flatten(1)
        blocks[path.z_offset] = blocks[path.z_offset] + out if path.z_offset in blocks else out
    z = _joined(blocks, x.new_zeros(len(rows), spec.z_dim))
    if edge_index is None:
        return z
    return z.new_zeros(len(x) if num_receivers is None else num_receivers, spec.z_dim).index_add(0, edge_index[1], z)


def _joined(blocks: Mapping[int, Tensor], z: Tensor) -> Tensor:
    """Blocks of columns by their offsets, with the columns of `z` where there is none."""
    parts, end = [], 0
    for offset, block in sorted(blocks.items()):
        parts += [z[:, end:offset], block]
        end = offset + block.shape[1]
    return torch.cat([*parts, z[:, end:]], 1)


def _cut(columns: Tensor, pieces: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Columns by where they begin and how many they are, cut out at once where they do not overlap.

    The derivative of one slice is a matrix of zeros with a slice in it, as large as all of them.
    """
    ends = sorted({0, columns.shape[1], *(end for start, width in pieces for end in (start, start + width))})
    known = dict(zip(pairwise(ends), columns.split([b - a for a, b in pairwise(ends)], 1), strict=True))
    return [
        known[start, start + width] if (start, start + width) in known else columns.narrow(1, start, width)
        for start, width in pieces
    ]


def _mixed(path: Path, weights: Tensor, pairs: Tensor) -> Tensor:
    """Pairs of channels, (rows, mul1, mul2, 2l+1), weighted and added up to channels, (rows, mul3, 2l+1)."""
    mode = path.mode
    if mode.pairs is Pairs.EQUAL:
        pairs = pairs.diagonal(dim1=1, dim2=2).mT
    elif mode.pairs is Pairs.ORDERED:
        u, v = torch.triu_indices(path.mul1, path.mul1, 1, device=pairs.device)
        pairs = pairs[:, u, v]
    if path.weight_offset is not None:
        w = weights.unflatten(1, path.weight_shape)
        if mode.mixing is Mixing.DENSE:
            return torch.einsum("npw,npk->nwk", w.flatten(1, -2), pairs.flatten(1, -2))
        pairs = pairs * w.unsqueeze(-1)
    if mode.mixing is Mixing.DENSE:
        return pairs.flatten(1, -2).sum(1, keepdim=True)
    if mode.mixing is Mixing.OWN:
        return pairs.flatten(1, -2)
    return pairs.sum(2 if mode.mixing is Mixing.OVER_V else 1)


def derivatives(
    function: Callable[..., Tensor], operands: Sequence[Tensor], directions: Iterable[Sequence[Tensor]]
) -> list[Tensor]:
    """A function of operands, and its derivatives, one order for each entry of `directions`.

    Each order differentiates the inner product of its directions with the results of the order before, with respect to
    the operands and to all earlier directions, as a training step or a Hessian would.

    Args:
        function: Maps the operands to one tensor.
        operands: Tensors to differentiate by.
        directions: For each order, tensors shaped like the results before it: (z,), then (x, y, w), ...

    Returns:
        All results, flat: z; gx, gy, gw; then ggz, gx, gy, gw; then ga, gb, gc, ggz, gx, gy, gw; ...
    """
    variables = [tensor.detach().clone().requires_grad_() for tensor in operands]
    results = [function(*variables)]
    every = list(results)
    inputs = list(variables)
    orders = list(directions)
    for number, order in enumerate(orders, 1):
        tangents = [tensor.detach().clone().requires_grad_() for tensor in order]
        inner: Any = sum((r * t).sum() for r, t in zip(results, tangents, strict=True))
        # The last order runs as in a training step: operators are not told to be differentiated again.
        recorded = number < len(orders)
        results = list(torch.autograd.grad(inner, inputs, create_graph=recorded, materialize_grads=True))
        inputs = [*tangents, *inputs]
        every += results
    return [tensor.detach() for tensor in every]


def assert_close(results: Sequence[Tensor], references: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
    """Asserts |result - reference| <= ERROR_CONSTANT * eps * scale for every element.

    Args:
        results: What to test; its dtype sets eps.
        references: float64, any device.
        scales: The sums of absolute values that belong to the references.

    Raises:
        AssertionError: Naming the worst element.
    """
    for number, (result, expected, scale) in enumerate(zip(results, references, scales, strict=True)):
        assert result.shape == expected.shape, f"result {number}: shape {result.shape}, expected {expected.shape}"
        bound = ERROR_CONSTANT * torch.finfo(result.dtype).eps * scale.to(expected.device)
        error = (result.detach().to(expected) - expected).abs()
        if not bool((error <= bound).all()):  # also catches NaN
            excess = (error / bound).nan_to_num(nan=torch.inf)
            worst = int(excess.argmax())
            raise AssertionError(
                f"result {number}, element {worst}: off by {float(error.flatten()[worst]):.3g}, which is "
                f"{float(excess.max()):.3g} times the bound"
            )


def assert_product(module: nn.Module, operands: Operands, order: int = 2, seed: int = 1) -> None:
    """Asserts that a module agrees with the reference in its output and all derivatives up to an order.

    Args:
        module: A `TensorProduct` or `TensorProductConv`; its spec and layout define what is right.
        operands: What to call it with; their dtype sets the bound.
        order: Number of derivatives to test, 0 to 3.
        seed: Of the random directions to differentiate in.

    Raises:
        AssertionError: As for `assert_close`.
    """
    product_module: Any = module
    spec, layout = product_module.spec, "mul_ir" if module.mul_ir else "ir_mul"
    inputs = (operands.x, operands.y, operands.w)
    generator = torch.Generator().manual_seed(seed)

    def random_like(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in tensors]

    def product(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        if operands.edge_index is None:
            return module(x, y, w)
        return module(x, y, w, operands.edge_index, operands.num_receivers)

    z = operands.x.new_empty(operands.num_receivers, spec.z_dim)
    directions = [random_like((z,)), random_like(inputs), random_like((z, *inputs))][:order]

    def exact(absolute: bool) -> list[Tensor]:
        def prepare(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [t.double().abs() if absolute else t.double() for t in tensors]

        def define(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            edges, rows = operands.edge_index, operands.num_receivers
            return reference(spec, x, y, w, edges, rows, layout=layout, absolute=absolute)

        return derivatives(define, prepare(inputs), [prepare(order) for order in directions])

    assert_close(derivatives(product, inputs, directions), exact(absolute=False), exact(absolute=True))
