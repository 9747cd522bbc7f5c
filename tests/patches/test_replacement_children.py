"""Children that a replacement does not call: what happens to them is noticed, and the module computes as it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

from e3nn.nn import FullyConnectedNet
from patch_checks import assert_close, duplicated
from replacement_cases import Case, Pair, harmonics, mace_convolution, nequip_convolution, radial, random, typed
from torch import nn

from eqaccel.errors import PatchError
from eqaccel.patches.replacement import Replacement
from eqaccel.patches.snapshot import Snapshot

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("dense_everywhere")]


def radial_silu() -> Case:
    return radial(FullyConnectedNet([4, 8, 3], torch.nn.functional.silu), "layer0")


def forward_hook(child: nn.Module) -> None:
    child.register_forward_hook(lambda module, args, output: 2 * output)


def forward_pre_hook(child: nn.Module) -> None:
    child.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def backward_hook(child: nn.Module) -> None:
    child.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0], *inputs[1:]))


def own_forward(child: Any) -> None:
    forward = child.forward
    child.forward = lambda *args: 2 * forward(*args)


def doubled(cls: Any) -> type:
    return type("Doubled", (cls,), {"forward": lambda self, *args: 2 * cls.forward(self, *args)})


def other_class(child: nn.Module) -> None:
    child.__class__ = doubled(type(child))


CHANGES = [forward_hook, forward_pre_hook, backward_hook, own_forward, other_class]
CHILDREN: list[tuple[Callable[[], Case], str]] = [(nequip_convolution, "tp"), (radial_silu, "act")]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("make", "name"), CHILDREN)
def test_changes_of_children(
    make: Callable[[], Case], name: str, change: Callable[[nn.Module], None], device: torch.device
) -> None:
    pair = Pair(make, device=device)
    pair.check()
    pair.do(lambda part: change(getattr(part, name)))
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)


def test_children_that_were_hooked_before() -> None:
    pair = Pair(nequip_convolution, lambda part: forward_hook(part.tp))
    pair.check()


def test_observers_that_are_removed_before_a_call_change_nothing() -> None:
    pair = Pair(nequip_convolution)
    pair.part(pair.fast).tp.register_forward_hook(lambda *_: None).remove()
    pair.check()
    assert isinstance(pair.part(pair.fast), Replacement)


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_of_changed_children(how: str) -> None:
    pair = Pair(nequip_convolution)
    pair.do(lambda part: setattr(part.tp, "scale", 2.0))  # a number that nothing depends on
    pair.fast = duplicated(pair.fast, how)
    pair.check()
    assert isinstance(pair.part(pair.fast), Replacement)
    pair.do(lambda part: own_forward(part.tp))
    pair.check()


def test_products_of_another_class() -> None:
    """One that is put there, with the paths of the first, but a forward method that is not e3nn's."""
    pair = Pair(nequip_convolution)
    other = nequip_convolution().parent.part.tp
    other_class(other)
    pair.do(lambda part: setattr(part, "tp", other))
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)


def test_what_cannot_be_taken_back_is_an_error() -> None:
    pair = Pair(mace_convolution)
    pair.do(lambda part: part.add_module("child", nn.Identity()))
    pair.check()
    forward_hook(pair.part(pair.fast).child)
    with pytest.raises(PatchError, match="it has hooks in child, which eqaccel does not call"):
        pair.case.call(pair.fast, *pair.case.operands)


@pytest.mark.parametrize(
    ("make", "name", "value"), [(radial_silu, "var_in", 3.0), (harmonics, "normalization", "norm")]
)
def test_numbers_and_words(make: Callable[[], Case], name: str, value: object) -> None:
    pair = Pair(make)
    before = pair.case.call(pair.fast, *pair.case.operands)
    pair.do(lambda part: setattr(part, name, value))
    pair.check()
    assert isinstance(pair.part(pair.fast), Replacement)
    assert not torch.equal(pair.case.call(pair.fast, *pair.case.operands), before)


def test_functions() -> None:
    """The function of an activation, whose module stays."""
    pair = Pair(radial_silu)
    before = pair.case.call(pair.fast, *pair.case.operands)
    pair.do(lambda part: setattr(part.act, "f", torch.tanh))
    pair.check()
    assert not torch.allclose(pair.case.call(pair.fast, *pair.case.operands), before)


def test_what_stays_the_same_keeps_its_kernels() -> None:
    """With their plans and what was compiled ahead."""
    pair = Pair(harmonics)
    kernel = pair.part(pair.fast).eqaccel
    pair.do(lambda part: setattr(part, "normalize", False))
    pair.check()
    assert pair.part(pair.fast).eqaccel is kernel


def test_an_activation_that_is_taken_away() -> None:
    pair = Pair(radial_silu)
    pair.do(lambda part: setattr(part, "act", None))
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)


def other_embedding(embed: Any) -> None:
    embed.embed_module = nn.Embedding(3, 5)


def hooked_embedding(embed: Any) -> None:
    forward_hook(embed.embed_module)


@pytest.mark.parametrize("change", [other_embedding, hooked_embedding, forward_hook, own_forward])
def test_rows_of_no_type(change: Callable[[nn.Module], None]) -> None:
    """Another embedding than the one that was there, or a hook on it, gives rows that `TypedProduct` does not know."""
    pair = Pair(typed)
    for parent in (pair.plain, pair.fast):
        change(parent.embed)
    pair.case.operands = (pair.case.operands[0], random(6, 5))
    pair.check()
    assert not isinstance(pair.part(pair.fast), Replacement)
    scripted = torch.jit.script(pair.part(pair.fast))
    assert_close(scripted(*pair.case.operands), pair.part(pair.plain)(*pair.case.operands))


def test_a_graph_whose_text_is_written_anew_is_the_same() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    snapshot = Snapshot(nn.ModuleDict({"graph": graph}))
    graph._code = f"# by another version\n{graph._code}"
    assert snapshot.holds()
