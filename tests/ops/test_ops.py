"""The tensor product against its float64 reference: forward and derivatives, for every kind of operand."""

import dataclasses

import pytest
import torch

import eqaccel
from eqaccel import Graph, TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.errors import CompileError, MissingCompilerError, OperandError
from eqaccel.testing import Operands, assert_product, random_operands

SMALL = TensorProductSpec.channelwise("4x0e+4x1o", "0e+1o", "0e+1o")
SPECS = {
    "one_channel": TensorProductSpec.channelwise("1x0e+1x1o", "0e+1o+2e", "0e+1o+2e"),
    "mace": TensorProductSpec.channelwise("32x0e+32x1o", "0e+1o+2e", "0e+1o+2e"),
    "first_layer": TensorProductSpec.channelwise("89x0e", "0e+1o+2e+3o", "0e+1o+2e+3o"),
    "ragged": TensorProductSpec.channelwise("5x0e+33x1o+1x2e", "0e+1o", "0e+1o+2e"),
    "ragged_wide": TensorProductSpec.channelwise("128x0e+64x1o+32x2e+32x3o", "0e+1o", "0e+1o"),
    "high_degree": TensorProductSpec("2x7o", "3e", "2x6o", [(0, 0, 0, "uvu", True)]),
    "unsorted_repeated_mixed": TensorProductSpec(
        "4x1o+3x0e+4x1o",
        "2e+0e+1o+0e",
        "3x1o+4x1o+2x0e+4x0e",
        [
            (2, 0, 1, "uvu", True, 0.7),
            (0, 1, 1, "uvu", False),
            (1, 2, 0, "uvu", True),
            (0, 2, 3, "uvu", True, 2.0),
            (2, 3, 1, "uvu", True),
            (2, 2, 3, "uvu", False),
        ],
    ),
    "unweighted": TensorProductSpec("3x0e+2x1o", "1o", "2x0e+3x1o", [(1, 0, 0, "uvu", False), (0, 0, 1, "uvu", False)]),
}
MODES = [("mul_ir", True), ("ir_mul", False)]


@pytest.mark.parametrize(("layout", "deterministic"), MODES)
@pytest.mark.parametrize("name", SPECS)
def test_convolution(name, layout, deterministic, device, dtype):
    spec = SPECS[name]
    module = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
    assert_product(module, random_operands(spec, 9, 61, num_senders=11, dtype=dtype, device=device))


@pytest.mark.parametrize(("layout", "deterministic"), MODES)
def test_columns_that_no_path_reads_or_writes(layout, deterministic, device, dtype):
    """Nothing of what was in their memory before gets out."""
    paths = [(3, 1, 0, "uvu"), (0, 1, 2, "uvu")]
    spec = TensorProductSpec("4x0e+3x0o+5x1e+6x1o", "0e+1o", "6x0e+2x0o+4x1o", paths)
    module = TensorProductConv(spec, layout=layout, deterministic=deterministic).to(device)
    for edges in (61, 3000):  # rows of 3000 are cut
        operands = random_operands(spec, 9, edges, num_senders=11, dtype=dtype, device=device)
        kept = [torch.full((1 << size,), torch.nan, device=device, dtype=dtype) for size in range(6, 22)]
        del kept
        assert_product(module, operands, order=3)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("name", ["mace", "unsorted_repeated_mixed", "unweighted"])
def test_batch(name, layout, device, dtype):
    spec = SPECS[name]
    module = TensorProduct(spec, layout=layout).to(device)
    assert_product(module, random_operands(spec, 13, 13, batch=True, dtype=dtype, device=device))


