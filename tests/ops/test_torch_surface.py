"""Everything torch does with a module: operator checks, compile, export, tracing, scripting, copies, autocast, C++."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import torch
from folders import SUPPORT
from patch_checks import RELATIVE, assert_close
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import eqaccel
from eqaccel import Graph, TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.ops import library_path
from eqaccel.testing import random_operands

SPEC = TensorProductSpec.channelwise("3x0e+3x1o", "0e+1o", "0e+1o")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


class Energy(nn.Module):
    """Two layers on one graph and a nonlinear read-out, as a small stand-in for a model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TensorProductConv(SPEC)
        self.second = TensorProductConv(TensorProductSpec.channelwise(SPEC.irreps_out, "0e+1o", "0e"))
        self.weights = nn.Linear(SPEC.weight_numel, self.second.spec.weight_numel)

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        z = self.first(x, y, w, edge_index)
        return self.second(z, y, self.weights(w), edge_index).square().sum()


def energy_and_operands(device, dtype=torch.float64, **options):
    torch.manual_seed(0)
    o = random_operands(SPEC, 6, 20, dtype=dtype, device=device, **options)
    return Energy().to(device, dtype).requires_grad_(False), (o.x, o.y, o.w, o.edge_index)


def gradients(function, operands, order=2):
    """The energy and its gradients up to an order, by x, y and w."""
    x, y, w = (t.detach().clone().requires_grad_() for t in operands[:3])
    energy = function(x, y, w, *operands[3:])
    results = [energy.detach()]
    inner = energy
    for number in range(order):
        found = torch.autograd.grad(inner, (x, y, w), create_graph=number + 1 < order)
        results += [g.detach() for g in found]
        inner = sum(g.square().sum() for g in found)
    return results


def assert_equal(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("shared", [False, True])
def test_opcheck(shared, device):
    o = random_operands(SPEC, 4, 9, num_senders=5, shared=shared, device=device)
    module = TensorProductConv(SPEC).to(device)
    graph = Graph(o.edge_index[1], o.edge_index[0], 4, 5).index
    head, tail = (module.payload, module.key), (graph, 4, module.z_dim, True, True)

    def variables(*tensors):
        return tuple(torch.randn_like(t).requires_grad_() for t in tensors)

    z = o.x.new_empty(4, SPEC.z_dim)
    ops = torch.ops.eqaccel
    torch.library.opcheck(ops.graph.default, (o.edge_index[1], o.edge_index[0], 4, 5))
    torch.library.opcheck(ops.tensor_product.default, (*head, *variables(o.x, o.y, o.w), *tail))
    torch.library.opcheck(ops.tensor_product_backward.default, (*head, *variables(z, o.x, o.y, o.w), *tail))
    operands = variables(z, o.x, o.y, o.w, o.x, o.y, o.w)
    torch.library.opcheck(ops.tensor_product_double_backward.default, (*head, *operands, *tail))


def test_state_dict_is_empty(device):
    module = TensorProductConv(SPEC).to(device)
    assert not module.state_dict()
    assert not list(module.parameters())
    module.load_state_dict({})


@pytest.mark.parametrize("kind", [TensorProduct, TensorProductConv])
def test_copies_and_conversions(kind, device, dtype, tmp_path):
    batch = kind is TensorProduct
    o = random_operands(SPEC, 5, 5 if batch else 12, batch=batch, dtype=dtype, device=device)
    arguments = (o.x, o.y, o.w) if batch else (o.x, o.y, o.w, o.edge_index)
    module = kind(SPEC, layout="ir_mul").to(device)
    expected = module(*arguments)
    torch.save(module, tmp_path / "module.pt")
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(tmp_path / "module.pt", weights_only=False),
        copy.deepcopy(module).float(),
        copy.deepcopy(module).double(),
        copy.deepcopy(module).half(),
        copy.deepcopy(module).to(device, torch.float32),
        copy.deepcopy(module).eval(),
    ]
    for other in copies:
        assert other.payload.dtype == torch.uint8
        assert other.spec == module.spec
        assert torch.equal(other(*arguments), expected)
    assert "ir_mul" in repr(module)


