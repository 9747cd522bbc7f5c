"""Irreps are read, written and measured as e3nn does, and errors quote what was not understood."""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # e3nn 0.4 loads its constants by pickle

import pickle

import pytest
from e3nn import o3

from eqaccel.errors import IrrepsError
from eqaccel.irreps import Irrep, Irreps, MulIrrep

TEXTS = [
    "",
    "  ",
    "0e",
    "0e + 1o",
    "128x0e+64x1o",
    " 32x0o + 160x0e+ 3x2e + 2e",
    "0x1e+4x0e",
    "1y + 2y",
    "7x11o",
]


@pytest.mark.parametrize("text", TEXTS)
def test_reads_what_e3nn_reads(text: str) -> None:
    ours, theirs = Irreps(text), o3.Irreps(text)
    assert str(ours) == str(theirs)
    assert [(mul, ir.l, ir.p) for mul, ir in ours] == [(mul, ir.l, ir.p) for mul, ir in theirs]
    assert (ours.dim, ours.num_irreps) == (theirs.dim, theirs.num_irreps)
    assert ours.slices() == theirs.slices()
    assert list(ours.offsets()) == [part.start for part in theirs.slices()]
    assert Irreps(theirs) == Irreps(list(theirs)) == Irreps(str(ours)) == Irreps(ours) == ours
    assert hash(Irreps(theirs)) == hash(ours)


def test_other_forms() -> None:
    expected = Irreps("2x0e+1o")
    assert Irreps([(2, "0e"), "1o"]) == Irreps([(2, (0, 1)), (1, Irrep(1, -1))]) == expected
    assert Irreps([MulIrrep(2, Irrep(0, 1)), o3.Irrep("1o")]) == expected
    assert Irreps(Irrep(2, 1)) == Irreps("2e")
    assert Irreps(o3.Irrep("2e")) == Irreps([o3.Irrep("2e")]) == Irreps("2e")
    assert Irreps() == Irreps(None) == Irreps("")


def test_is_a_sequence() -> None:
    irreps = Irreps("2x0e+3x1o+2e")
    assert irreps[1] == (3, Irrep(1, -1))
    assert irreps[1].dim == 9
    assert isinstance(irreps[1:], Irreps)
    assert str(irreps[1:]) == "3x1o+1x2e"
    assert irreps[:1] + "4x1e" == Irreps("2x0e+4x1e")
    assert (repr(irreps), repr(irreps[1]), repr(irreps[1].ir)) == ("2x0e+3x1o+1x2e", "3x1o", "1o")
    assert Irreps(repr(irreps)) == irreps
    assert pickle.loads(pickle.dumps(irreps)) == irreps
    assert Irreps.spherical_harmonics(3) == Irreps(o3.Irreps.spherical_harmonics(3))


def test_products_and_order_are_those_of_e3nn() -> None:
    texts = [f"{degree}{parity}" for degree in range(4) for parity in "eo"]
    for a in texts:
        for b in texts:
            theirs = [str(ir) for ir in o3.Irrep(a) * o3.Irrep(b)]
            assert [str(ir) for ir in Irrep.parse(a) * Irrep.parse(b)] == theirs
            assert (Irrep.parse(a) < Irrep.parse(b)) == (o3.Irrep(a) < o3.Irrep(b))


