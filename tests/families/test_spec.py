"""Specs: coefficients, offsets and weight layout of e3nn, for every normalisation, and every error."""

from __future__ import annotations

import copy
import functools
import os

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import e3nn
import numpy as np
import pytest
import torch
from e3nn import o3
from executor_checks import sums_agree

from eqaccel.errors import SpecError, UnsupportedError
from eqaccel.families.tensor_product import Instruction, Path, TensorProductSpec, payload
from eqaccel.wigner import WignerConvention

SH = "0e+1o+2e+3o"


def _uvu(i: int, j: int, k: int, *, has_weight: bool = True, path_weight: float = 1.0) -> tuple[Any, ...]:
    return (i, j, k, "uvu", has_weight, path_weight)


# (irreps_in1, irreps_in2, irreps_out, instructions): ragged, repeated, unsorted, both parities, shared out blocks,
# paths without weights, path weights (0 too), blocks of multiplicity 0 and blocks that no path touches.
CASES: dict[str, tuple[str, str, str, list[tuple[Any, ...]]]] = {
    "ragged": ("8x0e+4x1o", "0e+1o", "8x1o+4x0e+4x1o", [_uvu(0, 1, 0), _uvu(1, 1, 1), _uvu(1, 0, 2)]),
    "same out block": (
        "4x0e+4x1o+4x0e",
        "0e+1o",
        "4x1o",
        [_uvu(0, 1, 0), _uvu(1, 0, 0), _uvu(2, 1, 0, path_weight=3.0)],
    ),
    "both parities": (
        "3x0o+5x0e+3x1e+3x2o",
        "0e+1o+2e",
        "3x1e+3x1o+5x2e+3x2e+3x1o",
        [_uvu(2, 0, 0), _uvu(2, 1, 1), _uvu(1, 2, 2), _uvu(2, 2, 3, has_weight=False), _uvu(3, 2, 4, path_weight=0.5)],
    ),
    "unweighted and zero": (
        "2x1o+0x0e+2x2e+6x0e",
        "1o+0x0e+2e",
        "2x0e+2x2e+0x0e+3x0o",
        [
            _uvu(0, 0, 0, has_weight=False, path_weight=2.0),
            _uvu(0, 0, 1, path_weight=0.0),
            _uvu(1, 1, 2),
            _uvu(2, 2, 0),
            _uvu(0, 0, 1),
        ],
    ),
    "zero in2": ("2x0e", "0x0e+0e", "2x0e", [_uvu(0, 0, 0), _uvu(0, 1, 0)]),
}


def _e3nn(case: str, **options: Any) -> o3.TensorProduct:
    return o3.TensorProduct(*CASES[case], internal_weights=False, shared_weights=False, **options)


def _apply(
    spec: TensorProductSpec,
    x: np.ndarray,
    y: np.ndarray,
    w: np.ndarray,
    coupling: Callable[[Path], np.ndarray] = Path.cg,
) -> np.ndarray:
    z = np.zeros((len(x), spec.z_dim))
    for p in spec.paths:
        d1, d2, d3 = coupling(p).shape
        block = x[:, p.x_offset : p.x_offset + p.mul * d1].reshape(-1, p.mul, d1)
        out = np.einsum("nui,nj,ijk->nuk", block, y[:, p.y_offset : p.y_offset + d2], coupling(p))
        if p.weight_offset is not None:
            out *= w[:, p.weight_offset : p.weight_offset + p.mul, None]
        z[:, p.z_offset : p.z_offset + p.mul * d3] += out.reshape(len(x), -1)
    return z


def _live(module: o3.TensorProduct) -> list[Any]:
    return [item for item in module.instructions if 0 not in item.path_shape]


