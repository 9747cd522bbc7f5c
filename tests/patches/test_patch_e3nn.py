"""Networks of other libraries: modules of e3nn are replaced wherever they are, and verified on inputs of the user's."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn import o3
from e3nn.nn import BatchNorm, FullyConnectedNet, Gate
from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork
from e3nn_pairs import assert_same, rows
from torch.utils._pytree import tree_leaves, tree_map

import eqaccel
from eqaccel.errors import AlreadyPatchedError, PatchError, VerificationError
from eqaccel.patches import finder
from eqaccel.patches.e3nn import forms
from eqaccel.patches.example import ExampleVerification
from eqaccel.patches.torch_state import default_dtype

pytestmark = pytest.mark.filterwarnings("ignore")


class Docking(nn.Module):
    """A layer as in DiffDock: weights of a dense product from an MLP for each edge, a mean over edges, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.SphericalHarmonics("0e+1o", normalize=True, normalization="component")
        self.embed = o3.Linear("3x0e", "3x0e+2x1o", biases=True, instructions=[(0, 0)])
        self.product = o3.FullyConnectedTensorProduct("3x0e+2x1o", "0e+1o", "4x0e+2x1o", shared_weights=False)
        self.weights = FullyConnectedNet([4, 8, self.product.weight_numel], torch.nn.functional.silu)
        self.gate = Gate("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
        self.norm = BatchNorm("2x0e+2x1o")
        self.square = o3.TensorSquare("2x0e+2x1o", "2x0e")
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("scales", torch.tensor([1.0, -0.5, 0.3, 0.2]))

    def forward(self, vectors: Tensor, species: Tensor, edge_index: Tensor) -> Any:
        sender, receiver = edge_index
        x = self.embed(torch.nn.functional.one_hot(species, 3).to(vectors))
        weights = self.weights(vectors.norm(dim=1, keepdim=True) * self.scales)
        edges = self.product(x[sender], self.harmonics(vectors), weights)
        nodes = edges.new_zeros(len(x), edges.shape[1]).index_add(0, receiver, edges)
        nodes = self.norm(self.gate(nodes))
        return {"nodes": nodes, "pooled": self.square(self.dropout(nodes)).sum(0), "count": receiver.bincount()}


def docking() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 0, 4], [1, 0, 3, 2, 4, 0]])
    return Docking(), (rows(6, 3, dtype=torch.float32), torch.tensor([0, 1, 2, 1, 0]), edges)


def points() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    radii = {"max_radius": 2.0, "num_neighbors": 3.0, "num_nodes": 5.0}
    network = SimpleNetwork("2x0e+1o", "2x0e+1o", **radii, mul=2, layers=0, lmax=1)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network, ({"pos": rows(6, 3, dtype=torch.float32), "x": rows(6, 5, dtype=torch.float32, seed=1)},)


