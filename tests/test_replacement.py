"""A replacement is the module it stands for: whatever is done to either, before or after, both stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate
from eqaccel.patches import dense, nodes
from eqaccel.patches.convolution import build_convolution
from eqaccel.patches.core import Swap, _restore
from eqaccel.patches.mace import MaceConvolution
from eqaccel.patches.nequip import NequipConvolution
from eqaccel.patches.radial import RadialLinear, radial_swaps
from eqaccel.patches.replacement import Entrance, Replacement, become
from eqaccel.patches.torch_state import default_dtype
from patch_checks import assert_close, duplicated

from eqaccel.errors import PatchError
from eqaccel.ops import MatrixProduct

pytestmark = pytest.mark.filterwarnings("ignore")
RECEIVERS, SENDERS = torch.tensor([0, 0, 0, 2, 2, 4, 4]), torch.tensor([1, 2, 3, 1, 4, 0, 1])


@dataclass
class Case:
    """A module in a parent, what replaces it, and operands for it; `call` takes the parent."""

    parent: nn.Module
    swap: Callable[[nn.Module], Swap]
    operands: tuple[Tensor, ...]
    call: Callable[..., Tensor]
    parameter: str = ""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def call_node(parent: nn.Module, *operands: Tensor) -> Tensor:
    return parent.part(*operands)


def node(part: nn.Module, *operands: Tensor, parameter: str = "", **others: nn.Module) -> Case:
    """A node-wise module."""
    parent = nn.ModuleDict({**others, "part": part})
    return Case(parent, lambda m: Swap(m, "part", *nodes._build(m, m.part)), operands, call_node, parameter)


def linear() -> Case:
    return node(o3.Linear("4x0e+3x1o", "5x0e+2x1o"), random(6, 13), parameter="weight")


def typed() -> Case:
    embed = type("NodeTypeEmbed", (nn.Module,), {})()
    embed.embed_module = nn.Embedding(3, 5)
    rows = embed.embed_module.weight.detach()[torch.arange(6) % 3].clone()
    product = o3.FullyConnectedTensorProduct("4x0e+3x1o", "5x0e", "5x0e+2x1o")
    return node(product, random(6, 13), rows, parameter="weight", embed=embed)


def gate() -> Case:
    module = Gate("4x0e", [torch.tanh], "3x0e", [torch.tanh], "3x1o")
    if not hasattr(module.act_gates, "paths"):
        pytest.skip("the gates of e3nn before 0.5 are left")
    return node(module, random(6, 16))


def harmonics() -> Case:
    return node(o3.SphericalHarmonics("0e+1o+2e", True, "component"), random(6, 3))


def contraction() -> Case:
    pytest.importorskip("mace")
    from mace.modules.symmetric_contraction import Contraction

    module = Contraction(o3.Irreps("5x0e+5x1o"), o3.Irreps("0e"), 3, num_elements=3)
    one_hot = nn.functional.one_hot(torch.arange(6) % 3, 3).double()
    return node(module, random(6, 5, 4), one_hot, parameter="weights_max")


def radial(network: nn.Module, name: str) -> Case:
    """The first layer of a radial network."""

    def swap(parent: nn.Module) -> Swap:
        return next(swap for swap in radial_swaps(parent) if swap.name == name)

    return Case(network, swap, (random(6, 4),), lambda parent, x: getattr(parent, name)(x), "weight")


def radial_layer() -> Case:
    return radial(FullyConnectedNet([4, 8, 3], torch.tanh), "layer0")


def radial_linear() -> Case:
    return radial(type("RadialMLP", (nn.Sequential,), {})(nn.Linear(4, 8), nn.Tanh()), "0")


def radial_scaled() -> Case:
    pytest.importorskip("nequip")
    from nequip.nn.mlp import ScalarLinearLayer

    return radial(type("ScalarMLPFunction", (nn.Sequential,), {})(ScalarLinearLayer(4, 8, alpha=0.3)), "0")


def product() -> o3.TensorProduct:
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (1, 1, 1, "uvu", True)]
    return o3.TensorProduct("4x0e+4x1o", "0e+1o", "4x0e+4x2e", paths, shared_weights=False, internal_weights=False)


def call_mace(parent: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """As an interaction block does."""
    if hasattr(parent, "conv_fusion"):
        return parent.part(x, y, w, torch.stack([SENDERS, RECEIVERS]))
    messages = parent.part(x[SENDERS], y, w)
    return messages.new_zeros(len(x), messages.shape[1]).index_add(0, RECEIVERS, messages)


def mace_convolution() -> Case:
    def swap(parent: nn.Module) -> Swap:
        added = build_convolution("part", parent.part, True, torch.device("cpu"))
        return Swap(parent, "part", MaceConvolution, added)

    operands = (random(5, 16), random(7, 4), random(7, 12))
    return Case(nn.ModuleDict({"part": product()}), swap, operands, call_mace)


class TensorProductScatter(nn.Module):
    """What NequIP's class of this name computes."""

    def __init__(self) -> None:
        super().__init__()
        self.tp = product()

    def forward(self, x: Tensor, y: Tensor, w: Tensor, edge_dst: Tensor, edge_src: Tensor) -> Tensor:
        messages = self.tp(x[edge_src], y, w)
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, edge_dst, messages)