@pytest.mark.parametrize("path_normalization", ["element", "path", "none"])
@pytest.mark.parametrize("irrep_normalization", ["component", "norm", "none"])
@pytest.mark.parametrize("with_variances", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_coefficients_are_those_of_e3nn(
    case: str, irrep_normalization: str, path_normalization: str, with_variances: bool
) -> None:
    options: dict[str, Any] = {"irrep_normalization": irrep_normalization, "path_normalization": path_normalization}
    if with_variances:
        rng = np.random.default_rng(0)
        lengths = [len(o3.Irreps(text)) for text in CASES[case][:3]]
        for name, length in zip(("in1_var", "in2_var", "out_var"), lengths, strict=True):
            options[name] = rng.uniform(0, 2, length).tolist()
        options["in1_var"][0] = 0.0
    module = _e3nn(case, **options)
    spec = TensorProductSpec(*CASES[case], **options)
    assert [abs(p.coefficient) for p in spec.paths] == [item.path_weight for item in _live(module)]
    assert spec.weight_numel == module.weight_numel
    read = TensorProductSpec.from_e3nn(module)
    assert (read, read.convention) == (spec, spec.convention)


@pytest.mark.parametrize("case", CASES)
def test_paths_compute_what_the_module_computes(case: str) -> None:
    dtype = torch.get_default_dtype()
    try:  # e3nn keeps its coupling tensors in the default dtype
        torch.set_default_dtype(torch.float64)
        module = _e3nn(case)
        x, y, w = (torch.randn(5, n) for n in (module.irreps_in1.dim, module.irreps_in2.dim, module.weight_numel))
    finally:
        torch.set_default_dtype(dtype)
    spec = TensorProductSpec.from_e3nn(module)
    args = x.numpy(), y.numpy(), w.numpy()
    # Both sums are rounded, and so is each entry of e3nn's tensors, whose norm is one.
    size = _apply(spec, *map(np.abs, args), lambda path: np.abs(path.cg()) + abs(path.coefficient))
    assert sums_agree(_apply(spec, *args), module(x, y, w).numpy(), size)
    assert (spec.x_dim, spec.y_dim) == (x.shape[1], y.shape[1])


@pytest.mark.parametrize("copied", [False, True], ids=["made", "copied"])
@pytest.mark.parametrize("scripted", [False, True], ids=["traced", "scripted"])
def test_from_e3nn_takes_the_sign_of_the_module(scripted: bool, copied: bool) -> None:
    options = e3nn.get_optimization_defaults()
    try:  # where e3nn keeps its tensors depends on what it does with the code that it generates
        e3nn.set_optimization_defaults(jit_script_fx=scripted)
        module = o3.TensorProduct("2x1o", "2e", "2x2o", [(0, 0, 0, "uvu", True)], shared_weights=False)
    finally:
        e3nn.set_optimization_defaults(**options)
    if copied:
        module = copy.deepcopy(module)
    assert any(path.endswith("_w3j_1_2_2") for path, _ in module.named_buffers())
    usual = TensorProductSpec.from_e3nn(module).paths[0]
    assert usual == TensorProductSpec("2x1o", "2e", "2x2o", [(0, 0, 0)]).paths[0]
    for path, buffer in module.named_buffers():
        if path.endswith("_w3j_1_2_2"):
            buffer.neg_()
    turned = TensorProductSpec.from_e3nn(module).paths[0]
    assert turned.coefficient == -usual.coefficient
    np.testing.assert_array_equal(turned.cg(), -usual.cg())
    for path, buffer in module.named_buffers():
        if path.endswith("_w3j_1_2_2"):
            buffer.mul_(2.0)
    with pytest.raises(UnsupportedError, match="_w3j_1_2_2"):
        TensorProductSpec.from_e3nn(module)


ALL_DEGREES = "+".join(f"{degree}e" for degree in range(8))


def _all_couplings(**options: Any) -> o3.TensorProduct:
    out = o3.Irreps(str(TensorProductSpec.channelwise(ALL_DEGREES, ALL_DEGREES, ALL_DEGREES).irreps_out))
    paths = TensorProductSpec.channelwise(ALL_DEGREES, ALL_DEGREES, ALL_DEGREES).paths
    instructions = [(p.in1, p.in2, p.out, "uvu", True) for p in paths]
    return o3.TensorProduct(
        ALL_DEGREES, ALL_DEGREES, out, instructions, shared_weights=False, internal_weights=False, **options
    )


@functools.cache
def _as_it_comes() -> TensorProductSpec:
    return TensorProductSpec.from_e3nn(_all_couplings())


def _couplings(spec: TensorProductSpec) -> list[np.ndarray]:
    return [path.cg() for path in spec.paths]


@pytest.mark.parametrize("made", ["with code", "without code", "on meta", "by hand"])
def test_all_couplings_have_the_signs_of_the_installed_e3nn(made: str) -> None:
    if made == "on meta":
        with torch.device("meta"):
            module = _all_couplings().to("meta")
    else:
        module = _all_couplings(compile_left_right=made == "with code")
    spec = TensorProductSpec.from_e3nn(module)
    if made == "by hand":
        spec = TensorProductSpec.channelwise(ALL_DEGREES, ALL_DEGREES, ALL_DEGREES)
    assert len(spec.paths) == len(module.instructions) > 222
    for path, item in zip(spec.paths, module.instructions, strict=True):
        theirs = item.path_weight * o3.wigner_3j(path.l1, path.l2, path.l3, dtype=torch.float64).numpy()
        assert sums_agree(path.cg(), theirs, item.path_weight)  # the norm of the tensor
    assert spec == _as_it_comes()


def test_convention_is_part_of_what_a_spec_computes() -> None:
    old, new, default = (
        TensorProductSpec.channelwise("2x1e+2x2e", "2e", "2e", convention=convention)
        for convention in ("e3nn<0.5", WignerConvention.E3NN_0_5, None)
    )
    assert old != new
    assert default == (old if WignerConvention.installed() is WignerConvention.E3NN_0_4 else new)
    assert old.digest != new.digest
    assert payload(old) != payload(new)
    assert [p.coefficient for p in old.paths] == [-new.paths[0].coefficient, new.paths[1].coefficient]
    np.testing.assert_array_equal(old.paths[0].cg(), -new.paths[0].cg())
    for spec, text in ((old, "signs of e3nn<0.5"), (new, "signs of e3nn>=0.5")):
        assert text in repr(spec)
        assert text in str(spec)
        same = pickle.loads(pickle.dumps(spec))
        assert (same, same.convention, same.digest) == (spec, spec.convention, spec.digest)
    sides = [TensorProductSpec.channelwise("2x1o", "1o", "0e+1e+2e", convention=c) for c in ("e3nn<0.5", "e3nn>=0.5")]
    assert sides[0] == sides[1]
    assert [spec.convention for spec in sides] == [None, None]
    assert "signs" not in repr(sides[0])
    with pytest.raises(SpecError, match=r"convention: expected 'e3nn<0.5' or 'e3nn>=0.5', got 'e3nn'"):
        TensorProductSpec.channelwise("2x0e", "0e", "0e", convention="e3nn")


def test_convention_of_a_module() -> None:
    options: dict[str, Any] = {"shared_weights": False, "internal_weights": False}
    arguments = ("2x1o", "2e", "2x2o", [(0, 0, 0, "uvu", True)])
    with_code = o3.TensorProduct(*arguments, **options)
    without = o3.TensorProduct(*arguments, **options, compile_left_right=False)
    assert not any("w3j" in name for name, _ in without.named_buffers())
    own = TensorProductSpec.from_e3nn(with_code)
    other = next(option for option in WignerConvention if option is not own.convention)
    assert TensorProductSpec.from_e3nn(without) == own == TensorProductSpec.from_e3nn(with_code, own.convention)
    told = TensorProductSpec.from_e3nn(without, str(other))
    assert (told.convention, told.paths[0].coefficient) == (other, -own.paths[0].coefficient)
    with pytest.raises(SpecError, match=f"convention: expected that of the module, .*_w3j_1_2_2 is not of '{other}'"):
        TensorProductSpec.from_e3nn(with_code, other)


def test_convention_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WignerConvention, "installed", lambda: None)
    depends = ("2x1o", "2e", "2x2o", [(0, 0, 0)])
    for make in (TensorProductSpec, lambda *args: TensorProductSpec.channelwise(*args[:3])):
        with pytest.raises(SpecError, match=r"convention: expected .*coupling \(1, 2, 2\) has opposite signs"):
            make(*depends)
        assert make("2x1o", "1o", "2x1e", [(0, 0, 0)]).convention is None
    assert TensorProductSpec(*depends, convention="e3nn<0.5").convention is WignerConvention.E3NN_0_4


