"""Hooks of a module, and what is around its call, act on its replacement."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

from patch_checks import assert_close, duplicated
from replacement_cases import ALL, Case, Pair, mace_convolution, random
from torch import Tensor, nn

from eqaccel.errors import PatchError
from eqaccel.ops import MatrixProduct
from eqaccel.patches.radial import RadialLinear
from eqaccel.patches.replacement import Entrance, become, restore_all

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("dense_everywhere")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", ALL)
def test_hooks(make: Callable[[], Case], when: str, device: torch.device) -> None:
    calls: list[str] = []

    def hook(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, args: calls.append("pre") or (2 * args[0], *args[1:]))
        module.register_forward_hook(lambda module, args, output: calls.append("forward") or 3 * output)
        module.register_full_backward_hook(lambda *_: calls.append("backward"))

    pair = Pair(make, hook, device) if when == "before" else Pair(make, device=device)
    if when == "after":
        pair.do(hook)
    if make not in (mace_convolution,):  # whose output the parent sums after the hooks
        pair.check()
        assert calls == 2 * ["pre", "forward", "backward"]
    assert len(pair.part(pair.fast)._forward_hooks) == 1
    restore_all(pair.fast)
    assert len(pair.part(pair.fast)._forward_hooks) == 1


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
        restore_all(twin)
        assert type(twin) is Model
    assert type(type(model)()) is Model


@pytest.mark.parametrize("make", ALL)
def test_autocast_is_refused(make: Callable[[], Case]) -> None:
    pair = Pair(make)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(PatchError, match="expected no autocast around a patched model, got bfloat16 on 'cpu'"):
            pair.case.call(pair.fast, *pair.case.operands)
        with torch.autocast("cpu", enabled=False):
            pair.check()
