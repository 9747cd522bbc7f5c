"""Products of every mode on torch's surfaces: the operator is that of all products, and works in the same programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from eqaccel import Graph, TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.testing import Operands, assert_product, random_operands

ARGUMENTS = (
    "3x0e+2x1o",
    "2x1o+1x0e",
    "4x1o+3x0e+1x0e",
    [(0, 0, 0, "uvw"), (1, 1, 0, "uvw"), (0, 1, 1, "uvuv"), (1, 0, 2, "uvu<v"), (1, 0, 2, "uuw", False)],
)
SPEC = TensorProductSpec(*ARGUMENTS)


class Energy(nn.Module):
    """Two layers of numbers, so that all gradients differ."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = TensorProductConv(SPEC)

    def forward(self, x: Tensor, y: Tensor, w: Tensor, edge_index: Tensor) -> Tensor:
        """The energy."""
        return self.conv(x, y, w, edge_index).sin().sum()


def _operands(device: torch.device, seed: int = 0, edges: int = 9) -> Operands:
    return random_operands(SPEC, 5, edges, seed=seed, device=device)


def _gradients(function: nn.Module, o: Operands) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in (o.x, o.y, o.w)]
    first = torch.autograd.grad(function(*inputs, o.edge_index), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]


def test_opcheck(device: torch.device) -> None:
    o = _operands(device)
    module = TensorProductConv(SPEC).to(device)
    head, tail = (
        (module.payload, module.key),
        (Graph(o.edge_index[1], o.edge_index[0], 5).index, 5, SPEC.z_dim, True, True),
    )
    operands = [
        torch.randn_like(t).requires_grad_() for t in (o.x.new_empty(5, SPEC.z_dim), *(3 * (o.x, o.y, o.w))[:6])
    ]
    ops = torch.ops.eqaccel
    torch.library.opcheck(ops.tensor_product.default, (*head, *operands[1:4], *tail))
    torch.library.opcheck(ops.tensor_product_backward.default, (*head, *operands[:4], *tail))
    torch.library.opcheck(ops.tensor_product_double_backward.default, (*head, *operands, *tail))


@pytest.mark.parametrize("kind", ["script", "compile"])
def test_programs(kind: str, device: torch.device, tmp_path: Path) -> None:
    module = Energy().to(device)
    if kind == "script":
        torch.jit.script(module).save(str(tmp_path / "energy.pt"))
        program = torch.jit.load(str(tmp_path / "energy.pt"), map_location=device)
    else:
        program = torch.compile(module, backend="aot_eager", dynamic=True)
    for seed, edges in ((0, 9), (1, 17)):
        o = _operands(device, seed, edges)
        if kind == "script":
            assert_close(_gradients(program, o), _gradients(module, o))
        else:  # compiled programs have first derivatives
            inputs = [t.clone().requires_grad_() for t in (o.x, o.y, o.w)]
            found = torch.autograd.grad(program(*inputs, o.edge_index), inputs)
            assert_close(list(found), _gradients(module, o)[:3])


def test_results_are_bitwise_reproducible(device: torch.device) -> None:
    module, o = Energy().to(device), _operands(device, edges=20)
    expected = _gradients(module, o)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, _gradients(module, o), expected))
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3)).to(device)
    shuffled = Operands(o.x, o.y[order], o.w[order], o.edge_index[:, order], o.num_receivers)
    found = _gradients(module, shuffled)
    for number, (gradient, wanted) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(gradient, wanted if number % 3 == 0 else wanted[order])


def test_a_convolution_is_a_product_between_gather_and_scatter(device: torch.device) -> None:
    o = _operands(device, edges=20)
    sender, receiver = o.edge_index
    rows = TensorProduct(SPEC).to(device)(o.x[sender], o.y, o.w)
    expected = rows.new_zeros(5, SPEC.z_dim).index_add(0, receiver, rows)
    assert_close(TensorProductConv(SPEC).to(device)(o.x, o.y, o.w, o.edge_index), expected)


def test_vmap(device: torch.device) -> None:
    product = TensorProduct(SPEC).to(device)
    x, y, w = (
        torch.randn(3, 4, dim, dtype=torch.float64, device=device)
        for dim in (SPEC.x_dim, SPEC.y_dim, SPEC.weight_numel)
    )
    found = torch.func.vmap(product)(x, y, w)
    assert_close(found, torch.stack([product(*rows) for rows in zip(x, y, w, strict=True)]))


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("scripted", [False, True])
def test_shared_weights_multiply_sums(layout: str, scripted: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Dense matrices are applied to nodes; the same as the kernel that has the weights of every edge."""
    spec = TensorProductSpec(*ARGUMENTS, shared_weights=True)
    o = random_operands(spec, 5, 12, num_senders=6, shared=True, dtype=dtype, device=device)
    for module, edges in ((TensorProductConv(spec, layout=layout), (o.edge_index, 5)), (TensorProduct(spec), ())):
        assert module.unmixed is not None
        x = o.x if edges else o.x[o.edge_index[0]]
        program = torch.jit.script(module) if scripted else module
        plain = type(module)(SPEC, layout="mul_ir" if module.mul_ir else "ir_mul")
        found, wanted = (each.to(device)(x, o.y, o.w, *edges) for each in (program, plain))
        assert_close(found, wanted)
        assert_close(program(x, o.y, o.w.expand(12, -1), *edges), wanted)
        message = r"(w: expected|argument 'w' must have) shape \(num_edges, 36\)"
        with pytest.raises((OperandError, torch.jit.Error, RuntimeError), match=message):
            program(x, o.y, o.w[1:], *edges)
    if not scripted:
        assert_product(TensorProductConv(spec, layout=layout).to(device), o)