@pytest.mark.parametrize("batch", [False, True])
def test_shared_weights(batch, device, dtype):
    module = (TensorProduct if batch else TensorProductConv)(SMALL).to(device)
    operands = random_operands(SMALL, 50, 50 if batch else 300, batch=batch, shared=True, dtype=dtype, device=device)
    assert_product(module, operands, order=3)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("receivers", "senders", "edges"),
    [(0, 0, 0), (3, 5, 0), (0, 4, 0), (1, 1, 1), (1, 1, 7), (1, 40, 40), (4, 30, 50), (200, 150, 20), (70, 70, 2000)],
)
def test_graph_sizes(receivers, senders, edges, deterministic, device, dtype):
    """Empty graphs, one node, self loops, one receiver, fewer receivers than senders, isolated nodes, high degree."""
    module = TensorProductConv(SMALL, deterministic=deterministic).to(device)
    assert_product(module, random_operands(SMALL, receivers, edges, num_senders=senders, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("degree", "deterministic", "dtype"),
    [(2, True, torch.float32), (2, False, torch.float64), (14, True, torch.float64), (14, False, torch.float32)],
)
def test_many_rows(degree, deterministic, device, dtype):
    """More nodes than a GPU has blocks: of few or many edges or of none, and two hubs, in no order."""
    nodes, hub = 6000, 3000
    generator = torch.Generator().manual_seed(degree)
    ends = []
    for hub_at in (17, 4321):
        degrees = torch.randint(0, 2 * degree + 1, (nodes,), generator=generator)
        degrees[1000:1100] = degrees[-300:] = 0
        degrees[hub_at] = hub
        end = torch.repeat_interleave(torch.arange(nodes), degrees)
        ends.append(end[torch.randperm(len(end), generator=generator)])
    edges = min(map(len, ends))
    operands = random_operands(SMALL, nodes, edges, num_senders=nodes, dtype=dtype, device=device)
    edge_index = torch.stack([end[:edges] for end in ends]).to(device)
    module = TensorProductConv(SMALL, deterministic=deterministic).to(device)
    assert_product(module, dataclasses.replace(operands, edge_index=edge_index))


def test_empty_batch(device, dtype):
    module = TensorProduct(SMALL).to(device)
    assert_product(module, random_operands(SMALL, 0, 0, batch=True, dtype=dtype, device=device))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_non_contiguous_operands(index_dtype, device, dtype):
    o = random_operands(SMALL, 8, 40, dtype=dtype, device=device)
    edge_index = o.edge_index.to(index_dtype).t().contiguous().t()
    strided = Operands(
        x=torch.cat([o.x, o.x], 1)[:, : SMALL.x_dim],
        y=o.y.t().contiguous().t(),
        w=torch.stack([o.w, o.w], 2)[:, :, 0],
        edge_index=edge_index,
        num_receivers=o.num_receivers,
    )
    assert not any(t.is_contiguous() for t in (strided.x, strided.y, strided.w, edge_index))
    module = TensorProductConv(SMALL).to(device)
    assert torch.equal(module(strided.x, strided.y, strided.w, edge_index), module(o.x, o.y, o.w, o.edge_index))
    z = module(strided.x.requires_grad_(), strided.y, strided.w, edge_index)
    strided_gradient = torch.randn(SMALL.z_dim, 8, dtype=dtype, device=device).t()
    (gx,) = torch.autograd.grad(z, strided.x, strided_gradient, retain_graph=True)
    (expected,) = torch.autograd.grad(z, strided.x, strided_gradient.contiguous())
    assert torch.equal(gx, expected)


def test_expanded_weights_and_gradient(device, dtype):
    """A weight row repeated by expand, and the gradient that sum() gives: both have stride 0."""
    module = TensorProductConv(SMALL).to(device)
    o = random_operands(SMALL, 6, 20, shared=True, dtype=dtype, device=device)
    row = o.w.clone().requires_grad_()
    shared = o.w.clone().requires_grad_()
    module(o.x, o.y, row.expand(20, -1), o.edge_index).sum().backward()
    module(o.x, o.y, shared[None], o.edge_index).sum().backward()
    torch.testing.assert_close(row.grad, shared.grad)


def test_layouts_are_permutations_of_each_other(device, dtype):
    o = random_operands(SMALL, 6, 20, dtype=dtype, device=device)

    def to_ir_mul(t, irreps):
        blocks = t.split([item.mul * item.ir.dim for item in irreps], 1)
        return torch.cat(
            [b.reshape(-1, i.mul, i.ir.dim).mT.reshape(len(b), -1) for b, i in zip(blocks, irreps, strict=True)], 1
        )

    z = TensorProductConv(SMALL).to(device)(o.x, o.y, o.w, o.edge_index)
    x = to_ir_mul(o.x, SMALL.irreps_in1)
    other = TensorProductConv(SMALL, layout="ir_mul").to(device)(x, o.y, o.w, o.edge_index)
    torch.testing.assert_close(to_ir_mul(z, SMALL.irreps_out), other)


def test_calls_agree(device, dtype):
    o = random_operands(SMALL, 6, 20, dtype=dtype, device=device)
    graph = Graph.from_edge_index(o.edge_index, 6)
    module = TensorProductConv(SMALL).to(device)
    z = module(o.x, o.y, o.w, o.edge_index)
    assert torch.equal(z, module(o.x, o.y, o.w, graph.index))
    assert torch.equal(z, module.convolve(o.x, o.y, o.w, graph))
    assert torch.equal(z, TensorProductConv(SMALL, deterministic=False).to(device)(o.x, o.y, o.w, o.edge_index))


def test_weights_may_be_left_out_only_without_weighted_paths(device, dtype):
    spec = SPECS["unweighted"]
    o = random_operands(spec, 5, 5, batch=True, dtype=dtype, device=device)
    module = TensorProduct(spec).to(device)
    assert torch.equal(module(o.x, o.y), module(o.x, o.y, o.w))
    o = random_operands(SMALL, 5, 5, batch=True, dtype=dtype, device=device)
    with pytest.raises(OperandError, match=r"argument 'w' must have shape \(num_edges, 16\)"):
        TensorProduct(SMALL).to(device)(o.x, o.y)


def test_only_requested_gradients(device, dtype):
    o = random_operands(SMALL, 6, 20, dtype=dtype, device=device)
    module = TensorProductConv(SMALL).to(device)
    assert not module(o.x, o.y, o.w, o.edge_index).requires_grad
    o.y.requires_grad_()
    (gy,) = torch.autograd.grad(module(o.x, o.y, o.w, o.edge_index).sum(), o.y)
    assert not gy.requires_grad
    with torch.no_grad():
        assert not module(o.x, o.y, o.w, o.edge_index).requires_grad


def operands_with(**changes):
    o = random_operands(SMALL, 5, 12)
    return {"x": o.x, "y": o.y, "w": o.w, "edge_index": o.edge_index, "num_receivers": 5} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 5, 16).double()}, r"x: expected shape \(num_senders, 16\), got \[2, 5, 16\]"),
        ({"x": torch.zeros(5, 15).double()}, r"'x' must have shape \(num_senders, 16\) = \(5, 16\), got \[5, 15\]"),
        ({"x": torch.zeros(16).double()}, r"x: expected shape \(num_senders, 16\), got \[16\]"),
        ({"x": torch.zeros(5, 16).half()}, r"'x' must be float32 or float64, got Half"),
        ({"y": torch.zeros(12, 3).double()}, r"'y' must have shape \(num_edges, 4\) = \(12, 4\), got \[12, 3\]"),
        ({"y": torch.zeros(12, 4)}, r"'y' must be Double on cpu, like 'x', got Float on cpu"),
        ({"y": torch.zeros(11, 4).double()}, r"'graph' must be the int32 result of eqaccel::graph"),
        ({"w": torch.zeros(12, 17).double()}, r"'w' must have shape \(num_edges, 16\) = \(12, 16\), or \(16,\)"),
        ({"w": torch.zeros(7, 16).double()}, r"'w' must have shape"),
        ({"w": None}, r"'w' must have shape"),
        ({"edge_index": torch.zeros(9, dtype=torch.int32)}, r"'graph' must be the int32 result of eqaccel::graph"),
    ],
)
def test_wrong_operands(changes, message):
    with pytest.raises(OperandError, match=message):
        TensorProductConv(SMALL)(**operands_with(**changes))


