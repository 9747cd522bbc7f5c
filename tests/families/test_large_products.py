"""Tensor products of several GPU kernels or CPU translation units, groups of warps, and receivers cut into pieces."""

import importlib
import resource

import pytest
import torch

from eqaccel import TensorProductConv, TensorProductSpec, runtime
from eqaccel.codegen import COMMON, Direction
from eqaccel.families.tensor_product import Plan, body_of, make_plan, payload, third_payload
from eqaccel.families.tensor_product.plan.model import multiply_adds, segment_work
from eqaccel.targets import TARGETS, host_target
from eqaccel.testing import ERROR_CONSTANT, Operands, assert_product, random_operands

SMALL = TensorProductSpec.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
DEGREES = "0e+1e+2e+3e"
LARGE = {
    "one_block_in_several_kernels": TensorProductSpec.channelwise("8x4e", "2e+3e", "2e+3e+4e"),
    "odd_channels": TensorProductSpec.channelwise("3x2e+3x3e", DEGREES, DEGREES),
    "preset_l": TensorProductSpec.channelwise("128x0e+64x1o+32x2e+32x3o", "0e+1o+2e+3o", "0e+1o+2e+3o"),
    "warp_groups": TensorProductSpec.channelwise("96x0e+32x1o+32x2e", "0e+1o+2e+3o", "0e+1o+2e+3o"),
    "ragged": TensorProductSpec.channelwise("40x0e+33x1e+5x2e+3x3e", "0e+1e+2e", DEGREES),
}
LARGE_FORWARD = TensorProductSpec.channelwise("8x3e+8x4e", f"{DEGREES}+4e", f"{DEGREES}+4e")
MODES = [("mul_ir", True), ("ir_mul", False)]


def test_plans_are_of_the_kinds_tested_here() -> None:
    def plan(spec: TensorProductSpec, direction: Direction) -> Plan:
        return make_plan(spec, direction, TARGETS["sm_90"], 4)

    def adds(plan: Plan) -> bool:
        return any(block.adds for segment in plan.segments for block in segment.blocks)

    names = ("one_block_in_several_kernels", "odd_channels", "warp_groups", "ragged")
    one_block, odd, warp_groups, ragged = (LARGE[name] for name in names)
    assert len(plan(LARGE_FORWARD, Direction.FORWARD).kernels) > 1
    by_multiplicity = [{s.mul for s in kernel.segments} for kernel in plan(ragged, Direction.FORWARD).kernels]
    assert by_multiplicity == [{40, 33}, {5, 3}]
    assert adds(plan(one_block, Direction.DOUBLE_BACKWARD))
    for direction in (Direction.BACKWARD, Direction.DOUBLE_BACKWARD):
        assert len(plan(odd, direction).kernels) > 1
        assert max(segment.warps_per_group for segment in plan(warp_groups, direction).segments) > 1


def test_forward_of_several_kernels(device: torch.device, dtype: torch.dtype) -> None:
    module = TensorProductConv(LARGE_FORWARD).to(device)
    assert_product(module, random_operands(LARGE_FORWARD, 5, 21, num_senders=6, dtype=dtype, device=device), order=0)


@pytest.mark.parametrize(
    ("name", "dtype", "layout", "deterministic"),
    [
        ("one_block_in_several_kernels", torch.float64, *MODES[1]),
        ("odd_channels", torch.float64, *MODES[0]),
        ("preset_l", torch.float32, *MODES[0]),
        ("warp_groups", torch.float32, *MODES[1]),
        ("ragged", torch.float32, *MODES[0]),
        ("ragged", torch.float64, *MODES[1]),
    ],
)
def test_convolution(name: str, dtype: torch.dtype, layout: str, deterministic: bool, device: torch.device) -> None:
    spec = LARGE[name]
    module = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
    assert_product(module, random_operands(spec, 5, 21, num_senders=6, dtype=dtype, device=device))


BUILD = importlib.import_module("eqaccel.families.tensor_product.plan.build")
UP_TO_FIVE = "0e+1o+2e+3o+4e+5o"
ALL_UP_TO_FIVE = "+".join(f"{degree}{parity}" for degree in range(6) for parity in "eo")


