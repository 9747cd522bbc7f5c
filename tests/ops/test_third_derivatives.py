"""The kernel of third derivatives: against the reference, against composition, and when it is taken."""

from __future__ import annotations

import pytest
import torch
from operator_calls import called
from torch import Tensor
from torch.autograd import gradgradcheck

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec, runtime, warmup
from eqaccel.families.tensor_product import payload, third_payload, third_payload_of
from eqaccel.families.tensor_product.spec import read_spec_text, spec_text
from eqaccel.testing import Operands, assert_close, assert_product, derivatives, random_operands, reference

SPECS = {
    "mace": TensorProductSpec.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e"),
    "ragged": TensorProductSpec.channelwise("5x0e+33x1o+1x2e", "0e+1o", "0e+1o+2e"),
    "mixed": TensorProductSpec(
        "4x1o+3x0e+4x1o",
        "2e+0e+1o+0e",
        "3x1o+4x1o+2x0e+4x0e",
        [(2, 0, 1, "uvu", True, 0.7), (0, 1, 1, "uvu", False), (1, 2, 0, "uvu", True), (2, 3, 1, "uvu", True, 0.0)],
    ),
}
SPEC = TensorProductSpec.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
DENSE = TensorProductSpec("2x0e+2x1o", "1x0e+2x1o", "3x0e", [(0, 0, 0, "uvw"), (1, 1, 0, "uvw")])
LAYOUTS = pytest.mark.parametrize(("layout", "deterministic"), [("mul_ir", True), ("ir_mul", True), ("mul_ir", False)])
KERNEL, COMPOSED = "tensor_product_triple_backward", "tensor_product_double_backward"


def call(module: TensorProductConv, o: Operands, operands: list[Tensor], kind: str = KERNEL) -> tuple[Tensor, ...]:
    """The operator of the kernel, or that of the double backward, on operands in the order of the operator."""
    from eqaccel.ops.graph import packed_index

    graph = packed_index(o.edge_index, o.num_receivers, len(o.x))
    problem = (graph, o.num_receivers, module.z_dim, module.mul_ir, module.deterministic)
    return getattr(torch.ops.eqaccel, kind)(module.payload, module.key, *operands, *problem)


def eleven(spec: TensorProductSpec, o: Operands) -> list[Tensor]:
    """gz, x, y, w, a, b, c, g, p, q and r."""
    generator = torch.Generator().manual_seed(4)
    z = o.x.new_empty(o.num_receivers, spec.z_dim)
    like = [z, o.x, o.y, o.w, o.x, o.y, o.w, z, o.x, o.y, o.w]
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in like]


def expected(spec: TensorProductSpec, o: Operands, operands: list[Tensor], layout: str, absolute: bool) -> list[Tensor]:
    """What the kernel gives, in its order, by autograd of the reference in float64."""
    gz, x, y, w, a, b, c, g, p, q, r = (t.double().abs() if absolute else t.double() for t in operands)

    def product(*inputs: Tensor) -> Tensor:
        return reference(spec, *inputs, o.edge_index, o.num_receivers, layout=layout, absolute=absolute)

    ga, gb, gc, ggz, gx, gy, gw = derivatives(product, (x, y, w), [(gz,), (a, b, c), (g, p, q, r)])[-7:]
    return [ggz, gx, gy, gw, ga, gb, gc]


@LAYOUTS
@pytest.mark.parametrize("name", SPECS)
def test_every_operand(name: str, layout: str, deterministic: bool, device: torch.device, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    module = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
    o = random_operands(spec, 9, 61, num_senders=11, dtype=dtype, device=device)
    operands = eleven(spec, o)
    results = call(module, o, operands)
    values = [[t.cpu() for t in expected(spec, o, operands, layout, absolute)] for absolute in (False, True)]
    assert_close([t.cpu() for t in results], *values)
    if deterministic:
        assert all(map(torch.equal, results, call(module, o, operands)))


@pytest.mark.parametrize(("receivers", "senders", "edges"), [(3, 5, 0), (0, 4, 0), (1, 1, 7), (70, 70, 2000)])
def test_graph_sizes(receivers: int, senders: int, edges: int, device: torch.device, dtype: torch.dtype) -> None:
    """No edges, one node, many edges a node; shared weights go with every graph."""
    for shared in (False, True):
        o = random_operands(SPEC, receivers, edges, num_senders=senders, shared=shared, dtype=dtype, device=device)
        assert_product(TensorProductConv(SPEC).to(device), o, order=3)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("shared", [False, True])
def test_batch(layout: str, shared: bool, device: torch.device, dtype: torch.dtype) -> None:
    o = random_operands(SPECS["mixed"], 13, 13, batch=True, shared=shared, dtype=dtype, device=device)
    assert_product(TensorProduct(SPECS["mixed"], layout=layout).to(device), o, order=3)


def test_operands_with_gaps(device: torch.device) -> None:
    o = random_operands(SPEC, 7, 30, num_senders=8, device=device)
    operands = eleven(SPEC, o)
    gaps = [torch.stack([t, t], -1)[..., 0] for t in operands]
    assert not any(t.is_contiguous() for t in gaps)
    module = TensorProductConv(SPEC).to(device)
    assert all(map(torch.equal, call(module, o, gaps), call(module, o, operands)))


def test_results_do_not_depend_on_threads() -> None:
    o = random_operands(SPEC, 60, 5000, dtype=torch.float32)
    module, operands, threads = TensorProductConv(SPEC), eleven(SPEC, o), torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(call(module, o, operands))
    torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for others in found[1:] for first, other in zip(found[0], others, strict=True))


