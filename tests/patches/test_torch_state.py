"""eqaccel.patches.torch_state: torch's global state is as it was afterwards, whatever several threads do."""

from __future__ import annotations

import threading

import pytest
import torch

from eqaccel.patches.torch_state import all_trainable, default_dtype, frozen

WAIT = 0.2
"""Seconds in which another thread would have come in, if it were let in."""


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def test_threads_leave_the_default_dtype_as_it_was() -> None:
    """The second thread would find float64, and put it back after the first has put back float32."""
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    found: list[torch.dtype] = []

    def first() -> None:
        with default_dtype(torch.float64):
            first_is_in.set()
            second_is_in.wait(WAIT)
            found.append(torch.get_default_dtype())
        first_is_out.set()

    def second() -> None:
        first_is_in.wait()
        with default_dtype(torch.float16):
            second_is_in.set()
            first_is_out.wait(WAIT)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [torch.float64]
    assert torch.get_default_dtype() == torch.float32


def test_one_thread_sets_it_twice() -> None:
    with default_dtype(torch.float64), default_dtype(torch.float16):
        assert torch.get_default_dtype() == torch.float16
    assert torch.get_default_dtype() == torch.float32


class Zeros(torch.nn.Parameter):
    """Parameters that stay zero, as MACE 0.3.14 has them."""

    def requires_grad_(self) -> Zeros:  # type: ignore[override]
        return self


def test_parameters_that_stay_as_they_are() -> None:
    model = torch.nn.Linear(2, 1)
    model.bias = Zeros(torch.zeros(1), requires_grad=False)
    model.weight.requires_grad_(False)
    with all_trainable(model) as parameters:
        assert list(parameters) == ["weight"]
        assert model.weight.requires_grad
    assert not model.weight.requires_grad
    model.weight.requires_grad_()
    assert frozen(model) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())