def flat(outputs: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(outputs)


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Sums of the networks' own, which PyTorch adds up in any order on a GPU, are the same twice."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize(("make", "dtype"), [(docking, torch.float32), (points, torch.float64)])
def test_networks_are_patched_verified_and_restored(make: Any, dtype: torch.dtype, device: torch.device) -> None:
    with default_dtype(dtype):
        network, example = make()
        network.eval().to(device)
        inputs = tree_map(lambda t: t.to(device, dtype if t.is_floating_point() else None), example)
        state = {name: value.clone() for name, value in network.state_dict().items()}
        parameters, classes = list(network.parameters()), [type(module) for module in network.modules()]
        before, expected_gradients = results(network, inputs)
        assert eqaccel.patch(network, example=example) is network
        report = eqaccel.report(network)
        assert report.accelerated > 3
        assert "not verified" not in str(report)
        assert all(mine is theirs for mine, theirs in zip(network.parameters(), parameters, strict=True))
        assert network.state_dict().keys() == state.keys()
        after, gradients = results(network, inputs)
        for value, expected in zip((*after, *gradients), (*before, *expected_gradients), strict=True):
            assert_same(value, expected, dtype)
        stream = io.BytesIO()
        torch.save(network, stream)
        stream.seek(0)
        for twin in (copy.deepcopy(network), torch.load(stream, weights_only=False)):
            for value, expected in zip(results(twin, inputs)[0], after, strict=True):
                assert_same(value, expected, dtype)
        with pytest.raises(AlreadyPatchedError):
            eqaccel.patch(network)
        eqaccel.unpatch(network)
        assert [type(module) for module in network.modules()] == classes
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
        assert all(torch.equal(*both) for both in zip(results(network, inputs)[0], before, strict=True))


def results(network: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """What a network gives, and the derivatives of the sum of squares in its parameters."""
    outputs = tree_leaves(network(*inputs))
    loss = sum((output**2).sum() for output in outputs if output.requires_grad)
    return outputs, list(torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True))


def test_reports_name_what_is_left() -> None:
    network, _ = docking()
    before = {row.path: row for row in eqaccel.report(network).rows}
    assert not any(row.accelerated for row in before.values())
    assert eqaccel.patch([SimpleNamespace(model=network)])[0].model is network
    rows_of = {row.path: row for row in eqaccel.report(network).rows}
    for name in ("harmonics", "embed", "product", "square"):
        assert rows_of[name].accelerated, name
        assert "eqaccel.patch(model) replaces it" in before[name].note
    for name in ("norm", "weights"):
        assert rows_of[name].note == "left: eqaccel has no kernel for it"
    assert "not verified as a whole: no example" in str(eqaccel.report(network))
    assert eqaccel.report([network]).unverified == ("0",)
    eqaccel.unpatch(network)
    assert not eqaccel.report(network).unverified


def test_a_wrong_replacement_is_found_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.dense(x, y, weight) * 1.0001

    monkeypatch.setattr(forms.Product, "forward", wrong)
    network, example = docking()
    classes = [type(module) for module in network.modules()]
    training = [module.training for module in network.modules()]
    with pytest.raises(VerificationError, match="output 1 of the example changed in float64"):
        eqaccel.patch(network, example=example)
    assert [type(module) for module in network.modules()] == classes
    assert [module.training for module in network.modules()] == training
    assert int(network.norm.state_dict().get("num_batches_tracked", 0)) == 0


class Holder(nn.Module):
    """A network of one module."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held


CROSS = [
    lambda: o3.TensorProduct("4x1o", "4x1o", "4x1e", [(0, 0, 0, "uuu", True)]),
    lambda: o3.FullTensorProduct("1o", "1o", ["1e"]),
    lambda: o3.FullyConnectedTensorProduct("2x1o", "2x1o", "4x1e", shared_weights=False),
    lambda: o3.TensorProduct("2e", "2e", "1e+3e", [(0, 0, 0, "uuu", False), (0, 0, 1, "uuu", False)]),
]


@pytest.mark.parametrize("make", CROSS)
def test_operands_of_one_shape_are_compared_apart(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cross product is zero where both operands are the same, and which is which cannot be seen there."""
    network = Holder(make())
    eqaccel.patch(network)
    eqaccel.unpatch(network)
    monkeypatch.setattr(
        forms.Product, "dense", lambda self, x, y, weight=None: self.eqaccel(y, x, self._get_weights(weight))
    )
    with pytest.raises(VerificationError, match="held: its dense form gives other numbers"):
        eqaccel.patch(network)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_kernels_do_not_take_are_left(dtype: torch.dtype) -> None:
    for held in (o3.Linear("2x0e", "2x0e"), o3.FullTensorProduct("1o", "1o")):
        with pytest.raises(PatchError, match=f"held .*its numbers are {dtype}, and kernels take torch.float32"):
            eqaccel.patch(Holder(held).to(dtype))


def test_the_original_can_be_asked_in_its_own_dtype() -> None:
    network, example = docking()
    check = ExampleVerification(network, example)
    found = [check._run(model, check._example).values for model in (network, check._before, check.original)]
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)
        assert_same(found[2][name], value, torch.float32)


class Data:
    """What torch_geometric hands around."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors

    def clone(self) -> Data:
        return Data(**{name: tensor.clone() for name, tensor in self.tensors.items()})

    def apply(self, function: Any) -> Data:
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}
        return self


class OfData(nn.Module):
    """A network that takes an object, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = o3.Linear("2x1o", "3x1o")

    def forward(self, data: Data, factor: float = 1.0) -> Data:
        data.tensors["x"] = data.tensors["x"] * factor
        return Data(z=self.linear(data.tensors["x"]))


def test_examples_of_objects_and_keywords() -> None:
    x = rows(2, 4, 6, dtype=torch.float32)
    data = Data(x=x.clone())
    for example in ((data, 2.0), {"data": data}):
        network = OfData()
        expected = network(data.clone()).tensors["z"]
        eqaccel.patch(network, example=example)
        assert torch.equal(data.tensors["x"], x)
        assert_same(network(data.clone()).tensors["z"], expected, torch.float32)


class Record(dict):
    """A dictionary of a class of its own."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """An object with tensors among its attributes."""

    x: Tensor
    others: tuple[Tensor, ...] = ()


class OfKind(nn.Module):
    """A network that takes and gives objects of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = o3.Linear("2x1o", "3x1o")

    def forward(self, data: Any) -> Any:
        """The same kind, of the map."""
        return type(data)(x=self.linear(data["x"] if isinstance(data, dict) else data.x))


