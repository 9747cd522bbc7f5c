"""Products of batches whose rows share matrices of weights, on a CPU: blocks of rows are lanes of one kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mode_cases import CASES, random_case
from torch import Tensor
from torch.testing import assert_close

from eqaccel import TensorProduct, TensorProductSpec
from eqaccel.errors import OperandError
from eqaccel.testing import assert_product, random_operands

ALL = {
    **{name: CASES[name] for name in ("modes", "wide")},
    "degrees": ("1x8e", "2x3o", "3x11o", [(0, 0, 0, "uvw", True)]),
    "one of each": ("1x1o", "2x0e", "1x1o", [(0, 0, 0, "uvw", True)]),
    "random": random_case(3),
}
SPECS = {name: TensorProductSpec(*case, shared_weights=True) for name, case in ALL.items()}
SPEC = SPECS["modes"]
ROWS = 70  # some blocks, and a part of one, in either type


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def gradients(product: TensorProduct, *operands: Tensor) -> list[Tensor]:
    """The output, its gradients, and those of the sum of their squares."""
    inputs = [operand.detach().requires_grad_() for operand in operands]
    z = product(*inputs)
    first = torch.autograd.grad(z.sin().sum(), inputs, create_graph=True)
    return [z, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)]


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("modes", torch.float32),
        ("modes", torch.float64),
        ("wide", torch.float32),
        ("degrees", torch.float64),
        ("one of each", torch.float32),
        ("random", torch.float64),
    ],
)
def test_derivatives(name: str, layout: str, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    product = TensorProduct(spec, layout=layout).to(device)
    assert product.spec.rows_share_weights == any(path.has_matrix for path in spec.paths)
    operands = random_operands(spec, ROWS, ROWS, batch=True, shared=True, dtype=dtype, device=device)
    assert_product(product, operands)


@pytest.mark.parametrize("rows", [0, 1, 16, 33, 700])
def test_any_number_of_rows(rows: int, device: torch.device, dtype: torch.dtype) -> None:
    operands = random_operands(SPEC, rows, rows, batch=True, shared=True, dtype=dtype, device=device)
    assert_product(TensorProduct(SPEC).to(device), operands)


@pytest.mark.usefixtures("threads")
def test_threads_make_no_difference(device: torch.device) -> None:
    product = TensorProduct(SPEC).to(device)
    o = random_operands(SPEC, 900, 900, batch=True, shared=True, dtype=torch.float32, device=device)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(gradients(product, o.x, o.y, o.w))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_operands_with_gaps(device: torch.device) -> None:
    product = TensorProduct(SPEC).to(device)
    o = random_operands(SPEC, ROWS, ROWS, batch=True, shared=True, device=device)
    with_gaps = [torch.stack([t, t], -1)[..., 0] for t in (o.x, o.y, o.w)]
    assert not any(operand.is_contiguous() for operand in with_gaps)
    assert all(map(torch.equal, gradients(product, *with_gaps), gradients(product, o.x, o.y, o.w)))


def test_weights_of_each_row(device: torch.device) -> None:
    """Rows may have weights of their own, views of one row among them: each has a gradient then."""
    product = TensorProduct(SPEC).to(device)
    o = random_operands(SPEC, 9, 9, batch=True, shared=True, device=device)
    shared = gradients(product, o.x, o.y, o.w)
    inputs = [o.x, o.y, o.w]
    for rows in (o.w.expand(9, -1), o.w.repeat(9, 1)):
        views = [inputs[0], inputs[1], rows.detach().requires_grad_()]
        z = product(*views)
        (of_rows,) = torch.autograd.grad(z.sin().sum(), views[2:])
        assert of_rows.shape == (9, SPEC.weight_numel)
        assert_close([z, of_rows.sum(0)], [shared[0], shared[3]])


def test_tangents_have_the_shape_of_weights() -> None:
    product = TensorProduct(SPEC)
    o = random_operands(SPEC, 9, 9, batch=True, shared=True)
    gz, rows = torch.ones(9, SPEC.z_dim, dtype=torch.float64), o.w.repeat(9, 1)
    graph = torch.empty(0, dtype=torch.int32)
    arguments = (product.payload, product.key, gz, o.x, o.y, o.w, o.x, o.y, rows, graph, 9, SPEC.z_dim, True, True)
    with pytest.raises(
        (OperandError, RuntimeError), match=f"'c' must have the shape of 'w', .{SPEC.weight_numel}., got"
    ):
        torch.ops.eqaccel.tensor_product_double_backward(*arguments)


def test_a_module_without_matrices_has_the_kernels_of_rows() -> None:
    spec = TensorProductSpec(*CASES["own channels"], shared_weights=True)
    assert not TensorProduct(spec).spec.rows_share_weights
