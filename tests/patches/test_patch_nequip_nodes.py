"""Dense forms of e3nn's node-wise modules give the numbers and derivatives of the modules, on whatever device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("nequip", reason="needs nequip")

import nequip_models as nm
from e3nn import o3
from e3nn.nn import Gate
from e3nn.util import jit
from nequip.nn.compile import ListInputOutputWrapper
from nequip.utils.fx import nequip_make_fx
from patch_checks import assert_close, assert_same_gradients, duplicated, patched
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from eqaccel import export, load_exported, patch, report, unpatch
from eqaccel.errors import VerificationError
from eqaccel.ops import GivenEdges, given_edges
from eqaccel.patches import dense, linear, nodes
from eqaccel.patches.nequip import typed_product
from eqaccel.patches.nequip.export import WholeSlices
from eqaccel.patches.nequip.swapping import FORMS
from eqaccel.patches.nequip.typed_product import shares_of_types
from eqaccel.patches.replacement import Replacement, preview

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nequip_defaults")]
Model = torch.nn.Module

OUTPUTS = ("total_energy", "atomic_energy", "forces", "stress")


def everywhere(x: torch.Tensor) -> bool:
    """Stands in for `prefers_dense`, in TorchScript too."""
    return x.dim() > 0


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything as on a GPU."""
    monkeypatch.setattr(dense, "prefers_dense", everywhere)


class Typed(torch.nn.Module):
    """A model that is nothing but an embedding of types and a product with it."""

    def __init__(self, irreps_in: str, irreps_out: str, num_types: int = 3) -> None:
        super().__init__()
        self.embed = type("NodeTypeEmbed", (torch.nn.Module,), {})()
        self.embed.embed_module = torch.nn.Embedding(num_types, 5)
        self.sc = o3.FullyConnectedTensorProduct(irreps_in, "5x0e", irreps_out)


def built(module: Model, model: Model | None = None) -> Replacement:
    return preview(module, *nodes.build_form(model or module, module, FORMS))


def assert_derivatives(module: Replacement, features: torch.Tensor, *others: torch.Tensor) -> None:
    """Values, first and second derivatives of both forms, with respect to the features and the weights."""
    results = []
    generator = torch.Generator().manual_seed(2)
    weights = list(module.parameters())
    cotangents: list[torch.Tensor] = []
    for form in (module.plain_forward, module.dense):
        x = features.detach().requires_grad_()
        y = form(x, *others)
        if not cotangents:
            cotangents = [torch.randn(t.shape, generator=generator, dtype=t.dtype, requires_grad=True) for t in (y, x)]
        first = grad(y, [x, *weights], cotangents[0], create_graph=True, allow_unused=True)
        second = grad(first[0], [cotangents[0], *weights], cotangents[1], allow_unused=True)
        results.append([y, *first, *second])
    for value, expected in zip(results[1], results[0], strict=True):
        if expected is None:
            assert value is None or not value.any()
        elif expected.numel():
            assert_close(value, expected)


LINEARS = [
    ("8x0e", "4x0e"),
    ("128x0e+64x1o+32x2e+32x3o", "256x0e+64x1o+32x2e+32x3o"),  # one product for each irrep
    ("32x0o+64x0e+96x1o+64x1e", "32x0o+96x0e+32x1o+32x1e"),
    ("3x1o+2x0e+5x2e", "4x2e+1x0o+7x0e+2x1o"),  # another order, and an irrep that nothing goes to
    ("96x3o+200x0e+17x2e", "11x2e+40x1o+130x0e+33x3o+2x4e"),  # the same, too large for one product
    ("300x0e+5x1o+300x0e", "300x0e+3x1o+200x0e"),  # irreps that are there twice
]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("irreps_in", "irreps_out"), LINEARS)
def test_linear(irreps_in: str, irreps_out: str, rows: int) -> None:
    module = built(o3.Linear(irreps_in, irreps_out))
    assert_derivatives(module, torch.randn(rows, module.irreps_in.dim))