def _units(spec: TensorProductSpec, direction: Direction) -> dict[int, list[int]]:
    """The work of the segments in each translation unit of a CPU kernel."""
    plan = make_plan(spec, direction, TARGETS["cpu-avx512"], 4)
    units: dict[int, list[int]] = {}
    for segment in plan.segments:
        units.setdefault(segment.unit, []).append(segment_work(direction, plan.matrices, segment))
    return units


@pytest.mark.parametrize("direction", COMMON)
def test_cpu_kernels_of_models_are_one_translation_unit(direction: Direction) -> None:
    """Their text does not change, nor does their speed."""
    layers = "128x0e+128x1o+128x2e+128x3o"
    both = "64x0e+64x0o+64x1e+64x1o+64x2e+64x2o+64x3e+64x3o"
    for in1, in2 in ((layers, UP_TO_FIVE[:11]), (layers, UP_TO_FIVE[:14]), (both, UP_TO_FIVE[:11])):
        spec = TensorProductSpec.channelwise(in1, in2, in1)
        assert set(_units(spec, direction)) == {0}
        assert "EQ_UNIT" not in body_of(make_plan(spec, direction, TARGETS["cpu-avx512"], 4))


@pytest.mark.parametrize("direction", [Direction.BACKWARD, Direction.DOUBLE_BACKWARD])
def test_large_cpu_kernels_are_compiled_in_units_of_limited_size(direction: Direction) -> None:
    in1 = "+".join(f"2x{ir}" for ir in ALL_UP_TO_FIVE.split("+"))
    spec = TensorProductSpec.channelwise(in1, UP_TO_FIVE, ALL_UP_TO_FIVE)
    assert len(spec.paths) == 222
    units = _units(spec, direction)
    assert sorted(units) == list(range(len(units)))
    plan = make_plan(spec, direction, TARGETS["cpu-avx512"], 4)
    paths = [path for segment in plan.segments for path in segment.paths]
    single = max(multiply_adds(direction, len(plan.matrices[p.matrix].elements), p.d1, p.d3) for p in paths)
    assert max(units[0]) <= BUILD._MOST_WORK
    assert max(max(work) for unit, work in units.items() if unit) <= max(BUILD._FUNCTION_WORK, single)
    assert max(sum(work) for unit, work in units.items() if unit) <= BUILD._UNIT_WORK + max(
        BUILD._FUNCTION_WORK, single
    )