@pytest.mark.parametrize("kind", [Record, Fields])
def test_examples_of_classes_of_their_own(kind: type) -> None:
    """Tensors in them are found: converted, differentiated and compared."""
    x = rows(2, 4, 6, dtype=torch.float32)
    network, example = OfKind(), (kind(x=x, others=(x[:1],)),)
    check = ExampleVerification(network, example)
    found = check._run(check.original, check._example).values
    expected = network(*example)
    assert_same(found["output 0"], expected["x"] if kind is Record else expected.x, torch.float32)
    derivatives = [f"derivative of a loss in input {number}" for number in range(2)]
    assert [name for name in found if "input" in name] == derivatives
    assert bool(found[derivatives[0]].any())
    eqaccel.patch(network, example=example)
    assert eqaccel.report(network).accelerated
    assert not x.requires_grad


def test_what_cannot_be_patched_says_why() -> None:
    x = rows(3, 6, dtype=torch.float32)
    network = nn.Sequential(o3.Linear("2x1o", "3x1o"))
    for target, options, error, match in (
        (nn.Linear(1, 1), {}, PatchError, "or holds modules of e3nn"),
        (network[0], {}, PatchError, r"is itself a module of e3nn.*from_e3nn"),
        (nn.Sequential(BatchNorm("2x1o")), {}, PatchError, r"holds nothing.*0 \(BatchNorm\): left"),
        (nn.Sequential(eqaccel.o3.Linear("1o", "1o")), {}, PatchError, "known kind"),
        (torch.compile(network), {}, PatchError, "torch.compile"),
        (network, {"example": x}, PatchError, "put a single argument into a tuple"),
        (network, {"example": (x,), "verify": False}, PatchError, "nothing would be verified"),
        (network, {"example": (x[:, 1:],)}, VerificationError, "could not be run on it"),
        (network, {"example": (x * torch.nan,)}, VerificationError, "NaN"),
    ):
        with pytest.raises(error, match=match):
            eqaccel.patch(target, **options)
        assert type(network[0]) is o3.Linear


def test_what_is_called_in_other_ways() -> None:
    """Leading dimensions, weights that are given and the method `right` go on as in e3nn."""
    shared = {"internal_weights": False, "shared_weights": True}
    network = nn.ModuleDict(
        {
            "product": o3.TensorProduct("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)], compile_right=True, **shared),
            "scalar": o3.FullyConnectedTensorProduct("2x1o", "2x0e", "1o"),
        }
    ).double()
    x, y, w = rows(2, 3, 6), rows(3, 3, seed=1), rows(2, seed=2)
    species = torch.eye(2, dtype=torch.float64)
    calls = [
        lambda: network["product"](x, y, w),
        lambda: network["product"].right(y, w),
        lambda: network["scalar"](x[:, :2], species),
        lambda: network["scalar"](x[:, :2], species, rows(4)),
    ]
    before = [call() for call in calls]
    eqaccel.patch(network)
    for call, expected in zip(calls, before, strict=True):
        assert_same(call(), expected, torch.float32)  # e3nn's coupling tensors are rounded to it


def test_dense_products_of_few_channels_and_of_many(device: torch.device) -> None:
    """With matrices that all rows share: pairs of channels come first, or scalars; and with those of each row."""
    few, many = ("2x0e+2x1o", "2x0e+2x1o", "1x0e+2x1o"), ("4x0e+5x1o", "6x0e+4x1o", "3x0e+4x1o")
    network = nn.ModuleDict(
        {
            "few": o3.FullyConnectedTensorProduct(*few),
            "many": o3.FullyConnectedTensorProduct(*many),
            "own": o3.FullyConnectedTensorProduct(*many, shared_weights=False),
        }
    )
    operands = {
        name: [rows(4, irreps.dim, seed=seed) for seed, irreps in enumerate((module.irreps_in1, module.irreps_in2))]
        for name, module in network.items()
    }
    operands["own"].append(rows(4, network["own"].weight_numel, seed=2))
    network.double().to(device)
    operands = tree_map(lambda t: t.to(device), operands)
    expected = {name: module(*operands[name]) for name, module in network.items()}
    eqaccel.patch(network)
    assert not any(row.idle for row in eqaccel.report(network).rows)
    for name, module in network.items():
        mixing = module.eqaccel.kernel.mixing
        assert (mixing is None, bool(mixing and mixing.scalars)) == (name == "own", name == "many")
        for program in (module, torch.jit.script(module)):
            assert_same(program(*operands[name]), expected[name], torch.float32)  # e3nn's coupling tensors are


def test_a_model_of_a_known_kind_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = docking()
    kind = type("Kind", (), {"recognises": lambda self, module: isinstance(module, BatchNorm), "name": "norm"})()
    monkeypatch.setattr(finder, "KINDS", [kind])
    (found,) = finder.find_models(network, PatchError)
    assert (found.path, found.kind) == ("norm", kind)
