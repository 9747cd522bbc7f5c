"""What is there at a time of the weights of edges."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from eqaccel.ops.portions import KeptWeights


def test_weights_are_kept_while_there_is_room() -> None:
    kept, made = KeptWeights(limit=3 * 8 * 4), []

    def make(name: str) -> Tensor:
        made.append(name)
        return torch.zeros(8)  # 32 bytes

    for name in "abcd":
        kept.made(name, functools.partial(make, name), 32)
    assert made == list("abcd")
    for name in "dcba":
        kept.taken(name, functools.partial(make, name), 32)
    assert made == [*"abcd", "a"]  # the oldest
    kept.made("large", functools.partial(make, "large"), 10**6)  # what finds no room at all is there alone
    assert len(kept._kept) == 1