def test_convention_of_a_packaged_module_is_not_that_of_the_installed_e3nn() -> None:
    module = o3.TensorProduct(
        "2x1o", "2e", "2x2o", [(0, 0, 0, "uvu", True)], shared_weights=False, compile_left_right=False
    )
    module.__class__ = type("TensorProduct", (type(module),), {"__module__": "<torch_package_0>.e3nn.o3"})
    with pytest.raises(SpecError, match="convention: expected"):
        TensorProductSpec.from_e3nn(module)
    assert TensorProductSpec.from_e3nn(module, "e3nn<0.5").convention is WignerConvention.E3NN_0_4


def test_channelwise_is_mace() -> None:
    irreps_tools = pytest.importorskip("mace.modules.irreps_tools")
    for in1, target in (("128x0e+128x1o", SH), ("6x1o+4x0e+4x0o+2x1e", "9x2e+0o+1e+1o+0e"), ("96x0e", "96x0e+96x2e")):
        out, instructions = irreps_tools.tp_out_irreps_with_instructions(
            o3.Irreps(in1), o3.Irreps(SH), o3.Irreps(target)
        )
        module = o3.TensorProduct(in1, SH, out, instructions, shared_weights=False, internal_weights=False)
        spec = TensorProductSpec.channelwise(in1, SH, target)
        assert str(spec.irreps_out) == str(out)
        assert [(p.in1, p.in2, p.out) for p in spec.paths] == [i[:3] for i in instructions]
        assert [abs(p.coefficient) for p in spec.paths] == [i.path_weight for i in module.instructions]
        assert TensorProductSpec.from_e3nn(module) == spec
    with pytest.raises(SpecError, match="irreps_out"):
        TensorProductSpec.channelwise("4x0e", "0e+1o", "0o")


