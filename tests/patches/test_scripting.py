"""eqaccel.patches.scripting: modules become TorchScript, whatever other libraries have made of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eqaccel.patches.scripting import script


class _Gather(nn.Module):
    def forward(self, values: Tensor, rows: Tensor) -> Tensor:
        return torch.index_select(values, 0, rows)


def test_a_function_of_torch_that_another_library_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch_geometric does when SevenNet imports it, by one that TorchScript cannot compile."""

    def replaced(input: Tensor, dim: int | str, index: Tensor, **options: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(torch, "index_select", replaced)
    scripted = script(_Gather())
    assert torch.index_select is replaced
    assert scripted(torch.arange(5.0), torch.tensor([3, 1])).tolist() == [3.0, 1.0]
