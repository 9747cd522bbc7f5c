"""Buffers that change: what a replacement computes with is made anew, or it is the plain module again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

from patch_checks import assert_close, duplicated
from replacement_cases import (
    Case,
    Pair,
    assert_restored,
    contraction,
    gate,
    linear,
    mace_convolution,
    nequip_convolution,
    radial_scaled,
    typed,
)
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from eqaccel.errors import PatchError
from eqaccel.patches.replacement import Replacement

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("dense_everywhere")]


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


def through_data(module: nn.Module) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data.neg_()


def through_numpy(module: nn.Module) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.numpy()[...] *= -1


def by_other_data(module: nn.Module) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = -buffer


CHANGES = [by_loading, by_assigned_loading, in_place, through_data, through_numpy, by_other_data]
IN_PLACE, BEHIND_TORCH = CHANGES[2:], (through_data, through_numpy)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [contraction, mace_convolution, nequip_convolution, radial_scaled, typed])
def test_buffers_that_change(
    make: Callable[[], Case], change: Callable[[nn.Module], None], device: torch.device
) -> None:
    if device.type == "cuda" and change in BEHIND_TORCH:
        pytest.skip("values on a GPU are not compared at every call")
    pair = Pair(make, device=device)
    pair.check()
    before = pair.case.call(pair.fast, *pair.case.operands)
    pair.do(change)
    pair.check()
    if change in IN_PLACE or make is not radial_scaled:  # whose buffer is not in its state dict
        assert not torch.equal(pair.case.call(pair.fast, *pair.case.operands), before)
    pair.check()
    assert_restored(pair)


class Counting(TorchDispatchMode):
    """Sees every operation, as counters of operations and profilers of memory do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", [by_loading, in_place])
def test_changes_are_seen_by_calls_whose_operations_are_counted(
    change: Callable[[nn.Module], None], device: torch.device
) -> None:
    pair = Pair(mace_convolution, device=device)
    pair.do(change)
    with Counting():
        pair.check()


@pytest.mark.parametrize("change", [by_loading, by_assigned_loading])
@pytest.mark.parametrize("make", [contraction, mace_convolution, nequip_convolution, typed])
def test_compiled_programs_see_what_was_loaded(make: Callable[[], Case], change: Callable[[nn.Module], None]) -> None:
    """Also where nobody has called the module since, and those that were compiled before."""
    pair = Pair(make)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *operands: pair.case.call(pair.fast, *operands), backend="eager")
    for _ in range(2):
        pair.do(change)
        for _ in range(2):
            assert_close(compiled(*pair.case.operands), pair.case.call(pair.plain, *pair.case.operands))


def test_exported_programs_need_values_that_were_looked_at() -> None:
    pair = Pair(contraction)
    pair.do(by_loading)
    part = pair.part(pair.fast)
    with pytest.raises(PatchError, match=r"expected values that eqaccel has seen, .* call the model once before"):
        torch.export.export(part, pair.case.operands, strict=False)
    pair.check()
    program = torch.export.export(part, pair.case.operands, strict=False).module()
    assert_close(program(*pair.case.operands), pair.part(pair.plain)(*pair.case.operands))


def test_programs_of_changed_buffers_have_the_new_values() -> None:
    pair = Pair(mace_convolution)
    pair.do(in_place)
    x, *operands = pair.case.operands
    traced = make_fx(lambda x: pair.case.call(pair.fast, x, *operands))(x)
    assert_close(traced(x), pair.case.call(pair.plain, x, *operands))


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
def test_children_that_change_end_the_replacement(make: Callable[[], Case], device: torch.device) -> None:
    pair = Pair(make, device=device)
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


@pytest.mark.parametrize("leave", [lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu")], ids=["meta", "empty"])
@pytest.mark.parametrize("make", [mace_convolution, contraction, gate])
def test_values_are_not_left_behind(make: Callable[[], Case], leave: Callable[[nn.Module], Any]) -> None:
    """State dicts have no kernels, so nobody could put them back."""
    pair = Pair(make)
    with pytest.raises(PatchError, match=r"leaves them behind, such as .* Call eqaccel.unpatch\(model\) first"):
        leave(pair.part(pair.fast))
    pair.check()
