"""Networks of other libraries as they are: with casts, forces and classes of their own; what cannot be compared."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn import o3
from e3nn_pairs import assert_same, rows

import eqaccel
from eqaccel.errors import PatchError, SpecError, VerificationError, VerificationWarning
from eqaccel.patches.example import ExampleVerification

pytestmark = pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit", "ignore:.*weights_only")


class Potential(nn.Module):
    """Energies and forces from one product, with species in float32 whatever else it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics("0e+1o", normalize=True)
        self.embed = o3.FullyConnectedTensorProduct("4x0e", "3x0e", "4x0e")
        self.product = o3.FullyConnectedTensorProduct("4x0e", "0e+1o", "4x0e+2x1o", shared_weights=False)
        self.weights = nn.Linear(1, self.product.weight_numel)
        self.square = o3.TensorSquare("4x0e+2x1o", "0e")

    def forward(self, positions: Tensor, species: Tensor, edge_index: Tensor) -> dict[str, Tensor]:
        sender, receiver = edge_index
        positions.requires_grad_()
        vectors = positions[receiver] - positions[sender]
        ones = torch.ones(len(species), 4, dtype=torch.float32, device=positions.device)
        x = self.embed(ones, nn.functional.one_hot(species, 3).float())
        edges = self.product(x[sender], self.harmonics(vectors), self.weights(vectors.norm(dim=1, keepdim=True)))
        energies = self.square(edges.new_zeros(len(x), edges.shape[1]).index_add(0, receiver, edges))
        (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=self.training)
        return {"energies": energies, "forces": -gradient}


def potential(name: str = "Potential") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A network whose class has some name, and what it is called with."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 0, 4], [1, 0, 3, 2, 4, 0]])
    return type(name, (Potential,), {})(), (rows(5, 3, dtype=torch.float32), torch.tensor([0, 1, 2, 1, 0]), edges)


def gradients(network: nn.Module, example: tuple[Tensor, ...]) -> list[Tensor]:
    """The derivatives of a loss on forces in the parameters."""
    loss = (network(*example)["forces"] ** 2).sum()
    return list(torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True))


@pytest.mark.parametrize("name", ["Potential", "GraphModel", "AtomGraphSequential"])
def test_networks_with_casts_and_forces_of_their_own(name: str, device: torch.device) -> None:
    """In float64 their casts to float32 are none; classes that are named as those of NequIP and SevenNet are not."""
    network, example = potential(name)
    network.to(device)
    example = tuple(tensor.to(device) for tensor in example)
    before, trained = network.eval()(*example), gradients(network.train(), example)
    check = ExampleVerification(network, example)
    exact = check._run(check.original, check._example).values
    for number, value in enumerate(before.values()):
        assert_same(exact[f"output {number}"], value.cpu(), torch.float32)
    assert bool(exact["derivative of a loss in input 0"].any())
    with warnings.catch_warnings():
        warnings.simplefilter("error", VerificationWarning)
        eqaccel.patch(network, example=example)
    report = eqaccel.report(network)
    assert report.accelerated == 4
    assert not report.unverified
    for value, expected in zip(network.eval()(*example).values(), before.values(), strict=True):
        assert_same(value, expected, torch.float32)
    for value, expected in zip(gradients(network.train(), example), trained, strict=True):
        assert_same(value, expected, torch.float32)


class InPlace(nn.Module):
    """Cannot be differentiated in its second argument, the exponential of which it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = o3.Linear("2x1o", "3x1o")

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return self.linear(x) * scales.exp().mul_(2)


def test_what_the_original_cannot_be_differentiated_in_is_said() -> None:
    network, example = InPlace(), (rows(4, 6, dtype=torch.float32), rows(4, 1, dtype=torch.float32, seed=1))
    with pytest.warns(VerificationWarning, match=r"differentiated in input 1 of the example.*modified by an inplace"):
        check = ExampleVerification(network, example)
    names = [name for name in check._run(check.original, check._example).values if "input" in name]
    assert names == ["derivative of a loss in input 0"]
    with pytest.warns(VerificationWarning) as told:
        eqaccel.patch(network, example=example)
    assert [warning.filename for warning in told if warning.category is VerificationWarning] == [__file__]
    assert eqaccel.report(network).accelerated == 1


class Narrow(InPlace):
    """Takes float32 alone."""

    def forward(self, x: Tensor, scales: Any = 1.0) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("x in another type")
        return self.linear(x) * scales


def test_networks_that_do_not_run_in_float64_say_so() -> None:
    network, example = Narrow(), (rows(4, 6, dtype=torch.float32),)
    match = r"could not be run on it in float64, in which it is compared, in .*x in another type.*without an example"
    with pytest.raises(VerificationError, match=match):
        eqaccel.patch(network, example=example)
    assert type(network.linear) is o3.Linear
    eqaccel.patch(network)
    assert eqaccel.report(network).unverified


class Linear(o3.Linear):
    """Named as e3nn's, and computes something else."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features) / 2


class Harmonics(o3.SphericalHarmonics):
    """The same, of another name."""

    forward = torch.nn.Identity.forward


def test_classes_with_forward_methods_of_their_own_are_left() -> None:
    """The rest of the network is patched; what takes a single module of e3nn's refuses them."""
    network, x = nn.Sequential(o3.Linear("2x1o", "3x1o"), Linear("3x1o", "1o")), rows(4, 6, dtype=torch.float32)
    expected = network(x)
    eqaccel.patch(network, example=(x,))
    assert_same(network(x), expected, torch.float32)
    notes = {row.path: row.note for row in eqaccel.report(network).rows}
    assert notes["1"] == f"left: its forward method is that of {__name__}.Linear, not of e3nn's Linear"
    assert eqaccel.report(network).accelerated == 1
    with pytest.raises(SpecError, match=rf"forward method of e3nn's Linear, got that of {__name__}.Linear"):
        eqaccel.o3.Linear.from_e3nn(network[1])
    with pytest.raises(SpecError, match=rf"forward method of e3nn's SphericalHarmonics, got that of {__name__}"):
        eqaccel.o3.SphericalHarmonics.from_e3nn(Harmonics("1o", normalize=True))
    changed = o3.Linear("1o", "1o")
    changed.forward = lambda features: features
    with pytest.raises(SpecError, match=r"forward method of e3nn's Linear, got one that was put into it"):
        eqaccel.o3.Linear.from_e3nn(changed)
    with pytest.raises(SpecError, match=r"expected an e3nn.o3.Linear, got a torch.nn.modules.linear.Linear"):
        eqaccel.o3.Linear.from_e3nn(nn.Linear(1, 1))


def test_a_class_of_nequip_by_name_alone_is_no_known_kind() -> None:
    """So that an example is not refused, and a network without modules of e3nn says what was expected."""
    with pytest.raises(PatchError, match="or holds modules of e3nn"):
        eqaccel.patch(type("GraphModel", (nn.Module,), {})())
