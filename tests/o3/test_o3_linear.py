"""`eqaccel.o3.Linear` is e3nn's: the same arguments, weights, biases, numbers and derivatives."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

pytest.importorskip("e3nn", reason="needs e3nn")

import e3nn.o3
from e3nn_pairs import assert_alike, made_alike, rows

from eqaccel import o3
from eqaccel.errors import OperandError, SpecError

pytestmark = pytest.mark.filterwarnings("ignore")

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": (("4x0e+3x1o+2x1o", "5x0e+2x1o+0o"), {}),
    "biased": (("4x0e+3x1o+0o", "0o+5x0e+2x1o+2x0e"), {"biases": True}),
    "one bias": (("4x0e+3x1o", "3x0e+2x1o+2x0e"), {"biases": [False, False, True], "path_normalization": "path"}),
    "pairs": (("4x0e+3x0e", "4x0e+3x0e"), {"instructions": [(0, 0), (1, 1), (0, 1)]}),
    "channels": (("2x0e+3x1o", "2x0e+1o"), {"f_in": 3, "f_out": 2, "biases": True}),
    "nothing": (("2x1o", "2x0e+0o"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_derivatives_and_files(case: str, device: torch.device) -> None:
    (args, options), dtype = CASES[case], torch.float32 if case == "biased" else torch.float64
    pair = made_alike("Linear", *args, dtype=dtype, device=device, **options)
    original, ours = pair
    channels = (options["f_in"],) if "f_in" in options else ()
    for leading in ((7,), (2, 3), ()):
        assert_alike(pair, [rows(*leading, *channels, original.irreps_in.dim)], dtype)
    assert [tuple(item) for item in ours.instructions] == [tuple(item) for item in original.instructions]
    assert (str(ours), ours.weight_numel) == (str(original), original.weight_numel)
    assert torch.equal(ours.output_mask, original.output_mask)
    original.load_state_dict(ours.state_dict())
    taken = o3.Linear.from_e3nn(original)
    assert taken.state_dict().keys() == original.state_dict().keys()
    assert all(mine is theirs for mine, theirs in zip(taken.parameters(), original.parameters(), strict=True))
    x = rows(5, *channels, original.irreps_in.dim, dtype=dtype).to(device)
    assert torch.equal(taken(x), ours(x))
    assert torch.equal(torch.jit.script(ours)(x), ours(x))
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(x), ours(x))


@pytest.mark.parametrize("case", ["biased", "one bias", "channels", "nothing"])
def test_modules_that_are_made_without_values(case: str, device: torch.device) -> None:
    """As large ones are: `to_empty`, and then a state dict."""
    args, options = CASES[case]
    original = o3.Linear(*args, **options).to(device)
    with torch.device("meta"):
        made = o3.Linear(*args, **options)
    for module in (made, o3.Linear(*args, **options)):
        module.to_empty(device=device)
        for buffer in module.buffers():
            assert buffer.device.type == device.type
        module.load_state_dict(original.state_dict())
        channels = (options["f_in"],) if "f_in" in options else ()
        x = rows(5, *channels, original.irreps_in.dim, dtype=torch.float32).to(device)
        assert torch.equal(module(x), original(x))


def test_given_weights() -> None:
    original, ours = made_alike("Linear", "4x0e+3x1o", "5x0e+2x1o", internal_weights=False, biases=True)
    x, w, b = rows(2, 3, 13), rows(26, seed=1), rows(5, seed=2)
    assert_alike((original, ours), [x, w, b])
    assert torch.equal(o3.Linear.from_e3nn(original)(x, w, b), ours(x, w, b))
    views = list(ours.weight_views(w))
    assert [tuple(view.shape) for view in views] == [(4, 5), (3, 2)]
    assert all(torch.equal(view, original.weight_view_for_instruction(n, w)) for n, view in enumerate(views))
    assert torch.equal(ours.weight_view_for_instruction(1, w), views[1])
    with pytest.raises(OperandError, match="none of its own"):
        ours(x)
    with pytest.raises(OperandError, match="last dimension of 26"):
        ours(x, w[1:], b)
    with pytest.raises(SpecError, match="f_in"):
        o3.Linear.from_e3nn(e3nn.o3.Linear("0e", "0e", f_in=2, f_out=2, internal_weights=False))


SHAPES = [((2, 3), (6,)), ((6,), (2, 3)), ((3, 1), (3,)), ((3,), (1, 3)), ((2, 1), (2, 1)), ((2, 3), (1,)), ((), (1,))]


@pytest.mark.parametrize(("leading", "of_weights"), SHAPES)
@pytest.mark.parametrize("channels", [{}, {"f_in": 3, "f_out": 2}])
def test_weights_of_rows_are_taken_one_after_another(
    leading: tuple[int, ...], of_weights: tuple[int, ...], channels: dict[str, int]
) -> None:
    pair = made_alike("Linear", "4x0e+3x1o", "5x0e+2x1o", shared_weights=False, **channels)
    further = tuple(channels.values())
    assert_alike(pair, [rows(*leading, *further[:1], 13), rows(*of_weights, *further, 26, seed=1)])


def test_weights_of_other_rows_are_refused() -> None:
    ours = o3.Linear("4x0e+3x1o", "5x0e+2x1o", shared_weights=False)
    with pytest.raises(OperandError, match="'w'"):
        ours(rows(2, 3, 13), rows(3, 26))


@pytest.mark.parametrize("biases", [False, True])
def test_initial_weights_are_those_of_e3nn(biases: bool) -> None:
    made = []
    for library in (e3nn.o3, o3):
        torch.manual_seed(3)
        first, second = (library.Linear("4x0e", "3x0e", biases=biases) for _ in range(2))
        made.append([*first.parameters(), *second.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_bad_arguments_are_named() -> None:
    for options, match in (
        ({"instructions": [(0, 2)]}, "instruction 0: expected i_out"),
        ({"instructions": [(0, 1)]}, "equal irreps"),
        ({"biases": [True, True]}, "biases"),
        ({"path_normalization": "none"}, "path_normalization"),
        ({"f_in": 2}, "f_in, f_out"),
        ({"internal_weights": True, "shared_weights": False}, "internal_weights"),
    ):
        with pytest.raises(SpecError, match=match):
            o3.Linear("2x0e", "3x0e+1o", **options)
    with pytest.raises(SpecError, match=r"expected an e3nn.o3.Linear"):
        o3.Linear.from_e3nn(torch.nn.Linear(1, 1))
    with pytest.raises(OperandError):
        o3.Linear("2x0e", "0e")(rows(3, 3, dtype=torch.float32))


def test_weights_of_each_row() -> None:
    original, ours = made_alike("Linear", "4x0e+3x1o", "5x0e+2x1o", shared_weights=False)
    assert_alike((original, ours), [rows(6, 13), rows(6, 26, seed=1)])
    assert_alike((original, ours), [rows(2, 3, 13), rows(2, 3, 26, seed=1)])
    taken = o3.Linear.from_e3nn(original)
    x, w = rows(6, 13), rows(6, 26)
    assert torch.equal(taken(x, w), ours(x, w))