# Gradients of some results of the double backward alone, in the order ggz, gx, gy, gw, and what computes theirs.
SOME = {
    (0, 1, 2, 3): KERNEL,
    (0, 2): KERNEL,
    (0, 1): KERNEL,
    (0,): COMPOSED,
    (1,): COMPOSED,
    (2, 3): KERNEL,
    (3,): COMPOSED,
}


@pytest.mark.parametrize("given", SOME)
def test_gradients_of_some_results(given: tuple[int, ...], device: torch.device) -> None:
    """Few are composed of fewer calls than the kernel takes the time of."""
    module = TensorProductConv(SPEC).to(device)
    o = random_operands(SPEC, 7, 30, num_senders=8, device=device)
    values = eleven(SPEC, o)
    operands, incoming = [t.requires_grad_() for t in values[:7]], values[7:]
    results = call(module, o, operands, COMPOSED)
    with called() as names:
        found = torch.autograd.grad(
            [results[n] for n in given], operands, [incoming[n] for n in given], allow_unused=True
        )
    assert set(names) & {KERNEL, COMPOSED} == {SOME[given]}
    zeroed = [t if n in given else torch.zeros_like(t) for n, t in enumerate(incoming)]
    wanted = [
        [t.cpu() for t in expected(SPEC, o, [*(t.detach() for t in operands), *zeroed], "mul_ir", absolute)]
        for absolute in (False, True)
    ]
    for ours, right, scale in zip(found, *wanted, strict=True):
        assert_close([torch.zeros_like(right) if ours is None else ours.cpu()], [right], [scale])


def test_what_is_not_needed_is_left_out(device: torch.device) -> None:
    module = TensorProductConv(SPEC).to(device)
    o = random_operands(SPEC, 7, 30, device=device)
    values = eleven(SPEC, o)
    operands = [values[0], *(t.requires_grad_() for t in values[1:7])]
    inner = sum((r * t).sum() for r, t in zip(call(module, o, operands, COMPOSED), values[7:], strict=True))
    with called() as names:
        inner.backward()
    assert KERNEL in names
    assert operands[0].grad is None
    assert all(t.grad is not None for t in operands[1:])


def test_fourth_derivatives_are_composed(device: torch.device) -> None:
    """The kernel's own derivatives, and third ones that are to be differentiated."""
    module = TensorProductConv(SPEC).to(device)
    o = random_operands(SPEC, 2, 4, device=device)
    operands = [t.requires_grad_() for t in eleven(SPEC, o)]
    assert gradgradcheck(lambda *inputs: call(module, o, list(inputs)), operands, fast_mode=True)
    results = call(module, o, operands[:7], COMPOSED)
    with called() as names:
        torch.autograd.grad(results, operands[:7], operands[7:], create_graph=True)
    assert KERNEL not in names


def test_products_that_are_not_channel_by_channel_are_composed(device: torch.device, dtype: torch.dtype) -> None:
    module = TensorProductConv(DENSE).to(device)
    assert third_payload(DENSE) is None
    with called() as names:
        assert_product(module, random_operands(DENSE, 4, 9, dtype=dtype, device=device), order=3)
    assert KERNEL not in names
    assert runtime.third_program(module.key) is None
    kernels = warmup(module, directions="triple_backward", dtypes=dtype).kernels
    assert [kernel.direction for kernel in kernels] == ["backward", "double_backward"]


def test_kernels_are_made_where_they_are_asked_for(device: torch.device) -> None:
    """The payload of a module has none, and no more than a note of what it computes."""
    content, _ = payload(SPEC)
    note = b"\nspec %d\n%s\n" % (len(spec_text(SPEC)), spec_text(SPEC).encode())
    assert note in content
    assert b"triple_backward" not in content
    module = TensorProductConv(SPEC).to(device)
    (kernel,) = warmup(module, directions="triple_backward", dtypes=torch.float32).kernels
    assert kernel.direction == "triple_backward"
    program = runtime.third_program(module.key)
    assert program is not None
    assert program.source("cpu", "float32", "triple_backward")


@pytest.mark.parametrize(
    "spec", [*SPECS.values(), DENSE, SPECS["mace"].with_bfloat16_weights(), TensorProductSpec("2x0e", "0e", "2x0e", [])]
)
def test_a_payload_says_what_it_computes(spec: TensorProductSpec) -> None:
    read = read_spec_text(spec_text(spec))
    assert read.digest == spec.digest
    assert payload(read) == payload(spec)
    made = third_payload(spec)
    assert third_payload_of(spec_text(spec)) == (None if made is None else made[0])


def test_rounded_weights(device: torch.device) -> None:
    """Operands of the kernel are rounded where they are weights, and no tangents are."""
    spec = SPECS["mace"].with_bfloat16_weights()
    module = TensorProductConv(spec).to(device)
    o = random_operands(spec, 9, 61, dtype=torch.float32, device=device)
    operands = eleven(spec, o)
    results = call(module, o, operands)
    operands[3] = operands[3].bfloat16().float()
    values = [[t.cpu() for t in expected(spec, o, operands, "mul_ir", absolute)] for absolute in (False, True)]
    assert_close([t.cpu() for t in results], *values)


def test_traced_with_fake_tensors(device: torch.device) -> None:
    """Shapes without data, as compilers ask for them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module = TensorProductConv(SPEC).to(device)
    o = random_operands(SPEC, 7, 30, num_senders=8, device=device)
    operands = eleven(SPEC, o)
    wanted = call(module, o, operands)
    traced = make_fx(lambda *inputs: call(module, o, list(inputs)), tracing_mode="fake", _allow_non_fake_inputs=True)
    assert all(map(torch.equal, traced(*operands)(*operands), wanted))
