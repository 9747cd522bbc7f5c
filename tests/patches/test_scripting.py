"""eqaccel.patches.scripting: modules become TorchScript, whatever other libraries have made of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eqaccel.patches.scripting import script


class _Gather(nn.Module):
    def forward(self, values: Tensor, rows: Tensor) -> Tensor:
        return torch.index_select(torch.select(values, 0, 1), 0, rows)


def test_functions_of_torch_that_another_library_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_geometric does when SevenNet imports it, by some that TorchScript cannot compile."""

    def replaced(input: Tensor, dim: int | str, index: Any, **options: Any) -> Tensor:
        raise AssertionError

    for name in ("index_select", "select"):
        monkeypatch.setattr(torch, name, replaced)
    scripted = script(_Gather())
    assert torch.index_select is torch.select is replaced
    assert scripted(torch.arange(10.0).view(2, 5), torch.tensor([3, 1])).tolist() == [8.0, 6.0]


class _Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def forward(self, values: Tensor) -> Tensor:
        return values + 1.0


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_constructors() -> None:
    assert script(_Annotated())(torch.ones(1)).tolist() == [2.0]