def test_offsets() -> None:
    spec = TensorProductSpec(*CASES["unweighted and zero"])
    found = [(p.in1, p.in2, p.out, p.mul, p.x_offset, p.y_offset, p.z_offset, p.weight_offset) for p in spec.paths]
    assert found == [
        (0, 0, 0, 2, 0, 0, 0, None),
        (0, 0, 1, 2, 0, 0, 2, 0),
        (2, 2, 0, 2, 6, 3, 0, 2),
        (0, 0, 1, 2, 0, 0, 2, 4),
    ]
    assert (spec.x_dim, spec.y_dim, spec.z_dim, spec.weight_numel) == (22, 8, 15, 6)


def test_equality_digest_and_text() -> None:
    spec = TensorProductSpec.channelwise("128x1o", "2e", "1o+3o")
    same = TensorProductSpec(spec.irreps_in1, "1x2e", "128x1o+128x3o", [(0, 0, 0), Instruction(0, 0, 1)])
    assert spec == same
    assert hash(spec) == hash(same)
    assert spec.digest == same.digest
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert (other, other.digest) == (spec, spec.digest)
    assert spec.digest == "ee786c4429d4b7354d4491c4cacb6d0fcbbf33a5ae1049d0d8ea9d9610c39f75"
    others = [
        TensorProductSpec.channelwise("128x1o", "2e", "1o+3o", shared_weights=True),
        TensorProductSpec.channelwise("128x1o", "2e", "1o+3o", irrep_normalization="norm"),
        TensorProductSpec("128x1o", "2e", "128x1o+128x3o", [(0, 0, 0), (0, 0, 1, "uvu", False)]),
        TensorProductSpec("128x1o", "2e", "128x1o+128x3o", [(0, 0, 1), (0, 0, 0)]),
    ]
    assert len({spec.digest, *(other.digest for other in others)}) == 5
    assert len({spec, *others}) == 5
    assert str(spec.paths[1]) == "128x1o (x) 1x2e -> 128x3o"
    assert repr(spec) == "TensorProductSpec(128x1o (x) 1x2e -> 128x1o+128x3o, 2 paths, 256 weights)"
    assert str(spec.paths[1]) in str(spec)
    assert len(str(spec).splitlines()) == 5
    with pytest.raises(AttributeError):
        spec.weight_numel = 3