def test_what_networks_ask_of_irreps_is_answered_as_by_e3nn() -> None:
    for text in ("2x0e+3x1o+0e+0x2e+1x1e", "1o", "3x0o+0x0e"):
        ours, theirs = Irreps(text), o3.Irreps(text)
        for ir in ("0e", "0o", "1o", "1e", "2e", "3o"):
            assert (ir in ours) == (Irrep(ir) in ours) == (o3.Irrep(ir) in ours) == (ir in theirs)
            assert ours.count(ir) == ours.count(o3.Irrep(ir)) == theirs.count(ir)
            assert Irrep(ir).is_scalar() == o3.Irrep(ir).is_scalar()
        assert (ours.lmax, ours.ls) == (theirs.lmax, theirs.ls)
        for mine, other in (
            (2 * ours, 2 * theirs),
            (ours * 2, theirs * 2),
            (ours.remove_zero_multiplicities(), theirs.remove_zero_multiplicities()),
            (ours.regroup(), theirs.sort().irreps.simplify()),
            (ours + theirs, theirs + ours),
            (3 * Irrep("1o"), 3 * o3.Irrep("1o")),
            (Irrep("1o") + Irrep("0e"), o3.Irrep("1o") + o3.Irrep("0e")),
            (ours.filter(lambda block: block.mul > 1), [block for block in theirs if block.mul > 1]),
            (ours.filter(drop=lambda block: block.mul > 1), [block for block in theirs if block.mul <= 1]),
            (ours.filter(lambda block: block.mul), [block for block in theirs if block.mul]),
            (ours.filter(["0e", "1e"]), [block for block in theirs if block.ir in o3.Irreps("0e+1e")]),
            (ours.filter(drop="7x0e+1e"), [block for block in theirs if block.ir not in o3.Irreps("0e+1e")]),
            (ours.filter([(0, 1), (1, -1)]), [block for block in theirs if block.ir in o3.Irreps("0e+1o")]),
            (ours.filter(ours[0]), [block for block in theirs if block.ir == theirs[0].ir]),
            (ours.filter(o3.Irrep("1o")), [block for block in theirs if block.ir == o3.Irrep("1o")]),
            (ours.filter(drop=theirs[:1]), [block for block in theirs if block.ir != theirs[0].ir]),
            (ours.filter([]), []),
            (ours.filter(lmax=0), [block for block in theirs if block.ir.l == 0]),
            (ours.filter(), theirs),
        ):
            assert isinstance(mine, Irreps)
            assert mine == Irreps(other)
    assert Irreps.spherical_harmonics(3, p=1) == Irreps("0e+1e+2e+3e")
    assert list(Irrep.iterator(2)) == [Irrep(str(ir)) for ir in o3.Irrep.iterator(2)]
    assert [str(ir) for ir in Irrep("1o") * "1e"] == ["0o", "1o", "2o"]
    assert Irrep("2y") == Irrep(o3.Irrep("2e")) == Irrep((2, 1)) == Irrep(2, 1)


def test_slices_by_multiplicity_hold_single_irreps() -> None:
    irreps = Irreps("2x0e+3x1o+0x2e+1e")
    single = [Irreps(ir) for mul, ir in irreps for _ in range(mul)]
    for start in (None, 0, 1, 4, -2, 9):
        for stop in (None, 0, 2, 6, -1):
            part = slice(start, stop)
            assert irreps.slice_by_mul[part].simplify() == sum(single[part], Irreps()).simplify()
    assert irreps.slice_by_mul[1:4] == Irreps("1x0e+2x1o")


def test_errors_of_what_is_asked() -> None:
    irreps = Irreps("2x0e+1o")
    with pytest.raises(IrrepsError, match="lmax: expected at least one irrep"):
        _ = Irreps("0x1o").lmax
    with pytest.raises(IrrepsError, match="expected one of keep, drop and lmax, got several"):
        irreps.filter("0e", lmax=1)
    for index in (1, slice(0, 2, 2)):
        with pytest.raises(IrrepsError, match="slice_by_mul: expected a slice without a step, got"):
            _ = irreps.slice_by_mul[index]  # type: ignore[index]
    with pytest.raises(IrrepsError, match="parity p: expected"):
        Irrep(1)
    with pytest.raises(IrrepsError, match="cannot read irrep 'x'"):
        _ = "x" in irreps


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("128x0f", "128x0f"),
        ("4x0e+", "''"),
        ("4x0e++1o", "''"),
        ("-2x0e", "-2x0e"),
        ("4x-1o", "4x-1o"),
        ("2 3x0e", "2 3x0e"),
        ([(2, "0e", 1)], "(2, '0e', 1)"),
        ([(-2, "0e")], "-2"),
        ([(2.0, "0e")], "2.0"),
        ([(2, "e")], "'e'"),
        ([(2, (1, 0))], "+1 or -1, got 0"),
        ([(2, (-1, 1))], ">= 0, got -1"),
        ([3], "3"),
        (3, "int 3"),
        ([(2, 3.5)], "3.5"),
    ],
)
def test_errors_quote_the_part(value: object, part: str) -> None:
    with pytest.raises(IrrepsError, match="expected") as caught:
        Irreps(value)
    assert part in str(caught.value)
