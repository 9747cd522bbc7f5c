"""eqaccel.patches.torch_state: torch's global state is as it was afterwards, whatever several threads do."""

from __future__ import annotations

import threading

import pytest
import torch

from eqaccel.patches.torch_state import default_dtype

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