def nequip_convolution() -> Case:
    def swap(parent: nn.Module) -> Swap:
        added = build_convolution("part.tp", parent.part.tp, True, torch.device("cpu"))
        return Swap(parent, "part", NequipConvolution, added)

    operands = (random(5, 16), random(7, 4), random(7, 12), RECEIVERS, SENDERS)
    return Case(nn.ModuleDict({"part": TensorProductScatter()}), swap, operands, call_node)


WITH_WEIGHTS = (linear, typed, contraction, radial_layer, radial_linear, radial_scaled)
ALL = (*WITH_WEIGHTS, gate, harmonics, mace_convolution, nequip_convolution)


@pytest.fixture(autouse=True)
def everything_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dense, "prefers_dense", lambda x: x.dim() > 0)
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        yield


class Pair:
    """A plain parent and a patched one with equal contents."""

    def __init__(self, make: Callable[[], Case], before: Callable[[nn.Module], object] = lambda module: None) -> None:
        self.case = make()
        self.plain, self.fast = self.case.parent.eval(), copy.deepcopy(self.case.parent).eval()
        for parent in (self.plain, self.fast):
            before(self.part(parent))
        self.replace()

    def part(self, parent: nn.Module) -> Any:
        return getattr(parent, self.swap.name) if hasattr(self, "swap") else next(iter(self._named(parent)))

    def _named(self, parent: nn.Module) -> list[nn.Module]:
        return [parent.part] if "part" in parent._modules else list(parent.children())

    def replace(self) -> None:
        self.kind = type(self.part(self.fast))
        self.swap = self.case.swap(self.fast)
        self.swap.apply()
        assert isinstance(self.part(self.fast), Replacement)

    def do(self, change: Callable[[nn.Module], object]) -> None:
        for parent in (self.plain, self.fast):
            change(self.part(parent))

    def check(self) -> None:
        """Values, and gradients of operands and parameters, by name."""
        results = []
        for parent in (self.plain, self.fast):
            operands = [t.detach().requires_grad_(t.is_floating_point()) for t in self.case.operands]
            if isinstance(self.part(parent), o3.FullyConnectedTensorProduct):
                operands[1] = operands[1].detach()
            named = [(name, p) for name, p in parent.named_parameters() if p.requires_grad]
            value = self.case.call(parent, *operands)
            inputs = [t for t in operands if t.requires_grad] + [p for _, p in named]
            gradients = torch.autograd.grad((value**3).sum(), inputs, allow_unused=True, retain_graph=True)
            results.append(([name for name, _ in named], [value, *gradients], list(parent.state_dict())))
        assert results[0][0] == results[1][0]
        assert results[0][2] == results[1][2]
        for value, expected in zip(results[1][1], results[0][1], strict=True):
            assert (value is None) == (expected is None)
            if expected is not None:
                assert_close(value, expected, floor=1.0)


def assert_restored(pair: Pair) -> None:
    """Nothing is left of the replacement, and what was done to it stays."""
    _restore(pair.fast)
    part = pair.part(pair.fast)
    assert not any(isinstance(module, Replacement) for module in pair.fast.modules())
    assert [name for name, _ in pair.fast.named_modules()] == [name for name, _ in pair.plain.named_modules()]
    assert type(part).__name__ == type(pair.part(pair.plain)).__name__
    assert vars(part).keys() - vars(pair.part(pair.plain)).keys() <= {"_backward_hooks"}
    assert not hasattr(pair.fast, "conv_fusion")
    pair.check()


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def assign(module: nn.Module, name: str) -> None:
    setattr(module, name, nn.Parameter(1.5 * getattr(module, name).detach()))


