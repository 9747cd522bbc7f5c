"""eqaccel.MatrixProduct: accuracy of float32 on GPUs and CPUs, torch's numbers elsewhere, what operators owe torch."""

from __future__ import annotations

import functools
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from folders import SUPPORT
from hosts import compile_cpp, needs_nvrtc
from runtime_checks import program, read
from torch.autograd import gradcheck, gradgradcheck

from eqaccel import MatrixProduct, MatrixProductSpec, TensorProduct, TensorProductSpec, families, runtime, warmup
from eqaccel.codegen import preludes
from eqaccel.errors import OperandError, SpecError
from eqaccel.families.matrix_product import MATRIX_PRODUCT, Factors, matrix_payload
from eqaccel.families.matrix_product.mma import mma_body
from eqaccel.integrations.export.precompiled import add_entries, precompiled_entries
from eqaccel.ops import has_matrix_kernel
from eqaccel.targets import TARGETS

UNIT = 2.0**-24
DEPTH = 32
"""Terms that tensor cores add up before float32 takes over."""

SPLIT, ROUNDED = (MatrixProductSpec(factors) for factors in Factors)

SHAPES = [(1, 4, 2), (127, 8, 64), (128, 32, 128), (129, 36, 66), (1000, 128, 1312), (500, 1312, 128), (70, 64, 320)]
SHAPES += [(20003, 36, 66), (20003, 132, 62)]  # several tiles a block


