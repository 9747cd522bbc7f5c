"""Tensor products without paths, which e3nn allows: the output is zero, and so are all derivatives."""

import pytest
import torch
from e3nn import o3

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec, runtime, warmup
from eqaccel.codegen import Direction
from eqaccel.families.tensor_product import TENSOR_PRODUCT, candidates, make_plan
from eqaccel.prepare import WarmKernel
from eqaccel.targets import MACHINE_CLASSES, TARGETS
from eqaccel.testing import assert_product, random_operands

SPECS = {
    "no instructions": TensorProductSpec("4x0e+2x1o", "0e+1o", "3x0e+2x1o", []),
    "empty in1": TensorProductSpec("", "0e+1o", "2x0e", []),
    "empty in2": TensorProductSpec("2x0e+2x1o", "", "2x0e", []),
    "empty out": TensorProductSpec("2x0e+2x1o", "0e+1o", "", []),
    "all empty": TensorProductSpec("", "", "", []),
    "no channels": TensorProductSpec("0x0e", "0e", "0x0e+2x1o", [(0, 0, 0)]),
}
ZEROS = [(0, 0, 0, "uvu", True, 0.0), (1, 1, 1, "uvu", True, 0.0)]
UNREACHED = TensorProductSpec("3x0e+2x1o", "0e+1o", "4x2e+3x1o+2x0e+0x1e+5x0o", [(0, 1, 1)])


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> TensorProductSpec:
    return SPECS[request.param]


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("shared", [False, True])
def test_convolution_and_its_derivatives_are_zero(spec, shared, layout, device, dtype) -> None:
    operands = random_operands(spec, 3, 7, num_senders=4, shared=shared, dtype=dtype, device=device)
    for deterministic in (True, False):
        module = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
        assert_product(module, operands, order=3)
    z = module(operands.x, operands.y, operands.w, operands.edge_index, 3)
    assert z.shape == (3, spec.z_dim)
    assert not z.any()


def test_product_of_rows_and_its_derivatives_are_zero(spec, device, dtype) -> None:
    module = TensorProduct(spec).to(device)
    operands = random_operands(spec, 5, 5, batch=True, dtype=dtype, device=device)
    assert_product(module, operands, order=3)
    assert module(operands.x, operands.y).shape == (5, spec.z_dim)
    assert module(operands.x[:0], operands.y[:0]).shape == (0, spec.z_dim)


def test_blocks_that_no_path_reaches_are_zero(device, dtype) -> None:
    operands = random_operands(UNREACHED, 3, 7, num_senders=4, dtype=dtype, device=device)
    for layout in ("mul_ir", "ir_mul"):
        module = TensorProductConv(UNREACHED, layout=layout).to(device)
        assert_product(module, operands, order=3)
        z = module(operands.x, operands.y, operands.w, operands.edge_index, 3)
        blocks = z.split([block.dim for block in UNREACHED.irreps_out], dim=1)
        assert [bool(block.any()) for block in blocks] == [False, True, False, False, False]


@pytest.mark.parametrize("paths", [ZEROS[:1], ZEROS], ids=["some", "all"])
def test_coefficients_of_zero(paths, device, dtype) -> None:
    rest = [(1, 0, 1, "uvu")] if len(paths) < len(ZEROS) else []
    spec = TensorProductSpec("3x0e+4x1o", "0e+1e", "3x0e+4x1o", [*paths, *rest])
    operands = random_operands(spec, 3, 7, num_senders=4, dtype=dtype, device=device)
    for layout in ("mul_ir", "ir_mul"):
        module = TensorProductConv(spec, layout=layout).to(device)
        assert_product(module, operands, order=3)
        z = module(operands.x, operands.y, operands.w, operands.edge_index, 3)
        assert bool(z.any()) == bool(rest)
    assert_product(
        TensorProduct(spec).to(device), random_operands(spec, 5, 5, batch=True, dtype=dtype, device=device), order=3
    )


def test_programs_without_python_code(spec, device, dtype, tmp_path) -> None:
    torch.compiler.reset()
    module = TensorProduct(spec).to(device)
    operands = random_operands(spec, 5, 5, batch=True, dtype=dtype, device=device)
    x, y, w = (t.requires_grad_() for t in (operands.x, operands.y, operands.w))
    scripted = torch.jit.script(module)
    scripted.save(tmp_path / "module.pt")
    exported = torch.export.export(module, (x.detach(), y.detach(), w.detach())).module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for program in (scripted, torch.jit.load(tmp_path / "module.pt"), exported, compiled):
        z = program(x, y, w)
        assert z.shape == (5, spec.z_dim)
        assert not z.any()
        for gradient, operand in zip(torch.autograd.grad(z.sum(), (x, y, w)), (x, y, w), strict=True):
            assert gradient.shape == operand.shape
            assert not gradient.any()


def test_warmup_and_tuning(spec, device, dtype) -> None:
    module = TensorProductConv(spec).to(device)
    found = warmup(module, directions=[d.value for d in Direction], dtypes=dtype)
    assert [(type(kernel), kernel.direction) for kernel in found.kernels] == [
        (WarmKernel, direction.value) for direction in Direction
    ]
    for target in TARGETS.values():
        for direction in Direction:
            assert len(candidates(spec, direction, target, 4)) == 1
            assert make_plan(spec, direction, target, 4).explain()


@pytest.mark.parametrize("direction", [direction.value for direction in Direction])
def test_sources_compile_for_a_gpu(direction: str) -> None:
    made = TENSOR_PRODUCT.payload_of(SPECS["all empty"], Direction(direction))
    assert made is not None
    program = runtime.Program(made[0])
    assert program.number(f"{MACHINE_CLASSES[0].name}/{direction}/float32/kernels") == 0
    assert runtime.compile_program(program, "cuda", "float32", direction, "sm_90")["resources"] is not None


def test_module_of_e3nn() -> None:
    module = o3.TensorProduct("2x0e", "0e", "2x0e+1x1o", [], shared_weights=False, internal_weights=False)
    ours = TensorProduct(TensorProductSpec.from_e3nn(module))
    x, y = torch.randn(4, 2), torch.randn(4, 1)
    assert torch.equal(ours(x, y), module(x, y))
