"""Weights of a replaced module are its own: whatever is done to them, before or after, counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

from patch_checks import assert_close
from replacement_cases import WITH_WEIGHTS, Case, Pair, assert_restored, linear, typed
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("dense_everywhere")]


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
def test_weights_are_those_of_the_module(
    make: Callable[[], Case], change: Callable[[nn.Module, str], None], device: torch.device
) -> None:
    pair = Pair(make, device=device)
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


@pytest.mark.parametrize("explicit", [linear, typed])
def test_weights_that_are_given(explicit: Callable[[], Case]) -> None:
    pair = Pair(explicit)
    weight = torch.randn_like(pair.part(pair.fast).weight)
    values = [pair.part(parent)(*pair.case.operands, weight) for parent in (pair.plain, pair.fast)]
    assert_close(values[1], values[0])
