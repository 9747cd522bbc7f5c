"""Dense products of batches whose rows share their weights: one kernel on a CPU, and on a GPU for few rows.

For many, a GPU has matrices around one kernel; there scalars of either operand meet the weights before the other one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.families.tensor_product import unmixed
from eqaccel.testing import assert_product, random_operands


def connected(irreps1: str, irreps2: str, out: str, couplings: list[tuple[int, int, int]]) -> TensorProductSpec:
    """Mode uvw with weights for each coupling of blocks."""
    return TensorProductSpec(irreps1, irreps2, out, [(*blocks, "uvw") for blocks in couplings], shared_weights=True)


SPECS = {
    # Pairs of channels are left for scalar outputs alone: rows of x stay in their layout.
    "scalar pairs": connected("5x0e+4x1o", "4x0e+6x1o", "4x0e+7x1o", [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]),
    # Those of 1o and 1o have components; two paths read the same scalars, and ones of both parities stand behind x.
    "vector pairs": connected(
        "5x0e+4x1o+4x0o",
        "6x0e+5x1o",
        "4x1o+4x1e+3x0e",
        [(0, 1, 0), (1, 0, 0), (2, 1, 1), (1, 1, 1), (0, 0, 2), (0, 1, 0)],
    ),
    "no pairs": connected("8x0e", "4x2e", "4x2e", [(0, 0, 0)]),
}


class InPieces(nn.Module):
    """A product as a GPU computes it for many rows, on any device."""

    def __init__(self, whole: TensorProduct) -> None:
        super().__init__()
        self.spec, self.mul_ir = whole.spec, whole.mul_ir
        self.mixing, self.unmixed = whole.mixing, whole.unmixed

    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Operands and result are those of the whole."""
        rows, attributes, own = self.mixing.operands(x, y, w)
        return self.mixing(self.unmixed(rows, attributes, own), w)


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> TensorProductSpec:
    return SPECS[request.param]


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"])
def in_pieces(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("scalar pairs", torch.float32), ("vector pairs", torch.float64), ("no pairs", torch.float32)],
)
def test_derivatives(
    name: str, layout: str, rows: int, in_pieces: bool, device: torch.device, dtype: torch.dtype
) -> None:
    spec = SPECS[name]
    product = TensorProduct(spec, layout=layout).to(device)
    assert product.mixing is not None
    assert product.mixing.scalars
    operands = random_operands(spec, rows, rows, batch=True, shared=True, dtype=dtype, device=device)
    assert_product(InPieces(product) if in_pieces else product, operands)


@pytest.mark.parametrize("is_differentiated", [True, False])
def test_a_gpu_takes_pieces_of_many_rows(
    spec: TensorProductSpec, is_differentiated: bool, device: torch.device
) -> None:
    whole = TensorProduct(spec).to(device)
    assert whole.mixing is not None
    assert whole.mixing.few_rows == 2**24 // spec.weight_numel
    whole.mixing.few_rows, whole.mixing.many_rows = 3, 5
    of_pieces: list[int] = []
    whole.unmixed.register_forward_pre_hook(lambda _, operands: of_pieces.append(operands[0].size(0)))
    for rows in (3, 4, 5, 6):
        o = random_operands(spec, rows, rows, batch=True, shared=True, device=device)
        operands = (o.x, o.y, o.w.requires_grad_(is_differentiated))
        found = whole(*operands)
        in_pieces = device.type == "cuda" and rows > (3 if is_differentiated else 5)
        assert of_pieces == ([rows] if in_pieces else [])
        assert_close(found, InPieces(whole)(*operands))
        of_pieces.clear()
        assert whole.mixing.pays(*operands) == (rows > (3 if is_differentiated else 5))
        with torch.no_grad():
            assert whole.mixing.pays(*operands) == (rows > 5)
            with FakeTensorMode():
                assert whole.mixing.pays(*operands)