def test_batch_rows_must_match():
    module = TensorProduct(SMALL)
    with pytest.raises(OperandError, match=r"a batch .* must have as many rows .* num_receivers = 3, got 3 and 4"):
        module(torch.zeros(3, 16), torch.zeros(4, 4), torch.zeros(16))


def test_wrong_layout():
    with pytest.raises(OperandError, match=r"layout: expected 'mul_ir' or 'ir_mul', got 'channels_last'"):
        TensorProduct(SMALL, layout="channels_last")


@pytest.mark.parametrize(("layout", "deterministic"), [("mul_ir", False), ("ir_mul", True)])
@pytest.mark.parametrize("name", ["mace", "ragged", "unsorted_repeated_mixed"])
def test_other_modes_of_gpus(name, layout, deterministic, device, dtype):
    """On a CPU gradients are added in the same order in any mode."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    o = random_operands(SPECS[name], 5, 21, num_senders=6, dtype=dtype, device=device)
    assert_product(TensorProductConv(SPECS[name], deterministic=deterministic, layout=layout).to(device), o)


def test_kernels_for_other_operands_are_refused(device, dtype):
    """Those for CPUs take both layouts, and rows as well as graphs."""
    x, y, w, _, rows = dataclasses.astuple(random_operands(SMALL, 3, 3, batch=True, dtype=dtype, device=device))
    empty = torch.empty(0, dtype=torch.int32, device=device)
    product = TensorProduct(SMALL).to(device)
    for module, mul_ir, text in [
        (product, False, r"blocks laid out \(2l\+1, mul\), got those for blocks laid out \(mul, 2l\+1\)"),
        (TensorProductConv(SMALL).to(device), True, "rows without a graph, got those for graphs"),
    ]:
        arguments = (module.payload, module.key, x, y, w, empty, rows, SMALL.z_dim, mul_ir, True)
        if device.type == "cpu":
            other = TensorProduct(SMALL, layout="mul_ir" if mul_ir else "ir_mul")
            assert torch.equal(torch.ops.eqaccel.tensor_product(*arguments), other(x, y, w))
        else:
            with pytest.raises(
                (RuntimeError, ValueError), match=f"payload: expected kernels for {text}: make a module"
            ):
                torch.ops.eqaccel.tensor_product(*arguments)


def test_gradient_of_the_wrong_shape():
    module = TensorProduct(SMALL)
    o = random_operands(SMALL, 3, 3, batch=True)
    arguments = (o.x, o.y, o.w, torch.empty(0, dtype=torch.int32), 3, SMALL.z_dim, True, True)
    with pytest.raises(RuntimeError, match=r"'gz' must have shape \(num_receivers, 32\) = \(3, 32\), got \[3, 31\]"):
        torch.ops.eqaccel.tensor_product_backward(module.payload, module.key, torch.zeros(3, 31).double(), *arguments)


def test_foreign_payload_and_dimensions():
    module = TensorProduct(SMALL)
    o = random_operands(SMALL, 3, 3, batch=True)
    batch = torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="argument 'payload' must be the uint8 tensor that belongs to key 12345"):
        torch.ops.eqaccel.tensor_product(torch.zeros(3), 12345, o.x, o.y, o.w, batch, 3, SMALL.z_dim, True, True)
    with pytest.raises(RuntimeError, match="argument 'z_dim' must be 32, as in the payload, got 31"):
        torch.ops.eqaccel.tensor_product(module.payload, module.key, o.x, o.y, o.w, batch, 3, 31, True, True)


@pytest.mark.parametrize(("degree", "error"), [(3, CompileError), (4, MissingCompilerError)])
def test_compiler_errors(degree, error, monkeypatch, tmp_path):
    """The kinds and the logs of the runtime's errors survive torch, which knows only RuntimeError."""
    compiler = tmp_path / "c++"
    if error is CompileError:
        compiler.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "c++ 99"; else echo boom >&2; exit 1; fi\n')
        compiler.chmod(0o755)
    monkeypatch.setenv("EQACCEL_CXX", str(compiler))
    monkeypatch.setenv("EQACCEL_CACHE_DIR", str(tmp_path / "cache"))
    module = TensorProduct(TensorProductSpec.channelwise(f"7x{degree}e", "0e", f"{degree}e"))  # compiled nowhere else
    with pytest.raises(error, match=r"compiler|executable") as raised:
        module(torch.zeros(2, module.spec.x_dim), torch.zeros(2, 1), torch.zeros(7))
    assert type(raised.value) is error
    assert ("boom" in raised.value.log) == (error is CompileError)
    assert "Compiler output" not in str(raised.value)