@pytest.mark.parametrize("rows", [0, 1, 7])
@pytest.mark.parametrize(
    ("irreps_in", "irreps_out"),
    [
        ("8x0e+4x1o", "12x0e+4x1o"),
        ("128x0e+64x1o+32x2e+32x3o", "128x0e+64x1o+32x2e+32x3o"),
        ("128x0e+64x1o+32x2e+32x3o", "128x0e"),
        ("3x1e+4x0o+2x1o+6x0e", "2x0e+2x1o+5x1e+1x2e"),
    ],
)
def test_typed_product(irreps_in: str, irreps_out: str, rows: int) -> None:
    model = Typed(irreps_in, irreps_out)
    with torch.no_grad():
        model.embed.embed_module.weight[2] = model.embed.embed_module.weight[0]  # types that are the same
    types = torch.arange(rows) % 3
    attributes = model.embed.embed_module(types).detach()
    assert_derivatives(built(model.sc, model), torch.randn(rows, model.sc.irreps_in1.dim), attributes)


@pytest.mark.parametrize("rows", [1, 5, 7])
@pytest.mark.parametrize("has_equal_rows", [False, True])
def test_typed_product_in_training(rows: int, has_equal_rows: bool) -> None:
    """Gradients of the embedding are those of the plain form, whether all of its rows are taken or some."""
    model = Typed("8x0e+4x1o", "12x0e+4x1o")
    module, table = built(model.sc, model), model.embed.embed_module.weight
    if has_equal_rows:  # as of a new element that starts as a copy of another one
        with torch.no_grad():
            table[2] = table[0]
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(rows, model.sc.irreps_in1.dim, generator=generator, requires_grad=True)
    operands = [features, *module.parameters(), table]
    incoming = torch.randn(rows, model.sc.irreps_out.dim, generator=generator, requires_grad=True)
    along = torch.randn(features.shape, generator=generator)
    results = []
    for form in (module.plain_forward, module.dense):
        scalars = model.embed.embed_module(torch.arange(7) % 3)
        scalars = scalars[:rows] if rows < 7 else scalars
        assert module.fits(features, scalars)
        z = form(features, scalars)
        first = grad(z, operands, incoming, create_graph=True)
        results.append([z, *first, *grad(first[0], [incoming, *operands[1:]], along)])
    for expected, value in zip(*results, strict=True):
        assert_close(value, expected)


def test_gradients_of_other_scalars_take_the_plain_form() -> None:
    model = Typed("8x0e+4x1o", "8x0e+4x1o")
    module, types, features = built(model.sc, model), torch.tensor([0, 2]), torch.randn(2, 20)
    looked_up = model.embed.embed_module
    wanted, seen = looked_up(types), looked_up(types)
    wanted.retain_grad()
    seen.register_hook(lambda gradient: None)
    assert module.fits(features, looked_up(types))
    for scalars in (
        wanted,
        seen,
        looked_up(types) * 1,
        looked_up(types)[[1, 0]],
        looked_up(types).detach().requires_grad_(),
        torch.nn.functional.embedding(types, looked_up.weight * 1),
        torch.nn.Embedding(3, 5)(types),
    ):
        assert not module.fits(features, scalars)
        assert torch.equal(module(features, scalars), module.plain_forward(features, scalars))
    (gradient,) = grad(module(features, wanted).sum(), wanted)
    assert gradient.abs().min() > 0
    looked_up.scale_grad_by_freq = True
    assert not module.fits(features, looked_up(types))


def test_checkpointed_lookups_take_the_plain_form() -> None:
    """What is looked up would be computed anew to tell the types."""
    model = Typed("8x0e+4x1o", "8x0e+4x1o")
    module, types, features = built(model.sc, model), torch.tensor([0, 2]), torch.randn(2, 20)
    fits = []

    def region(form: Callable[..., torch.Tensor]) -> torch.Tensor:
        scalars = model.embed.embed_module(types)
        fits.append(module.fits(features, scalars))
        return form(features, scalars).square().sum()

    loss = checkpoint(region, module, use_reentrant=False)
    (gradient,) = grad(loss, model.embed.embed_module.weight)
    assert_close(gradient, grad(region(module.plain_forward), model.embed.embed_module.weight)[0])
    assert fits == [False, False, True]  # also when it is computed again


def test_models_with_equal_rows_are_verified() -> None:
    model = nm.model()
    table = model.model.func.type_embed.embed_module.weight
    with torch.no_grad():
        table[2] = table[0]
    assert all(row.accelerated for row in report(patch(model)).rows if row.path.endswith(".sc"))