@pytest.mark.parametrize(("channels", "most_rows"), [(128, sys.maxsize), (129, 2**30 // 129**2)])
def test_rows_that_are_one_kernel_without_gradients(channels: int, most_rows: int) -> None:
    product = TensorProduct(connected(f"{channels}x0e", "0e", f"{channels}x0e", [(0, 0, 0)]))
    assert product.mixing is not None
    assert product.mixing.many_rows == most_rows


def test_programs(spec: TensorProductSpec, in_pieces: bool, device: torch.device) -> None:
    whole = TensorProduct(spec).to(device)
    o = random_operands(spec, 9, 9, batch=True, shared=True, device=device)
    expected = whole(o.x, o.y, o.w)
    assert_close(whole(o.x, o.y, o.w.expand(9, -1)), expected)  # by the kernel that knows no rule for shared weights
    product = InPieces(whole) if in_pieces else whole
    compiled = torch.compile(product, backend="aot_eager", dynamic=True)
    for program in (torch.jit.script(product), compiled):
        assert_close(program(o.x, o.y, o.w), expected)
        assert_close(gradients(program, o.x, o.y, o.w), gradients(product, o.x, o.y, o.w))
    several = torch.func.vmap(product, in_dims=(0, 0, None))(*(t.view(3, 3, -1) for t in (o.x, o.y)), o.w)
    assert_close(several.flatten(0, 1), expected)


def gradients(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """Of numbers that depend on all operands."""
    inputs = [operand.clone().requires_grad_() for operand in operands]
    return list(torch.autograd.grad(function(*inputs).sin().sum(), inputs))


def test_autocast_keeps_single_precision(spec: TensorProductSpec, in_pieces: bool, device: torch.device) -> None:
    """Of values and of gradients that are asked for there; otherwise digits would depend on the number of rows."""
    whole = TensorProduct(spec).to(device)
    o = random_operands(spec, 9, 9, batch=True, shared=True, dtype=torch.float32, device=device)
    assert_autocast_changes_nothing(InPieces(whole) if in_pieces else whole, o.x, o.y, o.w)


def test_autocast_keeps_single_precision_of_convolutions(spec: TensorProductSpec, device: torch.device) -> None:
    convolution = TensorProductConv(spec).to(device)
    o = random_operands(spec, 5, 12, shared=True, dtype=torch.float32, device=device)
    assert_autocast_changes_nothing(lambda x, y, w: convolution(x, y, w, o.edge_index), o.x, o.y, o.w)


def assert_autocast_changes_nothing(function: Callable[..., Tensor], *operands: Tensor) -> None:
    wanted = (function(*operands), *gradients(function, *operands))
    with torch.autocast(operands[0].device.type, torch.bfloat16):
        found = (function(*operands), *gradients(function, *operands))
    assert all(map(torch.equal, found, wanted))
    assert found[0].dtype == torch.float32


def test_results_are_bitwise_reproducible(spec: TensorProductSpec, device: torch.device) -> None:
    product = TensorProduct(spec).to(device)
    o = random_operands(spec, 200, 200, batch=True, shared=True, dtype=torch.float32, device=device)
    results = [(product(o.x, o.y, o.w), *gradients(product, o.x, o.y, o.w)) for _ in range(2)]
    assert all(map(torch.equal, *results))


def test_operands_that_do_not_fit_are_named(spec: TensorProductSpec, device: torch.device) -> None:
    product = TensorProduct(spec).to(device)
    o = random_operands(spec, 9, 9, batch=True, shared=True, device=device)
    for operands, message in (
        ((o.x, o.y, o.w[1:]), r"(w: expected|argument 'w' must have) shape \(num_edges, "),
        ((o.x, o.y[1:], o.w), "must have as many rows in 'x' and 'y'"),
        ((o.x, o.y[:, 1:], o.w), "argument 'y' must have shape"),
        ((o.x[:, 1:], o.y, o.w), "argument 'x' must have shape"),
        ((o.x[0], o.y, o.w), "arguments 'x' and 'y' must have shapes"),
        ((o.x, o.y.float(), o.w), "argument 'y' must be"),
        ((o.x, o.y, o.w.float()), "argument 'w' must be"),
    ):
        with pytest.raises(OperandError, match=message):
            product(*operands)


def test_sums_over_edges_come_before_their_weights() -> None:
    """A convolution adds up pairs of channels, of which there are less than edges."""
    for spec in SPECS.values():
        of_batch, of_graph = unmixed(spec, by_rows=True), unmixed(spec)
        assert of_batch is not None
        assert of_graph is not None
        assert of_batch.scalars
        assert not of_graph.scalars
        assert TensorProductConv(spec).mixing.ones_of_x == 0


def test_few_channels_are_paired() -> None:
    """Then there is little to save: the harmonics of an edge have one channel each."""
    spec = connected("16x0e+16x1o", "1x0e+1x1o", "16x0e+16x1o", [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)])
    found = unmixed(spec, by_rows=True)
    assert found is not None
    assert not found.scalars
