"""Modules and what replaces them, side by side: what the tests of replacements share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate
from patch_checks import assert_close
from torch import Tensor, nn

from eqaccel.patches import nodes
from eqaccel.patches.convolution import build_convolution
from eqaccel.patches.e3nn import forms as e3nn_forms
from eqaccel.patches.mace import swapping as mace_swapping
from eqaccel.patches.mace.swapping import RADIAL_FORMS, MaceConvolution
from eqaccel.patches.nequip import swapping as nequip_swapping
from eqaccel.patches.nequip.swapping import NequipConvolution
from eqaccel.patches.precision import Options
from eqaccel.patches.radial import RadialForms, radial_swaps
from eqaccel.patches.replacement import Replacement, Swap, restore_all

FORMS = {**mace_swapping.FORMS, **nequip_swapping.FORMS}
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


def node(
    part: nn.Module, *operands: Tensor, parameter: str = "", forms: nodes.NodeForms = FORMS, **others: nn.Module
) -> Case:
    """A node-wise module."""
    parent = nn.ModuleDict({**others, "part": part})
    return Case(parent, lambda m: Swap(m, "part", *nodes.build_form(m, m.part, forms)), operands, call_node, parameter)


def linear() -> Case:
    return node(o3.Linear("4x0e+3x1o", "5x0e+2x1o"), random(6, 13), parameter="weight")


def biased_linear() -> Case:
    module = o3.Linear("4x0e+3x1o", "5x0e+2x1o", biases=True)
    return node(module, random(6, 13), parameter="weight", forms=e3nn_forms.FORMS)


def dense_product() -> Case:
    module = o3.FullyConnectedTensorProduct("3x0e+2x1o", "0e+1o", "2x0e+2x1o")
    return node(module, random(6, 9), random(6, 4), parameter="weight", forms=e3nn_forms.FORMS)


def square() -> Case:
    module = copy.deepcopy(o3.TensorSquare("3x0e+2x1o"))  # e3nn 0.6 has more constants in the state dicts of copies
    return node(module, random(6, 9), forms=e3nn_forms.FORMS)


def typed() -> Case:
    embed = type("NodeTypeEmbed", (nn.Module,), {})()
    embed.embed_module = nn.Embedding(3, 5)
    rows = embed.embed_module.weight.detach()[torch.arange(6) % 3].clone()
    product = o3.FullyConnectedTensorProduct("4x0e+3x1o", "5x0e", "5x0e+2x1o")
    return node(product, random(6, 13), rows, parameter="weight", embed=embed)


def gate() -> Case:
    module = Gate("4x0e", [torch.tanh], "3x0e", [torch.tanh], "3x1o")
    return node(module, random(6, 16))


def harmonics() -> Case:
    return node(o3.SphericalHarmonics("0e+1o+2e", True, "component"), random(6, 3))


def contraction() -> Case:
    pytest.importorskip("mace")
    from mace.modules.symmetric_contraction import Contraction

    module = Contraction(o3.Irreps("5x0e+5x1o"), o3.Irreps("0e"), 3, num_elements=3)
    one_hot = nn.functional.one_hot(torch.arange(6) % 3, 3).double()
    return node(module, random(6, 5, 4), one_hot, parameter="weights_max")


def radial(network: nn.Module, name: str, forms: RadialForms = RADIAL_FORMS) -> Case:
    """The first layer of a radial network."""

    def swap(parent: nn.Module) -> Swap:
        return next(swap for swap in radial_swaps(parent, forms) if swap.name == name)

    return Case(network, swap, (random(6, 4),), lambda parent, x: getattr(parent, name)(x), "weight")


def radial_layer() -> Case:
    return radial(FullyConnectedNet([4, 8, 3], torch.tanh), "layer0")


def radial_linear() -> Case:
    return radial(type("RadialMLP", (nn.Sequential,), {})(nn.Linear(4, 8), nn.Tanh()), "0")


def radial_scaled() -> Case:
    pytest.importorskip("nequip")
    from nequip.nn.mlp import ScalarLinearLayer

    from eqaccel.patches.nequip import radial as nequip_radial

    network = type("ScalarMLPFunction", (nn.Sequential,), {})(ScalarLinearLayer(4, 8, alpha=0.3))
    return radial(network, "0", nequip_radial.RADIAL_FORMS)


def product() -> o3.TensorProduct:
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (1, 1, 1, "uvu", True)]
    return o3.TensorProduct("4x0e+4x1o", "0e+1o", "4x0e+4x2e", paths, shared_weights=False, internal_weights=False)


def call_mace(parent: nn.Module, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """As an interaction block does."""
    if hasattr(parent, "conv_fusion"):
        return parent.part(x, y, w, torch.stack([SENDERS, RECEIVERS]).to(x.device))
    messages = parent.part(x[SENDERS], y, w)
    return messages.new_zeros(len(x), messages.shape[1]).index_add(0, RECEIVERS.to(x.device), messages)


def mace_convolution() -> Case:
    def swap(parent: nn.Module) -> Swap:
        added = build_convolution("part", parent.part, Options(), parent.part.output_mask.device)
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
        added = build_convolution("part.tp", parent.part.tp, Options(), parent.part.tp.output_mask.device)
        return Swap(parent, "part", NequipConvolution, added)

    operands = (random(5, 16), random(7, 4), random(7, 12), RECEIVERS, SENDERS)
    return Case(nn.ModuleDict({"part": TensorProductScatter()}), swap, operands, call_node)


WITH_WEIGHTS = (linear, biased_linear, dense_product, typed, contraction, radial_layer, radial_linear, radial_scaled)
ALL = (*WITH_WEIGHTS, square, gate, harmonics, mace_convolution, nequip_convolution)


class Pair:
    """A plain parent and a patched one with equal contents."""

    def __init__(
        self,
        make: Callable[[], Case],
        before: Callable[[nn.Module], object] = lambda module: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.case = make()
        self.case.parent.to(device)
        self.case.operands = tuple(operand.to(device) for operand in self.case.operands)
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
    restore_all(pair.fast)
    part = pair.part(pair.fast)
    assert not any(isinstance(module, Replacement) for module in pair.fast.modules())
    assert [name for name, _ in pair.fast.named_modules()] == [name for name, _ in pair.plain.named_modules()]
    assert type(part).__name__ == type(pair.part(pair.plain)).__name__
    assert vars(part).keys() - vars(pair.part(pair.plain)).keys() <= {"_backward_hooks"}
    assert not hasattr(pair.fast, "conv_fusion")
    pair.check()