def test_types_are_told_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Typed("8x0e+4x1o", "8x0e+4x1o")
    product = built(model.sc, model)
    features, scalars = torch.randn(2, 20), model.embed.embed_module(torch.tensor([1, 2])).detach()
    calls = []

    def counted(*operands: torch.Tensor) -> torch.Tensor:
        calls.append(operands)
        return shares_of_types(*operands)

    monkeypatch.setattr(typed_product, "shares_of_types", counted)
    expected = product.dense(features, scalars)
    nobody = torch.zeros(2, 0, dtype=torch.int64)
    with given_edges(GivenEdges(nobody, torch.zeros(0, dtype=torch.int32), 2)):
        assert torch.equal(product.dense(features, scalars), expected)
        assert torch.equal(product.dense(features, scalars[:]), expected)  # another view of the same rows
        assert len(calls) == 2
        scalars.copy_(model.embed.embed_module(torch.tensor([2, 1])).detach())  # the same memory
        assert torch.equal(product.dense(features.flip(0), scalars), expected.flip(0))
        assert torch.equal(product.dense(features, scalars.clone().flip(0)), expected)
    assert len(calls) == 4


def test_a_slice_that_takes_all_is_no_slice() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with WholeSlices():
        for whole in (x[:4], x[:], x[:9]):
            assert whole is x
        for part, rows in ((x[:3], 3), (x[1:], 3), (x[::2], 2), (x[:-1], 3)):
            assert part is not x
            assert len(part) == rows
        assert torch.equal(x[:, 0], x.select(1, 0))
        assert torch.equal(x[torch.tensor([2, 0])], x.index_select(0, torch.tensor([2, 0])))
    assert x[:4] is not x


def test_scalars_of_no_type_are_no_numbers() -> None:
    model = Typed("8x0e+4x1o", "8x0e+4x1o")
    attributes = model.embed.embed_module(torch.tensor([1, 2])).detach()
    attributes[1] += 1e-3
    result = built(model.sc, model).dense(torch.randn(2, 20), attributes)
    assert not result[0].isnan().any()
    assert result[1].isnan().all()


GATES = [
    ("8x0e", [torch.tanh], "6x0e", [torch.tanh], "4x1o+2x2e"),
    ("4x0e+3x0o", [torch.nn.functional.silu, torch.tanh], "5x0e", [torch.nn.functional.silu], "2x1o+3x1e"),
    ("4x0o+3x0e", [torch.tanh, torch.nn.functional.silu], "3x0o+2x0e", [torch.tanh, torch.sigmoid], "2x3e+3x1o"),
    ("8x0e", [torch.nn.functional.silu], "", [], ""),
]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("gate", GATES)
def test_gate(gate: tuple[object, ...], rows: int) -> None:
    original = Gate(*gate)
    assert_derivatives(built(original), torch.randn(rows, original.irreps_in.dim))


def test_narrow_types_leave_no_trace() -> None:
    linear = o3.Linear("3x0e+5x1o", "2x0e+3x1o")
    expected = linear(torch.ones(1, 18))
    module = built(linear)
    weight = linear.weight.detach().clone()
    module.float().double()
    with torch.no_grad():
        linear.weight.copy_(weight)
    assert_close(module.dense(torch.ones(1, 18)), expected)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize(
    ("kind", "is_packaged"),
    [(kind, False) for kind in ("small", "L", "XL", "parity")] + [(kind, True) for kind in ("small", "L", "parity")],
)
def test_models(kind: str, is_packaged: bool, tmp_path: Path) -> None:
    plain = nm.model(kind).requires_grad_(False)
    expected = plain(nm.data())
    if is_packaged:
        plain = nm.packaged(plain, tmp_path / "model.nequip.zip").requires_grad_(False)
    fast = patch(plain, verify=kind == "small" and not is_packaged)  # other tests verify the others
    left = [row for row in report(fast).rows if not row.accelerated]
    assert all(row.path.endswith(".edge_mlp") for row in left)
    outputs = fast(nm.data())
    for name in OUTPUTS:
        assert_close(outputs[name], expected[name])


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_parameters(training: bool) -> None:
    """NequIP keeps what gradients of forces need in training only."""
    gradients = []
    for change in (lambda model: model, patched):
        model = change(nm.model("parity", do_derivatives=training)).train(training)
        outputs = model(nm.data())
        loss = (outputs["forces"] ** 2).sum() if training else outputs["total_energy"].sum()
        gradients.append(grad(loss, list(model.parameters()), allow_unused=True))
    assert_same_gradients(gradients[1], gradients[0])


@pytest.mark.usefixtures("forced")
def test_fewer_operators() -> None:
    """What host-bound calls are about: operators of a call for energy and forces."""
    counts = []
    for change in (lambda model: model, patched):
        model = change(nm.model("parity").requires_grad_(False))
        with warnings.catch_warnings(), _Counter() as counter:
            model(nm.data())
        counts.append(counter.calls)
    assert counts[1] < 0.5 * counts[0]


