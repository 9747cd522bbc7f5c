"""`eqaccel.o3.SphericalHarmonics` is e3nn's: the same arguments, numbers and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

import e3nn.o3
from e3nn_pairs import assert_alike, made_alike, rows

from eqaccel import o3
from eqaccel.errors import OperandError, SpecError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("0e+1o+2e+3o", True, "component"), {}),
        (([2, 0, 1, 1], False), {}),
        ((e3nn.o3.Irreps("2x1e+2e"), True, "norm"), {}),
        ((3, False, "component", "1e"), {}),
        (("4e+1o", True), {"irreps_in": "1o"}),
        (([10, 1, 11], True), {}),
    ],
    ids=str,
)
def test_values_and_derivatives(args: tuple[Any, ...], options: dict[str, Any], device: torch.device) -> None:
    original, ours = pair = made_alike("SphericalHarmonics", *args, device=device, **options)
    for leading in ((7,), (2, 3), ()):
        assert_alike(pair, [rows(*leading, 3).to(device)])
    assert [str(ours.irreps_in), str(ours.irreps_out)] == [str(original.irreps_in), str(original.irreps_out)]
    assert not ours.state_dict()
    x = rows(5, 3).to(device)
    assert torch.equal(o3.SphericalHarmonics.from_e3nn(original).to(device)(x), ours(x))
    assert torch.equal(torch.jit.script(ours)(x), ours(x))
    if len(args) < 4 and not options:
        assert torch.equal(o3.spherical_harmonics(args[0], x, *args[1:]), ours(x))


def test_bad_arguments_are_named() -> None:
    for args, match in (
        (("1e+1o", True), "parity"),
        ((-1, True), "degrees"),
        (([], True), "degrees"),
        ((1, True, "other"), "normalization"),
        ((1, True, "norm", "2x1o"), "irreps_in"),
    ):
        with pytest.raises(SpecError, match=match):
            o3.SphericalHarmonics(*args)
    with pytest.raises(UnsupportedError, match="degree 12"):
        o3.spherical_harmonics(12, rows(1, 3), True)
    with pytest.raises(OperandError):
        o3.SphericalHarmonics([0, 1], False)(rows(3, 4))
    with pytest.raises(SpecError, match=r"e3nn.o3.SphericalHarmonics"):
        o3.SphericalHarmonics.from_e3nn(torch.nn.Linear(1, 1))
