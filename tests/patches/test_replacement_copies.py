"""Copies of a replaced module are replaced modules, and a module stays the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn import o3
from patch_checks import duplicated
from replacement_cases import (
    ALL,
    SENDERS,
    Case,
    Pair,
    assert_restored,
    linear,
    mace_convolution,
    product,
    radial_linear,
    radial_scaled,
    typed,
)
from torch import nn

import eqaccel
from eqaccel.patches import copying
from eqaccel.patches.convolution import build_convolution
from eqaccel.patches.mace.swapping import MaceConvolution
from eqaccel.patches.precision import Options
from eqaccel.patches.replacement import Replacement, Swap, restore_all

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("dense_everywhere")]


@pytest.mark.parametrize("how", ["deepcopy", "save"])
@pytest.mark.parametrize("make", ALL)
def test_copies(make: Callable[[], Case], how: str, device: torch.device) -> None:
    if make in (typed, radial_linear, radial_scaled) and how == "save":
        how = "deepcopy"  # these tests make classes that no pickle can name
    pair = Pair(make, device=device)
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
    restore_all(case.parent)
    assert type(module) is kind
    assert module.note_of_a_user == 1


def test_its_class_makes_plain_modules() -> None:
    pair = Pair(linear)
    made = type(pair.part(pair.fast))("2x0e", "3x0e")
    assert type(made) is o3.Linear


def test_a_product_without_edges_is_the_plain_one() -> None:
    pair = Pair(mace_convolution)
    x, y, w = pair.case.operands
    values = [pair.part(parent)(x[SENDERS], y, w) for parent in (pair.plain, pair.fast)]
    assert torch.equal(values[0], values[1])


def test_a_module_with_two_parents() -> None:
    shared = product()
    parents = nn.ModuleList([nn.ModuleDict({"part": shared}), nn.ModuleDict({"part": shared})])
    for parent in parents:
        added = build_convolution("part", shared, Options(), torch.device("cpu"))
        Swap(parent, "part", MaceConvolution, added).apply()
    assert all(parent.part is shared and parent.conv_fusion for parent in parents)
    restore_all(parents)
    assert not any(hasattr(parent, "conv_fusion") for parent in parents)
    assert type(shared) is o3.TensorProduct


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("to", [torch.float32, torch.float64])
def test_duplicates_share_nothing_that_changes(to: torch.dtype, patched: bool) -> None:
    """Programs of e3nn, of torch.fx here or of TorchScript, and one of torch.fx alone."""
    irreps = o3.Irreps("4x0e+2x1o")
    product = o3.FullyConnectedTensorProduct(irreps, "1x0e+1x1o", irreps)
    model = torch.nn.ModuleList([product, o3.Linear(irreps, irreps), torch.fx.symbolic_trace(torch.nn.Linear(10, 10))])

    if patched:
        eqaccel.patch(model)
        assert isinstance(model[0], Replacement)
        assert isinstance(model[1], Replacement)

    def values(model: torch.nn.ModuleList) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        x, y = torch.linspace(-1, 1, 30, dtype=dtype).view(3, 10), torch.linspace(1, 2, 12, dtype=dtype).view(3, 4)
        return model[2](model[1](model[0](x, y)))

    before, bias = values(model).detach(), model[2].bias
    twin = copying.duplicated(model, {id(bias): bias})
    assert torch.equal(values(twin), before)
    assert twin[2].bias is bias
    tensors = [*twin.state_dict(keep_vars=True).items()]
    assert [name for name, _ in tensors] == list(model.state_dict())
    own = {tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()}
    assert not own & {tensor.data_ptr() for _, tensor in tensors if tensor.numel() and tensor is not bias}
    other = copying.converted(model, to)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert values(other).dtype == to
    assert torch.equal(values(model), before)


@pytest.mark.parametrize("make", ALL)
def test_duplicates_of_replacements_know_what_they_were_made_from(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    part = pair.part(copying.duplicated(pair.fast))
    assert isinstance(part, Replacement)
    assert part._made_from.holds()


class CountsItsCopies(o3.Linear):
    """A class that says itself how it is copied."""

    copies = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.copies += 1


def test_duplicates_of_classes_that_say_how_they_are_copied() -> None:
    twin = copying.duplicated(nn.ModuleList([CountsItsCopies("2x0e", "3x0e"), o3.Linear("2x0e", "3x0e")]))
    assert twin[0].copies == 1