class _Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("forced")
def test_torchscript_and_export(tmp_path: Path) -> None:
    plain = nm.model("parity", num_layers=2).requires_grad_(False)
    fast = patched(copy.deepcopy(plain))
    scripted = jit.script(copy.deepcopy(fast))
    structure = nm.structures()[:1]
    expected = plain(nm.data(structure))
    for _ in range(3):  # TorchScript profiles, then specialises
        outputs = scripted(nm.data(structure))
        for name in OUTPUTS:
            assert_close(outputs[name], expected[name])
    export(fast, tmp_path / "model.pt")  # compares with the model
    assert load_exported(tmp_path / "model.pt").metadata["family"] == "nequip"


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("duplicate", ["deepcopy", "save"])
def test_copies_follow_their_own_weights(duplicate: str) -> None:
    fast = patched(nm.model().requires_grad_(False))
    twin, other = duplicated(fast, duplicate), nm.model(seed=5)
    for assign in (False, True):
        twin.load_state_dict(other.state_dict(), strict=True, assign=assign)
        assert_close(twin(nm.data())["forces"], other(nm.data())["forces"])
        assert report(twin).accelerated == report(fast).accelerated > 7
    assert_close(fast(nm.data())["forces"], nm.model()(nm.data())["forces"])
    assert list(dict(twin.named_parameters())) == list(dict(other.named_parameters()))
    assert list(dict(unpatch(twin).named_parameters())) == list(dict(other.named_parameters()))
    assert_close(twin(nm.data())["forces"], other(nm.data())["forces"])


@pytest.mark.usefixtures("forced")
def test_tracing() -> None:
    """As nequip-compile traces a model on a GPU: energy and forces in one graph, of any size."""
    plain = nm.model("parity", num_layers=2).requires_grad_(False)
    data, model = nm.data(), copy.deepcopy(plain)
    fields = ["pos", "edge_index", "edge_cell_shift", "cell", "atom_types", "batch", "num_atoms"]
    expected = plain(nm.data())["forces"]
    wrapped = ListInputOutputWrapper(patched(plain), fields, ["total_energy", "forces"])
    graph = nequip_make_fx(wrapped, data, fields)
    assert_close(graph(*[data[name] for name in fields])[1], expected)
    data["atom_types"] = data["atom_types"].flip(0)
    assert_close(graph(*[data[name] for name in fields])[1], model(data)["forces"])


class Wrong(linear.LinearMap):
    """A form that is off."""

    def dense(self, features: torch.Tensor) -> torch.Tensor:
        return super().dense(features) * 1.001


def test_models_of_many_types() -> None:
    """Only the matrices of the types that there are take time."""
    types = [f"type{number}" for number in range(89)]
    model = nm.model(type_names=types, per_type_energy_scales=1.0, per_type_energy_shifts=0.0)
    expected = model(nm.data())
    fast = patched(model)
    assert all(row.accelerated for row in report(fast).rows if row.path.endswith(".sc"))
    for name in OUTPUTS:
        assert_close(fast(nm.data())[name], expected[name])


def test_what_is_left_says_why() -> None:
    charge = {"field": "charge", "num_features": 4, "min": -2, "max": 2}
    cases = [(nm.model(categorical_graph_field_embed=[charge]), "sc", "more than the atom")]
    biased = nm.model()
    biased.model.func.layer0_convnet.conv.linear_2 = o3.Linear("8x0e+8x1o", "12x0e+4x1o", biases=True)
    cases.append((biased, "layer0_convnet.conv.linear_2", "biases"))
    strange = nm.model()
    strange.model.func.layer1_convnet.equivariant_nonlin.act_gates.paths = None
    cases.append((strange, "layer1_convnet.equivariant_nonlin", "structure is unknown"))
    for model, name, why in cases:
        rows = report(patched(model)).rows
        assert why in next(row.note for row in rows if row.path.endswith(name) and not row.accelerated)


@pytest.mark.parametrize("verify", [True, False])
def test_forms_that_are_off_are_refused(monkeypatch: pytest.MonkeyPatch, verify: bool) -> None:
    monkeypatch.setattr(nodes, "LinearMap", Wrong)
    model = nm.model(dtype="float32")
    with pytest.raises(VerificationError, match=r"linear_1: its dense form gives other numbers"):
        patch(model, verify=verify)
    assert report(model).accelerated == 0
