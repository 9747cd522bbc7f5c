"""The exchange of ghost rows: values, derivatives of any order, what torch does with the operator, bad input."""

import pytest
import torch
from ghosts import Images

import eqaccel.ops  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def images():
    return Images([2, 0, 2, 1])


def test_values(images, device, dtype):
    x = torch.randn(3, 5, dtype=dtype, device=device)
    filled = torch.ops.eqaccel.exchange(x.T.contiguous().T, images.handle, 7)
    assert torch.equal(filled, torch.cat([x, x[images.owner.to(device)]]))
    assert filled.is_contiguous()
    alone = torch.ops.eqaccel.exchange(x, 0, 3)
    assert torch.equal(alone, x)
    assert alone.data_ptr() != x.data_ptr()


def test_a_rank_without_atoms_takes_part():
    nobody = Images([])
    x = torch.zeros(0, 5, requires_grad=True)
    filled = torch.ops.eqaccel.exchange(x, nobody.handle, 0)
    filled.sum().backward()
    assert filled.shape == (0, 5)
    assert nobody.calls == [("forward", 5), ("reverse", 5)]


def test_derivatives(images, device):
    x = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)

    def cubes(x):
        return torch.ops.eqaccel.exchange(x, images.handle, 7).pow(3)

    assert torch.autograd.gradcheck(cubes, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(cubes, x, check_fwd_over_rev=True)
    assert torch.autograd.gradcheck(lambda x, t: torch.func.jvp(cubes, (x,), (t,))[1], (x, x.detach() + 1))
    images.calls.clear()
    (gradient,) = torch.autograd.grad(cubes(x).sum(), x)
    assert images.calls == [("forward", 2), ("reverse", 2)]
    counts = 1 + torch.bincount(images.owner, minlength=3)
    torch.testing.assert_close(gradient, 3 * x**2 * counts[:, None].to(x))


def test_transforms(images, device):
    """Linear, so that the tangent of a result is the exchange of the tangent."""
    x, along = (torch.randn(3, 2, dtype=torch.float64, device=device) for _ in range(2))

    def exchange(x):
        return torch.ops.eqaccel.exchange(x, images.handle, 7)

    assert torch.equal(torch.func.jvp(exchange, (x,), (along,))[1], exchange(along))
    counts = 1 + torch.bincount(images.owner, minlength=3).to(x)
    hessian = torch.func.hessian(lambda x: exchange(x).pow(3).sum())(x).flatten(2).flatten(0, 1)
    torch.testing.assert_close(hessian, torch.diag((6 * x * counts[:, None]).flatten()))


def test_opcheck(images, device):
    x = torch.randn(3, 2, dtype=torch.float64, device=device, requires_grad=True)
    ghosts = torch.randn(7, 2, dtype=torch.float64, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.eqaccel.exchange.default, (x, images.handle, 7))
    torch.library.opcheck(torch.ops.eqaccel.exchange.default, (x, 0, 3))
    torch.library.opcheck(torch.ops.eqaccel.exchange_backward.default, (ghosts, images.handle, 3))


def test_script(images):
    @torch.jit.script
    def energy(x: torch.Tensor, handle: int, num_nodes: int):
        return torch.ops.eqaccel.exchange(x, handle, num_nodes).square().sum()

    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(energy(x, images.handle, 7), x)
    counts = 1 + torch.bincount(images.owner, minlength=3)
    torch.testing.assert_close(gradient, 2 * x * counts[:, None])


def test_script_keeps_calls_without_a_use(images):
    """Other ranks wait for every call, also for one that gives nothing new here."""

    @torch.jit.script
    def twice(x: torch.Tensor, handle: int):
        torch.ops.eqaccel.exchange(x, handle, 7)
        return torch.ops.eqaccel.exchange(x, handle, 7)

    for _ in range(3):
        twice(torch.zeros(3, 2), images.handle)
    assert len(images.calls) == 6


@pytest.mark.parametrize(
    ("x", "num_nodes", "message"),
    [
        (torch.zeros(3, 2), 4, "'handle' is 0"),
        (torch.zeros(3, 2), 2, "num_nodes >= num_local"),
        (torch.zeros(3), 3, "must have shape"),
        (torch.zeros(3, 2, dtype=torch.int64), 3, "must be float32 or float64"),
    ],
)
def test_bad_input(x, num_nodes, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.eqaccel.exchange(x, 0, num_nodes)
