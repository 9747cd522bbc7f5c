"""TorchScript graphs, run from Python, give what TorchScript gives, also under a tracer with symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eqaccel.integrations.export import interpreter

pytestmark = pytest.mark.filterwarnings("ignore")


def control_flow(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    parts = [x]
    for i in range(count):
        if i % 2 == 0:
            parts.append(x.to(torch.float32) * i)
        else:
            parts.append(torch.zeros(x.size(0), x.shape[1], dtype=x.dtype, device=x.device) - len(parts))
    total = torch.cat([part.double() for part in parts], dim=1)
    sizes = {"rows": len(x)}
    if sizes["rows"] < 0:
        raise ValueError("negative")
    sizes["columns"] = x.size(1)
    del sizes["columns"]
    return total, torch.tensor([sizes["rows"], total.dim(), len(sizes)])


def test_control_flow() -> None:
    scripted = torch.jit.script(control_flow)
    x = torch.randn(4, 3)
    for value, expected in zip(interpreter.run(scripted.inlined_graph, [x, 3]), scripted(x, 3), strict=True):
        assert torch.equal(value, expected)
        assert value.dtype == expected.dtype


def test_symbolic_sizes() -> None:
    graph = torch.jit.script(control_flow).inlined_graph
    traced = make_fx(lambda x: interpreter.run(graph, [x, 3])[0], tracing_mode="symbolic")(torch.randn(4, 3))
    x = torch.randn(7, 3)
    assert torch.equal(traced(x), control_flow(x, 3)[0])


def test_errors() -> None:
    @torch.jit.script
    def refuses(x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError("x: expected a matrix")
        return x

    with pytest.raises(RuntimeError, match="x: expected a matrix"):
        interpreter.run(refuses.graph, [torch.zeros(3)])

    @torch.jit.script
    def unknown(x: Tensor) -> list[float]:
        values: list[float] = x.tolist()
        return values

    with pytest.raises(NotImplementedError, match="TorchScript operation 'prim::tolist'"):
        interpreter.run(unknown.graph, [torch.zeros(3)])