def _compiler_seconds(spec: TensorProductSpec) -> float:
    """Time of cores that it takes to compile the largest kernel of a product."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = runtime.Program(payload(spec)[0])
    assert not runtime.compile_program(program, "cpu", "float32", "double_backward")["cached"]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def test_the_largest_product_compiles_within_half_a_minute(tmp_path, monkeypatch) -> None:
    """On two cores where a kernel of MACE takes 1.9 s of one; that one is the clock, for machines that are busy.

    A quarter of the paths, those of the highest degrees too, in a quarter of the time: no unit grows with their number.
    """
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    layer = "128x0e+128x1o+128x2e+128x3o"
    clock = _compiler_seconds(TensorProductSpec.channelwise(layer, "0e+1o+2e+3o", layer)) / 1.9
    part = TensorProductSpec.channelwise("32x1e+32x2e+32x5e", UP_TO_FIVE, ALL_UP_TO_FIVE)
    assert _compiler_seconds(part) / clock < 2 * 30 * len(part.paths) / 222


@pytest.mark.parametrize(("layout", "dtype"), [("mul_ir", torch.float32), ("ir_mul", torch.float64)])
def test_several_translation_units(layout, device, dtype, tmp_path, monkeypatch, request) -> None:
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path))
    for name, value in (("_MOST_WORK", 60), ("_FUNCTION_WORK", 30), ("_UNIT_WORK", 150)):
        monkeypatch.setattr(BUILD, name, value)
    spec = TensorProductSpec.channelwise("19x0e+19x1o+5x2e", "0e+1o+2e", "0e+1o+2e")
    third_payload.cache_clear()  # of the kernels that follow, none stay
    request.addfinalizer(third_payload.cache_clear)
    assert all(len(_units(spec, direction)) > 4 for direction in (Direction.DOUBLE_BACKWARD, Direction.TRIPLE_BACKWARD))
    module = TensorProductConv(spec, layout=layout).to(device)
    content, key = payload.__wrapped__(module.spec)
    text = runtime.Program(content).source("cpu", "float32", "backward")
    module.key, module.payload = key, torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    assert_product(module, random_operands(spec, 5, 21, num_senders=6, dtype=dtype, device=device), order=3)
    monkeypatch.undo()
    whole = text.replace("#define EQ_UNITS", "#define EQ_WHOLE")
    assert "EQ_UNITS" in text
    assert runtime.compile_cpu(whole, host_target().name)[0]  # the text holds all units


def _hub(nodes: int, degree: int, hub_edges: int) -> torch.Tensor:
    """A ring, and one node that receives many edges and sends as many; the last nodes have none."""
    around = torch.arange(nodes).repeat_interleave(degree)
    ring = torch.stack([(around + torch.arange(degree).repeat(nodes) + 1) % nodes, around])
    others = torch.arange(hub_edges) % nodes
    hub = torch.full_like(others, nodes // 2)
    return torch.cat([ring, torch.stack([others, hub]), torch.stack([hub, others])], dim=1)


@pytest.mark.parametrize(("layout", "deterministic"), MODES)
@pytest.mark.parametrize(("nodes", "degree", "hub_edges"), [(9, 3, 900), (2500, 2, 300)])
def test_one_node_with_many_edges(nodes, degree, hub_edges, layout, deterministic, device, dtype) -> None:
    edge_index = _hub(nodes, degree, hub_edges).to(device)
    made = random_operands(SMALL, nodes + 5, edge_index.shape[1], dtype=dtype, device=device)
    operands = Operands(made.x, made.y, made.w, edge_index, made.num_receivers)
    module = TensorProductConv(SMALL, layout=layout, deterministic=deterministic).to(device)
    assert_product(module, operands)


def test_pieces_are_added_in_a_fixed_order(device, dtype) -> None:
    edge_index = _hub(40, 5, 800).to(device)
    o = random_operands(SMALL, 45, edge_index.shape[1], dtype=dtype, device=device)
    module = TensorProductConv(SMALL).to(device)

    def results() -> list[torch.Tensor]:
        x = o.x.clone().requires_grad_()
        z = module(x, o.y, o.w, edge_index)
        (gx,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return [z, gx, *torch.autograd.grad(gx.square().sum(), x)]

    first = results()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))


@pytest.mark.gpu
def test_gradients_of_x_are_collected_in_parts() -> None:
    """A CPU does not keep them for each edge."""
    spec = TensorProductSpec.channelwise("128x0e+128x1o+128x2e", "0e", "0e+1o+2e")
    nodes, edges, row = 3000, 300_000, 128 * 9 * 8
    o = random_operands(spec, nodes, edges, device="cuda")

    def gradients(deterministic: bool, operands: tuple[torch.Tensor, ...] = (o.x, o.y, o.w)) -> list[torch.Tensor]:
        module = TensorProductConv(spec, deterministic=deterministic).cuda()
        inputs = [t.clone().requires_grad_() for t in operands]
        z = module(*inputs, o.edge_index)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = list(torch.autograd.grad(z.sum(), inputs))
        taken = torch.cuda.max_memory_allocated() - before - sum(t.numel() * 8 for t in (*inputs, z))
        assert not deterministic or taken < 1.1 * 2**30 < edges * row
        return results

    other, first = gradients(False), gradients(True)
    # Couplings with a scalar have no negative entry: gradients of absolute operands are sums of absolute terms.
    scales = gradients(True, (o.x.abs(), o.y.abs(), o.w.abs()))
    for of_parts, of_atomics, scale in zip(first, other, scales, strict=True):
        assert ((of_parts - of_atomics).abs() <= 2 * ERROR_CONSTANT * torch.finfo(torch.float64).eps * scale).all()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(True), strict=True))
