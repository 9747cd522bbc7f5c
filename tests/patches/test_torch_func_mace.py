"""Forward-mode derivatives of patched MACE models, and MACE's Hessian."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("mace", reason="needs mace-torch")

import mace_models as mm
from operator_calls import called
from patch_checks import RELATIVE, assert_close, assert_same_gradients, patched
from torch.autograd import forward_ad

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def energies_and_forces(model: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The energies of all structures and the forces, without what MACE does to the positions on the way."""
    inputs = mm.batch(model) | {"positions": positions}
    energy = model(inputs, compute_force=False)["energy"]
    return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def tangents(model: torch.nn.Module, along: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with forward_ad.dual_level():
        positions = forward_ad.make_dual(mm.batch(model)["positions"].requires_grad_(), along)
        results = energies_and_forces(model, positions)
        return tuple(forward_ad.unpack_dual(t).tangent.detach() for t in results)


@pytest.mark.parametrize("correlation", [2, 3])
def test_tangents_of_energies_and_forces(correlation: int, device: torch.device) -> None:
    model = patched(mm.energy_model(correlation=correlation).to(device))
    positions = mm.batch(model)["positions"]
    along = torch.randn(positions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    energy, force = tangents(model, along)

    here = positions.clone().requires_grad_()
    forces = energies_and_forces(model, here)[1]
    graph = mm.batch(model)["batch"]
    work = torch.zeros_like(energy).index_add(0, graph, -(forces.detach() * along).sum(1))
    assert_close(energy, work)
    (product,) = torch.autograd.grad(forces, here, along)  # the Hessian is symmetric
    assert_close(force, product)

    # Central differences: halving the step leaves a quarter of their error, besides what rounding of forces leaves.
    def difference(step: float) -> torch.Tensor:
        ends = [(positions + s * along).requires_grad_() for s in (step, -step)]
        above, below = (energies_and_forces(model, end)[1].detach() for end in ends)
        return (above - below) / (2 * step)

    step = torch.finfo(torch.float64).eps ** (1 / 3)
    halved, whole = difference(step / 2), difference(step)
    rounding = 2 * RELATIVE * float(forces.detach().abs().max()) / step
    assert float((halved - force).abs().max()) <= float((whole - halved).abs().max()) + rounding


def test_hessian(device: torch.device) -> None:
    """MACE's own Hessian, by torch.vmap over vector-Jacobian products."""
    plain = mm.energy_model().to(device)
    fast = patched(copy.deepcopy(plain))
    atoms = [mm.structures()[1]]
    expected = plain(mm.batch(plain, atoms), compute_hessian=True)["hessian"]
    assert_close(fast(mm.batch(fast, atoms), compute_hessian=True)["hessian"], expected)


def test_training_on_hessians(device: torch.device) -> None:
    """Derivatives of products with the Hessian in every parameter: of e3nn, by the kernel, and composed."""
    plain = mm.energy_model().to(device)
    fast = patched(copy.deepcopy(plain))

    def gradients(model: torch.nn.Module, create_graph: bool = False) -> tuple[torch.Tensor | None, ...]:
        positions = mm.batch(model)["positions"].requires_grad_()
        along = torch.randn(positions.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        forces = energies_and_forces(model, positions)[1]
        (product,) = torch.autograd.grad(forces, positions, along, create_graph=True)
        loss = (product**2).sum()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, create_graph=create_graph)

    kernel = "tensor_product_triple_backward"
    with called() as names:
        found = gradients(fast)
    assert kernel in names
    assert_same_gradients(found, gradients(plain))
    with called() as names:
        composed = gradients(fast, create_graph=True)
    assert kernel not in names
    assert_same_gradients(found, composed)
