"""eqaccel.MatrixProduct: accuracy of float32 on GPUs and CPUs, torch's numbers elsewhere, what operators owe torch."""

from __future__ import annotations

import functools

import pytest
import torch
from eqaccel.integrations.export.precompiled import add_entries, precompiled_entries
from torch.autograd import gradcheck, gradgradcheck

from eqaccel import MatrixProduct, runtime
from eqaccel.errors import OperandError
from eqaccel.families.matrix_product import matrix_payload
from eqaccel.families.matrix_product.body import TILINGS
from eqaccel.ops import has_matrix_kernel
from eqaccel.ops.matrix_product import adds_rows

UNIT = 2.0**-24
DEPTH = 32
"""Terms that tensor cores add up before float32 takes over."""

SHAPES = [(1, 4, 2), (127, 8, 64), (128, 32, 128), (129, 36, 66), (1000, 128, 1312), (500, 1312, 128), (70, 64, 320)]
SHAPES += [(20003, 36, 66), (20003, 132, 62)]  # several tiles a block


def operands(shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, terms, columns = shape
    a = torch.randn(rows, terms, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    return a.to(device), torch.randn(terms, columns, generator=generator).to(device)


def split_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the error of each element: tails left out and cut off, sums cut off on the way, and those rounded after."""
    size = a.double().abs() @ b.double().abs()
    left_out, cut_off = 12, 2 * 3 * (DEPTH // 8) * 2
    return (left_out + cut_off + a.size(1) / DEPTH) * UNIT * size


def torch_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of torch's product in whatever order it adds up: each term and each partial sum rounded once."""
    return a.size(1) * UNIT * (a.double().abs() @ b.double().abs())


def assert_product(value: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """A value is `a @ b` to the error of the kernel, or to that of torch where torch multiplies."""
    bound = split_bound(a, b) if has_matrix_kernel(a.device, a.dtype) else torch_bound(a, b)
    assert ((value.double() - a.double() @ b.double()).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape: tuple[int, int, int], device: torch.device) -> None:
    a, b = operands(shape, device)
    assert_product(MatrixProduct().to(device)(a, b), a, b)


def test_no_less_accurate_than_torch(device: torch.device) -> None:
    a, b = operands((2000, 128, 512), device)
    exact = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()

    def error(c: torch.Tensor) -> float:
        return float(((c - exact) / size).square().mean().sqrt())

    assert error(MatrixProduct().to(device)(a, b)) <= 2 * error(a @ b)


@pytest.mark.parametrize("shape", [(0, 8, 4), (5, 0, 4), (5, 8, 0), (5, 7, 4), (5, 8, 3)], ids=str)
def test_shapes_that_torch_multiplies(shape: tuple[int, int, int], device: torch.device) -> None:
    a, b = operands(shape, device)
    value = MatrixProduct().to(device)(a, b)
    if device.type == "cpu" and 0 not in shape:
        assert_product(value, a, b)
    else:
        assert torch.equal(value, a @ b)


def test_double_precision(device: torch.device) -> None:
    a, b = (t.double() for t in operands((1003, 70, 45), device))  # some rows, terms and columns that fill no vectors
    error = (MatrixProduct().to(device)(a, b) - a @ b).abs()
    assert (error <= 2 * 70 * 2.0**-53 * (a.abs() @ b.abs())).all()  # both round each term and each sum


def test_strides_and_offsets(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands((65, 16, 20), device)
    expected = product(a, b)
    assert torch.equal(product(a.t().contiguous().t(), b.t().contiguous().t()), expected)
    wide = torch.cat([a, a], 1)
    assert torch.equal(product(wide[:, 16:], b), expected)
    shifted = torch.cat([a.new_zeros(1), a.flatten()])[1:].view_as(a)  # not aligned
    assert_product(product(shifted, b), a, b)


@pytest.mark.parametrize("shape", [(3000, 128, 336), (20000, 64, 130), (20000, 160, 64)], ids=str)
def test_repeats_bitwise_and_row_by_row(shape: tuple[int, int, int], device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands(shape, device)
    expected = product(a, b)
    for _ in range(20):
        assert torch.equal(product(a, b), expected)
    if device.type == "cpu" or has_matrix_kernel(device, a.dtype):
        assert torch.equal(product(a[:700], b), expected[:700])


def sums_of_rows(a: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The rows that `matrix_product_shared` multiplies, in the dtype of `a`."""
    first, second = parts.long().unbind(1)
    sums = torch.where(second[:, None] >= 0, a[first] + a[second.clamp(min=0)], a[first])
    return torch.where(second[:, None] > -2, sums, torch.zeros_like(sums))


def shared_operands(
    rows: int, terms: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of rows, some alone, some absent, and NaN in rows that none has: nobody reads them."""
    a, b = operands((2 * rows, terms, columns), device)
    parts = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1)).int().view(rows, 2)
    parts[3::5, 1], parts[4::7, 1] = -1, -2
    a[parts[4::7, 0].long().to(device)] = torch.nan
    return a, b, parts.to(device)


SHARED_SHAPES = [(1, 4, 2), (127, 8, 64), (128, 32, 128), (129, 36, 66), (650, 1312, 128), (301, 260, 64), (5, 68, 130)]
SHARED_SHAPES += [(40001, 36, 64), (40001, 68, 128), (77, 7, 5)]  # several tiles a block; what torch multiplies


@pytest.mark.parametrize("shape", SHARED_SHAPES, ids=str)
def test_sums_of_rows(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b, parts = shared_operands(*shape, device)
    a, b = a.to(dtype), b.to(dtype)
    multiply = functools.partial(torch.ops.eqaccel.matrix_product_shared, product.payload, product.key)
    value = multiply(a, b, parts)
    exact = sums_of_rows(a.double(), parts) @ b.double()
    size = sums_of_rows(a.double().abs(), parts) @ b.double().abs()
    # Of what is multiplied, which is rounded once, and of the sum, in whatever order; plus those of the split.
    unit = torch.finfo(dtype).eps / 2
    split = 12 + 2 * 3 * (DEPTH // 8) * 2 if has_matrix_kernel(device, dtype) else 0
    # In float64 the exact sum has errors of the same size.
    factor = 2 if dtype == torch.float64 else 1
    assert ((value.double() - exact).abs() <= factor * (split + 1 + shape[1]) * unit * size).all()
    assert (value[parts[:, 1] == -2] == 0).all()
    for _ in range(5):
        assert torch.equal(multiply(a, b, parts), value)
    if adds_rows(device, dtype) and shape[1] % 4 == 0:  # each row for itself
        assert torch.equal(multiply(a, b, parts[1::3]), value[1::3])


def test_sums_of_rows_have_a_shape(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    op = torch.ops.eqaccel.matrix_product_shared
    a, b, parts = shared_operands(6, 8, 4, device)
    for rows in (parts, parts[:0]):
        value = op(product.payload, product.key, a, b, rows)
        there = op(product.payload, product.key, a.to("meta"), b.to("meta"), rows.to("meta"))
        assert value.shape == there.shape == (len(rows), 4)
        assert value.dtype == there.dtype
    assert op(product.payload, product.key, a[:, :0], b[:0], parts).eq(0).all()


def test_results_on_a_cpu_take_memory_that_was_given_back() -> None:
    product = MatrixProduct()
    a, b = torch.randn(70000, 16), torch.randn(16, 320)  # of a size that no other test has given back
    first = product(a, b)
    assert_product(first, a, b)
    where = first.data_ptr()
    del first
    assert product(a, b).data_ptr() == where


def test_derivatives(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = (t.double().requires_grad_() for t in operands((5, 8, 6), device))
    assert gradcheck(product, (a, b))
    assert gradgradcheck(product, (a, b))


def test_derivatives_in_single_precision(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = (t.requires_grad_() for t in operands((300, 64, 256), device))
    g = torch.randn(300, 256, device=device, requires_grad=True)
    of_a, of_b = torch.autograd.grad(product(a, b), (a, b), g, create_graph=True)
    assert_product(of_a, g, b.t())
    assert ((of_b.double() - a.double().t() @ g.double()).abs() <= torch_bound(a.t(), g)).all()
    (of_g,) = torch.autograd.grad(of_a, g, a.detach())
    assert_product(of_g, a, b)


def test_opcheck(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = (t.requires_grad_() for t in operands((6, 8, 4), device))
    torch.library.opcheck(torch.ops.eqaccel.matrix_product.default, (product.payload, product.key, a, b))


def test_script_and_meta(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands((65, 16, 20), device)
    assert torch.equal(torch.jit.script(product)(a, b), product(a, b))
    assert product(a.to("meta"), b.to("meta")).shape == (65, 20)
    assert not product.state_dict()


def test_autocast(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands((65, 16, 20), device)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(product(a, b), a @ b)


def test_torch_multiplies_where_it_may_use_fewer_bits(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands((65, 16, 20), device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        if device.type != "cpu":
            assert torch.equal(product(a, b), a @ b)
        assert not has_matrix_kernel(device, a.dtype)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def test_operands_that_do_not_fit(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = operands((5, 8, 6), device)
    for one, other, message in (
        (a, b[1:], r"'b' must have shape \(terms, columns\) = \(8, columns\), got \[7, 6\]"),
        (a, b.double(), r"'b' must be Float on .*, like 'a', got Double"),
        (a[0], b, r"'a' must have shape \(rows, terms\), got \[8\]"),
        (a[None], b, r"'a' must have shape \(rows, terms\), got \[1, 5, 8\]"),
    ):
        with pytest.raises(OperandError, match=message):
            product(one, other)


@pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")
def test_precompiling() -> None:
    product = MatrixProduct()
    key = product.key
    add_entries(product, precompiled_entries(product.family, None, "float32", ("cpu-avx2", "sm_80", "sm_90")))
    assert product.key != key
    program = runtime.Program(product.payload.numpy().tobytes())
    compiled = runtime.compile_program(program, "cuda", "float32", "forward", "sm_90a")
    assert compiled["key"] == "precompiled-sm_90a"


@pytest.mark.skipif(runtime.locate_nvrtc() is None, reason="the nvidia-cuda-nvrtc package is not installed")
def test_kernel_compiles_without_spills() -> None:
    program = runtime.Program(matrix_payload()[0])
    log = runtime.compile_program(program, "cuda", "float32", "forward", "sm_90a")["log"]
    used = runtime.resources(log)
    assert {f"eq_product_{n}" for n in range(len(TILINGS))} <= set(used)
    assert all(kernel["spill_store_bytes"] == 0 for kernel in used.values())
    assert "serialized" not in log  # ptxas says so if the tensor cores have to wait for registers
