"""Changing `from e3nn import o3` to `from eqaccel import o3` is enough, in networks that e3nn has as examples."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

import e3nn
from e3nn_pairs import assert_same, rows

from eqaccel import o3
from eqaccel.patches.torch_state import default_dtype

FOLDER = "nn/models/v2106"


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The networks with that import changed, and nothing else but their own place."""
    package = tmp_path / "changed_networks"
    package.mkdir()
    for file in (Path(e3nn.__file__).parent / FOLDER).glob("*.py"):
        text = file.read_text().replace(f"e3nn.{FOLDER.replace('/', '.')}", package.name)
        (package / file.name).write_text(re.sub(r"from e3nn(?= import o3|\.o3)", "from eqaccel", text))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(f"{package.name}.gate_points_networks")
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        del sys.modules[name]


def test_networks_of_e3nn_take_the_classes(changed: Any) -> None:
    plain = importlib.import_module(f"e3nn.{FOLDER.replace('/', '.')}.gate_points_networks")
    options = {"max_radius": 2.0, "num_neighbors": 3.0, "num_nodes": 5.0, "mul": 4, "layers": 2, "lmax": 2}
    with default_dtype(torch.float64):
        theirs, ours = (networks.SimpleNetwork("3x0e", "2x0e+1o", **options).double() for networks in (plain, changed))
        assert {type(module) for module in ours.modules()} >= {o3.FullyConnectedTensorProduct, o3.TensorProduct}
        ours.load_state_dict(theirs.state_dict())
        position, features = rows(6, 3, dtype=torch.float64), rows(6, 3, dtype=torch.float64, seed=1)
        results = []
        for network in (theirs, ours):
            pos, x = position.clone().requires_grad_(), features.clone().requires_grad_()
            value = network({"pos": pos, "x": x})
            results.append([value, *torch.autograd.grad(value.square().sum(), [pos, x, *network.parameters()])])
    for expected, found in zip(*results, strict=True):
        assert_same(found, expected, torch.float64)