@pytest.mark.parametrize(
    ("instruction", "part"),
    [
        ((5, 0, 0), "i_in1"),
        ((0, -1, 0), "i_in2"),
        ((0, 0, 9), "i_out"),
        ((0, 1, 0), "gives 1x1o"),
        ((0, 0, 4), "gives 1x0e"),
        ((1, 1, 3), "gives 1x0e+1x1e+1x2e"),
        ((0, 0, 1), "equal multiplicities"),
        ((0, 0, 0, "uvx"), "uvw, uvu"),
        ((0, 0, "a"), "three block indices"),
        ((0, 0), "i_in1, i_in2"),
        ((0, 0, 0, "uvu", True, 1.0, (4,)), "from_e3nn"),
        ((0, 0, 0, "uvu", True, -1.0), "path_weight"),
        ((0, 0, 0, "uvu", True, float("nan")), "path_weight"),
        ("uvu", "uvu"),
        (3, "got 3"),
    ],
)
def test_errors_name_the_instruction(instruction: Any, part: str) -> None:
    with pytest.raises(SpecError, match="instruction 1: ") as caught:
        TensorProductSpec("4x0e+2x1o", "0e+1o", "4x0e+2x0e+4x1o+2x3e+4x0o", [(0, 0, 0), instruction])
    assert part in str(caught.value)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize(
    ("mode", "weighted", "out", "part"),
    [
        ("uvu", True, "2x0e", "equal multiplicities of in1 and out"),
        ("uvv", True, "3x0e", "equal multiplicities of in2 and out"),
        ("uuw", True, "2x0e", "equal multiplicities of in1 and in2"),
        ("uuu", True, "2x0e", "equal multiplicities of in1 and in2"),
        ("uvuv", False, "5x0e", "multiplicity 6 of out"),
        ("uvu<v", True, "3x0e", "equal multiplicities of in1 and in2"),
        ("u<vw", True, "3x0e", "equal multiplicities of in1 and in2"),
        ("uvw", False, "4x0e", "expected weights"),
    ],
)
def test_multiplicities_of_each_mode(mode: str, weighted: bool, out: str, part: str) -> None:
    with pytest.raises(SpecError, match=f"instruction 1: 3x0e .* in mode {mode}: ") as caught:
        TensorProductSpec("3x0e", "2x0e", f"4x0e+{out}", [(0, 0, 0, "uvw"), (0, 0, 1, mode, weighted)])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "weighted", "out", "part"),
    [
        ("uuw", False, "2x0e", "expected weights, or multiplicity 1 of out"),
        ("uuu", True, "2x0e", "multiplicity 3 of out"),
        ("uvu<v", True, "2x0e", "multiplicity 3 of out"),
        ("u<vw", False, "3x0e", "expected weights"),
    ],
)
def test_multiplicities_of_modes_of_equal_ones(mode: str, weighted: bool, out: str, part: str) -> None:
    with pytest.raises(SpecError, match=f"instruction 0: 3x0e .* in mode {mode}: ") as caught:
        TensorProductSpec("3x0e", "3x0e", out, [(0, 0, 0, mode, weighted)])
    assert part in str(caught.value)


def test_unsupported_degree() -> None:
    with pytest.raises(UnsupportedError, match=r"instruction 0: .*degrees above 11"):
        TensorProductSpec("4x0e", "12e", "4x12e", [(0, 0, 0)])


@pytest.mark.parametrize("mode", ["uvuv", "uvu"])
def test_what_is_channel_by_channel_has_one_mode(mode: str) -> None:
    spec = TensorProductSpec("4x1o", "1x2e", "4x1o", [(0, 0, 0, mode)])
    assert spec.is_channelwise
    assert spec == TensorProductSpec("4x1o", "1x2e", "4x1o", [(0, 0, 0, "uvu")])
    of_one = [TensorProductSpec("1o", "2e", "1o", [(0, 0, 0, mode, True)]) for mode in ("uvw", "uuu", "uuw", "uvv")]
    assert len({*of_one, TensorProductSpec("1o", "2e", "1o", [(0, 0, 0)])}) == 1
    assert not TensorProductSpec("4x1o", "2x2e", "4x1o", [(0, 0, 0)]).is_channelwise


def test_bad_options() -> None:
    args = ("4x0e", "0e", "4x0e", [(0, 0, 0)])
    with pytest.raises(SpecError, match="irrep_normalization: expected one of"):
        TensorProductSpec(*args, irrep_normalization="components")
    with pytest.raises(SpecError, match="path_normalization: expected one of"):
        TensorProductSpec(*args, path_normalization="norm")
    with pytest.raises(SpecError, match="in2_var: expected 1 finite numbers"):
        TensorProductSpec(*args, in2_var=[1.0, 2.0])
    with pytest.raises(SpecError, match="out_var"):
        TensorProductSpec(*args, out_var=[-1.0])


def test_from_e3nn_errors() -> None:
    with pytest.raises(SpecError, match="Linear without irreps_in1"):
        TensorProductSpec.from_e3nn(torch.nn.Linear(2, 2))
    item = SimpleNamespace(i_in1=0, i_in2=0, i_out=0, connection_mode="uvu", has_weight=True, path_weight=-2.0)
    module = SimpleNamespace(
        irreps_in1="2x0e", irreps_in2="0e", irreps_out="2x0e", instructions=[item], shared_weights=True, weight_numel=2
    )
    spec = TensorProductSpec.from_e3nn(module)
    assert (spec.paths[0].coefficient, spec.shared_weights) == (-2.0, True)
    module.weight_numel = 3
    with pytest.raises(SpecError, match=r"weight_numel: expected 2 .*got 3"):
        TensorProductSpec.from_e3nn(module)
    item.path_weight = float("nan")
    with pytest.raises(SpecError, match="instruction 0: expected a finite path_weight"):
        TensorProductSpec.from_e3nn(module)
    module.instructions = [(0, 0, 0)]
    with pytest.raises(SpecError, match="instruction 0: expected an instruction of e3nn"):
        TensorProductSpec.from_e3nn(module)
