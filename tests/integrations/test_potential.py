"""A potential without a model library: what files share, on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from export_checks import assert_close, with_ghosts
from torch import Tensor, nn

from eqaccel import TensorProductConv, TensorProductSpec
from eqaccel.integrations.export.precompiled import add_entries, precompiled_entries
from eqaccel.patches.mace.export import ExportedConvolution
from eqaccel.patches.potential import Convolution, Potential
from eqaccel.patches.scripting import script
from eqaccel.targets import host_target

pytestmark = pytest.mark.filterwarnings("ignore")

FIRST = TensorProductSpec.channelwise("4x0e", "0e+1o", "0e+1o")
SECOND = TensorProductSpec.channelwise(FIRST.irreps_out, "0e+1o", "0e")
CONSTANTS = torch.tensor([-2042.123456789, 0.5], dtype=torch.float64)


class Toy(Potential):
    """Two layers; edge attributes are 1 and the vector, weights are functions of its square."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, [FIRST.z_dim], CONSTANTS.clone())
        generator = torch.Generator().manual_seed(0)
        self.types = nn.Parameter(torch.randn(2, 4, generator=generator, dtype=dtype), requires_grad=False)
        self.first = ExportedConvolution(TensorProductConv(FIRST))
        self.second = ExportedConvolution(TensorProductConv(SECOND))
        self.first_numel, self.second_numel = FIRST.weight_numel, SECOND.weight_numel

    def weights(self, squares: Tensor, count: int) -> Tensor:
        steps = torch.arange(1, count + 1, device=squares.device, dtype=squares.dtype)
        return torch.exp(-squares[:, None] / steps)

    def node_energies(
        self, vectors: Tensor, edge_index: Tensor, types: Tensor, num_local: int, exchange: int
    ) -> Tensor:
        y = torch.cat([torch.ones_like(vectors[:, :1]), vectors], dim=1)
        squares = vectors.square().sum(dim=1)
        x = self.first(self.types[types], y, self.weights(squares, self.first_numel), edge_index)[:num_local]
        x = torch.ops.eqaccel.exchange(x, exchange, types.size(0))
        return self.second(x, y, self.weights(squares, self.second_numel), edge_index)[:num_local].sum(dim=1)


def operands(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(40, 3, generator=generator, dtype=torch.float64).to(device, dtype)
    edge_index = torch.randint(9, (2, 40), generator=generator).to(device)
    return vectors, edge_index, torch.arange(9, device=device) % 2


def target_of(device: torch.device) -> str:
    if device.type == "cpu":
        return host_target().name
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@pytest.mark.parametrize("precompiled", [False, True], ids=["compiled", "precompiled"])
def test_saved_potential(precompiled: bool, device: torch.device, dtype: torch.dtype, tmp_path: Any) -> None:
    """A file written on the CPU gives the energies and gradients of the eager module on any device."""
    toy, whole = Toy(dtype), operands(device, dtype)
    if precompiled:
        for module, spec in ((toy.first, FIRST), (toy.second, SECOND)):
            add_entries(
                module,
                precompiled_entries(module.family, spec, str(dtype).removeprefix("torch."), (target_of(device),)),
            )
    script(toy).save(tmp_path / "toy.pt")
    loaded = torch.jit.load(tmp_path / "toy.pt", map_location=device)
    plain = Toy(dtype).to(device)
    vectors = whole[0].clone().requires_grad_()
    energies = plain.node_energies(vectors, *whole[1:], 9, 0)
    (gradient,) = torch.autograd.grad(energies.sum(), vectors)
    relative = 4096 * torch.finfo(dtype).eps
    energies = energies.detach().double() + plain.constants[whole[2]]
    with torch.no_grad():
        for value, wanted in zip(loaded(*whole, 9, 0), (energies, gradient), strict=True):
            assert value.device == wanted.device
            assert value.dtype == wanted.dtype
            assert not value.requires_grad
            assert_close(value, wanted, relative)


def test_constants_keep_their_digits(device: torch.device, dtype: torch.dtype) -> None:
    """An atom without neighbours has nothing else: not a bit of it is lost, whatever the dtype of the file."""
    loaded = script(Toy(dtype)).to(device)
    types = torch.tensor([0, 1, 0], device=device)
    edge_index = torch.zeros(2, 0, dtype=torch.int64, device=device)
    energies, _ = loaded(torch.zeros(0, 3, dtype=dtype, device=device), edge_index, types, 3, 0)
    assert torch.equal(energies.cpu(), CONSTANTS[types.cpu()])


@pytest.mark.parametrize("records", [False, True])
def test_an_error_leaves_the_gradient_mode_as_it_was(records: bool, device: torch.device) -> None:
    loaded = script(Toy(torch.float64)).to(device)
    vectors, edge_index, types = operands(device, torch.float64)
    with torch.set_grad_enabled(records):
        # Nodes that are no images of local ones, without anybody to ask for them: raised between the layers.
        with pytest.raises(Exception, match="'handle' is 0"):
            loaded(vectors, edge_index % 8, types, 8, 0)
        assert torch.is_grad_enabled() is records
        loaded(vectors, edge_index, types, 9, 0)
        assert torch.is_grad_enabled() is records


def test_ghosts(device: torch.device) -> None:
    loaded, whole = script(Toy(torch.float64)).to(device), operands(device, torch.float64)
    *rest, images = with_ghosts(*whole)
    for value, wanted in zip(loaded(*rest, images.handle), loaded(*whole, 9, 0), strict=True):
        assert_close(value, wanted)
    assert images.calls == [("forward", FIRST.z_dim), ("reverse", FIRST.z_dim)]


def test_precompiling_changes_the_key() -> None:
    plain, precompiled = (Convolution(TensorProductConv(FIRST)) for _ in range(2))
    add_entries(precompiled, b"binary/none 0\n\n")
    assert plain.key == TensorProductConv(FIRST).key
    assert precompiled.key != plain.key
    assert 0 <= precompiled.key < 2**63
