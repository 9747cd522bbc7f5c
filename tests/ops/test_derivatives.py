"""Derivatives: numerical checks in float64, every order, every way autograd may ask; and reproducibility."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from eqaccel import TensorProduct, TensorProductConv, TensorProductSpec
from eqaccel.testing import assert_product, random_operands

SPEC = TensorProductSpec.channelwise("2x0e+2x1o", "0e+1o", "0e+1o")
MODES = pytest.mark.parametrize(("layout", "deterministic"), [("mul_ir", True), ("ir_mul", False)])


def differentiable(spec, device, **options):
    """A function of (x, y, w) and operands that need gradients, on a small graph (float64)."""
    o = random_operands(spec, 3, 5, num_senders=4, device=device, **options)
    module = TensorProductConv(spec).to(device)
    operands = [t.requires_grad_() for t in (o.x, o.y, o.w)]
    return lambda x, y, w: module(x, y, w, o.edge_index, 3), operands


@MODES
def test_third_derivatives_match_the_reference(layout, deterministic, device, dtype):
    module = TensorProductConv(SPEC, layout=layout, deterministic=deterministic).to(device)
    assert_product(module, random_operands(SPEC, 7, 30, num_senders=8, dtype=dtype, device=device), order=3)


@pytest.mark.parametrize("shared", [False, True])
def test_gradcheck_and_gradgradcheck(shared, device):
    function, operands = differentiable(SPEC, device, shared=shared)
    assert gradcheck(function, operands)
    assert gradgradcheck(function, operands)


def test_third_derivative_numerically(device):
    """gradgradcheck of the first derivative: the finite differences are of second derivatives."""
    function, operands = differentiable(SPEC, device)

    def gradient(*inputs):
        z = function(*inputs)
        return torch.autograd.grad((z * z).sum(), inputs, create_graph=True)

    assert gradgradcheck(gradient, operands, fast_mode=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_second_derivatives_of_some_operands(wanted, device):
    """Only some operands need gradients, as in inference (positions only) or a frozen radial network."""
    function, operands = differentiable(SPEC, device)
    chosen = [operands[i] for i in wanted]

    def second(fn, inputs):
        gradients = torch.autograd.grad((fn(*operands) ** 2).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in gradients), chosen)

    everything = second(function, chosen)
    for i, tensor in enumerate(operands):
        tensor.requires_grad_(i in wanted)
    for ours, expected in zip(second(function, chosen), everything, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_hessian_by_vmap(device):
    """MACE's Hessian: vmap of a vector-Jacobian product through a graph that is recorded already."""
    function, (x, y, w) = differentiable(SPEC, device)
    (gy,) = torch.autograd.grad((function(x, y, w) ** 2).sum(), y, create_graph=True)
    flat = gy.flatten()
    unit = torch.eye(flat.numel(), dtype=flat.dtype, device=device)

    def row(v):
        return torch.autograd.grad(flat, y, v, retain_graph=True)[0].flatten()

    loop = torch.stack([row(v) for v in unit])
    torch.testing.assert_close(torch.vmap(row)(unit), loop)
    torch.testing.assert_close(loop, loop.T)


def test_operands_modified_after_use_are_detected(device):
    function, (x, y, w) = differentiable(SPEC, device)
    z = function(x, y, w * 1).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_backward_twice_needs_retain_graph(device):
    function, operands = differentiable(SPEC, device)
    z = function(*operands).sum()
    z.backward(retain_graph=True)
    z.backward()
    with pytest.raises(RuntimeError, match="second time"):
        z.backward()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def results(module, operands, edge_index, seed=0):
    """Output, gradients and second derivatives, in an order of edges that `edge_index` fixes."""
    x, y, w = (t.detach().clone().requires_grad_() for t in operands)
    z = module(x, y, w, edge_index)
    first = torch.autograd.grad((z**2).sum(), (x, y, w), create_graph=True)
    return [z.detach(), *(t.detach() for t in first), *torch.autograd.grad(sum((g**2).sum() for g in first), (x, y, w))]


@pytest.mark.parametrize("shared", [False, True])
def test_bitwise_reproducible(shared, device, dtype, two_threads):
    """Over runs, over threads, and over the order that the edges come in."""
    spec = TensorProductSpec.channelwise("33x0e+33x1o", "0e+1o", "0e+1o")
    o = random_operands(spec, 40, 700, shared=shared, dtype=dtype, device=device)
    module = TensorProductConv(spec).to(device)
    expected = results(module, (o.x, o.y, o.w), o.edge_index)
    for run in range(20):
        torch.set_num_threads(1 + run % 2)
        for ours, first in zip(results(module, (o.x, o.y, o.w), o.edge_index), expected, strict=True):
            assert torch.equal(ours, first)

    order = torch.randperm(700, generator=torch.Generator().manual_seed(3)).to(device)
    w = o.w if shared else o.w[order]
    shuffled = results(module, (o.x, o.y[order], w), o.edge_index[:, order])
    for ours, first in zip(shuffled, expected, strict=True):
        per_edge = len(first) == 700
        assert torch.equal(ours, first[order] if per_edge else first)


def test_atomic_mode_respects_use_deterministic_algorithms(device):
    o = random_operands(SPEC, 4, 9, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        for deterministic in (True, False):
            module = TensorProductConv(SPEC, deterministic=deterministic).to(device)
            z = module(o.x.requires_grad_(), o.y, o.w, o.edge_index).sum()
            if deterministic:
                z.backward()
            else:
                with pytest.raises(RuntimeError, match="deterministic"):
                    z.backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", [TensorProduct, TensorProductConv])
def test_equivariance(kind, device):
    """Inversion flips the odd parts of the output and nothing else (rotations are tested with the spec)."""
    batch = kind is TensorProduct
    o = random_operands(SPEC, 6, 6 if batch else 20, batch=batch, device=device)
    module = kind(SPEC).to(device)
    edges = () if batch else (o.edge_index,)

    def parity(irreps):
        signs = [float(item.ir.p) for item in irreps for _ in range(item.mul * item.ir.dim)]
        return torch.tensor(signs, dtype=torch.float64, device=device)

    z = module(o.x, o.y, o.w, *edges)
    flipped = module(o.x * parity(SPEC.irreps_in1), o.y * parity(SPEC.irreps_in2), o.w, *edges)
    assert torch.equal(flipped, z * parity(SPEC.irreps_out))