def test_the_dtype_is_that_of_the_input(device):
    module = TensorProductConv(SPEC).to(device)
    for dtype in (torch.float32, torch.float64, torch.float32):
        o = random_operands(SPEC, 5, 12, dtype=dtype, device=device)
        assert module(o.x, o.y, o.w, o.edge_index).dtype == dtype


def test_make_fx(device):
    """The traced energy and forces hold two convolutions and two backward operators, and no sort is left out."""
    module, operands = energy_and_operands(device)

    def energy_and_forces(x, y, w, edge_index):
        y = y.detach().requires_grad_()
        energy = module(x, y, w, edge_index)
        return energy.detach(), torch.autograd.grad(energy, y)[0]

    traced = make_fx(energy_and_forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*operands)
    names = [str(node.target) for node in traced.graph.nodes]
    assert names.count("eqaccel.tensor_product.default") == 2
    assert names.count("eqaccel.tensor_product_backward.default") == 2
    other = random_operands(SPEC, 9, 31, seed=5, device=device)
    other = (other.x, other.y, other.w, other.edge_index)
    assert_equal(traced(*other), energy_and_forces(*other))


def test_export(device, tmp_path):
    module, operands = energy_and_operands(device)
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    shapes = ({0: nodes}, {0: edges}, {0: edges}, {1: edges})
    program = torch.export.export(module, operands, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "energy.pt2")
    loaded = torch.export.load(tmp_path / "energy.pt2")
    other = random_operands(SPEC, 9, 31, seed=5, device=device)
    other = (other.x, other.y, other.w, other.edge_index)
    for exported in (program, loaded):
        assert_equal(gradients(exported.module(), other, 1), gradients(module, other, 1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    module, operands = energy_and_operands(device)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
    assert_equal(gradients(compiled, operands, 1), gradients(module, operands, 1))
    other = random_operands(SPEC, 9, 31, seed=5, device=device)
    other = (other.x, other.y, other.w, other.edge_index)
    assert_equal(gradients(compiled, other, 1), gradients(module, other, 1))


def test_script(device, tmp_path):
    module, operands = energy_and_operands(device)
    expected = gradients(module, operands)
    scripted = torch.jit.script(module)
    scripted.save(tmp_path / "energy.pt")
    loaded = torch.jit.load(tmp_path / "energy.pt", map_location=device)
    frozen = torch.jit.freeze(torch.jit.script(copy.deepcopy(module).eval()))
    for program in (scripted, loaded, frozen, copy.deepcopy(loaded)):
        assert_equal(gradients(program, operands), expected)


def test_script_accepts_what_eager_accepts(device):
    o = random_operands(SPEC, 5, 12, num_senders=7, device=device)
    conv = TensorProductConv(SPEC).to(device)
    expected = conv(o.x, o.y, o.w, o.edge_index, 5)
    scripted = torch.jit.script(conv)
    assert torch.equal(scripted(o.x, o.y, o.w, o.edge_index, 5), expected)
    index = Graph(o.edge_index[1], o.edge_index[0], 5, 7).index
    assert torch.equal(scripted(o.x, o.y, o.w, index, 5), expected)
    unweighted = TensorProduct(TensorProductSpec("2x0e", "1o", "2x1o", [(0, 0, 0, "uvu", False)])).to(device)
    x, y = torch.randn(3, 2, device=device), torch.randn(3, 3, device=device)
    assert torch.equal(torch.jit.script(unweighted)(x, y), unweighted(x, y))
    with pytest.raises(RuntimeError, match="'y' must have shape"):
        scripted(o.x, o.y[:, :2], o.w, o.edge_index, 5)


def test_fresh_process_loads_what_was_saved(device, tmp_path):
    """The payload travels with the program: another process, which never saw the spec, runs it."""
    module, operands = energy_and_operands(device)
    torch.jit.script(module).save(tmp_path / "scripted.pt")
    torch.export.save(torch.export.export(module, operands), tmp_path / "exported.pt2")
    torch.save(module, tmp_path / "pickled.pt")
    torch.save(operands, tmp_path / "operands.pt")
    script = f"""
import torch
torch.ops.load_library({str(library_path())!r})
operands = torch.load("operands.pt")
print(repr(float(torch.jit.load("scripted.pt")(*operands))))
exported = torch.export.load("exported.pt2")
torch.compile(exported.module(), backend="aot_eager", fullgraph=True)
print(repr(float(exported.run_decompositions().module()(*operands))))
import sys; assert not any(name.startswith("eqaccel") for name in sys.modules)
sys.path.insert(0, {str(Path(eqaccel.__file__).parents[1])!r})
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(SUPPORT)!r}]
print(repr(float(torch.load("pickled.pt", weights_only=False)(*operands))))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = float(module(*operands))
    assert [float(line) for line in done.stdout.split()] == pytest.approx([expected] * 3, rel=RELATIVE)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(low, device):
    o = random_operands(SPEC, 5, 12, dtype=torch.float32, device=device)
    module = TensorProductConv(SPEC).to(device)
    x, y, w = o.x.to(low).requires_grad_(), o.y.to(low), o.w.to(low)
    with torch.autocast(device.type, dtype=low):
        z = module(x, y, w, o.edge_index)
        assert z.dtype == torch.float32
        assert torch.equal(z, module(x.float(), y.float(), w, o.edge_index))
        double = module(o.x.double(), o.y.double(), o.w.double(), o.edge_index)
        assert double.dtype == torch.float64
    z.sum().backward()
    assert x.grad.dtype == low


def test_meta_tensors():
    o = random_operands(SPEC, 5, 12, num_senders=7)
    module = TensorProductConv(SPEC).to("meta")
    z = module(*(t.to("meta") for t in (o.x, o.y, o.w, o.edge_index)), 5)
    assert z.shape == (5, SPEC.z_dim)
    assert z.device.type == "meta"


@pytest.mark.gpu
def test_cuda_graph():
    device = torch.device("cuda")
    module, (x, y, w, edge_index) = energy_and_operands(device)
    static = [x.clone(), y.clone().requires_grad_(), w.clone(), edge_index.clone()]

    def step():
        energy = module(*static)
        return energy.detach(), *torch.autograd.grad(energy, static[1])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = step()
    other = random_operands(SPEC, 6, 20, seed=7, device=device)
    with torch.no_grad():
        for buffer, value in zip(static, (other.x, other.y, other.w, other.edge_index), strict=True):
            buffer.copy_(value)
    captured.replay()
    assert_equal(outputs, step())


@pytest.mark.gpu
def test_streams():
    device = torch.device("cuda")
    module, operands = energy_and_operands(device)
    expected = gradients(module, operands)
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(gradients(module, operands))
    torch.cuda.synchronize()
    for result in results:
        assert_equal(result, expected)


@pytest.mark.slow
def test_cpp_host(device, tmp_path):
    """A C++ program without Python finds first and second derivatives of a scripted model."""
    module, operands = energy_and_operands(device)
    for name, tensor in zip(("x", "y", "w", "edge_index"), operands, strict=True):
        module.register_buffer(name, tensor)
    torch.jit.script(module).save(tmp_path / "energy.pt")

    printed = hosts.run(hosts.build("main.cpp", tmp_path), library_path(), tmp_path / "energy.pt")
    assert len(printed) == 7
    assert_equal(
        [torch.tensor(values, dtype=torch.float64) for values in printed],
        [t.flatten().cpu() for t in gradients(module, operands)],
    )