def assign_by_loading(module: nn.Module, _: str) -> None:
    module.load_state_dict({key: 1.5 * value for key, value in module.state_dict().items()}, assign=True)


def write_to_data(module: nn.Module, name: str) -> None:
    getattr(module, name).data.mul_(1.5)


def put_a_tensor(module: nn.Module, name: str) -> None:
    """As adapters do for one call."""
    weight = getattr(module, name)
    del module._parameters[name]
    setattr(module, name, 1.5 * weight)
    module.kept = weight


def parametrize_twice(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Twice())
    parametrize.register_parametrization(module, name, Twice())


def weight_norm(module: nn.Module, name: str) -> None:
    parametrizations.weight_norm(module, name)
    module.parametrizations[name].original0.data.mul_(1.5)


def old_weight_norm(module: nn.Module, name: str) -> None:
    nn.utils.weight_norm(module, name)
    getattr(module, f"{name}_g").data.mul_(1.5)


def pruned(module: nn.Module, name: str) -> None:
    prune.l1_unstructured(module, name, amount=0.5)


CHANGES = (
    assign,
    assign_by_loading,
    write_to_data,
    put_a_tensor,
    parametrize_twice,
    weight_norm,
    old_weight_norm,
    pruned,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", WITH_WEIGHTS)
def test_weights_are_those_of_the_module(make: Callable[[], Case], change: Callable[[nn.Module, str], None]) -> None:
    pair = Pair(make)
    name = pair.case.parameter
    pair.check()
    before = pair.case.call(pair.fast, *pair.case.operands)
    pair.do(lambda module: change(module, name))
    pair.check()
    assert not torch.equal(pair.case.call(pair.fast, *pair.case.operands), before)
    if change not in (put_a_tensor, old_weight_norm, pruned):  # torch copies no tensors that were computed
        pair.fast = copy.deepcopy(pair.fast)
        pair.check()
    assert_restored(pair)


@pytest.mark.parametrize("change", [parametrize_twice, weight_norm, old_weight_norm, pruned])
@pytest.mark.parametrize("make", WITH_WEIGHTS[:4])
def test_changed_before_the_patch(make: Callable[[], Case], change: Callable[[nn.Module, str], None]) -> None:
    name = make().parameter
    pair = Pair(make, lambda module: change(module, name))
    pair.check()
    if parametrize.is_parametrized(pair.part(pair.fast)):
        pair.do(lambda module: parametrize.remove_parametrizations(module, name))
        pair.check()
    assert_restored(pair)


@pytest.mark.parametrize("make", WITH_WEIGHTS)
def test_parametrization_taken_off_after_the_patch(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    name = pair.case.parameter
    pair.do(lambda module: parametrize_twice(module, name))
    assert_restored(pair)
    pair.replace()
    pair.do(lambda module: parametrize.remove_parametrizations(module, name))
    pair.check()
    assert_restored(pair)
    assert type(pair.part(pair.fast)) is type(pair.part(pair.plain))


@pytest.mark.parametrize("make", WITH_WEIGHTS)
def test_deleted_weights_are_missed(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    pair.do(lambda module: delattr(module, pair.case.parameter))
    for parent in (pair.plain, pair.fast):
        with pytest.raises(AttributeError, match=pair.case.parameter):
            pair.case.call(parent, *pair.case.operands)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", ALL)
def test_hooks(make: Callable[[], Case], when: str) -> None:
    calls: list[str] = []

    def hook(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, args: calls.append("pre") or (2 * args[0], *args[1:]))
        module.register_forward_hook(lambda module, args, output: calls.append("forward") or 3 * output)
        module.register_full_backward_hook(lambda *_: calls.append("backward"))

    pair = Pair(make, hook) if when == "before" else Pair(make)
    if when == "after":
        pair.do(hook)
    if make not in (mace_convolution,):  # whose output the parent sums after the hooks
        pair.check()
        assert calls == 2 * ["pre", "forward", "backward"]
    assert len(pair.part(pair.fast)._forward_hooks) == 1
    _restore(pair.fast)
    assert len(pair.part(pair.fast)._forward_hooks) == 1


@pytest.mark.parametrize("how", ["deepcopy", "save"])
@pytest.mark.parametrize("make", ALL)
def test_copies(make: Callable[[], Case], how: str) -> None:
    if make in (typed, radial_linear, radial_scaled) and how == "save":
        how = "deepcopy"  # these tests make classes that no pickle can name
    pair = Pair(make)
    for _ in range(2):
        pair.fast = duplicated(pair.fast, how)
        assert isinstance(pair.part(pair.fast), Replacement)
        pair.check()
    assert_restored(pair)


@pytest.mark.parametrize("make", ALL)
def test_attributes_and_identity(make: Callable[[], Case]) -> None:
    case = make()
    swap = case.swap(case.parent)
    module, parameters = swap.module, list(case.parent.named_parameters())
    kind, contents = type(module), {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
    swap.apply()
    assert swap.module is module
    assert isinstance(module, kind)
    assert type(module).__name__ == kind.__name__
    assert [id(p) for _, p in case.parent.named_parameters()] == [id(p) for _, p in parameters]
    assert [name for name, _ in case.parent.named_parameters()] == [name for name, _ in parameters]
    methods = {"forward", "_apply", "_load_from_state_dict", "state_dict", "call_super_init"}
    for name, value in contents.items():
        now = getattr(module, name)
        assert now is value or callable(value) or name in methods or now == value, name
    module.note_of_a_user = 1
    _restore(case.parent)
    assert type(module) is kind
    assert module.note_of_a_user == 1


def test_its_class_makes_plain_modules() -> None:
    pair = Pair(linear)
    made = type(pair.part(pair.fast))("2x0e", "3x0e")
    assert type(made) is o3.Linear


@pytest.mark.parametrize("explicit", [linear, typed])
def test_weights_that_are_given(explicit: Callable[[], Case]) -> None:
    pair = Pair(explicit)
    weight = torch.randn_like(pair.part(pair.fast).weight)
    values = [pair.part(parent)(*pair.case.operands, weight) for parent in (pair.plain, pair.fast)]
    assert_close(values[1], values[0])


def test_a_product_without_edges_is_the_plain_one() -> None:
    pair = Pair(mace_convolution)
    x, y, w = pair.case.operands
    values = [pair.part(parent)(x[SENDERS], y, w) for parent in (pair.plain, pair.fast)]
    assert torch.equal(values[0], values[1])


def test_a_module_with_two_parents() -> None:
    shared = product()
    parents = nn.ModuleList([nn.ModuleDict({"part": shared}), nn.ModuleDict({"part": shared})])
    for parent in parents:
        added = build_convolution("part", shared, True, torch.device("cpu"))
        Swap(parent, "part", MaceConvolution, added).apply()
    assert all(parent.part is shared and parent.conv_fusion for parent in parents)
    _restore(parents)
    assert not any(hasattr(parent, "conv_fusion") for parent in parents)
    assert type(shared) is o3.TensorProduct


# Buffers


def scaled_buffers(module: nn.Module) -> dict[str, Tensor]:
    changed = {name for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    return {name: -value if name in changed else value for name, value in module.state_dict().items()}


def by_loading(module: nn.Module) -> None:
    module.load_state_dict(scaled_buffers(module))


def by_assigned_loading(module: nn.Module) -> None:
    module.load_state_dict(scaled_buffers(module), assign=True)


def in_place(module: nn.Module) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.neg_()


@pytest.mark.parametrize("change", [by_loading, by_assigned_loading, in_place])
@pytest.mark.parametrize("make", [contraction, mace_convolution, nequip_convolution, radial_scaled, typed])
def test_buffers_that_change(make: Callable[[], Case], change: Callable[[nn.Module], None]) -> None:
    pair = Pair(make)
    pair.check()
    before = pair.case.call(pair.fast, *pair.case.operands)
    pair.do(change)
    pair.check()
    if change is in_place or make is not radial_scaled:  # whose buffer is not in its state dict
        assert not torch.equal(pair.case.call(pair.fast, *pair.case.operands), before)
    pair.check()
    assert_restored(pair)


def test_assigned_buffers() -> None:
    pair = Pair(contraction)
    pair.do(lambda module: setattr(module, "U_matrix_2", 2.0 * module.U_matrix_2))
    pair.check()
    assert isinstance(pair.part(pair.fast), Replacement)


def test_equal_buffers_change_nothing() -> None:
    pair = Pair(contraction)
    added = pair.part(pair.fast).eqaccel
    pair.fast.load_state_dict(pair.plain.state_dict())
    pair.fast.float().double()
    pair.fast = pair.fast.to("cpu")
    pair.case.call(pair.fast, *pair.case.operands)
    assert pair.part(pair.fast).eqaccel is added


def test_coefficients_that_are_none() -> None:
    """Without a kernel for them, NequIP's module computes as it came, and MACE's block, which cannot, is told so."""
    for make in (nequip_convolution, mace_convolution):
        pair = Pair(make)
        pair.do(lambda module: [b.mul_(1.5) for b in module.buffers() if b.is_floating_point()])
        if make is nequip_convolution:
            pair.check()
            assert not isinstance(pair.part(pair.fast), Replacement)
        else:
            with pytest.raises(PatchError, match="use the model unpatched"):
                pair.case.call(pair.fast, *pair.case.operands)


def test_buffers_that_have_no_kernel_end_the_replacement() -> None:
    pair = Pair(contraction)
    pair.do(lambda module: [buffer.zero_() for buffer in module.buffers()])
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)


@pytest.mark.parametrize("make", [gate, linear])
def test_children_that_change_end_the_replacement(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    if make is gate:
        pair.do(lambda module: module.act_scalars.acts.__setitem__(0, nn.Softplus()))
    else:
        pair.do(lambda module: module.output_mask.mul_(2))
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)


def test_the_embedding_of_a_typed_product() -> None:
    pair = Pair(typed)
    for parent in (pair.plain, pair.fast):
        parent.embed.embed_module.weight = nn.Parameter(parent.embed.embed_module.weight.detach() * 2)
    pair.case.operands = (pair.case.operands[0], 2 * pair.case.operands[1])
    pair.check()


def test_copies_of_changed_buffers() -> None:
    for how in ("deepcopy", "save"):
        pair = Pair(contraction)
        pair.do(in_place)
        pair.fast = duplicated(pair.fast, how)
        pair.check()
        pair.fast = duplicated(pair.fast, how)
        pair.do(in_place)  # before a copy is called for the first time
        pair.check()


def test_scripts_of_changed_buffers() -> None:
    pair = Pair(contraction)
    pair.do(in_place)
    scripted = torch.jit.script(pair.part(pair.fast))
    assert_close(scripted(*pair.case.operands), pair.part(pair.plain)(*pair.case.operands))


def test_transformed_buffers_are_an_error() -> None:
    pair = Pair(contraction)
    part = pair.part(pair.fast)

    def energy(coefficients: Tensor) -> Tensor:
        return torch.func.functional_call(part, {"U_matrix_2": coefficients}, pair.case.operands).sum()

    with pytest.raises(PatchError, match="U_matrix_2: expected an ordinary tensor"):
        torch.func.grad(energy)(part.U_matrix_2)
    pair.check()

    def work(x: Tensor) -> Tensor:
        return part(x, pair.case.operands[1]).sum()

    pair.do(in_place)
    x = pair.case.operands[0].requires_grad_()
    expected = torch.autograd.grad(pair.part(pair.plain)(*pair.case.operands).sum(), x)[0]
    assert_close(torch.autograd.grad(work(x), x)[0], expected)


# Compiled and called as a model


class Model(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(x))


def test_compiled_models() -> None:
    """`torch.compile` goes through the entrance of a model, and through a replacement, to the forward methods."""
    plain = Model()
    fast = copy.deepcopy(plain)
    become(fast.part, RadialLinear, MatrixProduct())
    become(fast, Entrance)
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    x = random(6, 4)
    assert_close(compiled(x), plain(x))
    assert_close(torch.jit.script(fast)(x), plain(x))
    assert_close(torch.export.export(fast, (x,)).module()(x), plain(x))


def test_an_entrance_is_the_model() -> None:
    model = Model()
    become(model, Entrance)
    assert type(model).__name__ == "Model"
    for twin in (duplicated(model, "deepcopy"), duplicated(model, "save")):
        assert isinstance(twin, Entrance)
        _restore(twin)
        assert type(twin) is Model
    assert type(type(model)()) is Model


# Autocast


@pytest.mark.parametrize("make", ALL)
def test_autocast_is_refused(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(PatchError, match="expected no autocast around a patched model, got bfloat16 on 'cpu'"):
            pair.case.call(pair.fast, *pair.case.operands)
        with torch.autocast("cpu", enabled=False):
            pair.check()