def test_weights_keep_the_order_of_e3nn():
    w = torch.randn(2, 3, SMALL.weight_numel, requires_grad=True)
    for reorder in (eqaccel.reorder_weights_from_e3nn, eqaccel.reorder_weights_to_e3nn):
        assert torch.equal(reorder(SMALL, w), w)
        (gradient,) = torch.autograd.grad(reorder(SMALL, w).sum(), w)
        assert torch.equal(gradient, torch.ones_like(w))
        with pytest.raises(OperandError, match=rf"w: expected shape \(..., {SMALL.weight_numel}\), .* got \(2, 3\)"):
            reorder(SMALL, w[..., 0])


@pytest.mark.parametrize("scalar", [torch.float32, torch.float64])
def test_large_weight_gradients_of_paths_that_start_between_vectors(scalar):
    """Rows of weights that fill the caches are written past them, which takes aligned vectors."""
    instructions = [(block, 0, block, "uvu", True) for block in range(3)]
    spec = TensorProductSpec("5x0e+16x0e+11x0e", "0e", "5x0e+16x0e+11x0e", instructions)
    rows = 140_000  # 17 MiB of gradients in float32
    x, y, w = (torch.rand(rows, size, dtype=scalar) - 0.5 for size in (spec.x_dim, spec.y_dim, spec.weight_numel))
    module = TensorProduct(spec)
    (gw,) = torch.autograd.grad(module(x, y, w.requires_grad_()).sum(), w)
    coefficients = torch.tensor([path.coefficient for path in spec.paths], dtype=scalar)
    expected = x * y * coefficients.repeat_interleave(torch.tensor([path.mul for path in spec.paths]))
    assert bool(((gw - expected).abs() <= 4 * torch.finfo(scalar).eps * expected.abs()).all())


@pytest.mark.parametrize("scalar", [torch.float32, torch.float64])
def test_large_convolutions_write_every_output(scalar):
    """Outputs are written past the caches where weights fill these: of many edges, of few and of none."""
    spec = TensorProductSpec.channelwise("64x0e", "0e", "64x0e")
    nodes, edges = 500, 70_000  # 17 MiB of weights in float32
    receiver, sender = torch.randint(1, nodes // 2, (edges,)), torch.randint(nodes, (edges,))
    receiver[:2] = nodes - 1
    x, y, w = (torch.rand(size, dtype=scalar) - 0.5 for size in ((nodes, 64), (edges, 1), (edges, 64)))
    z = TensorProductConv(spec, layout="ir_mul")(x, y, w, torch.stack([sender, receiver]))
    terms = spec.paths[0].coefficient * x.double()[sender] * y.double() * w.double()
    expected, scale = (torch.zeros(nodes, 64).double().index_add(0, receiver, t) for t in (terms, terms.abs()))
    additions = int(receiver.bincount().max())
    assert bool(((z - expected).abs() <= additions * torch.finfo(scalar).eps * scale).all())