def operands(shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, terms, columns = shape
    a = torch.randn(rows, terms, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    return a.to(device), torch.randn(terms, columns, generator=generator).to(device)


def sum_bound(a: torch.Tensor, products: int) -> float:
    """Of sums of such products, over that of absolute values: cut off on the way, and rounded after."""
    return (2 * products * (DEPTH // 8) * 2 + a.size(1) / DEPTH) * UNIT


def product_bound(a: torch.Tensor, spec: MatrixProductSpec) -> float:
    """Of products over those of absolute values: what factors lack, tails left out and cut off or factors rounded."""
    lacking = 12 * UNIT if spec == SPLIT else (1 + 2.0**-11) ** 2 - 1
    return lacking + (1 + lacking) * sum_bound(a, spec.products)


def lost_beside_the_largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the error of each element: halves end at 2^-24, and the largest of a row or a column is 2^14 or more."""
    a, b = a.double().abs(), b.double().abs()
    largest_a, largest_b = a.amax(1, keepdim=True), b.amax(0, keepdim=True)
    return 2.0**-39 * (1 + 2.0**-11) * (largest_a @ b.sum(0, keepdim=True) + a.sum(1, keepdim=True) @ largest_b)


def kernel_bound(a: torch.Tensor, b: torch.Tensor, spec: MatrixProductSpec = SPLIT) -> torch.Tensor:
    """Of the error of each element."""
    return product_bound(a, spec) * (a.double().abs() @ b.double().abs()) + lost_beside_the_largest(a, b)


def torch_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of torch's product in whatever order it adds up: each term and each partial sum rounded once."""
    return a.size(1) * UNIT * (a.double().abs() @ b.double().abs())


def assert_product(value: torch.Tensor, a: torch.Tensor, b: torch.Tensor, spec: MatrixProductSpec = SPLIT) -> None:
    """A value is `a @ b` to the error of the kernel, or to that of torch where torch multiplies."""
    bound = kernel_bound(a, b, spec) if has_matrix_kernel(a.device, a.dtype, spec) else torch_bound(a, b)
    assert ((value.double() - a.double() @ b.double()).abs() <= bound).all()


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(shape: tuple[int, int, int], spec: MatrixProductSpec, device: torch.device) -> None:
    a, b = operands(shape, device)
    assert_product(MatrixProduct(spec).to(device)(a, b), a, b, spec)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of 11 bits, even where two are as near."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_factors_are_the_nearest(shape: tuple[int, int, int], device: torch.device) -> None:
    a, b = operands(shape, device)
    value = MatrixProduct(ROUNDED).to(device)(a, b).double()
    if has_matrix_kernel(device, a.dtype, ROUNDED):
        a, b = rounded(a), rounded(b)
        bound = sum_bound(a, 1) * (a.double().abs() @ b.double().abs()) + lost_beside_the_largest(a, b)
    else:
        bound = torch_bound(a, b)
    assert ((value - a.double() @ b.double()).abs() <= bound).all()


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("shape", [(300, 128, 64), (150, 68, 320), (130, 256, 128)], ids=str)
def test_numbers_of_all_sizes(shape: tuple[int, int, int], spec: MatrixProductSpec, device: torch.device) -> None:
    """Halves have five bits for exponents: rows and columns are brought into their range, subnormal numbers too."""
    rows, terms, columns = shape
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(rows, terms, generator=generator), torch.randn(terms, columns, generator=generator))
    a = a * torch.randn(rows, terms, generator=generator).mul(4).exp2()
    a, b = a * torch.linspace(-140, 70, rows).exp2()[:, None], b * torch.linspace(-60, 30, columns).exp2()
    a[1], a[2, 1:], b[:, 3] = 0, 0, 0
    a, b = a.to(device), b.to(device)
    value = MatrixProduct(spec).to(device)(a, b)
    has_kernel = has_matrix_kernel(device, a.dtype, spec)
    bound = kernel_bound(a, b, spec) if has_kernel else torch_bound(a, b)
    smallest = 2.0**-149  # of a float: terms and sums are rounded to multiples of it
    assert ((value.double() - a.double() @ b.double()).abs() <= bound + 2 * terms * smallest).all()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row_and_column(bad: float, device: torch.device) -> None:
    a, b = operands((200, 64, 66), device)
    product = MatrixProduct().to(device)
    expected = product(a, b)
    for matrix, index in ((a, (70, 37)), (b, (37, 40))):
        kept = matrix[index].item()
        matrix[index] = bad
        value = product(a, b)
        matrix[index] = kept
        reached = torch.zeros_like(value, dtype=torch.bool)
        (reached[70] if matrix is a else reached[:, 40])[:] = True
        assert not value[reached].isfinite().any()
        assert torch.equal(value[~reached], expected[~reached])


def test_cpus_and_double_precision_have_all_of_a_factor(device: torch.device) -> None:
    a, b = operands((300, 64, 96), torch.device("cpu"))
    assert torch.equal(MatrixProduct(ROUNDED)(a, b), MatrixProduct()(a, b))
    a, b = a.double().to(device), b.double().to(device)
    assert torch.equal(MatrixProduct(ROUNDED).to(device)(a, b), MatrixProduct().to(device)(a, b))


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


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("shape", [(3000, 128, 336), (20000, 64, 130), (20000, 160, 64)], ids=str)
def test_repeats_bitwise_and_row_by_row(
    shape: tuple[int, int, int], spec: MatrixProductSpec, device: torch.device
) -> None:
    product = MatrixProduct(spec).to(device)
    a, b = operands(shape, device)
    expected = product(a, b)
    for _ in range(20):
        assert torch.equal(product(a, b), expected)
    if device.type == "cpu" or has_matrix_kernel(device, a.dtype, spec):
        assert torch.equal(product(a[:700], b), expected[:700])


def sums_of_rows(a: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
    """The rows that `matrix_product_shared` multiplies, in the dtype of `a`."""
    first, second = summands.long().unbind(1)
    sums = torch.where(second[:, None] >= 0, a[first] + a[second.clamp(min=0)], a[first])
    return torch.where(second[:, None] > -2, sums, torch.zeros_like(sums))


def shared_operands(
    rows: int, terms: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs of rows, some alone, some absent, and NaN in rows that none has: nobody reads them."""
    a, b = operands((2 * rows, terms, columns), device)
    summands = torch.randperm(2 * rows, generator=torch.Generator().manual_seed(1)).int().view(rows, 2)
    summands[3::5, 1], summands[4::7, 1] = -1, -2
    a[summands[4::7, 0].long().to(device)] = torch.nan
    return a, b, summands.to(device)


SHARED_SHAPES = [(1, 4, 2), (127, 8, 64), (128, 32, 128), (129, 36, 66), (650, 1312, 128), (301, 260, 64), (5, 68, 130)]
SHARED_SHAPES += [(40001, 36, 64), (40001, 68, 128), (77, 7, 5)]  # several tiles a block; what torch multiplies


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("shape", SHARED_SHAPES, ids=str)
def test_sums_of_rows(
    shape: tuple[int, int, int], spec: MatrixProductSpec, dtype: torch.dtype, device: torch.device
) -> None:
    product = MatrixProduct(spec).to(device)
    a, b, summands = shared_operands(*shape, device)
    a, b = a.to(dtype), b.to(dtype)
    multiply = functools.partial(torch.ops.eqaccel.matrix_product_shared, product.payload, product.key)
    value = multiply(a, b, summands)
    exact = sums_of_rows(a.double(), summands) @ b.double()
    size = sums_of_rows(a.double().abs(), summands) @ b.double().abs()
    # Of the product, in whatever order, of what is multiplied, which is rounded once.
    unit = torch.finfo(dtype).eps / 2
    has_kernel = has_matrix_kernel(device, dtype, spec)
    bound = product_bound(a, spec) if has_kernel else shape[1] * unit
    # In float64 the exact sum has errors of the same size.
    factor = 2 if dtype == torch.float64 else 1
    lost = lost_beside_the_largest(sums_of_rows(a.abs(), summands), b) if has_kernel else 0
    assert ((value.double() - exact).abs() <= factor * (bound + unit + bound * unit) * size + lost).all()
    assert (value[summands[:, 1] == -2] == 0).all()
    for _ in range(5):
        assert torch.equal(multiply(a, b, summands), value)
    if device.type == "cpu" or (has_kernel and shape[1] % 4 == 0):  # each row for itself
        assert torch.equal(multiply(a, b, summands[1::3]), value[1::3])


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
def test_kernels_that_add_rows(spec: MatrixProductSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs those of compute capability 9.0, where no setting makes them smaller ones."""
    content, key = MATRIX_PRODUCT.payload(spec)
    program = runtime.register_program(key, content)
    found = {}
    for capability, kib in itertools.product(("sm_80", "sm_90", "sm_100"), ("227", "163")):
        monkeypatch.setenv("EQACCEL_SHARED_KIB", kib)
        arch = program.compile_arch("cuda", "float32", "forward", capability)
        if arch is not None:
            entry = program.body("cuda", "float32", "forward", arch)
            kernels = [f"{entry}/{n}/adds_rows" for n in range(program.number(f"{entry}/kernels"))]
            found[capability, kib] = any(map(program.number, kernels))
    assert [where for where, adds in found.items() if adds] == [("sm_90", "227")]


def test_sums_of_rows_have_a_shape(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    op = torch.ops.eqaccel.matrix_product_shared
    a, b, summands = shared_operands(6, 8, 4, device)
    for rows in (summands, summands[:0]):
        value = op(product.payload, product.key, a, b, rows)
        there = op(product.payload, product.key, a.to("meta"), b.to("meta"), rows.to("meta"))
        assert value.shape == there.shape == (len(rows), 4)
        assert value.dtype == there.dtype
    assert op(product.payload, product.key, a[:, :0], b[:0], summands).eq(0).all()


def test_derivatives(device: torch.device) -> None:
    product = MatrixProduct().to(device)
    a, b = (t.double().requires_grad_() for t in operands((5, 8, 6), device))
    assert gradcheck(product, (a, b))
    assert gradgradcheck(product, (a, b))


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
def test_derivatives_in_single_precision(spec: MatrixProductSpec, device: torch.device) -> None:
    product = MatrixProduct(spec).to(device)
    a, b = (t.requires_grad_() for t in operands((300, 64, 256), device))
    g = torch.randn(300, 256, device=device, requires_grad=True)
    of_a, of_b = torch.autograd.grad(product(a, b), (a, b), g, create_graph=True)
    assert_product(of_a, g, b.t(), spec)
    assert ((of_b.double() - a.double().t() @ g.double()).abs() <= torch_bound(a.t(), g)).all()
    (of_g,) = torch.autograd.grad(of_a, g, a.detach())
    assert_product(of_g, a, b, spec)


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
    single = MatrixProduct(ROUNDED).to(device)
    expected, kept = single(a, b), device.type == "cpu" or has_matrix_kernel(device, a.dtype, ROUNDED)
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        if device.type != "cpu":
            assert torch.equal(product(a, b), a @ b)
        assert not has_matrix_kernel(device, a.dtype)
        if kept:
            assert torch.equal(single(a, b), expected)
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


def test_other_factors_are_refused() -> None:
    with pytest.raises(SpecError, match=r"factors: expected one of 'split', 'rounded', got 'cut'"):
        MatrixProductSpec("cut")


@needs_nvrtc
def test_precompiling() -> None:
    product = MatrixProduct()
    key = product.key
    targets = ("cpu-avx2", "sm_80", "sm_86", "sm_90")
    add_entries(product, precompiled_entries(product.family, product.spec, "float32", targets))
    assert product.key != key
    content = product.payload.numpy().tobytes()
    made = {name for name in (f"sm_{n}" for n in (80, 86, 90, "90a")) if f"binary/{name}/".encode() in content}
    assert made == {"sm_80", "sm_90a"}
    for arch in made:
        compiled = runtime.compile_program(runtime.Program(content), "cuda", "float32", "forward", arch)
        assert compiled["key"] == f"precompiled-{arch}"


def test_gpus_whose_tensor_cores_are_faster() -> None:
    found = {}
    for spec in (SPLIT, ROUNDED):
        text = runtime.Program(matrix_payload(spec)[0])
        for name, target in TARGETS.items():
            if target.is_gpu and (arch := text.compile_arch(target.backend, "float32", "forward", name)):
                found.setdefault(spec, {})[name] = arch
    assert found[SPLIT] == {"sm_80": "sm_80", "sm_90": "sm_90a"}
    assert found[ROUNDED] == found[SPLIT] | {name: name for name in ("sm_86", "sm_89", "sm_120")}


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
def test_a_setting_chooses_the_kernel_of_smaller_gpus(spec: MatrixProductSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    text = runtime.Program(matrix_payload(spec)[0])
    for kib, arch in (("227", "sm_90a"), ("163", "sm_90"), ("99", "sm_90"), ("40", None)):
        monkeypatch.setenv("EQACCEL_SHARED_KIB", kib)
        assert text.compile_arch("cuda", "float32", "forward", "sm_90") == arch
        if arch:
            source = text.source("cuda", "float32", "forward", arch)
            assert ("\nEQ_EXPORT_MMA_PRODUCT" in source, "\nEQ_EXPORT_WGMMA_PRODUCT" in source) == (
                arch == "sm_90",
                arch == "sm_90a",
            )


def test_products_of_older_files_are_refused() -> None:
    entries = read(matrix_payload()[0])
    old = program(entries | {"meta": entries["meta"].replace("products=3\n", "")})
    with pytest.raises(ValueError, match="those of an older one: make or export the model again with it"):
        old.compile_arch("cuda", "float32", "forward", "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120"])
def test_kernels_compile_without_spills(arch: str, spec: MatrixProductSpec) -> None:
    text = runtime.Program(matrix_payload(spec)[0])
    log = runtime.compile_program(text, "cuda", "float32", "forward", arch)["log"]
    body = text.body("cuda", "float32", "forward", arch)
    assert body == ("tuned/sm_90a/forward/float32" if arch == "sm_90a" else "gpu/forward/float32")
    kernels = range(text.number(f"{body}/kernels"))
    used = runtime.resources(log)
    assert set(used) == {"eq_pack", *(f"eq_product_{n}" for n in kernels)}
    assert all(kernel["spill_store_bytes"] == 0 for kernel in used.values())
    assert "serialized" not in log  # ptxas says so if the tensor cores have to wait for registers
    room = TARGETS[arch.removesuffix("a")].shared_bytes
    assert max(text.number(f"{body}/{n}/shared_bytes") for n in kernels) <= room


@needs_nvrtc
def test_warmup_compiles_them_where_they_have_a_kernel() -> None:
    other = TensorProduct(TensorProductSpec.channelwise("3x0e", "0e+1o", "0e+1o"))
    model = torch.nn.ModuleList([other, MatrixProduct(), MatrixProduct(), MatrixProduct(ROUNDED)])
    found = {}
    for dtype in (torch.float32, torch.float64):
        for device in ("sm_75", "sm_80", "sm_86", "sm_90"):
            result = warmup(model, directions="forward", dtypes=dtype, devices=device)
            found[dtype, device] = [kernel.name for kernel in result.kernels]
    assert found.pop((torch.float32, "sm_80")) == found.pop((torch.float32, "sm_90")) == ["0", "1, 2", "3"]
    assert found.pop((torch.float32, "sm_86")) == ["0", "3"]
    assert all(names == ["0"] for names in found.values())


EMULATED = [(1, 4, 2, 1, 0), (129, 36, 66, 3, 1), (300, 100, 62, 2, 0), (1, 600, 2, 1, 1)]
"""Rows, terms, columns, blocks, and whether B is transposed; in the third, blocks have several tiles of many stages,
and in the last, threads pack two units of a column."""


@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
def test_mma_kernel_on_a_cpu(spec: MatrixProductSpec, tmp_path: Path) -> None:
    """Each number is where it is looked for, and is there when it is: the text of the kernel without a GPU."""
    family = Path(families.__file__).parent / "matrix_product"
    for file in (family / "mma_product.h", family / "factors.h", Path(preludes.__file__).parent / "halves.h"):
        shutil.copy(file, tmp_path)
    body = mma_body(spec)
    (tmp_path / "body.h").write_text(body.text)
    host = SUPPORT / "gpu_on_cpu"
    options = ["-std=c++20", "-O1", "-fno-strict-aliasing", f"-DSHARED_BYTES={body.shared_bytes}"]
    compile_cpp(*options, f"-I{tmp_path}", f"-I{host}", host / "product.cpp", "-o", tmp_path / "run")
    for case in EMULATED:
        ran = subprocess.run([str(tmp_path / "run"), *map(str, case)], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        found = dict(line.split() for line in ran.stdout.splitlines())
        assert found["changed"] == "0"
        one = torch.ones(1, case[1])
        assert float(found["error"]) <= float(kernel_bound(one, one.t(), spec)) / case[1]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [SPLIT, ROUNDED], ids=["split", "rounded"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_of_smaller_gpus(
    shape: tuple[int, int, int], spec: MatrixProductSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    a, b = operands(shape, device)
    product = MatrixProduct(spec).to(device)
    monkeypatch.setenv("EQACCEL_SHARED_KIB", "99")
    value = product(a, b)
    assert_product(value, a, b, spec)
    assert torch.equal(product(a[: shape[0] // 2], b), value[: shape[0] // 2])
